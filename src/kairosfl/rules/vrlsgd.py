"""VRL-SGD: Liang et al., "Variance Reduced Local SGD with Lower Communication Complexity", 2019.

    local     g = ∇f_i(w) − Δ_i
    server    Δ_i ← Δ_i + rate · (G_i − Σ p_j G_j),    G_i = (x − w_i) / mass_i the mean local gradient

The centred form keeps Σ n_i Δ_i = 0 over all clients, whoever takes part. p_j are the shares before any other rule
weighs them: with PA3Fed's, which change from round to round, that sum would wander off and the run with it. The paper's
(x̂ − w_i) / (k · lr) is the same for equal steps; with unequal steps, taken literally, it ends where FedAvg does.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kairosfl.core.briefs import Briefs, Reports, mean_gradients
from kairosfl.core.round import Round
from kairosfl.core.rule import Algorithm, Rule, State


@dataclass(frozen=True, kw_only=True)
class VRLSGD(Rule):
    """Removes from every local gradient the part in which the client differs from the others.

    `rate = 0.005` is what the released FedCL code uses; it brings VRL-SGD close to FedAvg.
    """

    rate: float = 1.0

    def __post_init__(self) -> None:
        self.demand("rate", 0 <= self.rate <= 1, "use 0 (FedAvg) to 1 (the paper)")

    def client(self, x: Tensor) -> State:
        return {"delta": torch.zeros_like(x)}

    def brief(self, briefs: Briefs, state: State, rows: State, round: Round) -> Briefs:
        return briefs.pushed(-rows["delta"])

    def observe(
        self, state: State, rows: State, weights: Tensor, briefs: Briefs, reports: Reports, round: Round
    ) -> tuple[State, State]:
        gradient = mean_gradients(briefs, reports, round.x)
        counts = Algorithm(round.rules).counts(reports)
        gradient -= (counts / counts.sum()).to(gradient) @ gradient
        return state, {"delta": gradient.mul_(self.rate).add_(rows["delta"])}  # in place: a cohort of models is large
