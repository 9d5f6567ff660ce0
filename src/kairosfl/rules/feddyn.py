"""FedDyn: Acar et al., "Federated Learning Based on Dynamic Regularization", ICLR 2021.

local     g = ∇f_i(w) − h_i + alpha · (w − x)
client    h_i ← h_i − alpha · (w_i − x)
server    h = Σ p_i h_i over all clients,    x ← Σ p_i w_i over the cohort − h / alpha

For uniform weights that is the paper's h ← h − alpha · (1 / N) Σ (w_i − x).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from torch import Tensor

from kairosfl.core.briefs import Briefs, Reports, strides
from kairosfl.core.round import Round
from kairosfl.core.rule import Rule, State
from kairosfl.core.table import Table
from kairosfl.rules import everyone


@dataclass(frozen=True, kw_only=True)
class FedDyn(Rule):
    """Bends every client's loss so that its own optimum moves to everyone's. A small `alpha` corrects slowly."""

    last = True  # −h / alpha moves the model; no other rule's momentum is to gather it

    alpha: float = 0.01
    weights: str = "uniform"

    def __post_init__(self) -> None:
        self.demand("alpha", self.alpha > 0, "use a number above 0; the paper uses 0.1, 0.01 and 0.001")
        self.demand("weights", self.weights in ("uniform", "samples"), "use 'uniform' or 'samples'")

    @property
    def base_weights(self) -> str | None:
        return "uniform" if self.weights == "uniform" else None

    def server(self, x: Tensor, clients: int) -> State:
        return everyone.nobody(x)

    def client(self, x: Tensor) -> State:
        return everyone.unseen(x)

    def brief(self, briefs: Briefs, state: State, rows: State, round: Round) -> Briefs:
        return replace(briefs.pushed(-rows["vector"]), pull=briefs.pull + self.alpha)

    def observe(
        self, state: State, rows: State, weights: Tensor, briefs: Briefs, reports: Reports, round: Round
    ) -> tuple[State, State]:
        h = rows["vector"] - self.alpha * strides(briefs, reports, round.x)
        return everyone.changed(state, rows, h, reports, round)

    def step(self, direction: Tensor, state: State, table: Table, round: Round) -> tuple[Tensor, State]:
        return direction - everyone.mean(state, round) / self.alpha, state
