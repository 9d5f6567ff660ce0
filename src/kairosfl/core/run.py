"""A run: what stays the same throughout it, and all of its state."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kairosfl.core.clock import Fleet
from kairosfl.core.fields import Briefs, Field, Reports, fields
from kairosfl.core.flight import Flight
from kairosfl.core.layout import Layout
from kairosfl.core.recipe import Recipe
from kairosfl.core.rule import (
    NAN,
    NOT_YET,
    Algorithm,
    Detector,
    Memory,
    Round,
    Rule,
    Signals,
    State,
    acts,
    changed,
)
from kairosfl.core.table import Allocate, Table, alike
from kairosfl.core.work import Work
from kairosfl.errors import UserError

ENTRIES = {entry.name: entry for entry in fields(Briefs)}

__all__ = ["NOT_YET", "Record", "Round", "Run", "Setup", "changed", "upcoming"]


@dataclass(frozen=True)
class Setup:
    """What stays the same throughout a run.

    Args:
        algorithm: The rules.
        recipe: Rounds, cohort, and how clients train.
        clients: Size of the population.
        layout: Where the model's tensors lie in the vector, `task.layout`.
        detectors: Of critical periods; all are recorded, the first one decides. Without one every
            round is critical, and rules that act by a detector are refused.
        own: The own part of a client that has not trained yet, `[e]`, where the model has one:
        `task.own_start()`.
        sizes: Samples of every client, where the server knows them.
        waits: Defaults of what a plan says about waiting, where there are devices to wait for.
        fleet: The simulated devices of the clients; None runs without a clock.
        devices: Whether clients are devices, which keep what clients keep: `Run.kept` is then empty.
    """

    algorithm: Algorithm
    recipe: Recipe
    clients: int
    layout: Layout
    detectors: tuple[Detector, ...] = ()
    own: Tensor | None = None
    sizes: np.ndarray | None = None
    waits: Mapping[str, Any] | None = None
    fleet: Fleet | None = None
    devices: bool = False

    def __post_init__(self) -> None:
        self.recipe.check_cohort(self.clients)
        self.algorithm.check_mass(self.recipe.optimizer)
        self.algorithm.check_whole()
        self.algorithm.check_detectors(self.detectors)
        self._check_own()
        if (0 if self.own is None else len(self.own)) != self.layout.own_size:
            raise UserError(
                f"The model has {self.layout.own_size} parameters that stay with the clients, but Setup.own has "
                f"{0 if self.own is None else len(self.own)}; give task.own_start()."
            )
        self._check_clock()

    def _check_clock(self) -> None:
        if self.fleet is None and self.waits is None:
            for rule, traits in zip(self.algorithm.rules, self.algorithm.traits, strict=True):
                if traits.clock:
                    raise UserError(
                        f"{rule.name()} needs a clock: give Setup.fleet, or [fleet] in a configuration; "
                        "without one, leave it out."
                    )
        if self.fleet is not None and self.sizes is None:
            raise UserError(
                "Setup.fleet needs Setup.sizes, the samples of every client, to know how long they train; give "
                "task.clients.sizes."
            )
        if self.fleet is not None and self.fleet.clients != self.clients:
            raise UserError(
                f"Setup.fleet has {self.fleet.clients} devices, but there are {self.clients} clients; give one each."
            )

    def _check_own(self) -> None:
        """Refuse rules that train an own part where the model has none."""
        for rule, traits in zip(self.algorithm.rules, self.algorithm.traits, strict=True):
            if "own" in traits.keeps and not self.layout.own:
                raise UserError(
                    f"{rule.name()} needs parameters that stay with the clients: name them by "
                    "model.own, such as ['head.*'], or leave the rule out."
                )

    @property
    def personal(self) -> bool:
        """Whether clients are evaluated each with a model of its own, as far as the server can."""
        if self.devices:
            return False
        return bool(self.layout.own) or any(acts(r, "personal") for r in self.algorithm.rules)

    @property
    def detector_names(self) -> tuple[str, ...]:
        """Under what each detector is recorded: its name, or its text where several have that name."""
        names = [detector.name() for detector in self.detectors]
        return tuple(
            str(detector) if names.count(name) > 1 else name
            for detector, name in zip(self.detectors, names, strict=True)
        )

    @property
    def keeps(self) -> frozenset[str]:
        """The fields that clients keep in this run."""
        names = frozenset(("own",)) if self.layout.own else frozenset[str]()
        return names.union(*(traits.keeps for traits in self.algorithm.traits))

    def kept(self, x: Tensor) -> State:
        """What a client keeps before its first visit."""
        return {name: self._first(ENTRIES[name], x) for name in sorted(self.keeps)}

    def _first(self, entry: Field, x: Tensor) -> Tensor:
        if entry.first == "model":
            return x
        if entry.shape == "own" and self.own is not None:
            return self.own.to(x)
        if entry.shape == "vector":
            return torch.full_like(x, float(entry.first))
        dtype = torch.int64 if entry.kind is int else torch.float64
        return torch.tensor(entry.first, dtype=dtype)


@dataclass(frozen=True)
class Record:
    """What happened in one round, for metrics and plots; not part of the state."""

    ids: Tensor
    weights: Tensor
    reports: Reports | None
    rejected: tuple[tuple[int, str], ...]
    asked: int
    lr: float
    bytes_down: int
    bytes_up: int = 0
    consensus: float = float("nan")
    values: tuple[float, ...] = ()
    first: tuple[Briefs, Reports] | None = None  # who was measured before the round was planned
    samples: int = 0  # on which the reporters trained, each counted every time
    work: Work | None = None  # what they were asked
    clock: Timing | None = None  # None without a fleet


@dataclass(frozen=True)
class Timing:
    """What one round took by the clock.

    Args:
        seconds: From the last round's end to this one's.
        device_seconds: That devices spent on the orders that ended in it.
        wasted_seconds: Of those among them that do not count.
        together: Mean number of clients in a pass of the engine; NaN if none trained in it.
        took: Seconds of each reporter from sending to landing, `[m]`.
        ages: Rounds from sending to landing, `[m]`.
    """

    seconds: float
    device_seconds: float
    wasted_seconds: float
    together: float
    took: Tensor
    ages: Tensor

    @property
    def age(self) -> float:
        """Mean age of the answers, in rounds; NaN without one."""
        return float(self.ages.double().mean())


@dataclass(frozen=True)
class Run:
    """The entire state of a run. Saving it is a checkpoint; loading it resumes bit for bit.

    Client rows are written in place, so a run can only be continued until a later round has written
    rows; continuing from an earlier one afterwards is refused. `snapshot` copies the rows.
    """

    seed: int
    round: int  # rounds done
    x: Tensor
    states: tuple[State, ...]  # of every rule, then of every detector
    tables: tuple[Table, ...]  # of client rows, likewise
    signals: Signals = field(default_factory=Signals)
    idle: int = 0  # consecutive rounds without a usable report
    record: Record | None = None
    finished: str = ""  # why a rule ended it before its last round
    writes: tuple[int, ...] = ()  # how often each table had been written to
    time: float = 0.0  # seconds of the clock; 0 without one
    flight: Flight = field(default_factory=Flight)  # orders that have not ended
    base: Tensor | None = None  # how far rules moved the frozen weights, `[b]`; None: not at all
    kept: Table = field(
        default_factory=lambda: Table({})
    )  # what clients keep, where they are simulated
    counted: Table = field(
        default_factory=lambda: Table({})
    )  # the round of each client's last report that counted

    @classmethod
    def start(cls, x: Tensor, setup: Setup, *, seed: int, allocate: Allocate = alike) -> Run:
        """A run before its first round.

        Args:
            x: The model to start from, `engine.start()`.
            setup: What stays the same throughout the run.
            seed: Of everything random in the run.
            allocate: Gives memory for client rows; `kairosfl.engines.memory.spilling` uses the host
            when a GPU is full.
        """
        kept = {} if setup.devices else setup.kept(x)
        counted = {"round": torch.tensor(-1)} if setup.keeps else {}
        run = cls(
            seed=seed,
            round=0,
            x=x,
            states=(),
            tables=(),
            signals=Signals(values=dict.fromkeys(setup.detector_names, NAN)),
            kept=Table(kept, allocate),
            counted=Table(counted),
        )
        now = upcoming(run, setup)
        parts: tuple[Rule | Detector, ...] = (*setup.algorithm.rules, *setup.detectors)
        run = replace(
            run,
            states=tuple(part.server(now) for part in parts),
            tables=tuple(Table(part.client(now), allocate) for part in parts),
        )
        return replace(run, writes=tuple(table.writes for table in run.every_table))

    @property
    def every_table(self) -> tuple[Table, ...]:
        """The tables of the rules and detectors, of what clients keep, and of their last reports
        that counted.
        """
        return (*self.tables, self.kept, self.counted)

    def snapshot(self) -> Run:
        """A copy with client rows of its own, which later rounds of this one leave alone."""
        self.check_fresh()
        tables, kept, counted = copy.deepcopy((self.tables, self.kept, self.counted))
        return replace(self, tables=tables, kept=kept, counted=counted)

    def check_fresh(self) -> None:
        """Refuse a run whose client rows a later round has overwritten."""
        if self.writes != tuple(table.writes for table in self.every_table):
            raise UserError(
                f"The client rows of this run, after round {self.round}, were overwritten by a later round; continue "
                "from the latest run, or keep run.snapshot() before continuing."
            )

    def memory(self, i: int, rows: State | None = None) -> Memory:
        """What the rule or detector with this number remembers."""
        return Memory(self.states[i], rows or {}, self.tables[i])


def upcoming(run: Run, setup: Setup) -> Round:
    """The next round of a run."""
    return Round(
        number=run.round,
        rounds=setup.recipe.rounds,
        population=setup.clients,
        cohort=setup.recipe.cohort,
        x=run.x,
        lr=setup.recipe.lr_at(run.round),
        layout=setup.layout,
        recipe=setup.recipe,
        signals=run.signals,
        algorithm=setup.algorithm,
        detectors=setup.detectors,
        seed=run.seed,
        time=run.time,
        sizes=setup.sizes,
    )
