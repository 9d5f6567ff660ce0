"""The pages of results, written from the files in `results/` and nothing else: the same files give the same pages.

`make results` rewrites those of this repository: `python -m kairosfl.papers.page results docs/results.md`. The page
itself can be read in a minute; a page for every paper, in the folder of the same name, has tables, curves and remarks.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import get_args

from kairosfl.errors import UserError
from kairosfl.papers.curves import draw_curves
from kairosfl.papers.details import device_name, markdown, section, verdict_line
from kairosfl.papers.overview import draw_overview
from kairosfl.papers.results import Results, complete, longest, read, values
from kairosfl.papers.verdicts import Agreement, claim_holds, gains, outcome
from kairosfl.papers.words import words
from kairosfl.report.tables import fixed, signed
from kairosfl.runs.files import write

TITLES = {
    "fedaware": "FedAWARE (AISTATS 2025)",
    "pa3fed": "PA3Fed (AAAI 2025)",
    "fedcl": "FedCL, or CriticalFL (KDD 2023)",
    "alt": "ALT (2025)",
    "public": "Public benchmarks",
    "beyond": "Beyond the papers",
    "searches": "Appendix: searches",
}
INTRODUCTION = """We ran experiments of published papers and public benchmarks again. A value is *reproduced* when our
mean is within 2 points of accuracy of the published one, and *open* when it is further off, but within two standard
deviations of our seeds. Every rule is tested against numbers worked out independently. What we found where values
differ are texts and released code that disagree, baselines that are better in our runs, and seeds that differ by more
than the gain; what we tried, and what remains unexplained, is on the page of each paper.
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
  counts in the table above.

This page and the pages of the papers are written by `make results` from the files in `results/`; each holds the
configuration, seeds, version, device and curves of every run. To run an item yourself, or part of it with fewer rounds
and seeds:

    kairosfl reproduce
    kairosfl reproduce fedaware/table2 --cells cifar10 --rounds 20 --seeds 1

