"""Every plot as a file for a paper, and every table as CSV and LaTeX."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kairosfl.errors import UserError
from kairosfl.report.draw import draw, save, style
from kairosfl.report.figures import figures
from kairosfl.report.pictures import HeatMap, letter
from kairosfl.report.read import read_groups
from kairosfl.report.tables import chosen_target, columns, pair_cells, paired_tests, results, results_table
from kairosfl.runs.files import plain, write

KINDS = ("svg", "pdf", "png")


def checked_kind(kind: str) -> None:
    """Refuse an unknown picture format."""
    if kind not in KINDS:
        raise UserError(f"kind = {kind!r} is not a picture format; use {', '.join(KINDS)}.")


def export_figures(dirs: Sequence[Path], folder: Path, kind: str = "svg") -> list[Path]:
    """Every picture of the report in its own file; heat maps carry the letter of their group."""
    checked_kind(kind)
    groups = read_groups(dirs)
    written = []
    with style():
        for picture in figures(groups)[0]:
            name = picture.key
            if isinstance(picture, HeatMap):
                name = f"{name.rpartition('-')[0]}-{letter(picture.group)}"
            written.append(Path(folder) / f"{name}.{kind}")
            save(draw(picture, groups), written[-1], kind)
    return written


def export_tables(
    dirs: Sequence[Path], folder: Path, target: float | None = None, baseline: str | None = None
) -> list[Path]:
    """results and tests, each as .csv, numbers for programs, and as .tex, text for papers."""
    groups = read_groups(dirs)
    target = chosen_target(groups, target, baseline)
    rows, pairs = results(groups, target, baseline), paired_tests(groups, baseline)
    tables = {
        "results.csv": as_csv([{"target": target} | columns(row) for row in rows]),
        "results.tex": as_latex(results_table(rows, target)),
    }
    if pairs:
        tables["tests.csv"] = as_csv([columns(pair) for pair in pairs])
        tables["tests.tex"] = as_latex([pair_cells(pair) for pair in pairs])
    for name, text in tables.items():
        write(Path(folder) / name, text)
    return [Path(folder) / name for name in tables]


def as_csv(rows: Sequence[dict[str, Any]]) -> str:
    """Rows as CSV with a header; unknown values are left empty."""
    out = io.StringIO()
    writer = csv.DictWriter(out, fieldnames=list(rows[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(plain(row) for row in rows)
    return out.getvalue()


def as_latex(rows: Sequence[dict[str, str]]) -> str:
    """Rows of text as a tabular in booktabs style; the first column left, the others right."""
    lines = [
        f"\\begin{{tabular}}{{l{'r' * (len(rows[0]) - 1)}}}",
        "\\toprule",
        " & ".join(map(latex, rows[0])) + " \\\\",
        "\\midrule",
        *(" & ".join(map(latex, row.values())) + " \\\\" for row in rows),
        "\\bottomrule",
        "\\end{tabular}",
    ]
    return "\n".join(lines) + "\n"


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
    "±": "$\\pm$",
    "−": "$-$",
    "–": "--",
    "×": "$\\times$",
    "·": "$\\cdot$",
}


def latex(text: str) -> str:
    """Text with all special characters of LaTeX escaped."""
    return "".join(_LATEX.get(character, character) for character in text)
