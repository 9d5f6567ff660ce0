"""An item of a paper: a table or figure as data. Each cell is a preset, what it changes, and what the paper prints."""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kairosfl import presets
from kairosfl.errors import UserError, nearest
from kairosfl.runs.config import RunConfig, change, resolve
from kairosfl.runs.sweep import Member

TEXT = "text"  # the reading of a cell that follows what the paper says


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One run of an item, for any number of seeds.

    `settings` are `algorithm`, dotted keys, or whole sections; `printed` holds the paper's values by measure.
    `baseline` names the cell that this one is compared with. A cell in a setting of our own is not `judged` by them.
    """

    preset: str
    settings: Mapping[str, Any] = field(default_factory=dict)
    printed: Mapping[str, float] = field(default_factory=dict)
    reading: str = TEXT
    baseline: str = ""
    judged: bool = True

    def config(self, *, seed: int = 0, rounds: int | None = None, changes: Sequence[str] = ()) -> RunConfig:
        """The cell as a configuration; `changes` are `section.key=value` texts on top of it."""
        tables = presets.read(self.preset)
        for name, value in self.settings.items():
            section, dot, key = name.rpartition(".")
            whole = dict(value) if isinstance(value, Mapping) else value  # a section of ours, not the cell's
            (tables.setdefault(section, {}) if dot else tables)[key] = whole
        tables["seed"] = seed
        if rounds is not None:
            tables["train"]["rounds"] = rounds
        return resolve(change(tables, changes))


@dataclass(frozen=True, kw_only=True)
class Item:
    """A table or figure. The first of its `measures` is the one that counts.

    `claim` is what the paper says in words, `note` what a reader must know about our settings. Printed values are there
    to be met or, with `beat`, to be passed. `traces` are the curves that the figure has beside accuracy's.
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

    @property
    def key(self) -> str:
        """Its name on the command line."""
        return f"{self.paper}/{self.name}"


def choose(item: Item, cells: Sequence[str] = ()) -> dict[str, Cell]:
    """The cells that fit any of the filters, or all.

    The whole name of a cell fits that cell alone. Another filter fits when all its words, separated by spaces, stand in
    the cell's name between hyphens: `cifar10 fedavg` fits `cifar10-h0.1-fedavg` and neither `cifar100-…` nor
    `…-fedavgm`. A word may have wildcards: `fed*`.
    """

    def fits(name: str, text: str) -> bool:
        return name == text if text in item.cells else _fits(name, text)

    chosen = {name: cell for name, cell in item.cells.items() if not cells or any(fits(name, text) for text in cells)}
    for text in cells:
        if not any(fits(name, text) for name in item.cells):
            words = dict.fromkeys(word for name in item.cells for word in name.split("-"))
            raise UserError(f"No cell of {item.key} fits {text!r}; {nearest(text, words)}")
    return chosen


def _fits(name: str, text: str) -> bool:
    return all(fnmatch.fnmatchcase(f"-{name}-", f"*-{word}-*") for word in text.split())


def members(
    item: Item,
    cells: Sequence[str] = (),
    seeds: int | None = None,
    rounds: int | None = None,
    changes: Sequence[str] = (),
) -> list[Member]:
    """The runs of an item as members of a sweep: one seed of everything before the second of anything."""
    seeds = item.seeds if seeds is None else seeds
    for name, value in (("seeds", seeds), ("rounds", rounds)):
        if value is not None and value < 1:
            raise UserError(f"{name} = {value} must be 1 or more.")
    # Runs of other lengths are other runs: schedules and ALT's threshold depend on it.
    suffix = "" if rounds is None else f"-rounds{rounds}"
    return [
        Member(
            f"{name}-seed{seed}{suffix}",
            {"cell": name, "seed": seed},
            cell.config(seed=seed, rounds=rounds, changes=changes),
        )
        for seed in range(seeds)
        for name, cell in choose(item, cells).items()
    ]
