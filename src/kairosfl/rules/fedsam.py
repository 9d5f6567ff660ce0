"""FedSAM and MoFedSAM: Qu et al., "Generalized Federated Learning via Sharpness Aware
Minimization", ICML 2022.

    w̃ = w + rho · ∇L(w) / ‖∇L(w)‖,    g = ∇L(w̃)        at every local step, on the same batch

MoFedSAM mixes the last round's global direction into every such gradient: that is `fedsam + fedcm`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from kairosfl.core.fields import Briefs
from kairosfl.core.rule import Memory, Rule
from kairosfl.core.run import Round
from kairosfl.core.traits import Traits


@dataclass(frozen=True, kw_only=True)
class FedSAM(Rule):
    """Clients look for flat minima, with two gradients a step. `rho = 0` is FedAvg.

    Args:
        rho: Distance to the point where gradients are taken, 0 or more.
    """

    rho: float = 0.05

    def __post_init__(self) -> None:
        self.check("rho", 0 <= self.rho < float("inf"), "use 0 (FedAvg) or more, and finite")

    def traits(self) -> Traits:
        return Traits(reads="direction", sums=True, late=True)

    def verdict(self, memory: Memory, now: Round) -> str | None:
        if self.rho:
            return None
        return "fedsam(rho=0) has no effect"

    def brief(self, briefs: Briefs, memory: Memory, now: Round) -> Briefs:
        if not self.rho:
            return briefs
        return replace(briefs, radius=briefs.radius + self.rho)