The first command lists the items. The second estimates the time it will take before it starts, and resumes if it is
run again after an interruption; it prints our values next to the published ones and plots the curves in
`runs/reproduce/fedaware-table2`, whose runs can be examined with `kairosfl report`. Runs whose
[data](data.md#where-the-files-are) is missing are named and skipped. `--results DIR` adds the results to files like
those from which this page is generated.
"""
WIDE = ("---", "hide:", "  - toc", "---", "")  # the tables need the room
DETAILS = """[All results](../{page}) · Values are our mean ± sample standard deviation over the seeds that got
furthest; columns that end in *published* are the paper's.

- *Rounds* and *seeds* show what a row is based on: `40 of 500` means that 40 of the published 500 rounds were run, so
  the row is not compared with the published value; with `1 of 2` seeds, the other run was interrupted or diverged.
- A *reading* other than *text* follows another passage of the paper or its released code.
- Test accuracies are in per cent; *final 10 %* is the mean of the evaluations in the final 10 % of rounds.
- *name* is the cell's name for `kairosfl reproduce ITEM --cells NAME`.
"""


def write_results_page(results: Path, page: Path) -> Path:
    """Write the page, and one for every paper, from every JSON file in a folder; `ITEM.md` is put below its tables.

    Figures are saved to `assets/results` next to the page; searches have none.
    """
    files = sorted(results.glob("*.json"), key=lambda path: (path.name.startswith("beyond"), path.stem))
    if not files:
        raise UserError(f"{results} contains no results (no .json file); run `kairosfl reproduce` with --results.")
    everything = {path: read(path) for path in files}
    remarks = {
        found["item"]: path.with_suffix(".md").read_text(encoding="utf-8")
        for path, found in everything.items()
        if path.with_suffix(".md").is_file()
    }
    pages: dict[str, list[str]] = {}
    for path, found in everything.items():
        picture = f"assets/results/{path.stem}.svg"
        if "/search" in found["item"] or not draw_curves(found, page.parent / picture):
            picture = ""
        text = section(found, remarks.get(found["item"], ""), f"../{picture}" if picture else "")
        pages.setdefault(chapter(found), []).append(text)
    for name, sections in pages.items():
        head = [*WIDE, f"# {TITLES.get(name, name)}", "", DETAILS.format(page=page.name)]
        write(page.parent / page.stem / f"{name}.md", "\n".join([*head, *sections]))
    items = list(everything.values())
    drawn = draw_overview(items, page.parent / "assets" / "results" / "overview.svg")
    write(page, "\n".join(summary(items, remarks, page.stem, "assets/results/overview.svg" if drawn else "")))
    return page


def chapter(results: Results) -> str:
    """The page on which an item is shown."""
    return "searches" if "/search" in results["item"] else str(results["item"].partition("/")[0])


def summary(everything: Sequence[Results], remarks: Mapping[str, str], folder: str, picture: str) -> list[str]:
    """The page that can be read in a minute: a verdict per claim, one picture, the public comparison."""
    claims = [each for each in everything if each["claim"] and chapter(each) not in ("beyond", "public")]
    public = [each for each in everything if chapter(each) == "public"]
    lines = ["# Results", ""]
    if claims:
        lines += [INTRODUCTION, f"**{_count(claims)}**", ""]
        lines += [*markdown([_claim(each, remarks, folder) for each in claims]), "", TERMS]
    if picture:
        lines += [
            f"![Ours against the published accuracy, one point per compared cell]({picture})",
            "",
            "*Every compared value: our accuracy against the published one. The band is ± 2 points.*",
            "",
        ]
    if public:
        lines += ["## Public benchmarks", "", *_agreements(public, folder), *_speed(public, folder)]
    return [*lines, "## All items", "", *markdown([_row(each, folder) for each in everything]), "", HOW]


def _count(items: Sequence[Results]) -> str:
    found = [outcome(each, cell) for each in items for cell in each["cells"].values()]
    number = {word: found.count(word) for word in get_args(Agreement)}
    total = sum(number.values())
    left = (
        f", {number['open']} {'is' if number['open'] == 1 else 'are'} open because our seeds differ widely"
        if number["open"]
        else ""
    )
    return f"{number['reproduced']} of {total} compared values were reproduced{left}."


def _agreements(public: Sequence[Results], folder: str) -> list[str]:
    """One line for every benchmark with published values to compare."""
    compared = [each for each in public if any(outcome(each, cell) for cell in each["cells"].values())]
    lines = [f"- [{each['title']}]({_link(each, folder)}): **{_count([each])}**" for each in compared]
    return [*lines, ""] if lines else []


def _claim(results: Results, remarks: Mapping[str, str], folder: str) -> dict[str, str]:
    cells = results["cells"].values()
    outcomes = [outcome(results, cell) for cell in cells]
    compared = [word for word in outcomes if word]
    measured = []
    if compared:
        measured.append(f"{compared.count('reproduced')} of {len(compared)} values within 2 points")
    changes = gains(results)
    known = [each for each in changes if each.holds != "–" and each.printed is not None]
    if known:
        ours = signed(statistics.fmean(each.ours for each in known), 1)
        printed = signed(statistics.fmean(each.printed or 0.0 for each in known), 1)
        measured.append(f"mean gain {ours} points, published {printed}, in {_comparisons(len(known))}")
    elif changes:
        mean = signed(statistics.fmean(each.ours for each in changes), 1)
        rounds = {(longest(cell)[0]["rounds"], cell["rounds"]) for cell in cells if not complete(cell)}
        after = f" after {min(rounds)[0]} of {min(rounds)[1]} rounds" if rounds else ""
        measured.append(f"mean gain {mean} points in {_comparisons(len(changes))}{after}")
    return {
        "paper": f"[{TITLES.get(chapter(results), chapter(results))}]({_link(results, folder)})",
        "claim": results["claim"],
        "measured": "; ".join(measured) or "no accuracy to compare",
        "seeds": _range([len(longest(cell)) for cell in cells]),
        "verdict": f"**{verdict_line(remarks.get(results['item'], '')) or claim_holds(results)}**",
    }


def _speed(public: Sequence[Results], folder: str) -> list[str]:
    """The clocks: theirs as published, ours as measured."""
    rows = []
    for results in public:
        for name, cell in results["cells"].items():
            theirs, ours = cell["printed"].get("total_seconds"), values(cell, "total_seconds")
            if theirs is not None and ours and complete(cell):
                device = ", ".join(sorted({device_name(run) for run in longest(cell)}))
                rows.append(
                    {
                        "benchmark": f"[{results['title']}]({_link(results, folder)})",
                        "run": words(name),
                        "seconds, theirs": f"{theirs:,.0f}",
                        "seconds, ours": fixed(statistics.fmean(ours), 0),
                        "our device": device,
                    }
                )
    note = (
        "Their seconds are as published, on the source's own hardware, unless its page says that we measured them; "
        "where the hardware differs, the two columns are not a comparison of programs."
    )
    return [*markdown(rows), "", note, ""] if rows else []


def _row(results: Results, folder: str) -> dict[str, str]:
    cells = results["cells"].values()
    outcomes = [outcome(results, cell) for cell in cells]
    return {
        "item": f"[{results['item']}]({_link(results, folder)})",
        "cells run": str(len(outcomes)),
        "completed": str(sum(map(complete, cells))),
        "seeds": _range([len(longest(cell)) for cell in cells]),
        **{word: str(outcomes.count(word)) if any(outcomes) else "–" for word in get_args(Agreement)},
    }


def _link(results: Results, folder: str) -> str:
    return f"{folder}/{chapter(results)}.md#{results['item'].replace('/', '')}"


def _comparisons(number: int) -> str:
    return f"{number} comparison{'s' * (number != 1)}"


def _range(numbers: Sequence[int]) -> str:
    low, high = min(numbers), max(numbers)
    return str(low) if low == high else f"{low} to {high}"


if __name__ == "__main__":
    write_results_page(*map(Path, sys.argv[1:]))
