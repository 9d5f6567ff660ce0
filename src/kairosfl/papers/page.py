"""The page of results, written from the files in `results/` and nothing else: the same files give the same page.

`make results` rewrites the page of this repository: `python -m kairosfl.papers.page results docs/results.md`.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

from kairosfl.errors import UserError
from kairosfl.papers.curves import draw_curves
from kairosfl.papers.measures import MEASURES
from kairosfl.papers.results import Results, complete, done, gain, longest, read, spread, table, values
from kairosfl.report.tables import fixed, signed
from kairosfl.runs.files import write

Agreement = Literal["reproduced", "open", "not reproduced"]

INTRODUCTION = """# Reproduction results

This page is written by `make results` from the files in `results/`; each holds the configuration, seeds, version,
device and curves of every run. *Ours* is the mean ± sample standard deviation over the seeds that got furthest.
*Rounds* and *seeds* show what a row is based on: `40 of 500` means that 40 of the paper's 500 rounds were run, so the
row is not compared with the published value; with `1 of 2` seeds, the other run was interrupted or diverged. A reading
other than *text* follows another passage of the paper or its released code.

A published value counts as reproduced when ours is within 2 points of accuracy (0.2 of e-LUDD); if it is further off,
but within two standard deviations of our seeds, it is left open. A published gain of one method over another holds when
ours is at least half as large, and holds in part when ours has at least the same sign. Cells in a setting of our own,
such as PA3Fed's `slow` schedule, are shown next to the published values but are not compared with them. Test accuracies
are in per cent; *final 10 %* is the mean of the evaluations in the final 10 % of rounds.

To run an item yourself, or part of it with fewer rounds and seeds:

    kairosfl reproduce
    kairosfl reproduce fedaware/table2 --cells cifar10 --rounds 20 --seeds 1

