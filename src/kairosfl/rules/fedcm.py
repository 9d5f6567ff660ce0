"""FedCM: Xu et al., "FedCM: Federated Learning with Client-level Momentum", 2021.

    local     g = alpha · ∇f_i(w) + (1 − alpha) · Δ
    server    Δ ← Σ p_i (x − w_i) / mass_i,    x ← x + lr · Σ p_i (w_i − x)

Weight decay is kept out of Δ: the clients add it themselves, and it would be counted again in every
round. With `decay` it stays in, as in FL-Simulator's code; where Δ has settled, it is then 1 /
alpha times as strong.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kairosfl.core.fields import Briefs
from kairosfl.core.mass import strides
from kairosfl.core.rule import Memory, Rule, State
from kairosfl.core.run import Round
from kairosfl.core.traits import Traits


@dataclass(frozen=True, kw_only=True)
class FedCM(Rule):
    """Mixes the last round's global direction into every local step. `alpha = 1` is FedAvg.

    Args:
        alpha: Share of the client's own gradient, above 0 and at most 1.
        lr: The server's learning rate.
        weights: "uniform", as in the paper, or "samples": clients are weighted by their samples.
        decay: Whether Δ contains the clients' weight decay.
    """

    alpha: float = 0.1
    lr: float = 1.0
    weights: str = "uniform"
    decay: bool = False

    def __post_init__(self) -> None:
        self.check("alpha", 0 < self.alpha <= 1, "use above 0 and at most 1")
        self.check("lr", self.lr > 0, "use a number above 0")
        self.check("weights", self.weights in ("uniform", "samples"), "use 'uniform' or 'samples'")

    def traits(self) -> Traits:
        return Traits(
            needs={"mass"},
            uniform=self.weights == "uniform",
            sums=True,
            late=True,
            changes={"gradients", "local momentum"},
        )

    def server(self, now: Round) -> State:
        return {"momentum": torch.zeros_like(now.x)}

    def brief(self, briefs: Briefs, memory: Memory, now: Round) -> Briefs:
        if self.alpha == 1:
            return briefs
        return replace(
            briefs.pushed((1 - self.alpha) * memory.state["momentum"]),
            scale=briefs.scale * self.alpha,
        )

    def observe(self, memory: Memory, now: Round) -> Memory:
        gradient = (-now.weights / now.reports.mass).to(now.reports.delta) @ strides(now)
        if self.decay:
            return memory.replace(state={"momentum": gradient})
        start = now.briefs.start
        decay = (now.weights * now.briefs.weight_decay).to(start)
        if start.ndim == 2:  # a start for each client
            decayed = decay @ start
        else:
            decayed = decay.sum() * start
        return memory.replace(state={"momentum": gradient - decayed})

    def step(self, direction: Tensor, memory: Memory, now: Round) -> tuple[Tensor, Memory]:
        return self.lr * direction, memory
