"""VRL-SGD: Liang et al., "Variance Reduced Local SGD with Lower Communication Complexity", 2019.

    local     g = ∇f_i(w) − Δ_i
    server    Δ_i ← Δ_i + rate · (G_i − Σ p_j G_j)

with the mean local gradients G_i = (x − w_i) / mass_i. The centred form keeps Σ n_i Δ_i = 0 over
all clients, independent of who takes part. p_j are the weights before any other rule changes them:
with PA3Fed's, which change every round, that sum would drift, and the run with it. The paper's
(x̂ − w_i) / (k · lr) is the same for equal steps; with unequal steps, taken literally, it ends
where FedAvg does.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kairosfl.core.fields import Briefs
from kairosfl.core.mass import mean_gradients
from kairosfl.core.rule import Memory, Rule, State
from kairosfl.core.run import Round
from kairosfl.core.traits import Traits
from kairosfl.rules.pairs import SAID


@dataclass(frozen=True, kw_only=True)
class VRLSGD(Rule):
    """Removes from every local gradient what the client's differ by from the others'.

    Args:
        rate: How much of the correction is applied, 0 (FedAvg) to 1 (the paper); FedCL's released
            code has 0.005.
    """

    rate: float = 1.0

    def __post_init__(self) -> None:
        self.check("rate", 0 <= self.rate <= 1, "use 0 (FedAvg) to 1 (the paper)")

    def traits(self) -> Traits:
        return Traits(needs={"mass"}, late=True, changes={"drift", "histories"})

    def verdict(self, memory: Memory, now: Round) -> str | None:
        if self.rate:
            return None
        return "vrlsgd(rate=0) has no effect"

    def note_with(self, other: Rule) -> str | None:
        return SAID.get((self.name(), other.name()))

    def client(self, now: Round) -> State:
        return {"delta": torch.zeros_like(now.x)}

    def brief(self, briefs: Briefs, memory: Memory, now: Round) -> Briefs:
        return briefs.pushed(-memory.rows["delta"])

    def observe(self, memory: Memory, now: Round) -> Memory:
        # In place: a cohort of models is large.
        gradient = mean_gradients(now)
        counts = now.counts()
        gradient -= (counts / counts.sum()).to(gradient) @ gradient
        gradient.mul_(self.rate).add_(memory.rows["delta"])
        return memory.replace(rows={"delta": gradient})
