"""FedAsync: Xie, Koyejo and Gupta, "Asynchronous Federated Optimization", 2019.

local   f_i(w) + mu/2 · ‖w − start‖²
server  x ← (1 − α s(τ)) x + α s(τ) w_i        with every answer
s(τ)    constant: 1    poly: (τ + 1)^−a    hinge: 1 if τ ≤ b, else 1 / (a (τ − b) + 1)
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kairosfl.core.fields import Briefs
from kairosfl.core.rule import Memory, Plan, Rule
from kairosfl.core.run import Round
from kairosfl.core.traits import Traits
from kairosfl.rules.buffered import SYNCHRONOUS

FALLS = ("constant", "poly", "hinge")


@dataclass(frozen=True, kw_only=True)
class FedAsync(Rule):
    """Mixes every answer into the model, the less the older it is.

    Args:
        alpha: The share of a fresh answer in the new model.
        concurrency: How many clients are at work at once.
        falls: How the share falls with age: "constant", "poly" or "hinge".
        a: How fast it falls.
        b: "hinge": the age up to which it does not.
        mu: Strength of the pull back to the model that a client received.
    """

    alpha: float = 0.6
    concurrency: int = 10
    falls: str = "poly"
    a: float = 0.5
    b: float = 4.0
    mu: float = 0.005

    def __post_init__(self) -> None:
        self.check("alpha", 0 < self.alpha <= 1, "use a number above 0 and at most 1")
        self.check("concurrency", self.concurrency >= 1, "use 1 or more")
        self.check("falls", self.falls in FALLS, f"use one of {', '.join(FALLS)}")
        self.check("a", self.a >= 0, "use 0 or more")
        self.check("b", self.b >= 0, "use 0 or more")
        self.check("mu", self.mu >= 0, "use 0 or more")

    def traits(self) -> Traits:
        return Traits(
            uniform=True,
            late=True,
            clock=True,
            undeployable=SYNCHRONOUS,
            changes={"size", "waiting", "ages"},
        )

    def largest_cohort(self, cohort: int, population: int) -> int:
        return min(self.concurrency, population)

    def select(self, plan: Plan, memory: Memory, now: Round) -> Plan:
        return replace(plan, size=1, concurrency=self.concurrency, late="keep")

    def brief(self, briefs: Briefs, memory: Memory, now: Round) -> Briefs:
        return replace(briefs, pull=briefs.pull + self.mu)

    def combine(self, direction: Tensor, memory: Memory, now: Round) -> Tensor:
        mixed = now.weights * self.alpha * self._share(now.age.double())
        towards = now.trained() - now.x
        return mixed.to(towards) @ towards

    def _share(self, age: Tensor) -> Tensor:
        """What age leaves of each answer's share."""
        if self.falls == "constant":
            return torch.ones_like(age)
        if self.falls == "poly":
            return (age + 1) ** -self.a
        return 1 / (self.a * (age - self.b).clamp(min=0) + 1)
