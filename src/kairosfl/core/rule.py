"""Rule and Algorithm: every difference from FedAvg is a rule, and an algorithm is a sum of rules."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, Self

import torch
from torch import Tensor

from kairosfl.core.spec import Spec
from kairosfl.errors import UserError

if TYPE_CHECKING:
    from kairosfl.core.briefs import Briefs, Plan, Reports
    from kairosfl.core.round import Round
    from kairosfl.core.table import Table

State = dict[str, Tensor]


class Rule(Spec):
    """Eight hooks, all on the server, each "as FedAvg" unless it is overridden.

    A rule is a frozen dataclass of hyper-parameters. It keeps nothing on itself: what it remembers about the run is
    its server slot (`server`), what it remembers about a client is that client's row (`client`), and both are
    dictionaries of tensors. `rows` holds the rows of this round's clients stacked, `[m, ...]`.
    """

    kind: ClassVar[Literal["base", "adaptive"]] = "base"
    last: ClassVar[bool] = False  # it selects and steps after every other rule

    @property
    def base_weights(self) -> str | None:
        """None: clients count by their samples; "uniform" where the paper averages uniformly."""
        return None

    def beside(self, other: Rule) -> str | None:
        """Why this rule makes no sense beside `other`, or None when it does."""
        return None

    def largest(self, cohort: int, clients: int) -> int:
        """The largest cohort that it may ask for, so that memory can be set aside."""
        return cohort

    def server(self, x: Tensor, clients: int) -> State:
        """Its server slot before the first round."""
        return {}

    def client(self, x: Tensor) -> State:
        """A row before anything was learnt about the client."""
        return {}

    def select(self, plan: Plan, state: State, round: Round) -> Plan:
        """Who trains: how many, from whom, or exactly whom."""
        return plan

    def brief(self, briefs: Briefs, state: State, rows: State, round: Round) -> Briefs:
        """What the chosen clients are told."""
        return briefs

    def weigh(
        self, factors: Tensor, state: State, rows: State, briefs: Briefs, reports: Reports, round: Round
    ) -> Tensor:
        """How much each reporter counts, `[m]`; multiply the factors, the core divides by their sum."""
        return factors

    def combine(
        self,
        direction: Tensor,
        state: State,
        rows: State,
        weights: Tensor,
        briefs: Briefs,
        reports: Reports,
        round: Round,
    ) -> Tensor:
        """The cohort's direction `[d]`; it arrives as the weighted mean of the updates."""
        return direction

    def observe(
        self, state: State, rows: State, weights: Tensor, briefs: Briefs, reports: Reports, round: Round
    ) -> tuple[State, State]:
        """What is remembered of this round: the new server slot, and the reporters' new rows (none: write none)."""
        return state, {}

    def step(self, direction: Tensor, state: State, table: Table, round: Round) -> tuple[Tensor, State]:
        """How the model moves: x ← x + direction. `table` holds every row ever written."""
        return direction, state

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
            for other in self.rules[:i]:
                if type(rule) is type(other):
                    raise UserError(f"{rule.name()} stands twice in the algorithm; name it once.")
                reason = rule.beside(other) or other.beside(rule)
                if reason:
                    raise UserError(f"{other.name()} + {rule.name()} make no algorithm: {reason}.")

    def __add__(self, other: Rule | Algorithm) -> Self:
        more = other.rules if isinstance(other, Algorithm) else (other,)
        return type(self)(self.rules + more)

    def __str__(self) -> str:
        return " + ".join(map(str, self.rules)) or "fedavg"

    @property
    def base_weights(self) -> str:
        """ "uniform" when a rule asks for it, "samples" otherwise."""
        return next((rule.base_weights for rule in self.rules if rule.base_weights), "samples")

    def counts(self, reports: Reports) -> Tensor:
        """How much each report counts before any rule weighs it, `[m]`: its samples, or one."""
        return reports.n.double() if self.base_weights == "samples" else torch.ones(len(reports)).double()

    def largest(self, cohort: int, clients: int) -> int:
        """The largest cohort that any of its rules may ask for."""
        return max((rule.largest(cohort, clients) for rule in self.rules), default=cohort)

    def order(self) -> list[int]:
        """The order in which rules select and step: as written, the `last` ones at the end, of those the adaptive."""
        last = [(rule.last, rule.last and rule.kind == "adaptive") for rule in self.rules]
        return sorted(range(len(last)), key=last.__getitem__)
