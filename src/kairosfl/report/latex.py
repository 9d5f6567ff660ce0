"""The table of results as a paper prints it: LaTeX in booktabs style, the best in bold, with
caption and label.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from kairosfl.errors import UserError, nearest
from kairosfl.report.pictures import BAND, counted
from kairosfl.report.ranking import best_rows
from kairosfl.report.tables import DAGGER, Row, cells

COLUMNS = (
    "final 10 %",
    "rounds to target",
    "MB to target",
    "MB",
)  # after the algorithm, unless others are chosen
# How a paper would head them, and what makes the best value: {title} and {unit} are the metric's,
# {goal} the target.
_HEADS = {
    "algorithm": "Algorithm",
    "seeds": "Seeds",
    "rounds": "Rounds",
    "final 10 %": "{title}{unit}",
    "final": "{title}, last round{unit}",
    "best": "{title}, best round{unit}",
    "worst clients": "{title}, worst tenth of clients{unit}",
    "rounds to target": "Rounds to {goal}",
    "MB to target": "MB to {goal}",
    "MB": "MB",
    "epochs": "Client epochs",
    "cohort": "Clients per round",
    "e-LUD": "e-LUD",
    "seconds": "Seconds",
}


def chosen_columns(text: str | None) -> tuple[str, ...]:
    """Columns of the table of results by their names, separated by commas; spaces and signs do not
    matter.
    """
    if text is None:
        return COLUMNS
    known = {_plain(name): name for name in _HEADS if name != "algorithm"}
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if _plain(name) not in known:
            raise UserError(f"{name!r} is not a column of results; {nearest(name, known.values())}")
    if not names:
        raise UserError(f"--columns names no column; known: {', '.join(known.values())}.")
    return tuple(dict.fromkeys(known[_plain(name)] for name in names))


def _plain(name: str) -> str:
    return "".join(character for character in name.lower() if character.isalnum())


def paper_table(
    rows: Sequence[Row],
    target: float,
    names: Sequence[str],
    columns: Sequence[str] = COLUMNS,
    caption: str | None = None,
    label: str = "tab:results",
) -> str:
    """The results as a `table` of LaTeX; `caption` is LaTeX, too, and by default says what the
    columns are.
    """
    shown = [cells(row) | {"algorithm": name} for row, name in zip(rows, names, strict=True)]
    score, kept = rows[0].score, ("algorithm", *columns)
    goal = "target" if math.isnan(target) else score.shown(target)
    words = {
        "title": score.title,
        "unit": f" ({score.unit.strip()})" if score.unit else "",
        "goal": goal,
    }
    best = {name: best_rows(rows, name) for name in columns}
    body = [
        [
            f"\\textbf{{{latex(row[name])}}}" if i in best.get(name, ()) else latex(row[name])
            for name in kept
        ]
        for i, row in enumerate(shown)
    ]
    caption = latex(_caption(rows, columns)) if caption is None else caption
    return (
        f"\\begin{{table}}[t]\n\\centering\n\\caption{{{caption}}}\n\\label{{{label}}}\n"
        + tabular([latex(_HEADS[name].format(**words)) for name in kept], body)
        + "\\end{table}\n"
    )


def _caption(rows: Sequence[Row], columns: Sequence[str]) -> str:
    counts = {len(row.seeds) for row in rows}
    seeds = (
        counted(max(counts), "seed")
        if len(counts) == 1
        else f"{min(counts)} to {counted(max(counts), 'seed')}"
    )
    text = (
        f"Results over {seeds}."
        if max(counts) == 1
        else f"Mean {BAND.replace('over seeds', f'over {seeds}')}."
    )
    if "final 10 %" in columns:
        text += f" {rows[0].score.title}: mean over the final 10 % of rounds."
        if any(row.dagger for row in rows):
            text += f" {DAGGER}: after the last round, since models are averaged only within these."
    if any("MB" in name for name in columns):
        text += " MB: sent and received by all clients together."
    return f"{text} Bold: best." if any(best_rows(rows, name) for name in columns) else text


def tabular(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A tabular in booktabs style of what LaTeX already understands; the first column left, the
    others right.
    """
    lines = [
        f"\\begin{{tabular}}{{l{'r' * (len(heads) - 1)}}}",
        "\\toprule",
        " & ".join(heads) + " \\\\",
        "\\midrule",
    ]
    lines += [" & ".join(row) + " \\\\" for row in rows]
    return "\n".join([*lines, "\\bottomrule", "\\end{tabular}"]) + "\n"


_LATEX = {
    "\\": "\\textbackslash{}",
    "&": "\\&",
    "%": "\\%",
    "$": "\\$",
    "#": "\\#",
    "_": "\\_",
    "{": "\\{",
    "}": "\\}",
    "~": "\\textasciitilde{}",
    "^": "\\textasciicircum{}",
    "<": "$<$",
    ">": "$>$",
    "†": "$^\\dagger$",
    "±": "$\\pm$",
    "−": "$-$",
    "–": "--",
    "×": "$\\times$",
    "·": "$\\cdot$",
    "…": "\\dots{}",
    **{
        "α": "$\\alpha$",
        "β": "$\\beta$",
        "γ": "$\\gamma$",
        "δ": "$\\delta$",
        "ε": "$\\varepsilon$",
        "λ": "$\\lambda$",
    },
    **{"μ": "$\\mu$", "ρ": "$\\rho$", "σ": "$\\sigma$", "τ": "$\\tau$", "₁": "$_1$", "₂": "$_2$"},
}


def latex(text: str) -> str:
    """Text with all special characters of LaTeX escaped."""
    return "".join(_LATEX.get(character, character) for character in text)
