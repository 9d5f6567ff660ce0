"""SCAFFOLD: Karimireddy et al., "SCAFFOLD: Stochastic Controlled Averaging for Federated Learning",
ICML 2020.

    local        g = ∇f_i(w) − c_i + c
    option II    c_i⁺ = c_i − c + (x − w_i) / mass_i          mass_i = K · lr for plain SGD
    server       x ← x + lr_g · Σ p_i Δ_i,    c = Σ p_i c_i over all clients

For uniform weights that is the paper's c ← c + (1 / N) Σ (c_i⁺ − c_i). With the mass instead of K ·
lr, −Δ_i / mass_i is the mean local gradient under momentum, weight decay and early stops too.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kairosfl.core.fields import Briefs
from kairosfl.core.mass import mean_gradients, strides
from kairosfl.core.rule import Memory, Rule, State
from kairosfl.core.run import Round
from kairosfl.core.traits import Traits
from kairosfl.rules import everyone
from kairosfl.rules.pairs import SAID


@dataclass(frozen=True, kw_only=True)
class SCAFFOLD(Rule):
    """Corrects every local gradient by the global minus the client's own mean gradient.

    Args:
        lr: The server's learning rate.
        weights: "uniform", as in the paper; "samples": clients are weighted by their samples;
            "models": only their models are, and c is the plain mean, as in NIID-Bench's released
            code, which converges to another point where sizes differ.
        divisor: Of the mean gradients: the "mass", or "steps": K · lr, as in the paper, which is
            right only without momentum.
        correct: What is corrected: "gradients", or "steps": adds c − c_i to every step, after the
            momentum, as NIID-Bench's released code does; needs divisor = "steps".
    """

    lr: float = 1.0
    weights: str = "uniform"
    divisor: str = "mass"
    correct: str = "gradients"

    def __post_init__(self) -> None:
        self.check("lr", self.lr > 0, "use a number above 0")
        self.check(
            "weights",
            self.weights in ("uniform", "samples", "models"),
            "use 'uniform', 'samples' or 'models'",
        )
        self.check("divisor", self.divisor in ("mass", "steps"), "use 'mass' or 'steps'")
        self.check("correct", self.correct in ("gradients", "steps"), "use 'gradients' or 'steps'")
        fits = self.correct == "gradients" or self.divisor == "steps"
        self.check(
            "correct", fits, "it needs divisor = 'steps', since the mass is that of gradients"
        )

    def traits(self) -> Traits:
        changes = {"drift", "histories"}
        if self.correct == "steps":
            changes.add("steps")
        return Traits(
            needs={"mass"},
            uniform=self.weights == "uniform",
            late=True,  # c comes back with the order
            changes=changes,
            instead={"gradients": "use correct = 'gradients'"},
        )

    def note_with(self, other: Rule) -> str | None:
        return SAID.get((self.name(), other.name()))

    def server(self, now: Round) -> State:
        return everyone.no_clients(now)

    def client(self, now: Round) -> State:
        return everyone.unseen(now)

    def brief(self, briefs: Briefs, memory: Memory, now: Round) -> tuple[Briefs, State]:
        mean = everyone.mean(memory, now)
        briefs = briefs.pushed(mean - memory.rows["vector"])
        if self.correct == "steps":
            briefs = replace(briefs, push_after=True)
        return briefs, {"mean": mean.expand(len(briefs), -1)}  # the c that the clients will use

    def observe(self, memory: Memory, now: Round) -> Memory:
        c = mean_gradients(now) if self.divisor == "mass" else _by_steps(now)
        c += memory.rows["vector"] - memory.sent["mean"]
        counts = None  # as the models do
        if self.weights == "models":
            counts = torch.ones_like(now.counts())
        return everyone.changed(memory, c, now, counts)

    def step(self, direction: Tensor, memory: Memory, now: Round) -> tuple[Tensor, Memory]:
        return self.lr * direction, memory


def _by_steps(now: Round) -> Tensor:
    """Each reporter's mean gradient as the paper has it, for SGD without momentum."""
    return strides(now) / -(now.reports.steps * now.briefs.lr).to(now.reports.delta)[:, None]
