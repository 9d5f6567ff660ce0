"""The contract: what a rule is, what it is given, and what it says about itself.

Every difference from FedAvg is a rule, and an algorithm is a sum of rules. `core/round.py` calls
the hooks.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, ClassVar, Literal, Self, TypeVar

import numpy as np
import torch
from torch import Tensor

from kairosfl.core.fields import Briefs, Reports
from kairosfl.core.layout import Layout
from kairosfl.core.recipe import Recipe
from kairosfl.core.refusals import Member, facts, refused
from kairosfl.core.spec import Spec
from kairosfl.core.streams import stream
from kairosfl.core.table import Table
from kairosfl.core.traits import WHEN, Declarations, Traits, traits_of
from kairosfl.errors import UserError

State = dict[str, Tensor]
NAN = float("nan")


class Finished(Exception):
    """Raised by `select`: the run ends before this round, for the reason given, and has finished."""


@dataclass(frozen=True)
class Plan:
    """Who may train, how many of them, and how the server waits for them.

    The words about waiting need a clock: devices, or a simulation with a fleet.

    Args:
        size: How many answers the round wants.
        eligible: Client ids to draw from; None: everyone.
        ids: Exactly these clients, whatever the size.
        over: The fraction of `size` that is asked in addition, for those that will not answer in
        time.
        first: Clients to measure before the round is planned. `select` is then called again, with
            their reports in `now.measured`.
        measure: What these clients measure.
        concurrency: How many orders the server waits for at once; 0: those that were asked.
        deadline: Seconds after its first order at which the round ends with what has landed.
        quorum: Fewer answers than this fraction of `size` do not count.
        late: Whether an answer after the end of its round is dropped, or kept for a later one.
        patience: Seconds after which an order is given up and its place is free.
        max_age: Rounds after which an answer no longer counts.
        partial: Whether a client that would be late does as many steps as fit before the deadline.
    """

    size: int
    eligible: np.ndarray | None = None
    ids: np.ndarray | None = None
    over: float = 0.0
    first: np.ndarray | None = None
    measure: frozenset[str] = frozenset()
    concurrency: int = 0
    deadline: float = math.inf
    quorum: float | None = None
    late: Literal["drop", "keep"] = "drop"
    patience: float = math.inf
    max_age: float = math.inf
    partial: bool = False

    def waiting(self) -> tuple[str, ...]:
        """The words about waiting that are set."""
        return tuple(name for name, unset in _WAITING.items() if getattr(self, name) != unset)


_WAITING: dict[str, Any] = {
    "over": 0.0,
    "concurrency": 0,
    "deadline": math.inf,
    "quorum": None,
    "late": "drop",
    "patience": math.inf,
    "max_age": math.inf,
    "partial": False,
}


@dataclass(frozen=True)
class Memory:
    """What a rule or a detector remembers: about the run, this round's clients, and every client.

    `rows` holds the rows of this round's clients stacked, `[m, ...]`: of those asked in `brief`, of
    the reporters from `receive` on; it is empty in `select`, `step` and `result`.
    """

    state: State
    rows: State
    table: Table  # every row ever written
    sent: State = field(
        default_factory=dict
    )  # what `brief` returned for these clients, from `receive` on
    kept: State = field(default_factory=dict)  # what these clients keep; in `personal`

    def replace(self, *, state: State | None = None, rows: State | None = None) -> Memory:
        """With a new state, or with rows to store (by `observe`; names left out keep their values),
        or both.
        """
        state = self.state if state is None else state
        rows = self.rows if rows is None else rows
        return changed(self, state=state, rows=rows)


@dataclass(frozen=True)
class Signals:
    """What is known about the progress of a run. NaN: not measured yet.

    Args:
        critical: Whether the period is critical, as the first detector decides; without one it
        always is.
        values: Of every detector, by its name.
        elud: Empirical local update diversity.
        coherence: The mean cosine of two clients' updates.
    """

    critical: bool = True
    values: Mapping[str, float] = field(default_factory=dict)
    elud: float = NAN
    coherence: float = NAN

    def __getattr__(self, name: str) -> float:
        """A detector's value as an attribute, as in `signals.fgn`."""
        values = vars(self).get("values", {})
        if name not in values:
            raise AttributeError(
                f"no detector of this run is called {name!r}; there are {', '.join(values) or 'none'}"
            )
        return float(values[name])


