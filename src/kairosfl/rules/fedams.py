"""FedAMS: Wang, Lin and Chen, "Communication-Efficient Adaptive Federated Learning", ICML 2022.

m ← beta1 · m + (1 − beta1) Δ,    v ← beta2 · v + (1 − beta2) Δ²
option 1 (FedAMS)        v̂ ← max(v̂, v, eps),    x ← x + lr · m / √v̂
option 2 (FedAMSGrad)    v̂ ← max(v̂, v),         x ← x + lr · m / (√v̂ + eps)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kairosfl.core.rule import Memory, Rule, State
from kairosfl.core.run import Round
from kairosfl.core.traits import Traits


@dataclass(frozen=True, kw_only=True)
class FedAMS(Rule):
    """Adaptive server steps whose second moment never falls.

    Args:
        lr: The server's learning rate, above 0.
        beta1: Momentum of Δ, at least 0 and below 1.
        beta2: Decay of the second moment, at least 0 and below 1.
        eps: Lower bound (option 1) or addend (option 2), above 0.
        option: 1 is FedAMS, 2 is FedAMSGrad.
        bias_correction: Whether m is divided by 1 − beta1^t and v̂ by 1 − beta2^t.
    """

    lr: float = 1.0
    beta1: float = 0.9
    beta2: float = 0.99
    eps: float = 1e-3
    option: int = 1
    bias_correction: bool = False

    def __post_init__(self) -> None:
        self.check("lr", self.lr > 0, "use a number above 0")
        self.check("beta1", 0 <= self.beta1 < 1, "use at least 0 and below 1")
        self.check("beta2", 0 <= self.beta2 < 1, "use at least 0 and below 1")
        self.check("eps", self.eps > 0, "use a number above 0")
        self.check("option", self.option in (1, 2), "use 1 (FedAMS) or 2 (FedAMSGrad)")

    def traits(self) -> Traits:
        changes = {"coordinates"}
        if self.beta1:
            changes.add("momentum")
        return Traits(
            server_optimizer=True,
            reads="direction",
            sums=True,
            late=True,
            changes=changes,
        )

    def server(self, now: Round) -> State:
        zero = torch.zeros_like(now.x)
        return {"m": zero, "v": zero.clone(), "v_max": zero.clone(), "t": torch.tensor(0)}

    def step(self, direction: Tensor, memory: Memory, now: Round) -> tuple[Tensor, Memory]:
        state = memory.state
        t = int(state["t"]) + 1
        m = self.beta1 * state["m"] + (1 - self.beta1) * direction
        v = self.beta2 * state["v"] + (1 - self.beta2) * direction * direction
        v_max = torch.maximum(state["v_max"], v)
        if self.option == 1:
            v_max = v_max.clamp(min=self.eps)
        state = {"m": m, "v": v, "v_max": v_max, "t": torch.tensor(t)}

        first = m
        second = v_max
        if self.bias_correction:
            first = m / (1 - self.beta1**t)
            second = v_max / (1 - self.beta2**t)
        added = self.eps if self.option == 2 else 0.0
        return self.lr * first / (second.sqrt() + added), memory.replace(state=state)
