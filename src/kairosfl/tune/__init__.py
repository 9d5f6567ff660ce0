"""Search for a recipe and an algorithm: Optuna proposes, successive halving stops the poor ones.

space.py     what is searched: default ranges, and those of [tune]
demands.py   what every trial keeps: privacy, robust rules, limits
proposals.py Optuna's study: the same trials again after an interruption
variants.py  the configurations and tasks of trials
budget.py    how many rounds each stage has, and who goes on with what is left
price.py     what a run sends, before it has begun
pricing.py   what runs of trials may use of the budget
ledger.py    what they have used of it, round by round
cost.py      what private runs cost their clients together
pools.py     the engines, and the runs that share one
outcomes.py  how a trial ended, and its score on validation samples
search.py    the search itself, in a folder that survives interruptions
result.py    the best configuration, and how much each parameter mattered
page.py      the report
"""
