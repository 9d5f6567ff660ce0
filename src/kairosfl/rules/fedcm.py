"""FedCM: Xu et al., "FedCM: Federated Learning with Client-level Momentum", 2021.

    local     g = alpha · ∇f_i(w) + (1 − alpha) · Δ
    server    Δ ← Σ p_i (x − w_i) / mass_i,    x ← x + lr · Σ p_i (w_i − x)

Weight decay is kept out of Δ: the clients add it themselves, and it would be counted again in every round.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kairosfl.core.briefs import Briefs, Reports, strides
from kairosfl.core.round import Round
from kairosfl.core.rule import Rule, State
from kairosfl.core.table import Table


@dataclass(frozen=True, kw_only=True)
class FedCM(Rule):
    """Mixes the last round's global direction into every local step. `alpha = 1` is FedAvg."""

    alpha: float = 0.1
    lr: float = 1.0
    weights: str = "uniform"

    def __post_init__(self) -> None:
        self.demand("alpha", 0 < self.alpha <= 1, "use above 0 and at most 1")
        self.demand("lr", self.lr > 0, "use a number above 0")
        self.demand("weights", self.weights in ("uniform", "samples"), "use 'uniform' or 'samples'")

    @property
    def base_weights(self) -> str | None:
        return "uniform" if self.weights == "uniform" else None

    def server(self, x: Tensor, clients: int) -> State:
        return {"momentum": torch.zeros_like(x)}

    def brief(self, briefs: Briefs, state: State, rows: State, round: Round) -> Briefs:
        if self.alpha == 1:
            return briefs
        return replace(briefs.pushed((1 - self.alpha) * state["momentum"]), scale=briefs.scale * self.alpha)

    def observe(
        self, state: State, rows: State, weights: Tensor, briefs: Briefs, reports: Reports, round: Round
    ) -> tuple[State, State]:
        gradient = (-weights / reports.mass).to(reports.delta) @ strides(briefs, reports, round.x)
        decay = (weights * briefs.weight_decay).to(briefs.start)
        decayed = decay @ briefs.start if briefs.start.ndim == 2 else decay.sum() * briefs.start
        return {"momentum": gradient - decayed}, {}

    def step(self, direction: Tensor, state: State, table: Table, round: Round) -> tuple[Tensor, State]:
        return self.lr * direction, state
