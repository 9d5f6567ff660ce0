"""SCAFFOLD: Karimireddy et al., "SCAFFOLD: Stochastic Controlled Averaging for Federated Learning", ICML 2020.

    local        g = ∇f_i(w) − c_i + c
    option II    c_i⁺ = c_i − c + (x − w_i) / mass_i          mass_i = K · lr for plain SGD
    server       x ← x + lr_g · Σ p_i Δ_i,    c = Σ p_i c_i over all clients

For uniform weights that is the paper's c ← c + (1 / N) Σ (c_i⁺ − c_i). With the mass instead of K · lr,
−Δ_i / mass_i is the mean local gradient under momentum, weight decay and early stops too.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kairosfl.core.briefs import Briefs, Reports, mean_gradients
from kairosfl.core.round import Round
from kairosfl.core.rule import Rule, State
from kairosfl.core.table import Table
from kairosfl.rules import everyone
from kairosfl.rules.vrlsgd import VRLSGD


@dataclass(frozen=True, kw_only=True)
class SCAFFOLD(Rule):
    """Corrects every local gradient by how far the client's gradient is from everyone's. `lr` is the server's."""

    lr: float = 1.0
    weights: str = "uniform"

    def __post_init__(self) -> None:
        self.demand("lr", self.lr > 0, "use a number above 0")
        self.demand("weights", self.weights in ("uniform", "samples"), "use 'uniform' or 'samples'")

    @property
    def base_weights(self) -> str | None:
        return "uniform" if self.weights == "uniform" else None

    def beside(self, other: Rule) -> str | None:
        if isinstance(other, VRLSGD):
            return "both correct the same drift, and together they correct it twice"
        return None

    def server(self, x: Tensor, clients: int) -> State:
        return everyone.nobody(x)

    def client(self, x: Tensor) -> State:
        return everyone.unseen(x)

    def brief(self, briefs: Briefs, state: State, rows: State, round: Round) -> Briefs:
        return briefs.pushed(everyone.mean(state, round) - rows["vector"])

    def observe(
        self, state: State, rows: State, weights: Tensor, briefs: Briefs, reports: Reports, round: Round
    ) -> tuple[State, State]:
        c = mean_gradients(briefs, reports, round.x)
        c += rows["vector"] - everyone.mean(state, round)
        return everyone.changed(state, rows, c, reports, round)

    def step(self, direction: Tensor, state: State, table: Table, round: Round) -> tuple[Tensor, State]:
        return self.lr * direction, state
