"""FedAdagrad, FedAdam, FedYogi: Reddi et al., "Adaptive Federated Optimization", ICLR 2021,
Algorithm 2.

Δ = Σ p_i Δ_i,    m ← beta1 · m + (1 − beta1) Δ
v ← v + Δ²                                   Adagrad
v ← beta2 · v + (1 − beta2) Δ²               Adam
v ← v − (1 − beta2) Δ² sign(v − Δ²)          Yogi
x ← x + lr · m / (√v + tau),    v starts at tau²
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from kairosfl.core.rule import Memory, Rule, State
from kairosfl.core.run import Round
from kairosfl.core.traits import Traits


@dataclass(frozen=True, kw_only=True)
class FedOpt(Rule):
    """An adaptive optimiser on the server; the subclasses say how its second moment moves."""

    lr: float = 0.1
    beta1: float = 0.9
    tau: float = 1e-3

    def __post_init__(self) -> None:
        self.check("lr", self.lr > 0, "use a number above 0")
        self.check("beta1", 0 <= self.beta1 < 1, "use at least 0 and below 1")
        self.check("tau", self.tau > 0, "use a number above 0")

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
        return {
            "m": torch.zeros_like(now.x),
            "v": torch.full_like(now.x, self.tau**2),
            "t": torch.tensor(0),
        }

    @abstractmethod
    def second(self, v: Tensor, square: Tensor) -> Tensor:
        """The new second moment from the old one and Δ²."""

    def corrected(self, m: Tensor, v: Tensor, t: int) -> tuple[Tensor, Tensor]:
        """The moments as they enter the step; Reddi et al. do not correct their bias."""
        return m, v

    def step(self, direction: Tensor, memory: Memory, now: Round) -> tuple[Tensor, Memory]:
        state = memory.state
        t = int(state["t"]) + 1
        m = self.beta1 * state["m"] + (1 - self.beta1) * direction
        v = self.second(state["v"], direction * direction)
        first, second = self.corrected(m, v, t)
        state = {"m": m, "v": v, "t": torch.tensor(t)}
        return self.lr * first / (second.sqrt() + self.tau), memory.replace(state=state)


@dataclass(frozen=True, kw_only=True)
class FedAdagrad(FedOpt):
    """Step sizes that only shrink, most where updates were large.

    Args:
        lr: The server's learning rate, above 0.
        beta1: Momentum of Δ, at least 0 and below 1.
        tau: Degree of adaptivity: smaller adapts more; above 0.
    """

    beta1: float = 0.0

    def second(self, v: Tensor, square: Tensor) -> Tensor:
        return v + square


@dataclass(frozen=True, kw_only=True)
class FedAdam(FedOpt):
    """Step sizes from a moving average of squared updates.

    Args:
        lr: The server's learning rate, above 0.
        beta1: Momentum of Δ, at least 0 and below 1.
        tau: Degree of adaptivity: smaller adapts more; above 0.
        beta2: Decay of the second moment, at least 0 and below 1.
        bias_correction: Whether m is divided by 1 − beta1^t and v by 1 − beta2^t.
    """

    beta2: float = 0.99
    bias_correction: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check("beta2", 0 <= self.beta2 < 1, "use at least 0 and below 1")

    def server(self, now: Round) -> State:
        state = super().server(now)
        # The correction is for moments that start at 0; it would blow up tau² by 1 / (1 − beta2).
        if self.bias_correction:
            state["v"] = torch.zeros_like(now.x)
        return state

    def second(self, v: Tensor, square: Tensor) -> Tensor:
        return self.beta2 * v + (1 - self.beta2) * square

    def corrected(self, m: Tensor, v: Tensor, t: int) -> tuple[Tensor, Tensor]:
        if not self.bias_correction:
            return m, v
        return m / (1 - self.beta1**t), v / (1 - self.beta2**t)


@dataclass(frozen=True, kw_only=True)
class FedYogi(FedAdam):
    """Like FedAdam, but one large round does not erase the second moment.

    It changes by the size of Δ² alone.

    Args:
        lr: The server's learning rate, above 0.
        beta1: Momentum of Δ, at least 0 and below 1.
        tau: Degree of adaptivity: smaller adapts more; above 0.
        beta2: Decay of the second moment, at least 0 and below 1.
        bias_correction: Whether m is divided by 1 − beta1^t and v by 1 − beta2^t.
    """

    lr: float = 0.01

    def second(self, v: Tensor, square: Tensor) -> Tensor:
        return v - (1 - self.beta2) * square * torch.sign(v - square)
