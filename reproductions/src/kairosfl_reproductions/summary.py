"""The page that can be read in a minute: every verdict in one table, one picture, the time on
public benchmarks.
"""

from __future__ import annotations

import statistics
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from kairosfl.report.tables import signed
from kairosfl.wording import counted
from kairosfl_reproductions.catalogue import ITEMS
from kairosfl_reproductions.details import markdown, verdict_line
from kairosfl_reproductions.headline import headline
from kairosfl_reproductions.measures import MEASURES
from kairosfl_reproductions.results import Results, complete, longest
from kairosfl_reproductions.speed import speed
from kairosfl_reproductions.verdicts import (
    Agreement,
    Gain,
    claim_holds,
    family,
    gains,
    outcome,
    published,
    tally,
)

WIDE = ("---", "hide:", "  - toc", "---", "")  # the tables need the room
TITLES = {
    "fedaware": "FedAWARE (AISTATS 2025)",
    "pa3fed": "PA3Fed (AAAI 2025)",
    "fedcl": "FedCL, or CriticalFL (KDD 2023)",
    "alt": "ALT (2025)",
    "public": "Public benchmarks",
    "beyond": "Beyond the papers",
    "searches": "Appendix: searches",
}
INTRODUCTION = """We ran experiments of published papers and public benchmarks again. A value is *reproduced* if our
mean is within 2 points of accuracy of the published one, and *open* if it is further off, but within two standard
deviations of our seeds. Every rule is tested against numbers worked out independently. Where values differ, we
found three causes: the text and the released code disagree, our baselines are better than the published ones, or seeds
differ by more than the gain. What we tried, and what remains unexplained, is on the page of each paper.
"""
TERMS = """*×AWARE* is FedAWARE added to another method, *e-LUDD* how diverse the clients' updates are; *alpha* and *h*
say how much the clients' data differ (smaller: more); *FGN* and *FedFIM* are detectors of critical learning periods.
"""
HOW = """## How to read it

- An **item** is a table or figure of a paper, a **cell** one of its entries: a setting and a method. *Completed* counts
  the cells that ran for all their rounds. Only runs in the paper's setting with all its rounds are compared.
- A published **value** is reproduced or open as defined at the top; for e-LUDD, within 0.2 instead of 2 points.
- A published **gain** of one method over another holds when ours is at least half as large, and holds in part when ours
  has at least the same sign.
- A **claim** holds when two thirds of its gains do, and in part when half of them have at least the same sign.
- Where a paper is unclear, every **reading** is a row of its own; of a published gain, the reading that comes closest
  counts in the table above, and a published value counts as reproduced if one of its readings reproduces it. A
  *comparison* is one reading against its published value.

This page and the pages of the papers are written by `make results` from the files in `results/`; each holds the
configuration, seeds, version, device and curves of every run. To run an item yourself, or part of it with fewer rounds
and seeds:

    kairosfl reproduce
    kairosfl reproduce fedaware/table2 --cells cifar10 --rounds 20 --seeds 1

The first command lists the items. The second estimates the time it will take before it starts, and resumes if it is
run again after an interruption; it prints our values next to the published ones and plots the curves in
`runs/reproduce/fedaware-table2`, whose runs can be examined with `kairosfl report`. Runs whose
[data](data.md#where-the-files-are) is missing are named and skipped. `--results DIR` adds the results to files like
those from which this page is generated, after Ctrl-C those of the finished rounds. `reproductions/tables.sh` has the
commands of these pages, with the time that each takes on a GPU, and `reproductions/parts.sh` runs several side by side.
"""


def chapter(results: Results) -> str:
    """The page on which an item is shown."""
    if "/search" in results["item"]:
        return "searches"
    return str(results["item"].partition("/")[0])


