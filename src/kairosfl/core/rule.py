"""Rule and Algorithm: every difference from FedAvg is a rule, and an algorithm is a sum of rules."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Literal, Self

import numpy as np
import torch
from torch import Tensor

from kairosfl.core.fields import Briefs, Reports
from kairosfl.core.spec import Spec
from kairosfl.core.table import Table
from kairosfl.errors import UserError

if TYPE_CHECKING:
    from kairosfl.core.run import Round
    from kairosfl.detectors import Detector

State = dict[str, Tensor]
Reads = Literal["clients", "signals", "direction"]


class Finished(Exception):
    """Raised by `select`: the run ends before this round, for the reason given, and has finished."""


@dataclass(frozen=True)
class Plan:
    """Who may train and how many of them."""

    size: int
    eligible: np.ndarray | None = None  # client ids; None: everyone
    ids: np.ndarray | None = None  # exactly these, whatever the size


@dataclass(frozen=True)
class Memory:
    """What a rule or a detector remembers: about the run, this round's clients, and every client.

    `rows` holds the rows of this round's clients stacked, `[m, ...]`: of those asked in `brief`, of the reporters from
    `receive` on; it is empty in `select`, `step` and `result`.
    """

    state: State
    rows: State
    table: Table  # every row ever written

    def replace(self, *, state: State | None = None, rows: State | None = None) -> Memory:
        """With a new state, or with rows to store (by `observe`; names left out keep their values), or both."""
        state = self.state if state is None else state
        return Memory(state, self.rows if rows is None else rows, self.table)


class Rule(Spec):
    """Ten hooks, all on the server, each "as FedAvg" unless it is overridden.

    A rule is a frozen dataclass of hyper-parameters. It keeps nothing on itself: what it remembers about the run is
    its `state`, what it remembers about a client is that client's row, and both are dictionaries of tensors. Every hook
    takes the value that flows through the round, the rule's memory, and the round, and returns the value.
    """

    kind: ClassVar[Literal["base", "adaptive"]] = "base"
    last: ClassVar[bool] = False  # it selects and steps after every other rule
    server_optimizer: ClassVar[bool] = False  # it turns directions into steps; an algorithm has at most one such rule
    needs_features: ClassVar[bool] = False  # it has clients compare features, which not every model has
    needs_mass: ClassVar[bool] = False  # it uses mean gradients, which only local sgd defines
    sees_idle: ClassVar[bool] = False  # observe and step are also called in rounds without a usable report
    private: ClassVar[bool] = False  # only what has noise decides anything: rounds without reports run like all others
    # What it acts on: reports or rows of single clients, the detector's answer, or at most the cohort's direction. A
    # private rule is combined only with rules that say that they do not read clients.
    reads: ClassVar[Reads] = "clients"

    @property
    def uniform(self) -> bool:
        """Whether all clients have equal weight, as in some papers, instead of by their samples."""
        return False

    @property
    def reads_rounds(self) -> bool:
        """Whether its behaviour depends on the total number of rounds, so that none can be added later."""
        return False

    def conflicts_with(self, other: Rule) -> str | None:
        """Why this rule cannot be combined with `other`, or None when it can."""
        return None

    def largest_cohort(self, cohort: int, population: int) -> int:
        """The largest cohort that it may select, so that memory can be reserved."""
        return cohort

    def widened(self, factor: float) -> Self:
        """The same rule for a cohort `factor` times as large, of which not all will be waited for."""
        return self

    def server(self, now: Round) -> State:
        """Its state before the first round."""
        return {}

    def client(self, now: Round) -> State:
        """A client's row before its first report."""
        return {}

    def select(self, plan: Plan, memory: Memory, now: Round) -> Plan:
        """Who trains: how many, from whom, or exactly whom."""
        return plan

    def brief(self, briefs: Briefs, memory: Memory, now: Round) -> Briefs:
        """What the selected clients are told."""
        return briefs

    def receive(self, reports: Reports, memory: Memory, now: Round) -> Reports:
        """The reports as all later stages see them (clipped, decoded, with noise), of the same clients."""
        return reports

    def weigh(self, factors: Tensor, memory: Memory, now: Round) -> Tensor:
        """The weight of each reporter, `[m]`: multiply the factors by yours; the core divides by their sum."""
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

    def result(self, x: Tensor, memory: Memory, now: Round) -> Tensor:
        """The vector to evaluate, export and deploy; it arrives as the model itself."""
        return x

    def record(self, memory: Memory, now: Round) -> dict[str, float]:
        """After every round: numbers to record in `metrics.jsonl`, by name."""
        return {}

    def verdict(self, memory: Memory, now: Round) -> str | None:
        """After the last round: what the user should know about its effect, for instance that it had none."""
        return None

    def __add__(self, other: Rule | Algorithm) -> Algorithm:
        return Algorithm((self,)) + other