The first command lists the items. The second estimates the time it will take before it starts, and resumes if it is
run again after an interruption; it prints our values next to the published ones and plots the curves in
`runs/reproduce/fedaware-table2`, whose runs can be examined with `kairosfl report`. Runs whose
[data](data.md#where-the-files-are) is missing are named and skipped. `--results DIR` adds the results to files like
those from which this page is generated.
"""
CAPTION = (
    "*Mean and standard deviation over the seeds shared by all curves of a panel; triangles: published final values.*"
)


def write_results_page(results: Path, page: Path) -> Path:
    """Write the page from every JSON file in a folder; if there is an `ITEM.md`, it is inserted below the tables.

    Figures are saved to `assets/results` next to the page; searches have none.
    """
    files = sorted(results.glob("*.json"), key=lambda path: (path.name.startswith("beyond"), path.name))
    if not files:
        raise UserError(f"{results} contains no results (no .json file); run `kairosfl reproduce` with --results.")
    everything = {path: read(path) for path in files}
    parts = [INTRODUCTION, _overview(list(everything.values()))]
    for path, found in everything.items():
        remarks = path.with_suffix(".md")
        picture = f"assets/results/{path.stem}.svg"
        if "/search" in found["item"] or not draw_curves(found, page.parent / picture):
            picture = ""
        parts.append(section(found, remarks.read_text(encoding="utf-8") if remarks.is_file() else "", picture))
    write(page, "\n".join(parts))
    return page


def section(results: Results, remarks: str = "", picture: str = "") -> str:
    """One item: its figure and table, what was reproduced and what was not, and our remarks."""
    lines = [f"## {results['item']}", "", f"{results['title']}.", ""]
    if results["claim"]:
        lines += [f"The paper says: {results['claim']}", ""]
    if results["note"]:
        lines += [results["note"], ""]
    lines += [f"    kairosfl reproduce {results['item']}", ""]
    if picture:
        lines += [f"![Curves by round, one panel per baseline]({picture})", "", CAPTION, ""]
    lines += [*_markdown(table(results)), ""]
    gains = _gains(results)
    if gains:
        lines += ["Difference from the baseline, on the seeds and rounds that both have:", "", *_markdown(gains), ""]
    lines += _conclusion(results)
    if remarks:
        lines += [remarks.strip(), ""]
    lines += [_made_on(results), ""]
    return "\n".join(lines)


def agreement(cell: Mapping[str, Any], measure: str) -> Agreement | None:
    """Whether ours agrees with the published value; None if there is none or the cell was not run as published."""
    ours, printed = values(cell, measure), cell["printed"].get(measure)
    if printed is None or not ours or not as_published(cell):
        return None
    off = abs(statistics.fmean(ours) - printed)
    if off <= MEASURES[measure].tolerance:
        return "reproduced"
    return "open" if len(ours) > 1 and off <= 2 * statistics.stdev(ours) else "not reproduced"


def outcome(results: Results, cell: Mapping[str, Any]) -> Agreement | None:
    """The verdict on a cell: of its primary measure, or the best of those that `sources` name."""
    found = [agreement(cell, measure) for measure in results.get("sources") or results["measures"][:1]]
    return next((word for word in get_args(Agreement) if word in found), None)


def as_published(cell: Mapping[str, Any]) -> bool:
    """Whether a cell was run in the paper's setting and for all its rounds."""
    return complete(cell) and bool(cell["comparable"])


def _overview(everything: Sequence[Results]) -> str:
    rows = []
    for results in everything:
        cells = results["cells"].values()
        outcomes = [None if results.get("beat") else outcome(results, cell) for cell in cells]
        rows.append(
            {
                "item": f"[{results['item']}](#{results['item'].replace('/', '')})",
                "cells run": str(len(outcomes)),
                "completed": str(sum(map(complete, cells))),
                "seeds": _range([len(longest(cell)) for cell in cells]),
                **{word: str(outcomes.count(word)) if any(outcomes) else "–" for word in get_args(Agreement)},
            }
        )
    return "\n".join([*_markdown(rows), ""])


def _gains(results: Results) -> list[dict[str, str]]:
    measure = results["measures"][0]
    digits = MEASURES[measure].digits
    rows = []
    for name, cell in results["cells"].items():
        found = gain(results, name, measure)
        if found is None or not found[0]:
            continue
        ours, printed = found
        rows.append(
            {
                "cell": name,
                "baseline": cell["baseline"],
                "ours": _signed_spread(ours, digits),
                "published": "–" if printed is None else signed(printed, digits),
                "rounds": done(cell),
                "seeds": str(len(ours)),
                "holds": _holds(statistics.fmean(ours), printed, comparable=as_published(cell)),
            }
        )
    return rows


def _holds(ours: float, printed: float | None, *, comparable: bool) -> str:
    if printed is None or not comparable:
        return "–"
    if ours * printed <= 0:
        return "no"
    return "yes" if abs(ours) >= abs(printed) / 2 else "in part"


def _conclusion(results: Results) -> list[str]:
    """What was not reproduced and what is left open, in words."""
    measure = results["measures"][0]
    title = MEASURES[measure].title
    if results.get("beat"):
        return _beaten(results, measure)
    outcomes = {name: outcome(results, cell) for name, cell in results["cells"].items()}
    named = {word: [name for name, outcome in outcomes.items() if outcome == word] for word in get_args(Agreement)}
    total = sum(map(len, named.values()))
    if not total:
        return []
    left = f", {len(named['open'])} left open" if named["open"] else ""
    lines = [f"**{title.capitalize()}: {len(named['reproduced'])} of {total} compared cells reproduced{left}.**", ""]
    for word, heading in (("not reproduced", "Not reproduced"), ("open", "Left open, because the seeds differ widely")):
        if named[word]:
            lines += [
                f"{heading}:",
                "",
                *(line for name in named[word] for line in _comparisons(name, results)),
                "",
            ]
    return lines


def _comparisons(name: str, results: Results) -> list[str]:
    """Ours against every published value that counts."""
    cell, sources = results["cells"][name], results.get("sources") or {}
    lines = []
    for measure in sources or results["measures"][:1]:
        if measure in cell["printed"]:
            ours, printed, digits = values(cell, measure), cell["printed"][measure], MEASURES[measure].digits
            where = f" ({sources[measure]})" if measure in sources else ""
            lines.append(
                f"- `{name}` ({cell['reading']}): ours {spread(ours, digits)}, published {printed:.{digits}f}{where}, "
                f"{signed(statistics.fmean(ours) - printed, digits)}"
            )
    return lines


def _beaten(results: Results, measure: str) -> list[str]:
    """By how much the best published values are exceeded."""
    digits = MEASURES[measure].digits
    lines = []
    for name, cell in results["cells"].items():
        ours, printed = values(cell, measure), cell["printed"].get(measure)
        if ours and printed is not None:
            more = signed(statistics.fmean(ours) - printed, digits)
            lines += [
                f"**`{name}`: {spread(ours, digits)} where the best published value is {printed:.{digits}f}, {more}.**",
                "",
            ]
    return lines


def _made_on(results: Results) -> str:
    runs = [run for cell in results["cells"].values() for run in cell["runs"]]
    made = sorted(
        {f"version {run['version']}, {run['engine']} engine, {run['precision']}, {run['device']}" for run in runs}
    )
    evaluated = " or ".join(map(str, sorted({run["evaluated"] for run in runs if run.get("evaluated")})))
    every = {"": "", "1": " Evaluated every round."}.get(evaluated, f" Evaluated every {evaluated} rounds.")
    return f"Run with {'; '.join(made)}.{every}"


def _signed_spread(numbers: Sequence[float], digits: int) -> str:
    shown = signed(statistics.fmean(numbers), digits)
    return f"{shown} ± {fixed(statistics.stdev(numbers), digits)}" if len(numbers) > 1 else shown


def _range(numbers: Sequence[int]) -> str:
    low, high = min(numbers), max(numbers)
    return str(low) if low == high else f"{low} to {high}"


def _markdown(rows: Sequence[Mapping[str, str]]) -> list[str]:
    heads = list(rows[0])
    lines = [heads, ["---" if head in ("cell", "reading", "item", "baseline") else "---:" for head in heads]]
    lines += [[row[head] for head in heads] for row in rows]
    return [f"| {' | '.join(cells)} |" for cells in lines]


if __name__ == "__main__":
    write_results_page(*map(Path, sys.argv[1:]))
