"""The page of results, written from the files in `results/` and nothing else: the same files give the same page."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

from kairosfl.errors import UserError
from kairosfl.papers.curves import draw_curves
from kairosfl.papers.measures import MEASURES
from kairosfl.papers.results import Results, complete, done, gain, longest, read, spread, table, values
from kairosfl.report.tables import fixed, signed
from kairosfl.runs.files import write

Verdict = Literal["reproduced", "open", "not reproduced"]

INTRODUCTION = """# Reproduction results

This page is written by `kairosfl results` from the files in `results/`; each holds the configuration, seeds, version,
device and curves of every run. *Ours* is the mean ± sample deviation over the seeds that got furthest. *Rounds*
and *seeds* say how much stands behind a row: `40 of 500` has run 40 of the paper's 500 rounds and is not judged against
the print; with `1 of 2` seeds the other was cut, or diverged on its way. A reading other than *text* follows another
sentence of the paper or its released code.

A printed value counts as reproduced when ours lies within 2 points of accuracy (0.2 of e-LUDD) of it; further off, but
within two deviations of our seeds, it is left open. A printed gain of one method over another holds when ours is at
least half of it, and holds in part when ours has at least its sign. Cells in a setting of our own, such as PA3Fed's
`slow` schedule, stand beside the print and are not judged by it. Test accuracies are in per cent; the final 10 % is the
mean of the evaluations in it.

To run an item yourself, or a part of it with fewer rounds and seeds:

    kairosfl reproduce
    kairosfl reproduce fedaware/table2 --cells cifar10 --rounds 20 --seeds 1

The first lists the items. The second says how long it will take before it starts, and started again goes on where it
was cut; it prints our values beside the print and draws the curves into `runs/reproduce/fedaware-table2`, whose runs
`kairosfl report` explains. What needs [data](data.md#where-the-files-lie) that is not there is named, and the rest
runs. `--results DIR` adds the outcome to files like those that this page is made of.
"""
CAPTION = "*Mean and deviation over the seeds that all curves of a panel have; triangles, if any: the end in print.*"


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
        lines += [f"![Curves by round, panels for each baseline]({picture})", "", CAPTION, ""]
    lines += [*_markdown(table(results)), ""]
    gains = _gains(results)
    if gains:
        lines += ["With against without, on the seeds and rounds that both have:", "", *_markdown(gains), ""]
    lines += _verdict(results)
    if remarks:
        lines += [remarks.strip(), ""]
    lines += [_made_on(results), ""]
    return "\n".join(lines)


def judge(cell: Mapping[str, Any], measure: str) -> Verdict | None:
    """Whether ours agrees with the printed value; None: nothing printed or run, not all its rounds, not the paper's."""
    ours, printed = values(cell, measure), cell["printed"].get(measure)
    if printed is None or not ours or not as_printed(cell):
        return None
    off = abs(statistics.fmean(ours) - printed)
    if off <= MEASURES[measure].tolerance:
        return "reproduced"
    return "open" if len(ours) > 1 and off <= 2 * statistics.stdev(ours) else "not reproduced"


def as_printed(cell: Mapping[str, Any]) -> bool:
    """Whether a cell has run as the paper's did, to the end."""
    return complete(cell) and bool(cell.get("judged", True))


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
                **{word: str(verdicts.count(word)) if any(verdicts) else "–" for word in get_args(Verdict)},
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
                "holds": _holds(statistics.fmean(ours), printed, judged=as_printed(cell)),
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
    """What did not reproduce and what cannot be told, in plain words."""
    measure = results["measures"][0]
    title = MEASURES[measure].title
    if results.get("beat"):
        return _beaten(results, measure)
    verdicts = {name: judge(cell, measure) for name, cell in results["cells"].items()}
    named = {word: [name for name, verdict in verdicts.items() if verdict == word] for word in get_args(Verdict)}
    total = sum(map(len, named.values()))
    if not total:
        return []
    left = f", {len(named['open'])} left open" if named["open"] else ""
    lines = [f"**{title.capitalize()}: {len(named['reproduced'])} of {total} judged cells reproduced{left}.**", ""]
    for word, heading in (("not reproduced", "Did not reproduce"), ("open", "Left open, by seeds that lie far apart")):
        if named[word]:
            lines += [f"{heading}:", "", *(_beside(name, results["cells"][name], measure) for name in named[word]), ""]
    return lines


def _beside(name: str, cell: Mapping[str, Any], measure: str) -> str:
    ours, printed, digits = values(cell, measure), cell["printed"][measure], MEASURES[measure].digits
    return (
        f"- `{name}` ({cell['reading']}): ours {spread(ours, digits)}, printed {printed:.{digits}f}, "
        f"{signed(statistics.fmean(ours) - printed, digits)}"
    )


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
    evaluated = " or ".join(map(str, sorted({run["evaluated"] for run in runs if run.get("evaluated")})))
    every = {"": "", "1": " Evaluated every round."}.get(evaluated, f" Evaluated every {evaluated} rounds.")
    return f"Made with {'; '.join(made)}.{every}"


def _signed_spread(numbers: Sequence[float], digits: int) -> str:
    shown = signed(statistics.fmean(numbers), digits)
    return f"{shown} ± {fixed(statistics.stdev(numbers), digits)}" if len(numbers) > 1 else shown


def _range(numbers: Sequence[int]) -> str:
    low, high = min(numbers), max(numbers)
    return str(low) if low == high else f"{low} to {high}"


def _markdown(rows: Sequence[Mapping[str, str]]) -> list[str]:
    heads = list(rows[0])
    lines = [heads, ["---" if head in ("cell", "reading", "item", "against") else "---:" for head in heads]]
    lines += [[row[head] for head in heads] for row in rows]
    return [f"| {' | '.join(cells)} |" for cells in lines]
