"""GeometricMedian: Pillutla, Kakade and Harchaoui, "Robust Aggregation for Federated Learning"
(RFA), 2022.

    z ← Σ β_i Δ_i / Σ β_i,    β_i = p_i / max(nu, ‖z − Δ_i‖)        `iterations` times from z = 0

The smoothed Weiszfeld algorithm (Algorithm 2) for the point with the smallest weighted sum of
distances.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kairosfl.core.rule import Memory
from kairosfl.core.run import Round
from kairosfl.core.traits import Traits
from kairosfl.detectors import squared_norms
from kairosfl.rules.robust import Robust, taking_part


@dataclass(frozen=True, kw_only=True)
class GeometricMedian(Robust):
    """The vector nearest to all updates at once.

    It begins at the model, not at the mean, which one liar can move far.

    Args:
        nu: Smallest distance that enters a factor, so that it stays finite; above 0.
        iterations: Steps of Weiszfeld's algorithm.
        weights: By "samples", as in the paper, or "uniform".
    """

    nu: float = 1e-6
    iterations: int = 3
    weights: str = "samples"

    def __post_init__(self) -> None:
        self.check("nu", self.nu > 0, "use a number above 0; the paper uses 1e-6")
        self.check("iterations", self.iterations >= 1, "use 1 or more; the paper uses 3")
        self.check("weights", self.weights in ("uniform", "samples"), "use 'uniform' or 'samples'")

    def traits(self) -> Traits:
        return replace(super().traits(), uniform=self.weights == "uniform")

    def combine(self, direction: Tensor, memory: Memory, now: Round) -> Tensor:
        updates, weights = taking_part(now)
        z = torch.zeros_like(updates[0])
        for _ in range(self.iterations):
            # Row by row, so that no second matrix [k, d] is in memory.
            squares = torch.cat([squared_norms(row[None] - z) for row in updates])
            distances = squares.double().sqrt().cpu()
            beta = weights / distances.clamp(min=self.nu)
            z = (beta / beta.sum()).to(updates) @ updates
        return z.to(direction)
