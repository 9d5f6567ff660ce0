"""The table of results as a paper prints it: LaTeX in booktabs style, the best in bold."""

from __future__ import annotations

import math
from collections.abc import Sequence

from kairosfl.errors import UserError, nearest
from kairosfl.report.pictures import BAND, counted
from kairosfl.report.ranking import best_rows
from kairosfl.report.tables import DAGGER, Row, cells
from kairosfl.runs.score import Score

# After the algorithm, unless others are chosen.
COLUMNS = ("final 10 %", "rounds to target", "MB to target", "MB")
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
    "passes": "Passes of samples",
    "cohort": "Clients per round",
    "e-LUD": "e-LUD",
    "seconds": "Seconds",
}


def chosen_columns(text: str | None) -> tuple[str, ...]:
    """Columns of the table of results by their names, separated by commas.

    Spaces and signs in the names do not matter.
    """
    if text is None:
        return COLUMNS
    columns = {_plain(name): name for name in _HEADS if name != "algorithm"}
    chosen: list[str] = []
    for name in filter(None, map(str.strip, text.split(","))):
        if _plain(name) not in columns:
            raise UserError(
                f"{name!r} is not a column of results; {nearest(name, columns.values())}"
            )
        chosen.append(columns[_plain(name)])
    if not chosen:
        raise UserError(f"--columns names no column; known: {', '.join(columns.values())}.")
    return tuple(dict.fromkeys(chosen))


def _plain(name: str) -> str:
    return "".join(filter(str.isalnum, name.lower()))


def paper_table(
    rows: Sequence[Row],
    target: float,
    names: Sequence[str],
    columns: Sequence[str] = COLUMNS,
    caption: str | None = None,
    label: str = "tab:results",
) -> str:
    """The results as a `table` of LaTeX.

    Args:
        rows: The results of the groups.
        target: Of the main metric; NaN if it is not known.
        names: What to call each row.
        columns: After the algorithm.
        caption: In LaTeX; by default it says what the columns are.
        label: To refer to the table by.
    """
    if caption is None:
        caption = latex(_caption(rows, columns))
    best = {name: best_rows(rows, name) for name in columns}
    body = []
    for i, (row, name) in enumerate(zip(rows, names, strict=True)):
        texts = cells(row)
        line = [latex(name)]
        for column in columns:
            text = latex(texts[column])
            line.append(f"\\textbf{{{text}}}" if i in best[column] else text)
        body.append(line)
    return (
        f"\\begin{{table}}[t]\n\\centering\n\\caption{{{caption}}}\n\\label{{{label}}}\n"
        f"{tabular(_heads(rows[0].score, target, columns), body)}"
        "\\end{table}\n"
    )


def _heads(score: Score, target: float, columns: Sequence[str]) -> list[str]:
    """The algorithm and these columns, as a paper would head them."""
    words = {
        "title": score.title,
        "unit": f" ({score.unit.strip()})" if score.unit else "",
        "goal": "target" if math.isnan(target) else score.shown(target),
    }
    return [latex(_HEADS[name].format(**words)) for name in ("algorithm", *columns)]


def _caption(rows: Sequence[Row], columns: Sequence[str]) -> str:
    """What the numbers are."""
    counts = [len(row.seeds) for row in rows]
    most = max(counts)
    seeds = counted(most, "seed")
    if min(counts) < most:
        seeds = f"{min(counts)} to {seeds}"
    sentences = [f"Results over {seeds}."]
    if most > 1:
        sentences = [f"Mean {BAND.replace('over seeds', f'over {seeds}')}."]
    if "final 10 %" in columns:
        sentences.append(f"{rows[0].score.title}: mean over the final 10 % of rounds.")
        if any(row.dagger for row in rows):
            sentences.append(
                f"{DAGGER}: after the last round, since models are averaged only within these."
            )
    if any("MB" in name for name in columns):
        sentences.append("MB: sent and received by all clients together.")
    if any(best_rows(rows, name) for name in columns):
        sentences.append("Bold: best.")
    return " ".join(sentences)


def tabular(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A tabular in booktabs style of LaTeX texts; the first column left, the others right."""
    body = "".join(map(_line, rows))
    return (
        f"\\begin{{tabular}}{{l{'r' * (len(heads) - 1)}}}\n"
        f"\\toprule\n{_line(heads)}\\midrule\n{body}\\bottomrule\n"
        "\\end{tabular}\n"
    )


def _line(texts: Sequence[str]) -> str:
    return " & ".join(texts) + " \\\\\n"


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
    "α": "$\\alpha$",
    "β": "$\\beta$",
    "γ": "$\\gamma$",
    "δ": "$\\delta$",
    "ε": "$\\varepsilon$",
    "λ": "$\\lambda$",
    "μ": "$\\mu$",
    "ρ": "$\\rho$",
    "σ": "$\\sigma$",
    "τ": "$\\tau$",
    "₁": "$_1$",
    "₂": "$_2$",
}


_ESCAPES = str.maketrans(_LATEX)


def latex(text: str) -> str:
    """Text with all special characters of LaTeX escaped."""
    return text.translate(_ESCAPES)
