"""Search for a recipe and an algorithm: Optuna proposes, successive halving stops the poor ones.

space.py     what is searched: default ranges, and those of [tune]
proposals.py Optuna's study: asking for trials and telling their scores, the same ones again after an interruption
budget.py    how many rounds each stage has, and who goes on with what is left
outcomes.py  how a trial ended, and its score on validation samples
search.py    the search itself, in a folder that survives interruptions
result.py    the best configuration, and how much each parameter mattered
page.py      the report
"""