def summary(
    everything: Sequence[Results],
    remarks: Mapping[str, str],
    folder: str,
    picture: str,
    study: Path,
) -> list[str]:
    """The lines of the page; `study` is where the times of pfl and ours in one process are, if they
    are known.
    """
    public = []
    papers = []
    rows = []
    for results in everything:
        where = chapter(results)
        if where == "public":
            public.append(results)
        elif where not in ("beyond", "searches"):
            papers.append(results)
        if where != "searches":
            rows.append(_row(results, remarks, folder))
    groups = _groups([*papers, *public])
    lines = [*WIDE, "# Results", ""]
    if groups:
        lines += [*_findings(papers, public), ""]
        lines += [*markdown([_verdict(group, remarks, folder) for group in groups]), ""]
    if picture:
        lines += [
            f"![Ours against the published accuracy, one point per comparison]({picture})",
            "",
            "*Our accuracy against the published one, a point for every comparison: two if two sources have a cell. "
            "The band is ± 2 points. Other readings of public cells are left out.*",
            "",
        ]
    if groups:
        lines += [INTRODUCTION, TERMS]
    timed = speed(public, study, lambda results: _link(results, folder))
    if timed:
        lines += ["## Time on public benchmarks", "", *timed]
    return [*lines, "## All items", "", *markdown(rows), "", *_unrun(everything, folder), HOW]


def counts(papers: Sequence[Results]) -> str:
    """How many comparisons, how many published values, and how many of both were reproduced; empty
    without any.
    """
    total = tally(papers)
    if not total.values:
        return ""
    with_readings = total.comparisons > total.values

    text = f"In {counted(total.comparisons, 'comparison')}"
    text += f" with {counted(total.values, 'published value')}"
    if with_readings:
        text += " (an unclear paper has several readings of one value)"
    text += f", {total.reproduced} came within 2 points"
    if total.open == 1:
        text += " and 1 is open because our seeds differ widely"
    elif total.open:
        text += f" and {total.open} are open because our seeds differ widely"
    if with_readings:
        text += f"; {total.met} of the {total.values} values were reproduced"
        text += " by at least one reading"
    text += "."

    not_run = published(papers) - total.values
    if not_run > 0:
        text += f" Another {not_run} comparable values of the same tables were not run,"
        text += " or not to the end."
    return text


def _findings(papers: Sequence[Results], public: Sequence[Results]) -> list[str]:
    lines = []
    for what, text in (("Papers", counts(papers)), ("Public benchmarks", headline(public))):
        if text:
            lines.append(f"- **{what}.** {text}")
    return lines


def _groups(items: Sequence[Results]) -> list[list[Results]]:
    """The items of a paper or a public source together, first the one whose verdict counts: the
    first with a claim.

    A source without an accuracy to compare is left out.
    """
    groups: dict[str, list[Results]] = {}
    for results in items:
        name = chapter(results)
        if name == "public":
            name = family(results["item"])
        groups.setdefault(name, []).append(results)

    ranked = []
    for group in groups.values():
        group.sort(key=lambda results: not results["claim"])
        if group[0]["claim"] or tally(group).values:
            ranked.append(group)
    return ranked


def _verdict(group: Sequence[Results], remarks: Mapping[str, str], folder: str) -> dict[str, str]:
    """The row of a paper: the verdict on its main item."""
    first = group[0]
    total = tally(group)
    title = TITLES.get(chapter(first), chapter(first))
    if chapter(first) == "public":
        title = first["title"]
    claim = first["claim"]
    if not claim:
        claim = counted(total.values, "published value")
    measured = _measured(group)
    if not measured:
        measured = ["no accuracy to compare"]
    verdict = _conclusion(first, remarks)
    if not verdict:
        verdict = f"{total.met} of {total.values} reproduced"

    cells = [cell for results in group for cell in results["cells"].values()]
    if any(map(complete, cells)):
        cells = list(filter(complete, cells))
    return {
        "paper or benchmark": f"[{title}]({_link(first, folder)})",
        "claim": claim,
        "measured": "; ".join(measured),
        "seeds": _seeds(cells),
        "verdict": _short_in_bold(verdict),
    }


def _short_in_bold(verdict: str) -> str:
    """What comes before the first colon is the verdict in short."""
    short, colon, rest = verdict.partition(": ")
    return f"**{short}**{colon}{rest}"


