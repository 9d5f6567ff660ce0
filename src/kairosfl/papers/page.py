"""The page of results, written from the files in `results/` and nothing else: the same files give the same page."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kairosfl.errors import UserError
from kairosfl.papers.curves import draw_curves
from kairosfl.papers.measures import MEASURES
from kairosfl.papers.results import Results, complete, done, gain, longest, read, signed, spread, table, values
from kairosfl.runs.files import write

INTRODUCTION = """# Reproduction results

This page is written by `kairosfl results` from the files in `results/`; each holds the configuration, seeds, version,
device and accuracy curve of every run. *Ours* is the mean ± sample deviation over the seeds that got furthest. *Rounds*
and *seeds* say how much stands behind a row: `40 of 500` has run 40 of the paper's 500 rounds and is not judged against
the print; with `1 of 2` seeds the other was cut, or diverged on its way. A reading other than *text* follows another
sentence of the paper or its released code.

A printed value counts as reproduced when ours lies within 2 points of accuracy (0.2 of e-LUDD) or two deviations of it.
A printed gain of one method over another holds when ours is at least half of it, and holds in part when ours has at
least its sign. Test accuracies are in per cent.

To run an item yourself, or a part of it with fewer rounds and seeds:

    kairosfl reproduce
    kairosfl reproduce fedaware/table2 --cells cifar10 --rounds 20 --seeds 1

The first lists the items. The second says how long it will take before it starts, and started again goes on where it
was cut; it prints our values beside the print and draws the curves into `runs/reproduce/fedaware-table2`, whose runs
`kairosfl report` explains. What needs [data](data.md#where-the-files-lie) that is not there is named, and the rest
runs. `--results DIR` adds the outcome to files like those that this page is made of.
"""
CAPTION = "*Mean and one deviation over the seeds that all curves of a panel have; triangles: the end in print.*"


def write_results_page(results: Path, page: Path) -> Path:
    """Write the page from every JSON file in a folder; `ITEM.md` beside a file, if there, is put under its tables.

    The pictures go into `assets/results` beside the page; searches have none.
    """
    files = sorted(results.glob("*.json"), key=lambda path: (path.name.startswith("beyond"), path.name))
    if not files:
        raise UserError(f"{results} holds no results (no .json file); run `kairosfl reproduce` and keep its results.")
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
    """One item: its picture and table, what reproduced and what did not, and our remarks."""
    lines = [f"## {results['item']}", "", f"{results['title']}.", ""]
    if results["claim"]:
        lines += [f"The paper says: {results['claim']}", ""]
    if results["note"]:
        lines += [results["note"], ""]
    lines += [f"    kairosfl reproduce {results['item']}", ""]
    if picture:
        lines += [f"![Test accuracy by round, a panel for each baseline]({picture})", "", CAPTION, ""]
    lines += [*_markdown(table(results)), ""]
    gains = _gains(results)
    if gains:
        lines += ["With against without, on the seeds and rounds that both have:", "", *_markdown(gains), ""]
    lines += _verdict(results)
    if remarks:
        lines += [remarks.strip(), ""]
    lines += [_made_on(results), ""]
    return "\n".join(lines)


def judge(cell: Mapping[str, Any], measure: str) -> bool | None:
    """Whether ours agrees with the printed value; None: nothing printed, nothing run, or not all its rounds."""
    ours, printed = values(cell, measure), cell["printed"].get(measure)
    if printed is None or not ours or not complete(cell):
        return None
    deviation = statistics.stdev(ours) if len(ours) > 1 else 0.0
    return bool(abs(statistics.fmean(ours) - printed) <= max(MEASURES[measure].tolerance, 2 * deviation))


def _overview(everything: Sequence[Results]) -> str:
    rows = []
    for results in everything:
        measure, cells = results["measures"][0], results["cells"].values()
        verdicts = [None if results.get("beat") else judge(cell, measure) for cell in cells]
        rows.append(
            {
                "item": f"[{results['item']}](#{results['item'].replace('/', '')})",
                "cells run": str(len(verdicts)),
                "to the end": str(sum(map(complete, cells))),
                "seeds": _range([len(longest(cell)) for cell in cells]),
                "reproduced": str(verdicts.count(True)),
                "not reproduced": str(verdicts.count(False)),
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
                "against": cell["baseline"],
                "ours": _signed_spread(ours, digits),
                "printed": "–" if printed is None else signed(printed, digits),
                "rounds": done(cell),
                "seeds": str(len(ours)),
                "holds": _holds(statistics.fmean(ours), printed, judged=complete(cell)),
            }
        )
    return rows


def _holds(ours: float, printed: float | None, *, judged: bool) -> str:
    if printed is None or not judged:
        return "–"
    if ours * printed <= 0:
        return "no"
    return "yes" if abs(ours) >= abs(printed) / 2 else "in part"


def _verdict(results: Results) -> list[str]:
    """What did not reproduce, in plain words."""
    measure = results["measures"][0]
    title, digits = MEASURES[measure].title, MEASURES[measure].digits
    if results.get("beat"):
        return _beaten(results, measure)
    judged = {name: judge(cell, measure) for name, cell in results["cells"].items()}
    good = [name for name, verdict in judged.items() if verdict]
    bad = [name for name, verdict in judged.items() if verdict is False]
    if not good and not bad:
        return []
    lines = [f"**{title.capitalize()}: {len(good)} of {len(good) + len(bad)} judged cells reproduced.**", ""]
    if bad:
        lines += ["Did not reproduce:", ""]
    for name in bad:
        cell = results["cells"][name]
        ours = values(cell, measure)
        difference = statistics.fmean(ours) - cell["printed"][measure]
        lines.append(
            f"- `{name}` ({cell['reading']}): ours {spread(ours, digits)}, printed "
            f"{cell['printed'][measure]:.{digits}f}, {signed(difference, digits)}"
        )
    return [*lines, ""] if bad else lines


def _beaten(results: Results, measure: str) -> list[str]:
    """By how much the best printed values are passed."""
    digits = MEASURES[measure].digits
    lines = []
    for name, cell in results["cells"].items():
        ours, printed = values(cell, measure), cell["printed"].get(measure)
        if ours and printed is not None:
            more = signed(statistics.fmean(ours) - printed, digits)
            lines += [
                f"**`{name}`: {spread(ours, digits)} where the best in print is {printed:.{digits}f}, {more}.**",
                "",
            ]
    return lines


def _made_on(results: Results) -> str:
    runs = [run for cell in results["cells"].values() for run in cell["runs"]]
    made = sorted(
        {f"version {run['version']}, {run['engine']} engine, {run['precision']}, {run['device']}" for run in runs}
    )
    return f"Made with {'; '.join(made)}."


def _signed_spread(numbers: Sequence[float], digits: int) -> str:
    shown = signed(statistics.fmean(numbers), digits)
    return f"{shown} ± {statistics.stdev(numbers):.{digits}f}" if len(numbers) > 1 else shown


def _range(numbers: Sequence[int]) -> str:
    low, high = min(numbers), max(numbers)
    return str(low) if low == high else f"{low} to {high}"


def _markdown(rows: Sequence[Mapping[str, str]]) -> list[str]:
    heads = list(rows[0])
    lines = [heads, ["---" if head in ("cell", "reading", "item", "against") else "---:" for head in heads]]
    lines += [[row[head] for head in heads] for row in rows]
    return [f"| {' | '.join(cells)} |" for cells in lines]
