"""FedMut: Hu et al., "FedMut: Generalized Federated Learning via Stochastic Mutation", AAAI 2024.

    Δ = x^t − x^{t−1},    start_j[k] = x^t[k] + alpha · s_{j,k} · Δ[k]

for every tensor k of the model. Half of the cohort has s = +1, half s = −(1 − ρ), drawn anew for
every tensor; in an odd cohort one has 0. ρ = rate · (1 − min((t − 1) / bound, 1)): early mutants
lean forward on average, later ones centre on x.

    x^{t+1} = Σ p_j w_j + (1 − M) · (mean of start_j − Σ p_j start_j)

For uniform p that is the mean of the trained mutants. Mutations come from the server and should
cancel whatever the clients' weights: otherwise the next step would be alpha times the remainder,
and so on. M, from 0 to 1, is the fraction of its mutation that a client's training undid, by least
squares over the cohort, for every tensor.
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
class FedMut(Rule):
    """Starts clients around the model, which leads to flatter minima. `alpha = 0` is FedAvg.

    Args:
        alpha: Radius of the mutation, 0 or more.
        rate: How far early mutants lean forward, 0 to 1.
        bound: Number of mutated rounds after which they no longer lean.
        weights: "uniform", as in the paper, or "samples": clients are weighted by their samples.
    """

    alpha: float = 4.0
    rate: float = 0.3
    bound: int = 50
    weights: str = "uniform"

    def __post_init__(self) -> None:
        self.check("alpha", self.alpha >= 0, "use 0 or more")
        self.check("rate", 0 <= self.rate <= 1, "use 0 to 1")
        self.check("bound", self.bound >= 1, "use 1 or more rounds")
        self.check("weights", self.weights in ("uniform", "samples"), "use 'uniform' or 'samples'")

    def traits(self) -> Traits:
        return Traits(
            # The forward lean of early mutants is not a direction for another rule's momentum.
            when="late",
            uniform=self.weights == "uniform",
            changes={"starts"},
        )

    def verdict(self, memory: Memory, now: Round) -> str | None:
        if self.alpha:
            return None
        return "fedmut(alpha=0) mutates nothing"

    def server(self, now: Round) -> State:
        return {"previous": now.x.clone()}

    def brief(self, briefs: Briefs, memory: Memory, now: Round) -> Briefs:
        if now.number == 0 or not self.alpha:
            return briefs
        signs = self._signs(len(briefs), now)
        rng = now.stream("fedmut")
        delta = self.alpha * (now.x - memory.state["previous"])
        offset = torch.empty(len(briefs), len(now.x), dtype=now.x.dtype, device=now.x.device)
        for entry in now.layout.entries:
            part = slice(entry.offset, entry.offset + entry.size)
            drawn = torch.from_numpy(rng.permutation(signs)).to(offset)
            offset[:, part] = drawn[:, None] * delta[part]
        return replace(briefs, offset=offset)

    def combine(self, direction: Tensor, memory: Memory, now: Round) -> Tensor:
        if now.number == 0 or not self.alpha:
            return direction
        lean = self._lean(memory, now)
        away = now.briefs.start - now.version
        own = strides(now)
        missing = lean - now.weights.to(away) @ away
        for entry in now.layout.entries:
            part = slice(entry.offset, entry.offset + entry.size)
            missing[part] *= 1 - undone(away[:, part], own[:, part])
        return direction + (missing - lean).to(direction)

    def observe(self, memory: Memory, now: Round) -> Memory:
        state = {"previous": now.x}
        if self.alpha:
            state["lean"] = self._lean(memory, now)  # until the step
        return memory.replace(state=state)

    def step(self, direction: Tensor, memory: Memory, now: Round) -> tuple[Tensor, Memory]:
        lean = memory.state.get("lean")
        if lean is None:
            return direction, memory
        memory = memory.replace(state={"previous": memory.state["previous"]})
        return direction + lean.to(direction), memory

    def _lean(self, memory: Memory, now: Round) -> Tensor:
        """How far the reporters' mutants are from x on average."""
        signs = self._signs(len(now.reports), now)
        return self.alpha * sum(signs) / len(signs) * (now.x - memory.state["previous"])

    def _signs(self, clients: int, now: Round) -> list[float]:
        half, odd = divmod(clients, 2)
        rho = self.rate * (1 - min((now.number - 1) / self.bound, 1))
        return [1.0] * half + [-(1 - rho)] * half + [0.0] * odd


def undone(away: Tensor, own: Tensor) -> float:
    """The fraction of mutations, `[m, k]`, that training undid: 0 to 1, by least squares."""
    apart = away - away.mean(0)
    if apart.square().sum() <= 1e-12 * away.square().sum():  # all on one side
        apart = away
    square = float(apart.square().sum())
    if not square > 0:
        return 0.0
    fraction = -float((apart * own).sum()) / square
    return min(max(fraction, 0.0), 1.0)
