"""FedProx: Li et al., "Federated Optimization in Heterogeneous Networks", MLSys 2020.

local loss  f_i(w) + (mu / 2) ‖w − x‖²,    so    g = ∇f_i(w) + mu · (w − x)
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from kairosfl.core.fields import Briefs
from kairosfl.core.rule import Memory, Rule
from kairosfl.core.run import Round
from kairosfl.core.traits import Traits


@dataclass(frozen=True, kw_only=True)
class FedProx(Rule):
    """Pulls every client back to the model that it was sent. `mu = 0` is FedAvg to the bit.

    Args:
        mu: Strength of the pull, 0 or more; the paper tunes 0.001 to 1.
    """

    mu: float = 0.01

    def __post_init__(self) -> None:
        self.check("mu", self.mu >= 0, "use 0 or more")

    def traits(self) -> Traits:
        return Traits(reads="direction", sums=True, late=True)

    def verdict(self, memory: Memory, now: Round) -> str | None:
        if self.mu:
            return None
        return "fedprox(mu=0) has no effect"

    def brief(self, briefs: Briefs, memory: Memory, now: Round) -> Briefs:
        return replace(briefs, pull=briefs.pull + self.mu)
