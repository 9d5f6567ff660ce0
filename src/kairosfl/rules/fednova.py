"""FedNova: Wang et al., "Tackling the Objective Inconsistency Problem", NeurIPS 2020.

    d_i = Δ_i / a_i,    x ← x + τ_eff Σ p_i d_i,    τ_eff = Σ p_i a_i

a_i is how far a unit gradient moves the weights: the mass, which knows momentum, proximal pull and
weight decay. With FedProx the paper takes τ_eff = Σ p_i · steps_i · lr_i instead. FedCL's released
code divides the weights p_i / a_i by their sum, which is τ_eff = 1 / Σ (p_i / a_i): `convex`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kairosfl.core.mass import strides
from kairosfl.core.rule import Memory, Rule, State
from kairosfl.core.run import Round
from kairosfl.core.traits import Traits
from kairosfl.rules.fedprox import FedProx


@dataclass(frozen=True, kw_only=True)
class FedNova(Rule):
    """Averages mean gradients, not updates: more local steps do not mean more influence.

    With equal steps it is FedAvg, except with FedProx.

    Args:
        momentum: The server's momentum (the paper's slow momentum), at least 0 and below 1.
        convex: Whether the weights p_i / a_i are divided by their sum, as in FedCL's released code;
            the new model then lies in the convex hull of the clients'.
    """

    momentum: float = 0.0
    convex: bool = False

    def __post_init__(self) -> None:
        self.check("momentum", 0 <= self.momentum < 1, "use at least 0 and below 1")

    def traits(self) -> Traits:
        return Traits(needs={"mass"}, sums=True, late=True, changes={"units"})

    def server(self, now: Round) -> State:
        if not self.momentum:
            return {}
        return {"velocity": torch.zeros_like(now.x)}

    def combine(self, direction: Tensor, memory: Memory, now: Round) -> Tensor:
        weights = now.weights
        reports = now.reports
        if self.convex:
            effective = 1 / (weights @ (1 / reports.mass))
        elif any(isinstance(rule, FedProx) and rule.mu for rule in now.rules):
            effective = weights @ (reports.steps * now.briefs.lr)
        else:
            effective = weights @ reports.mass
        more = (weights * (effective / reports.mass - 1)).to(reports.delta)
        return direction + more @ strides(now)

    def step(self, direction: Tensor, memory: Memory, now: Round) -> tuple[Tensor, Memory]:
        if not self.momentum:
            return direction, memory
        # In units of gradient, as in the paper, so that a falling learning rate does not act on old
        # momentum twice.
        velocity = self.momentum * memory.state["velocity"] + direction / now.lr
        return now.lr * velocity, memory.replace(state={"velocity": velocity})
