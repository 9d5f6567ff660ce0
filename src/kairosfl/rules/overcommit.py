"""More clients are asked than are waited for: Bonawitz et al., "Towards Federated Learning at Scale:
System Design", MLSys 2019.

The first m of ⌈(1 + over) m⌉ answers count. The others are dropped; their devices work in vain.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from kairosfl.core.rule import Memory, Plan, Rule
from kairosfl.core.run import Round
from kairosfl.core.traits import Traits


@dataclass(frozen=True, kw_only=True)
class OverCommit(Rule):
    """Asks more clients than the round needs, and drops the answers of the slowest.

    Args:
        over: The fraction of the cohort that is asked in addition.
    """

    over: float = 0.3

    def __post_init__(self) -> None:
        self.check("over", self.over > 0, "use a number above 0")

    def traits(self) -> Traits:
        return Traits(
            adapts=True,
            reads="direction",
            sums=True,
            late=True,
            clock=True,
            undeployable="set deploy.over instead",
            changes={"waiting"},
        )

    def select(self, plan: Plan, memory: Memory, now: Round) -> Plan:
        return replace(plan, over=self.over)
