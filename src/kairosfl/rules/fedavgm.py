"""FedAvgM: Hsu, Qi and Brown, "Measuring the Effects of Non-Identical Data Distribution", 2019.

v ← beta · v + Σ p_i Δ_i,    x ← x + lr · v          (Nesterov: x ← x + lr · (Σ p_i Δ_i + beta · v))
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kairosfl.core.round import Round
from kairosfl.core.rule import Rule, State
from kairosfl.core.table import Table


@dataclass(frozen=True, kw_only=True)
class FedAvgM(Rule):
    """Momentum on the server. `beta = 0` is FedAvg to the bit."""

    beta: float = 0.9
    lr: float = 1.0
    nesterov: bool = False

    def __post_init__(self) -> None:
        self.demand("beta", 0 <= self.beta < 1, "use at least 0 and below 1")
        self.demand("lr", self.lr > 0, "use a number above 0")

    def server(self, x: Tensor, clients: int) -> State:
        return {"velocity": torch.zeros_like(x)}

    def step(self, direction: Tensor, state: State, table: Table, round: Round) -> tuple[Tensor, State]:
        velocity = self.beta * state["velocity"] + direction
        moved = direction + self.beta * velocity if self.nesterov else velocity
        return self.lr * moved, {"velocity": velocity}
