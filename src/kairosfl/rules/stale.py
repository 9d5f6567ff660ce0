"""Answers count less the older they are: Xie, Koyejo and Gupta, "Asynchronous Federated
Optimization", 2019, and Nguyen et al., "Federated Learning with Buffered Asynchronous Aggregation",
AISTATS 2022.

s(τ) = (1 + τ)^−power         τ: rounds since the client was sent its model
server  x ← x + Σ p_i s(τ_i) Δ_i        p_i as without the rule, sum 1
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kairosfl.core.rule import Memory, Rule
from kairosfl.core.run import Round
from kairosfl.core.traits import Traits


def share(now: Round, power: float) -> Tensor:
    """How much of each reporter's weight its age leaves, `[m]` float64; a fresh one's is 1."""
    return (1 + now.age.double()) ** -power


def shortened(direction: Tensor, now: Round, shares: Tensor) -> Tensor:
    """The direction by what age took from the weights: these have a sum of 1 again."""
    if not len(shares) or bool((shares == 1).all()):  # to the bit what it is without ages
        return direction
    before = now.weights / shares  # proportional to the weights without ages
    return direction / float(before.sum())


@dataclass(frozen=True, kw_only=True)
class Stale(Rule):
    """Weighs an answer by its age, and shortens the step by what age takes: an old answer counts
    less, and the others do not count more. Detectors and robust rules see updates as they are.

    Args:
        power: How fast the weight falls with age; 0: not at all, 0.5 as in FedBuff.
    """

    power: float = 0.5

    def __post_init__(self) -> None:
        self.check("power", self.power >= 0, "use 0 or more")

    def traits(self) -> Traits:
        return Traits(when="first", adapts=True, sums=True, late=True, clock=True, changes={"ages"})

    def weigh(self, factors: Tensor, memory: Memory, now: Round) -> Tensor:
        return factors * share(now, self.power)

    def step(self, direction: Tensor, memory: Memory, now: Round) -> tuple[Tensor, Memory]:
        return shortened(direction, now, share(now, self.power)), memory
