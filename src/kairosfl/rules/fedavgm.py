"""FedAvgM: Hsu, Qi and Brown, "Measuring the Effects of Non-Identical Data Distribution", 2019.

v ← beta · v + Σ p_i Δ_i,    x ← x + lr · v          (Nesterov: x ← x + lr · (Σ p_i Δ_i + beta · v))
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kairosfl.core.rule import Memory, Rule, State
from kairosfl.core.run import Round
from kairosfl.core.traits import NONE, Traits


@dataclass(frozen=True, kw_only=True)
class FedAvgM(Rule):
    """Momentum on the server. `beta = 0` is FedAvg to the bit.

    Args:
        beta: Momentum, at least 0 and below 1.
        lr: The server's learning rate.
        nesterov: Whether to look ahead by one more step of momentum.
    """

    beta: float = 0.9
    lr: float = 1.0
    nesterov: bool = False

    def __post_init__(self) -> None:
        self.check("beta", 0 <= self.beta < 1, "use at least 0 and below 1")
        self.check("lr", self.lr > 0, "use a number above 0")

    def traits(self) -> Traits:
        return Traits(
            server_optimizer=True,
            reads="direction",
            sums=True,
            late=True,
            changes={"momentum"} if self.beta else NONE,
        )

    def verdict(self, memory: Memory, now: Round) -> str | None:
        if self.beta == 0 and self.lr == 1:
            return "fedavgm(beta=0) is fedavg"
        return None

    def server(self, now: Round) -> State:
        return {"velocity": torch.zeros_like(now.x)}

    def step(self, direction: Tensor, memory: Memory, now: Round) -> tuple[Tensor, Memory]:
        velocity = self.beta * memory.state["velocity"] + direction
        memory = memory.replace(state={"velocity": velocity})
        if self.nesterov:
            return self.lr * (direction + self.beta * velocity), memory
        return self.lr * velocity, memory
