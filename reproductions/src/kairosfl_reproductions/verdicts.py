"""Whether a published value or claim was reproduced, from results alone."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from kairosfl_reproductions.catalogue import ITEMS
from kairosfl_reproductions.item import Cell, Item
from kairosfl_reproductions.measures import MEASURES
from kairosfl_reproductions.results import Results, as_published, gain, longest, values
from kairosfl_reproductions.words import method

Agreement = Literal["reproduced", "open", "not reproduced"]


def agreement(cell: Mapping[str, Any], measure: str) -> Agreement | None:
    """Whether ours agrees with the published value; None if there is none or the cell was not run
    as published.
    """
    ours, printed = values(cell, measure), cell["printed"].get(measure)
    if printed is None or not ours or not as_published(cell):
        return None
    off = abs(statistics.fmean(ours) - printed)
    if off <= MEASURES[measure].tolerance:
        return "reproduced"
    if len(ours) > 1 and off <= 2 * statistics.stdev(ours):
        return "open"
    return "not reproduced"


def compared_measures(results: Results) -> tuple[str, ...]:
    """The measures whose published values count: the primary one, or those that `sources` name."""
    return tuple(results.get("sources") or results["measures"][:1])


def outcome(results: Results, cell: Mapping[str, Any]) -> Agreement | None:
    """The verdict on a cell, the best of all measures that count."""
    if results.get("beat"):
        return None
    agreements = [agreement(cell, measure) for measure in compared_measures(results)]
    return next((word for word in get_args(Agreement) if word in agreements), None)


@dataclass(frozen=True)
class Tally:
    """How our comparisons with published values ended, and how many values these are.

    A value that has several readings is compared once for each; it is `met` if one of them
    reproduces it.
    """

    reproduced: int
    open: int
    comparisons: int
    met: int
    values: int


def tally(items: Sequence[Results]) -> Tally:
    """Of all cells that were run as published."""
    found: dict[object, list[Agreement]] = {}
    for results in items:
        for name, cell in results["cells"].items():
            word = outcome(results, cell)
            if word:
                found.setdefault(_published(results, name), []).append(word)
    words = [word for each in found.values() for word in each]
    met = sum("reproduced" in each for each in found.values())
    return Tally(words.count("reproduced"), words.count("open"), len(words), met, len(found))


def family(item: str) -> str:
    """The item whose published values an item compares: its own, or those of which it has other
    readings.
    """
    return item.removesuffix("-readings")


def published(items: Sequence[Results]) -> int:
    """How many published values the items of these results have, whether they were run or not."""
    identities = set()
    for results in items:
        item = ITEMS.get(results["item"])
        if item is None or item.beat:
            continue
        for name, cell in item.cells.items():
            numbers = _of_sources(item, cell)
            if cell.comparable and any(number is not None for number in numbers):
                identities.add(_identified(item.key, name, numbers))
    return len(identities)


def _of_sources(item: Item, cell: Cell) -> list[float | None]:
    return [cell.printed.get(measure) for measure in tuple(item.sources) or item.measures[:1]]


def _published(results: Results, name: str) -> object:
    printed = results["cells"][name]["printed"]
    return _identified(
        results["item"], name, [printed.get(measure) for measure in compared_measures(results)]
    )


def _identified(item: str, name: str, values: Sequence[float | None]) -> object:
    """Identifies the published value of a cell: that of other readings is the same, for the same
    data and method.

    A reading of one source's value is one of the value that several sources have.
    """
    plain = ITEMS.get(family(item))
    if plain is not None:
        for other, cell in plain.cells.items():
            numbers = _of_sources(plain, cell)
            if _part(other) == _part(name) and _fits(values, numbers):
                return family(item), *_part(name), tuple(numbers)
    return family(item), *_part(name), tuple(values)


def _fits(values: Sequence[float | None], numbers: Sequence[float | None]) -> bool:
    """Whether values are these numbers, as far as there are any."""
    pairs = zip(values, numbers, strict=True)
    return all(value in (None, number) for value, number in pairs)


def _part(name: str) -> tuple[str, str]:
    return name.partition("-")[0], method(name)


def holds(ours: float, printed: float | None, *, comparable: bool) -> str:
    """Whether a published gain holds: at least half as large, or at least of the same sign."""
    if printed is None or not comparable:
        return "–"
    if ours * printed <= 0:
        return "no"
    if abs(ours) >= abs(printed) / 2:
        return "yes"
    return "in part"


@dataclass(frozen=True)
class Gain:
    """Our mean gain of a cell over its baseline, the published one if known, whether that holds,
    and the rounds.
    """

    ours: float
    printed: float | None
    holds: str
    rounds: int
    planned: int


def gains(results: Results) -> list[Gain]:
    """Of every cell with a baseline, on the primary measure; of several readings of one published
    gain, the closest.
    """
    measure = results["measures"][0]
    found: dict[object, Gain] = {}
    for name, cell in results["cells"].items():
        known = gain(results, name, measure)
        if known is None or not known[0]:
            continue
        ours, printed = statistics.fmean(known[0]), known[1]
        holding = holds(ours, printed, comparable=as_published(cell))
        new = Gain(ours, printed, holding, longest(cell)[0]["rounds"], cell["rounds"])
        base = results["cells"][cell["baseline"]]["printed"].get(measure)
        key = name if printed is None or new.holds == "–" else (cell["printed"][measure], base)
        old = found.get(key)
        if old is None or (
            old.printed is not None and abs(ours - old.printed) < abs(old.ours - old.printed)
        ):
            found[key] = new
    return list(found.values())


def claim_holds(results: Results) -> str:
    """The verdict on an item's claim in words, from the gains that can be compared with published
    ones.
    """
    words = [each.holds for each in gains(results) if each.holds != "–"]
    if not words:
        if any(map(as_published, results["cells"].values())):
            return "no published numbers to compare"
        return "open: not all rounds were run"
    if words.count("yes") >= 2 * len(words) / 3:
        return "holds"
    if 2 * (words.count("yes") + words.count("in part")) >= len(words):
        return "holds in part"
    return "does not hold"
