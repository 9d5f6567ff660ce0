"""Asynchronous rounds: a round ends with its k-th answer, and clients go on working.

Whenever a client answers, another one is sent the model as it then is, so that always as many are
at work. The server steps with every k answers, whichever versions they were trained from.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from kairosfl.core.rule import Memory, Plan, Rule
from kairosfl.core.run import Round
from kairosfl.core.traits import Traits

SYNCHRONOUS = "a deployed server drops answers to an older round's orders; leave the rule out"


@dataclass(frozen=True, kw_only=True)
class Buffered(Rule):
    """The server steps with every `k` answers, and `concurrency` clients are always at work.

    Args:
        k: How many answers a round takes.
        concurrency: How many clients are at work at once.
        max_age: Rounds after which an answer no longer counts; 0: it always does.
        patience: Seconds after which an order is given up; 0: never.
    """

    k: int = 5
    concurrency: int = 10
    max_age: int = 0
    patience: float = 0.0

    def __post_init__(self) -> None:
        self.check("k", self.k >= 1, "use 1 or more")
        self.check("concurrency", self.concurrency >= 1, "use 1 or more")
        self.check("max_age", self.max_age >= 0, "use 0 or more")
        self.check("patience", self.patience >= 0, "use 0 or more")

    def traits(self) -> Traits:
        return Traits(
            adapts=True,
            reads="direction",
            sums=True,
            late=True,
            clock=True,
            undeployable=SYNCHRONOUS,
            changes={"size", "waiting"},
        )

    def largest_cohort(self, cohort: int, population: int) -> int:
        return min(max(self.k, self.concurrency), population)

    def select(self, plan: Plan, memory: Memory, now: Round) -> Plan:
        plan = replace(plan, size=self.k, concurrency=self.concurrency, late="keep")
        if self.max_age:
            plan = replace(plan, max_age=self.max_age)
        if self.patience:
            plan = replace(plan, patience=self.patience)
        return plan
