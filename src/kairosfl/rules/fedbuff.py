"""FedBuff: Nguyen et al., "Federated Learning with Buffered Asynchronous Aggregation", AISTATS 2022.

s(τ) = (1 + τ)^−power         τ: rounds since the client was sent its model
server  x ← x + lr · (1/k) Σ s(τ_i) Δ_i        over the k answers of a buffer, Δ_i = w_i − its start

An update that is rejected counts as zero: the divisor is always k.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from kairosfl.core.rule import Memory, Plan, Rule
from kairosfl.core.run import Round
from kairosfl.core.traits import Traits
from kairosfl.rules.buffered import SYNCHRONOUS
from kairosfl.rules.stale import share, shortened


@dataclass(frozen=True, kw_only=True)
class FedBuff(Rule):
    """The server steps with every `k` answers, which count equally and less the older they are.

    With `fedavgm`, the server has momentum, as in the paper's experiments.

    Args:
        k: How many answers a round takes.
        concurrency: How many clients are at work at once.
        power: How fast the weight of an answer falls with its age; 0: not at all.
        lr: The server's learning rate.
        max_age: Rounds after which an answer no longer counts; 0: it always does.
    """

    k: int = 10
    concurrency: int = 100
    power: float = 0.5
    lr: float = 1.0
    max_age: int = 0

    def __post_init__(self) -> None:
        self.check("k", self.k >= 1, "use 1 or more")
        self.check("concurrency", self.concurrency >= 1, "use 1 or more")
        self.check("power", self.power >= 0, "use 0 or more")
        self.check("lr", self.lr > 0, "use a number above 0")
        self.check("max_age", self.max_age >= 0, "use 0 or more")

    def traits(self) -> Traits:
        return Traits(
            when="first",
            reads="direction",
            uniform=True,
            sums=True,
            late=True,
            clock=True,
            undeployable=SYNCHRONOUS,
            changes={"size", "waiting", "ages"},
        )

    def largest_cohort(self, cohort: int, population: int) -> int:
        return min(max(self.k, self.concurrency), population)

    def select(self, plan: Plan, memory: Memory, now: Round) -> Plan:
        plan = replace(plan, size=self.k, concurrency=self.concurrency, late="keep")
        return replace(plan, max_age=self.max_age) if self.max_age else plan

    def weigh(self, factors: Tensor, memory: Memory, now: Round) -> Tensor:
        return factors * share(now, self.power)

    def step(self, direction: Tensor, memory: Memory, now: Round) -> tuple[Tensor, Memory]:
        direction = shortened(direction, now, share(now, self.power))
        factor = self.lr * len(now.reports) / now.size
        return direction if factor == 1 else factor * direction, memory
