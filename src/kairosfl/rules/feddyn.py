"""FedDyn: Acar et al., "Federated Learning Based on Dynamic Regularization", ICLR 2021.

local     g = ∇f_i(w) − h_i + alpha · (w − x)
client    h_i ← h_i − alpha · (w_i − x)
server    h = Σ p_i h_i over all clients,    x ← Σ p_i w_i over the cohort − h / alpha

For uniform weights that is the paper's h ← h − alpha · (1 / N) Σ (w_i − x).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from kairosfl.core.fields import Briefs
from kairosfl.core.mass import strides
from kairosfl.core.rule import Memory, Rule, State
from kairosfl.core.run import Round
from kairosfl.core.traits import Traits
from kairosfl.rules import everyone


@dataclass(frozen=True, kw_only=True)
class FedDyn(Rule):
    """Modifies every client's loss so that its optimum moves to the global one.

    Args:
        alpha: Strength of the regulariser, above 0; a small one corrects slowly. The paper uses
            0.1, 0.01 and 0.001.
        weights: "uniform", as in the paper, or "samples": clients are weighted by their samples.
    """

    alpha: float = 0.01
    weights: str = "uniform"

    def __post_init__(self) -> None:
        self.check(
            "alpha", self.alpha > 0, "use a number above 0; the paper uses 0.1, 0.01 and 0.001"
        )
        self.check("weights", self.weights in ("uniform", "samples"), "use 'uniform' or 'samples'")

    def traits(self) -> Traits:
        return Traits(
            # −h / alpha moves the model; no other rule's momentum should accumulate it.
            when="late",
            uniform=self.weights == "uniform",
            late=True,
            changes={"gradients", "descent", "histories"},
        )

    def server(self, now: Round) -> State:
        return everyone.no_clients(now)

    def client(self, now: Round) -> State:
        return everyone.unseen(now)

    def brief(self, briefs: Briefs, memory: Memory, now: Round) -> Briefs:
        return replace(briefs.pushed(-memory.rows["vector"]), pull=briefs.pull + self.alpha)

    def observe(self, memory: Memory, now: Round) -> Memory:
        h = memory.rows["vector"] - self.alpha * strides(now)
        return everyone.changed(memory, h, now)

    def step(self, direction: Tensor, memory: Memory, now: Round) -> tuple[Tensor, Memory]:
        return direction - everyone.mean(memory, now) / self.alpha, memory
