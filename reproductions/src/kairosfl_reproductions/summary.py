"""The page that can be read in a minute: every verdict in one table, one picture, the time on
public benchmarks.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import get_args

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
    return "searches" if "/search" in results["item"] else str(results["item"].partition("/")[0])


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
    public = [each for each in everything if chapter(each) == "public"]
    papers = [each for each in everything if chapter(each) not in ("public", "beyond", "searches")]
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
    shown = [_row(each, remarks, folder) for each in everything if chapter(each) != "searches"]
    return [*lines, "## All items", "", *markdown(shown), "", *_unrun(everything, folder), HOW]


def counts(papers: Sequence[Results]) -> str:
    """How many comparisons, how many published values, and how many of both were reproduced; empty
    without any.
    """
    found = tally(papers)
    if not found.values:
        return ""
    readings = (
        " (an unclear paper has several readings of one value)"
        if found.comparisons > found.values
        else ""
    )
    left = f" and {found.open} {'is' if found.open == 1 else 'are'} open because our seeds differ widely"
    by = f"; {found.met} of the {found.values} values were reproduced by at least one reading"
    unrun = published(papers) - found.values
    more = f" Another {unrun} comparable values of the same tables were not run, or not to the end."
    return (
        f"In {counted(found.comparisons, 'comparison')} with {counted(found.values, 'published value')}{readings}, "
        f"{found.reproduced} came within 2 points{left if found.open else ''}{by if readings else ''}."
        f"{more if unrun > 0 else ''}"
    )


def _findings(papers: Sequence[Results], public: Sequence[Results]) -> list[str]:
    said = {"Papers": counts(papers), "Public benchmarks": headline(public)}
    return [f"- **{what}.** {text}" for what, text in said.items() if text]


def _groups(items: Sequence[Results]) -> list[list[Results]]:
    """The items of a paper or a public source together, first the one whose verdict counts: the
    first with a claim.

    A source without an accuracy to compare is left out.
    """
    groups: dict[str, list[Results]] = {}
    for each in items:
        groups.setdefault(
            family(each["item"]) if chapter(each) == "public" else chapter(each), []
        ).append(each)
    ranked = (sorted(group, key=lambda each: not each["claim"]) for group in groups.values())
    return [group for group in ranked if group[0]["claim"] or tally(group).values]


def _verdict(group: Sequence[Results], remarks: Mapping[str, str], folder: str) -> dict[str, str]:
    """The row of a paper: the verdict on its main item."""
    first, found = group[0], tally(group)
    title = (
        first["title"] if chapter(first) == "public" else TITLES.get(chapter(first), chapter(first))
    )
    cells = [cell for each in group for cell in each["cells"].values()]
    counted_on = [*filter(complete, cells)] or cells
    return {
        "paper or benchmark": f"[{title}]({_link(first, folder)})",
        "claim": first["claim"] or counted(found.values, "published value"),
        "measured": "; ".join(_measured(group)) or "no accuracy to compare",
        "seeds": _range([len(longest(cell)) for cell in counted_on]),
        "verdict": _short_in_bold(
            _conclusion(first, remarks) or f"{found.met} of {found.values} reproduced"
        ),
    }


def _short_in_bold(verdict: str) -> str:
    """What comes before the first colon is the verdict in short."""
    short, colon, rest = verdict.partition(": ")
    return f"**{short}**{colon}{rest}"


def _conclusion(results: Results, remarks: Mapping[str, str]) -> str:
    """The verdict that the remarks state or, on a claim, the one that follows from its gains."""
    return verdict_line(remarks.get(results["item"], "")) or (
        claim_holds(results) if results["claim"] else ""
    )


def _measured(group: Sequence[Results]) -> list[str]:
    found, first = tally(group), group[0]
    said = []
    if found.values:
        text = f"{found.met} of {counted(found.values, 'value')} within 2 points"
        if found.comparisons > found.values:
            text += f" with at least one reading ({found.reproduced} of {counted(found.comparisons, 'comparison')})"
        said.append(text)
    return [*said, gained] if first["claim"] and (gained := mean_gain(first)) else said


def mean_gain(results: Results) -> str:
    """Our mean gain over the baselines, next to the published one where that is known, and what it
    is based on.
    """
    changes, measure = gains(results), MEASURES[results["measures"][0]]
    known = [each for each in changes if each.holds != "–" and each.printed is not None]
    shown = known or changes
    if not shown:
        return ""
    ours = signed(statistics.fmean(each.ours for each in shown), 1)
    what = (
        f"mean gain {ours} {measure.unit}"
        if measure.unit
        else f"mean difference {ours} in {measure.title}"
    )
    published = (
        f", published {signed(statistics.fmean(each.printed or 0.0 for each in known), 1)},"
        if known
        else ""
    )
    return f"{what}{published} in {counted(len(shown), 'pair')} of cells{_after(shown)}"


def _after(shown: Sequence[Gain]) -> str:
    """The rounds of what is compared, unless these are all the rounds."""
    if all(each.rounds >= each.planned for each in shown):
        return ""
    lengths, planned = sorted({each.rounds for each in shown}), max(each.planned for each in shown)
    done = " or ".join(map(str, lengths)) if len(lengths) < 3 else _range(lengths)
    return f" after {done} of {planned} rounds"


def _unrun(everything: Sequence[Results], folder: str) -> list[str]:
    """The searches in one line, and the items of which nothing was run."""
    searches = [each for each in everything if chapter(each) == "searches"]
    run = {results["item"] for results in everything}
    missing = [f"`{name}`" for name in ITEMS if name not in run]
    said = []
    if searches:
        cells = sum(len(each["cells"]) for each in searches)
        said += [
            f"Searches, {len(searches)} items with {cells} cells, are in the [appendix]({folder}/searches.md).",
            "",
        ]
    if missing:
        said += [f"Not run yet: {', '.join(missing)}. `kairosfl reproduce` says what each is.", ""]
    return said


def _row(results: Results, remarks: Mapping[str, str], folder: str) -> dict[str, str]:
    cells = results["cells"].values()
    whole = len(ITEMS[results["item"]].cells) if results["item"] in ITEMS else 0
    outcomes = [outcome(results, cell) for cell in cells]
    return {
        "item": f"[{results['item']}]({_link(results, folder)})",
        "cells run": f"{len(outcomes)} of {whole}" if whole > len(outcomes) else str(len(outcomes)),
        "completed": str(sum(map(complete, cells))),
        "seeds": _range([len(longest(cell)) for cell in cells]),
        **{
            word: str(outcomes.count(word)) if any(outcomes) else "–"
            for word in get_args(Agreement)
        },
        "verdict": _conclusion(results, remarks),
    }


def _link(results: Results, folder: str) -> str:
    return f"{folder}/{chapter(results)}.md#{results['item'].replace('/', '')}"


def _range(numbers: Sequence[int]) -> str:
    low, high = min(numbers), max(numbers)
    return str(low) if low == high else f"{low} to {high}"
