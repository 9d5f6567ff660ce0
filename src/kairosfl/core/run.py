"""A run: what stays the same throughout it, all of its state, and the round that hooks see."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import numpy as np
from torch import Tensor

from kairosfl.core.fields import Briefs, Reports
from kairosfl.core.recipe import Recipe
from kairosfl.core.rule import Algorithm, Memory, Rule, State
from kairosfl.core.streams import stream
from kairosfl.core.table import Allocate, Table, alike
from kairosfl.detectors import FGN, Detector, Signals
from kairosfl.errors import UserError
from kairosfl.tasks.vector import Layout


class _NotYet:
    """Placeholder for what a round does not have before its clients are briefed or have reported."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"{name!r} is not available: this round does not have its briefs, reports or weights yet")

    def __repr__(self) -> str:
        return "not yet"


NOT_YET: Any = _NotYet()
T = TypeVar("T")


def changed(given: T, /, **changes: Any) -> T:
    """`dataclasses.replace` for records that check nothing when they are made; a round does it often."""
    made: T = object.__new__(type(given))
    vars(made).update(vars(given), **changes)
    return made


@dataclass(frozen=True)
class Setup:
    """What stays the same throughout a run.

    Args:
        algorithm: The rules.
        recipe: Rounds, cohort, and how clients train.
        clients: Size of the population.
        layout: Where the model's tensors lie in the vector, `task.layout`.
        detectors: Of critical periods; all are recorded, the first one decides.
    """

    algorithm: Algorithm
    recipe: Recipe
    clients: int
    layout: Layout
    detectors: tuple[Detector, ...] = (FGN(),)

    def __post_init__(self) -> None:
        self.recipe.check_cohort(self.clients)
        self.algorithm.check_mass(self.recipe.optimizer)
        for first in self.detectors[:1]:  # it decides
            self.algorithm.check_detector(first)


@dataclass(frozen=True)
class Record:
    """What happened in one round, for metrics and plots; not part of the state."""

    ids: Tensor
    weights: Tensor
    reports: Reports | None
    rejected: tuple[tuple[int, str], ...]
    asked: int
    lr: float
    vectors_down: int
    numbers_down: int
    consensus: float = float("nan")
    values: tuple[float, ...] = ()


@dataclass(frozen=True)
class Run:
    """The entire state of a run. Saving it is a checkpoint; loading it resumes bit for bit.

    Client rows are written in place, so a run can only be continued until a later round has written rows; continuing
    from an earlier one afterwards is refused. `snapshot` copies the rows.
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

    @classmethod
    def start(cls, x: Tensor, setup: Setup, *, seed: int, allocate: Allocate = alike) -> Run:
        """A run before its first round.

        Args:
            x: The model to start from, `engine.start()`.
            setup: What stays the same throughout the run.
            seed: Of everything random in the run.
            allocate: Gives memory for client rows; `kairosfl.engines.memory.spilling` uses the host when a GPU is full.
        """
        run = cls(seed=seed, round=0, x=x, states=(), tables=())
        now = Round.of(run, setup)
        parts: tuple[Rule | Detector, ...] = (*setup.algorithm.rules, *setup.detectors)
        return replace(
            run,
            states=tuple(part.server(now) for part in parts),
            tables=tuple(Table(part.client(now), allocate) for part in parts),
            writes=(0,) * len(parts),
        )

    def snapshot(self) -> Run:
        """A copy with client rows of its own, which later rounds of this one leave alone."""
        self.check_fresh()
        return replace(self, tables=copy.deepcopy(self.tables))

    def check_fresh(self) -> None:
        """Refuse a run whose client rows a later round has overwritten."""
        if self.writes != tuple(table.writes for table in self.tables):
            raise UserError(
                f"The client rows of this run, after round {self.round}, were overwritten by a later round; continue "
                "from the latest run, or keep run.snapshot() before continuing."
            )

    def memory(self, i: int, rows: State | None = None) -> Memory:
        """What the rule or detector with this number remembers."""
        return Memory(self.states[i], rows or {}, self.tables[i])


@dataclass(frozen=True)
class Round:
    """The round that a hook acts in."""

    number: int  # rounds done before it
    rounds: int
    population: int
    cohort: int  # as in the recipe
    x: Tensor
    lr: float
    layout: Layout
    recipe: Recipe
    signals: Signals  # the last round's until the clients have trained, then this round's
    rules: tuple[Rule, ...]
    detectors: tuple[Detector, ...]
    seed: int
    size: int = NOT_YET  # of the cohort as the rules planned it; from `brief` on
    briefs: Briefs = NOT_YET  # of the selected clients; from `receive` on, of the reporters
    reports: Reports = NOT_YET
    weights: Tensor = NOT_YET  # [m], sum 1

    @classmethod
    def of(cls, run: Run, setup: Setup) -> Round:
        """The next round of a run."""
        return cls(
            number=run.round,
            rounds=setup.recipe.rounds,
            population=setup.clients,
            cohort=setup.recipe.cohort,
            x=run.x,
            lr=setup.recipe.lr_at(run.round),
            layout=setup.layout,
            recipe=setup.recipe,
            signals=run.signals,
            rules=setup.algorithm.rules,
            detectors=setup.detectors,
            seed=run.seed,
        )

    def stream(self, purpose: str, client: int = 0) -> np.random.Generator:
        """Random numbers for this purpose in this round."""
        return stream(self.seed, purpose, self.number, client)

    def counts(self) -> Tensor:
        """How much each reporter counts before any rule weighs it, `[m]`: its samples, or one."""
        return Algorithm(self.rules).counts(self.reports)