def _conclusion(results: Results, remarks: Mapping[str, str]) -> str:
    """The verdict that the remarks state or, on a claim, the one that follows from its gains."""
    stated = verdict_line(remarks.get(results["item"], ""))
    if stated or not results["claim"]:
        return stated
    return claim_holds(results)


def _measured(group: Sequence[Results]) -> list[str]:
    total = tally(group)
    first = group[0]
    clauses = []
    if total.values:
        text = f"{total.met} of {counted(total.values, 'value')} within 2 points"
        if total.comparisons > total.values:
            comparisons = counted(total.comparisons, "comparison")
            text += f" with at least one reading ({total.reproduced} of {comparisons})"
        clauses.append(text)
    gained = mean_gain(first)
    if first["claim"] and gained:
        clauses.append(gained)
    return clauses


def mean_gain(results: Results) -> str:
    """Our mean gain over the baselines, next to the published one where that is known, and what it
    is based on.
    """
    counting = gains(results)
    printed = []
    comparable = []
    for change in counting:
        if change.holds != "–" and change.printed is not None:
            printed.append(change.printed)
            comparable.append(change)
    if comparable:
        counting = comparable
    if not counting:
        return ""

    measure = MEASURES[results["measures"][0]]
    ours = signed(statistics.fmean(change.ours for change in counting), 1)
    text = f"mean difference {ours} in {measure.title}"
    if measure.unit:
        text = f"mean gain {ours} {measure.unit}"
    if printed:
        text += f", published {signed(statistics.fmean(printed), 1)},"
    return f"{text} in {counted(len(counting), 'pair')} of cells{_after(counting)}"


def _after(changes: Sequence[Gain]) -> str:
    """The rounds of what is compared, unless these are all the rounds."""
    if all(change.rounds >= change.planned for change in changes):
        return ""
    lengths = sorted({change.rounds for change in changes})
    planned = max(change.planned for change in changes)
    done = _range(lengths)
    if len(lengths) < 3:
        done = " or ".join(map(str, lengths))
    return f" after {done} of {planned} rounds"


def _unrun(everything: Sequence[Results], folder: str) -> list[str]:
    """The searches in one line, and the items of which nothing was run."""
    searches = 0
    cells = 0
    missing = dict.fromkeys(ITEMS)
    for results in everything:
        missing.pop(results["item"], None)
        if chapter(results) == "searches":
            searches += 1
            cells += len(results["cells"])

    lines = []
    if searches:
        appendix = f"[appendix]({folder}/searches.md)"
        lines += [f"Searches, {searches} items with {cells} cells, are in the {appendix}.", ""]
    if missing:
        names = "`, `".join(missing)
        lines += [f"Not run yet: `{names}`. `kairosfl reproduce` says what each is.", ""]
    return lines


def _row(results: Results, remarks: Mapping[str, str], folder: str) -> dict[str, str]:
    name = results["item"]
    cells = results["cells"].values()
    row = {
        "item": f"[{name}]({_link(results, folder)})",
        "cells run": str(len(cells)),
        "completed": str(sum(map(complete, cells))),
        "seeds": _seeds(cells),
    }
    if name in ITEMS and len(ITEMS[name].cells) > len(cells):
        row["cells run"] += f" of {len(ITEMS[name].cells)}"

    outcomes = [outcome(results, cell) for cell in cells]
    for word in get_args(Agreement):
        row[word] = "–"
        if any(outcomes):
            row[word] = str(outcomes.count(word))
    row["verdict"] = _conclusion(results, remarks)
    return row


def _link(results: Results, folder: str) -> str:
    return f"{folder}/{chapter(results)}.md#{results['item'].replace('/', '')}"


def _seeds(cells: Collection[Mapping[str, Any]]) -> str:
    """How many runs the cells are based on."""
    return _range([len(longest(cell)) for cell in cells])


def _range(numbers: Sequence[int]) -> str:
    low = min(numbers)
    high = max(numbers)
    if low == high:
        return str(low)
    return f"{low} to {high}"
