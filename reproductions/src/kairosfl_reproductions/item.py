"""An item of a paper: a table or figure as data. Each cell is a preset, its changes, and the
published values.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from kairosfl import presets
from kairosfl.errors import UserError, nearest
from kairosfl.runs.config import RunConfig, change, resolve
from kairosfl.runs.keys import updated

if TYPE_CHECKING:
    from kairosfl.runs.sweep import Member

TEXT = "text"  # the reading of a cell that follows the paper's text


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One run of an item, for any number of seeds.

    `settings` are `algorithm`, dotted keys, or whole sections; `printed` maps measures to the
    published values. `baseline` names the cell that this one is compared with. A cell in a setting
    of our own is not `comparable` with the published values.
    """

    preset: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    printed: Mapping[str, float] = field(default_factory=dict)
    reading: str = TEXT
    baseline: str = ""
    comparable: bool = True

    def config(
        self, *, seed: int = 0, rounds: int | None = None, changes: Sequence[str] = ()
    ) -> RunConfig:
        """The cell as a configuration; `changes` are further `section.key=value` overrides."""
        tables = updated(presets.read(self.preset), self.settings)
        tables["seed"] = seed
        if rounds is not None:
            tables["train"]["rounds"] = rounds
        return resolve(change(tables, changes))


@dataclass(frozen=True, kw_only=True)
class Item:
    """A table or figure. The first of its `measures` is the primary one.

    `claim` is what the paper says in words, `note` what a reader must know about our settings. The
    aim is to reproduce the published values or, with `beat`, to exceed them. `traces` are curves of
    the figure in addition to accuracy. `sources` names who published which measure, where several
    did: a cell that agrees with one of them is reproduced. `hardware` is that of the published
    seconds.
    """

    paper: str
    name: str
    title: str
    cells: Mapping[str, Cell]
    measures: tuple[str, ...]
    seeds: int = 3
    claim: str = ""
    note: str = ""
    beat: bool = False
    traces: tuple[str, ...] = ()
    sources: Mapping[str, str] = field(default_factory=dict)
    hardware: str = ""

    @property
    def key(self) -> str:
        """Its name on the command line."""
        return f"{self.paper}/{self.name}"


def choose(item: Item, cells: Sequence[str] = ()) -> dict[str, Cell]:
    """The cells that match any of the filters, or all cells without a filter.

    The full name of a cell matches that cell alone. Any other filter matches when all its words,
    separated by spaces, occur between hyphens in the cell's name: `cifar10 fedavg` matches
    `cifar10-h0.1-fedavg`, but neither `cifar100-…` nor `…-fedavgm`. A word may contain wildcards:
    `fed*`. Capitals do not matter.
    """

    def matches(name: str, text: str) -> bool:
        text = text.lower()
        return name == text if text in item.cells else _matches(name, text)

    chosen = {
        name: cell
        for name, cell in item.cells.items()
        if not cells or any(matches(name, text) for text in cells)
    }
    for text in cells:
        if not any(matches(name, text) for name in item.cells):
            words = dict.fromkeys(word for name in item.cells for word in name.split("-"))
            raise UserError(f"No cell of {item.key} matches {text!r}; {nearest(text, words)}")
    return chosen


def _matches(name: str, text: str) -> bool:
    return all(fnmatch.fnmatchcase(f"-{name}-", f"*-{word}-*") for word in text.split())


def members(
    item: Item,
    cells: Sequence[str] = (),
    seeds: int | None = None,
    rounds: int | None = None,
    changes: Sequence[str] = (),
    first_seed: int = 0,
) -> list[Member]:
    """The runs of an item as members of a sweep: the first seed of every cell before the second of
    any.
    """
    from kairosfl.runs.sweep import Member

    seeds = item.seeds if seeds is None else seeds
    for name, value in (("seeds", seeds), ("rounds", rounds)):
        if value is not None and value < 1:
            raise UserError(f"{name} = {value} must be 1 or more.")
    # Runs of different lengths are different runs: schedules and ALT's threshold depend on the
    # length.
    suffix = "" if rounds is None else f"-rounds{rounds}"
    return [
        Member(
            f"{name}-seed{seed}{suffix}",
            {"cell": name, "seed": seed},
            cell.config(seed=seed, rounds=rounds, changes=changes),
        )
        for seed in range(first_seed, first_seed + seeds)
        for name, cell in choose(item, cells).items()
    ]