def acts(rule: Rule, hook: str) -> bool:
    """Whether a rule overrides a hook."""
    return getattr(type(rule), hook) is not getattr(Rule, hook)


@dataclass(frozen=True)
class Algorithm:
    """A sum of rules. The empty sum is FedAvg."""

    rules: tuple[Rule, ...] = ()

    def __post_init__(self) -> None:
        for i, rule in enumerate(self.rules):
            rule.check_finite()
            for other in self.rules[:i]:
                if type(rule) is type(other):
                    raise UserError(f"{rule.name()} appears twice in the algorithm; name it once.")
                if rule.server_optimizer and other.server_optimizer:
                    raise UserError(
                        f"{other.name()} and {rule.name()} cannot be combined: both are server optimizers, and one "
                        "would take the other's step for a gradient; leave one of them out."
                    )
                reason = rule.conflicts_with(other) or other.conflicts_with(rule)
                if reason:
                    raise UserError(f"{other.name()} and {rule.name()} cannot be combined: {reason}.")

    def __add__(self, other: Rule | Algorithm) -> Self:
        more = other.rules if isinstance(other, Algorithm) else (other,)
        return replace(self, rules=self.rules + more)

    def __str__(self) -> str:
        return " + ".join(map(str, self.rules)) or "fedavg"

    def counts(self, reports: Reports) -> Tensor:
        """The weight of each report before any rule changes it, `[m]`: its samples, or one."""
        uniform = any(rule.uniform for rule in self.rules)
        return torch.ones(len(reports)).double() if uniform else reports.n.double()

    def largest_cohort(self, cohort: int, population: int) -> int:
        """The largest cohort that its rules may select, one after another."""
        for i in self.order():
            cohort = max(cohort, self.rules[i].largest_cohort(cohort, population))
        return cohort

    def order(self) -> list[int]:
        """The order in which rules select and step: as written, then the `last` ones, adaptive ones at the end."""
        last = [(rule.last, rule.last and rule.kind == "adaptive") for rule in self.rules]
        return sorted(range(len(last)), key=last.__getitem__)

    def check_detector(self, detector: Detector) -> None:
        """Refuse a detector that would decide by clients' numbers without noise beside a private rule."""
        private = next((rule for rule in self.rules if rule.private), None)
        reader = next((rule for rule in self.rules if rule.reads == "signals"), None)
        if private and reader and not detector.private:
            raise UserError(
                f"{reader.name()} and {private.name()} cannot be combined with run.detector = {str(detector)!r}, which "
                "decides by what clients report, without noise; use 'noisedfgn'."
            )
        if detector.private and not private:
            raise UserError(f"run.detector = {str(detector)!r} needs the rule privacy, which accounts for its noise.")

    def check_mass(self, optimizer: str) -> None:
        """Refuse rules that need mean gradients where the local optimizer does not define them."""
        for rule in self.rules:
            if rule.needs_mass and optimizer != "sgd":
                raise UserError(
                    f"{rule.name()} cannot be used with train.optimizer = {optimizer!r}: it needs the clients' mean "
                    "gradients, which only 'sgd' defines; use 'sgd', or leave the rule out."
                )
