"""One item in full: its tables and curves, what was reproduced and what was not, our remarks."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any, get_args

from kairosfl.report.tables import fixed, signed
from kairosfl_reproductions.measures import MEASURES
from kairosfl_reproductions.results import Results, as_published, done, gain, spread, table, values
from kairosfl_reproductions.verdicts import Agreement, agreement, compared_measures, holds, outcome
from kairosfl_reproductions.words import words

CAPTION = (
    "*Mean and standard deviation over the seeds shared by all curves of a panel; "
    "triangles: published final values.*"
)
CPUS = ("x86_64", "AMD64", "aarch64", "arm64")  # as the platform module names them
VERDICT = "Verdict: "  # begins the first line of remarks that state one
LEFT = (
    *(
        "cell",
        "reading",
        "name",
        "item",
        "baseline",
        "paper or benchmark",
        "claim",
        "measured",
        "verdict",
    ),
    *("benchmark", "run", "their hardware", "our hardware"),
)


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
    lines += [*markdown(_readable(results)), ""]
    gains = _gains(results)
    if gains:
        what = MEASURES[results["measures"][0]].title
        heading = f"Difference from the baseline ({what}), on the seeds and rounds that both have:"
        lines += [heading, "", *markdown(gains), ""]
    lines += _conclusion(results)
    readings = _distances(results)
    if len(readings) > 1:
        lines += [
            "Mean distance from the published values, by reading:",
            "",
            *markdown(readings),
            "",
        ]
    if verdict_line(remarks):
        first, _, remarks = remarks.partition("\n")
        lines += [f"**{first}**", ""]
    if remarks.strip():
        lines += [remarks.strip(), ""]
    lines += [_made_on(results), ""]
    return "\n".join(lines)


def verdict_line(remarks: str) -> str:
    """The verdict that remarks state in their first line; empty if they do not."""
    first = remarks.partition("\n")[0]
    if not first.startswith(VERDICT):
        return ""
    return first.removeprefix(VERDICT)


def _readable(results: Results) -> list[dict[str, str]]:
    """The table with the names of cells in words; those for the command line are in the last
    column.
    """
    rows = table(results)
    told = any(row["reading"] not in (words(row["cell"]), "text") for row in rows)
    readable = []
    for row in rows:
        name = row["cell"]
        row["cell"] = words(name)
        if not told:
            del row["reading"]
        readable.append(row | {"name": f"`{name}`"})
    return readable


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
                "cell": words(name),
                "baseline": words(cell["baseline"]),
                "ours": _signed_spread(ours, digits),
                "published": "–" if printed is None else signed(printed, digits),
                "rounds": done(cell),
                "seeds": str(len(ours)),
                "holds": holds(statistics.fmean(ours), printed, comparable=as_published(cell)),
            }
        )
    return rows


def _conclusion(results: Results) -> list[str]:
    """What was not reproduced and what is left open, in words."""
    measure = results["measures"][0]
    titles = " or ".join(MEASURES[each].title for each in compared_measures(results))
    if results.get("beat"):
        return _beaten(results, measure)
    outcomes = {name: outcome(results, cell) for name, cell in results["cells"].items()}
    named: dict[str, list[str]] = {word: [] for word in get_args(Agreement)}
    for name, agreed in outcomes.items():
        if agreed:
            named[agreed].append(name)
    total = sum(map(len, named.values()))
    if not total:
        return []
    text = f"{titles[0].upper()}{titles[1:]}: {len(named['reproduced'])} of {total}"
    text += " compared cells reproduced"
    if named["open"]:
        text += f", {len(named['open'])} left open"
    lines = [f"**{text}.**", ""]
    for word, heading in (
        ("not reproduced", "Not reproduced"),
        ("open", "Left open, because the seeds differ widely"),
    ):
        if named[word]:
            lines += [f"{heading}:", ""]
            for name in named[word]:
                lines += _comparisons(name, results)
            lines.append("")
    return lines


def _distances(results: Results) -> list[dict[str, str]]:
    """How far the cells of each reading are from the published values on average, where there is
    more than one cell.
    """
    distances: dict[str, dict[str, list[float]]] = {}
    for cell in results["cells"].values():
        for measure in results["measures"]:
            if not results.get("beat") and agreement(cell, measure):
                off = abs(statistics.fmean(values(cell, measure)) - cell["printed"][measure])
                of_reading = distances.setdefault(cell["reading"] or "text", {})
                of_reading.setdefault(measure, []).append(off)
    compared = set().union(*distances.values())
    rows = []
    for reading, by_measure in distances.items():
        cells = max(map(len, by_measure.values()))
        if cells == 1:
            continue
        row = {"reading": reading, "cells": str(cells)}
        for measure in results["measures"]:
            if measure in by_measure:
                mean = statistics.fmean(by_measure[measure])
                row[MEASURES[measure].title] = fixed(mean, MEASURES[measure].digits)
            elif measure in compared:
                row[MEASURES[measure].title] = "–"
        rows.append(row)
    return rows


def _comparisons(name: str, results: Results) -> list[str]:
    """Ours against every published value that counts."""
    cell, sources = results["cells"][name], results.get("sources") or {}
    lines = []
    for measure in compared_measures(results):
        if measure in cell["printed"]:
            ours, printed, digits = (
                values(cell, measure),
                cell["printed"][measure],
                MEASURES[measure].digits,
            )
            where = f" ({sources[measure]})" if measure in sources else ""
            told = "" if cell["reading"] in (words(name), "text") else f"; {cell['reading']}"
            lines.append(
                f"- {words(name)}{told}: ours {spread(ours, digits)}, "
                f"published {printed:.{digits}f}{where}, {signed(statistics.fmean(ours) - printed, digits)}"
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
            best = f"where the best published value is {printed:.{digits}f}, {more}"
            lines += [f"**{words(name)}: {spread(ours, digits)} {best}.**", ""]
    return lines


def _made_on(results: Results) -> str:
    descriptions = set()
    evaluated = set()
    for cell in results["cells"].values():
        for run in cell["runs"]:
            descriptions.add(
                f"version {run['version']}{_commit(run)}, {run['engine']} engine, "
                f"{run['precision']}, {device_name(run)}"
            )
            if run.get("evaluated"):
                evaluated.add(run["evaluated"])
    text = f"Run with {'; '.join(sorted(descriptions))}."
    if evaluated == {1}:
        text += " Evaluated every round."
    elif evaluated:
        text += f" Evaluated every {' or '.join(map(str, sorted(evaluated)))} rounds."
    return text


def device_name(run: Mapping[str, Any]) -> str:
    """The GPU, or what kind of CPU."""
    if run["device"] in CPUS:
        return f"CPU ({run['device']})"
    return str(run["device"])


def _commit(run: Mapping[str, Any]) -> str:
    commit, dirty, _ = str(run.get("git") or "").partition("-dirty")
    if not commit:
        return " (commit not recorded)"
    return f" ({commit[:9]}{dirty})"


def _signed_spread(numbers: Sequence[float], digits: int) -> str:
    text = signed(statistics.fmean(numbers), digits)
    if len(numbers) > 1:
        text += f" ± {fixed(statistics.stdev(numbers), digits)}"
    return text


def markdown(rows: Sequence[Mapping[str, str]]) -> list[str]:
    """A table in Markdown."""
    heads = list(rows[0])
    lines = [heads, ["---" if head in LEFT else "---:" for head in heads]]
    lines += [[row[head] for head in heads] for row in rows]
    return [f"| {' | '.join(cells)} |" for cells in lines]
