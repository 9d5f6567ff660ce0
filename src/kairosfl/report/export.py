"""Every plot of the report as a file for a paper, and every table as CSV and LaTeX."""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kairosfl.errors import UserError
from kairosfl.report.draw import KINDS
from kairosfl.report.figures import figures
from kairosfl.report.latex import COLUMNS, latex, paper_table, tabular
from kairosfl.report.paper import Page, write_figure
from kairosfl.report.pictures import HeatMap, letter
from kairosfl.report.read import read_groups
from kairosfl.report.tables import Row, chosen_target, columns, pair_cells, paired_tests, results
from kairosfl.report.words import in_words
from kairosfl.runs.files import plain, write

FORMULA = ("=", "+", "-", "@", "\t", "\r", "\n")  # how formulas begin


def checked_kind(kind: str) -> None:
    """Refuse an unknown picture format."""
    if kind not in KINDS:
        raise UserError(f"kind = {kind!r} is not a picture format; use {', '.join(KINDS)}.")


def export_figures(dirs: Sequence[Path], folder: Path, kind: str = "svg") -> list[Path]:
    """Every picture of the report in its own file, and captions.txt.

    Heat maps have the letter of their group in their names.
    """
    checked_kind(kind)
    groups = read_groups(dirs)
    page = Page(critical=True, followed=True)
    names = [in_words(group.label) for group in groups]
    paths = []
    captions = ""
    for picture in figures(groups)[0]:
        name = picture.key
        if isinstance(picture, HeatMap):
            name = f"{name.rpartition('-')[0]}-{letter(picture.group)}"
        path = Path(folder) / f"{name}.{kind}"
        caption = write_figure([picture], groups, names, path, page)
        paths.append(path)
        captions += f"{path.name}: {caption}\n"
    write(Path(folder) / "captions.txt", captions)
    return paths


def export_tables(
    dirs: Sequence[Path], folder: Path, target: float | None = None, baseline: str | None = None
) -> list[Path]:
    """results and tests, each as .csv, numbers for programs, and as .tex, text for papers."""
    groups = read_groups(dirs)
    target = chosen_target(groups, target, baseline)
    rows = results(groups, target, baseline)
    pairs = paired_tests(groups, baseline)
    tables = {
        "results.csv": results_file(Path("results.csv"), rows, target),
        "results.tex": results_file(Path("results.tex"), rows, target),
    }
    if pairs:
        tables["tests.csv"] = as_csv([columns(pair) for pair in pairs])
        tables["tests.tex"] = as_latex([pair_cells(pair) for pair in pairs])
    for name, text in tables.items():
        write(Path(folder) / name, text)
    return [Path(folder) / name for name in tables]


def checked_table(path: Path) -> None:
    """Refuse a file name that says neither CSV nor LaTeX."""
    if path.suffix not in (".csv", ".tex"):
        raise UserError(f"{path} does not end in .tex or .csv; rename it.")


def results_file(
    path: Path,
    rows: Sequence[Row],
    target: float,
    *,
    names: Sequence[str] = (),
    chosen: Sequence[str] = COLUMNS,
    caption: str | None = None,
    label: str = "tab:results",
) -> str:
    """The results as text for this file: all numbers as CSV, or the chosen columns as LaTeX."""
    checked_table(path)
    if path.suffix == ".csv":
        return as_csv([{"target": target} | columns(row) for row in rows])
    if not names:
        names = [in_words(row.label) for row in rows]
    return paper_table(rows, target, names, chosen, caption, label)


def as_csv(rows: Sequence[dict[str, Any]]) -> str:
    """Rows as CSV with a header; unknown values are left empty.

    Text may come from someone else's run folder: a spreadsheet would evaluate what begins like a
    formula.
    """
    out = io.StringIO()
    writer = csv.DictWriter(out, fieldnames=list(rows[0]), lineterminator="\n")
    writer.writeheader()
    for row in rows:
        writer.writerow({name: _defused(value) for name, value in plain(row).items()})
    return out.getvalue()


def _defused(value: Any) -> Any:
    """A value, with an apostrophe in front where a spreadsheet would take it for a formula."""
    if isinstance(value, str) and value.startswith(FORMULA):
        return f"'{value}"
    return value


def as_latex(rows: Sequence[dict[str, str]]) -> str:
    """Rows of text as a tabular."""
    heads = list(map(latex, rows[0]))
    return tabular(heads, [list(map(latex, row.values())) for row in rows])
