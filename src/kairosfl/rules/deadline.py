"""Rounds that end after a fixed time with what has landed: Bonawitz et al., "Towards Federated
Learning at Scale: System Design", MLSys 2019; with partial work, Li et al., "Federated Optimization
in Heterogeneous Networks" (FedProx), MLSys 2020.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from kairosfl.core.rule import Memory, Plan, Rule
from kairosfl.core.run import Round
from kairosfl.core.traits import NONE, Traits
from kairosfl.rules.buffered import SYNCHRONOUS


@dataclass(frozen=True, kw_only=True)
class Deadline(Rule):
    """A round ends after so many seconds, or as soon as everybody has answered.

    Args:
        seconds: After which a round ends, counted from its first order.
        partial: Whether a client that would be late does as many steps as fit, at least one.
        quorum: Fewer answers than this fraction of the cohort do not count.
        keep: Whether a late answer counts in a later round; otherwise it is dropped.
    """

    seconds: float = 60.0
    partial: bool = False
    quorum: float = 0.0
    keep: bool = False

    def __post_init__(self) -> None:
        self.check("seconds", self.seconds > 0, "use a number above 0")
        self.check("quorum", 0 <= self.quorum <= 1, "use a number between 0 and 1")

    def traits(self) -> Traits:
        return Traits(
            adapts=True,
            reads="direction",
            sums=True,
            late=True,
            clock=True,
            undeployable=SYNCHRONOUS if self.keep else "set deploy.deadline instead",
            changes={"quorum"} if self.keep or self.quorum else NONE,
        )

    def select(self, plan: Plan, memory: Memory, now: Round) -> Plan:
        plan = replace(plan, deadline=self.seconds, partial=self.partial)
        if self.quorum:
            plan = replace(plan, quorum=self.quorum)
        return replace(plan, late="keep") if self.keep else plan