class _NotYet:
    """Placeholder for what a round does not have before its clients are briefed or have reported."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"{name!r} is not available: this round does not have its briefs, reports or weights yet"
        )

    def __repr__(self) -> str:
        return "not yet"


NOT_YET: Any = _NotYet()
T = TypeVar("T")


def changed(record: T, /, **changes: Any) -> T:
    """`dataclasses.replace` for records that check nothing when they are made; a round does it
    often.
    """
    copy: T = object.__new__(type(record))
    vars(copy).update(vars(record), **changes)
    return copy


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
    algorithm: Algorithm
    detectors: tuple[Detector, ...]
    seed: int
    time: float = 0.0  # seconds of the clock before it; 0 without one
    sizes: np.ndarray | None = None  # samples of every client, where the server knows them
    first: tuple[Briefs, Reports] | None = (
        None  # of the clients that the plan wanted measured first
    )
    size: int = NOT_YET  # of the cohort as the rules planned it; from `brief` on
    briefs: Briefs = NOT_YET  # of the selected clients; from `receive` on, of the reporters
    reports: Reports = NOT_YET
    took: Tensor = NOT_YET  # [m] seconds from sending to landing by the clock; NaN without one
    weights: Tensor = NOT_YET  # [m], sum 1
    # [m], equal weights as the rules change them; only where a rule has the trait `weighs`
    factors: Tensor = NOT_YET
    moved: Tensor = NOT_YET  # the new x, for `rebase`

    @property
    def rules(self) -> tuple[Rule, ...]:
        """Those of the algorithm."""
        return self.algorithm.rules

    @property
    def measured(self) -> Reports | None:
        """The answers of the clients that the plan wanted measured first; None before they were
        asked.
        """
        return None if self.first is None else self.first[1]

    @property
    def age(self) -> Tensor:
        """For each reporter, how many rounds ago it was sent its brief, `[m]`; zeros in a
        synchronous run.
        """
        return self.number - self.briefs.round

    @property
    def version(self) -> Tensor:
        """The models from which the reporters' updates are measured, `[d]` for all of them or `[m,
        d]`: those that they were sent, or chose among the candidates.
        """
        briefs = self.briefs
        version = briefs.start if briefs.version is None else briefs.version
        if briefs.candidates is not None and self.reports.choice is not None:
            version = briefs.candidates[self.reports.choice]
        if briefs.rank is None:
            return version
        within = [self.layout.within(rank) for rank in briefs.rank.tolist()]
        return version * torch.stack(within).to(version)

    def trained(self) -> Tensor:
        """The models that the reporters ended with, `[m, d]`."""
        return self.version + self.reports.delta

    def stream(self, purpose: str, client: int = 0) -> np.random.Generator:
        """Random numbers for this purpose in this round."""
        return stream(self.seed, purpose, self.number, client)

    def counts(self) -> Tensor:
        """How much each reporter counts before any rule weighs it, `[m]`: its samples, or one."""
        return self.algorithm.counts(self.reports)


class Rule(Spec, Declarations):
    """Hooks, all on the server, each "as FedAvg" unless it is overridden.

    A rule is a frozen dataclass of hyper-parameters. It keeps nothing on itself: what it remembers
    about the run is its `state`, what it remembers about a client is that client's row, and both
    are dictionaries of tensors. Every hook takes the value that flows through the round, the rule's
    memory, and the round, and returns the value.
    """

    def traits(self) -> Traits:
        """What it says about itself; a rule that needs nothing said leaves it out."""
        return Traits()

    def widened(self, factor: float) -> Rule:
        """The same rule for a cohort `factor` times as large, of which not all will be waited for."""
        return self

    def conflicts_among(self, rules: Sequence[Rule]) -> str | None:
        """Why all these rules, it included, cannot be combined though any two of them can, or None
        when they can.
        """
        return None

    def note_with(self, other: Rule) -> str | None:
        """After the last round: what the user should know about this rule together with `other`."""
        return None

    def largest_cohort(self, cohort: int, population: int) -> int:
        """The largest cohort that it may select, so that memory can be reserved."""
        return cohort

    def server(self, now: Round) -> State:
        """Its state before the first round."""
        return {}

    def client(self, now: Round) -> State:
        """A client's row before its first report."""
        return {}

    def select(self, plan: Plan, memory: Memory, now: Round) -> Plan:
        """Who trains: how many, from whom, or exactly whom."""
        return plan

    def brief(self, briefs: Briefs, memory: Memory, now: Round) -> Briefs | tuple[Briefs, State]:
        """What the selected clients are told; with it, rows `[m, ...]` to find in `memory.sent`
        when they report.
        """
        return briefs

    def receive(self, reports: Reports, memory: Memory, now: Round) -> Reports:
        """The reports as all later stages see them (clipped, decoded, with noise), of the same
        clients.
        """
        return reports

    def weigh(self, factors: Tensor, memory: Memory, now: Round) -> Tensor:
        """The weight of each reporter, `[m]`: multiply the factors by yours; the core divides by
        their sum.
        """
        return factors

    def combine(self, direction: Tensor, memory: Memory, now: Round) -> Tensor:
        """The cohort's direction `[d]`; it arrives as the weighted mean of the updates."""
        return direction

    def observe(self, memory: Memory, now: Round) -> Memory:
        """What is remembered about this round; rows that are replaced are stored."""
        return memory

    def step(self, direction: Tensor, memory: Memory, now: Round) -> tuple[Tensor, Memory]:
        """How the model moves: x ← x + direction."""
        return direction, memory

    def rebase(self, base: Tensor, memory: Memory, now: Round) -> Tensor:
        """How far the frozen weights that all clients share are from the task's, `[b]`; `now.moved`
        is the new x.
        """
        return base

    def result(self, x: Tensor, memory: Memory, now: Round) -> Tensor:
        """The vector to evaluate, export and deploy; it arrives as the model itself."""
        return x

    def personal(self, x: Tensor, ids: Tensor, memory: Memory, now: Round) -> Tensor:
        """The vector with which these clients are evaluated, `[d]` or one each, `[m, d]`; it
        arrives as the result, and `memory.kept` has what these clients keep.
        """
        return x

    def record(self, memory: Memory, now: Round) -> dict[str, float]:
        """After every round: numbers to record in `metrics.jsonl`, by name."""
        return {}

    def verdict(self, memory: Memory, now: Round) -> str | None:
        """After the last round: what the user should know about its effect, for instance that it
        had none.
        """
        return None

    def __add__(self, other: Rule | Algorithm) -> Algorithm:
        return Algorithm((self,)) + other


def acts(rule: Rule, hook: str) -> bool:
    """Whether a rule overrides a hook."""
    return getattr(type(rule), hook) is not getattr(Rule, hook)


def about(rule: Rule) -> Traits:
    """What a rule says about itself, also one that says it as rules did until 0.2."""
    return traits_of(rule, Rule)


class Detector(Spec, ABC):
    """A value for each round, and whether that round lies in a critical learning period."""

    private: ClassVar[bool] = (
        False  # its value has noise that a private rule accounts for; also called without reports
    )

    @property
    def multiplier(self) -> float:
        """The noise multiplier of its value, if it is private."""
        return math.inf

    @property
    def measure(self) -> str | None:
        """What the clients must measure for it, if anything beyond what they always report."""
        return None

    @abstractmethod
    def server(self, now: Round) -> State:
        """Its state before the first round."""

    def client(self, now: Round) -> State:
        """What it remembers about a client, before it has seen the client."""
        return {}

    @abstractmethod
    def value(self, memory: Memory, now: Round) -> float:
        """This round's value, from what the clients reported."""

    @abstractmethod
    def decide(self, value: float, memory: Memory, now: Round) -> tuple[bool, Memory]:
        """Whether the period is critical, and what to remember; rows that are replaced are stored."""


@dataclass(frozen=True)
class Algorithm:
    """A sum of rules. The empty sum is FedAvg."""

    rules: tuple[Rule, ...] = ()

    def __post_init__(self) -> None:
        members: list[Member] = []
        for rule, said in zip(self.rules, self.traits, strict=True):
            rule.check_finite()
            member = Member(rule, said, facts(rule, said, acts))
            for other in members:
                if type(rule) is type(other.rule):
                    raise UserError(f"{rule.name()} appears twice in the algorithm; name it once.")
                reason = refused(other, member)
                if reason:
                    raise UserError(
                        f"{other.rule.name()} and {rule.name()} cannot be combined: {reason}."
                    )
            members.append(member)

    @cached_property
    def traits(self) -> tuple[Traits, ...]:
        """What each rule says about itself."""
        return tuple(about(rule) for rule in self.rules)

    def __add__(self, other: Rule | Algorithm) -> Self:
        more = other.rules if isinstance(other, Algorithm) else (other,)
        return replace(self, rules=self.rules + more)

    def __str__(self) -> str:
        return " + ".join(map(str, self.rules)) or "fedavg"

    def check_whole(self) -> None:
        """Refuse a sum in which a rule has no effect; unfinished sums are not refused, so that
        rules can be added.
        """
        for rule in self.rules:
            reason = rule.conflicts_among(self.rules)
            if reason:
                names = [member.name() for member in self.rules]
                raise UserError(
                    f"{', '.join(names[:-1])} and {names[-1]} cannot be combined: {reason}."
                )

    def any(self, trait: str) -> bool:
        """Whether one of its rules has this trait."""
        return any(getattr(each, trait) for each in self.traits)

    def names(self, trait: str, member: str = "") -> list[str]:
        """The names of the rules that have this trait, or this member of it."""
        names = []
        for rule, each in zip(self.rules, self.traits, strict=True):
            said = getattr(each, trait)
            if member in said if member else said:
                names.append(rule.name())
        return names

    def counts(self, reports: Reports) -> Tensor:
        """The weight of each report before any rule changes it, `[m]`: its samples, or one."""
        if self.any("uniform"):
            return torch.ones(len(reports)).double()
        return reports.n.double()

    def largest_cohort(self, cohort: int, population: int) -> int:
        """The largest cohort that its rules may select, one after another."""
        for i in self.order:
            cohort = max(cohort, self.rules[i].largest_cohort(cohort, population))
        return cohort

    @cached_property
    def order(self) -> tuple[int, ...]:
        """The order in which rules select and step: as written, then the late ones, the last ones
        at the end.
        """
        places = [WHEN.index(each.when) for each in self.traits]
        return tuple(sorted(range(len(places)), key=places.__getitem__))

    def check_detectors(self, detectors: tuple[Detector, ...]) -> None:
        """Refuse a rule that asks a detector where there is none, and one that would decide without
        noise.
        """
        reader = private = noisy = None
        for rule, said in zip(self.rules, self.traits, strict=True):
            if said.reads == "signals":
                reader = reader or rule
            if said.private:
                private = private or rule
            if "noise" in said.changes:
                noisy = noisy or rule
        if not detectors:
            if reader:
                raise UserError(
                    f"{reader.name()} acts by a detector of critical periods, and there is none; give one, such as "
                    "detectors=kairosfl.detectors.parse_detectors('fgn')."
                )
            return
        for detector in detectors:
            if noisy and detector.measure:
                raise UserError(
                    f"{noisy.name()} cannot be combined with run.detector = {str(detector)!r}, "
                    f"which asks clients for {detector.measure}: it tells what the noise in their "
                    "updates is to hide; use a detector that asks for nothing."
                )
        detector = detectors[0]
        if private and reader and not detector.private:
            raise UserError(
                f"{reader.name()} and {private.name()} cannot be combined with run.detector = {str(detector)!r}, which "
                "decides by what clients report, without noise; use a detector that adds noise."
            )
        if detector.private and not private:
            raise UserError(
                f"run.detector = {str(detector)!r} needs a private rule, which accounts for its noise."
            )

    def check_mass(self, optimizer: str) -> None:
        """Refuse rules that need mean gradients where the local optimizer does not define them."""
        if optimizer == "sgd":
            return
        for rule, each in zip(self.rules, self.traits, strict=True):
            if "mass" in each.needs:
                raise UserError(
                    f"{rule.name()} cannot be used with train.optimizer = {optimizer!r}: it needs the clients' mean "
                    "gradients, which only 'sgd' defines; use 'sgd', or leave the rule out."
                )
