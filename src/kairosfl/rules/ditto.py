"""Ditto: Li et al., "Ditto: Fair and Robust Federated Learning Through Personalization", ICML 2021.

server  x as FedAvg's
client  v_i ← v_i − lr (∇f_i(v_i) + lam · (v_i − x))    on the same batches, x as it was sent
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kairosfl.core.fields import Briefs
from kairosfl.core.rule import Memory, Rule
from kairosfl.core.run import Round
from kairosfl.core.traits import Traits

WHEN = ("batch", "before", "after")


@dataclass(frozen=True, kw_only=True)
class Ditto(Rule):
    """Every client trains a model of its own beside the shared one, and is pulled towards it.

    Args:
        lam: Strength of the pull towards the model that the client was sent, 0 or more; 0 is local
            training alone.
        lr: Learning rate of the client's own model; 0: that of the clients.
        when: "batch": its steps alternate with those of the shared model, on the same batches;
            "before" or "after": all of them come before or after, on batches of their own.
    """

    lam: float = 1.0
    lr: float = 0.0
    when: str = "batch"

    def __post_init__(self) -> None:
        self.check("lam", self.lam >= 0, "use 0 or more")
        self.check("lr", self.lr >= 0, "use a number above 0, or 0 for the clients' learning rate")
        self.check("when", self.when in WHEN, "use 'batch', 'before' or 'after'")

    def traits(self) -> Traits:
        return Traits(reads="direction", sums=True, late=True, keeps={"second"})

    def brief(self, briefs: Briefs, memory: Memory, now: Round) -> Briefs:
        rate = torch.full_like(briefs.lr, self.lr) if self.lr else briefs.lr
        return replace(
            briefs,
            second_lr=rate,
            second_pull=torch.full_like(briefs.lr, self.lam),
            second_centre="start",
            second_when=self.when,
        )

    def personal(self, x: Tensor, ids: Tensor, memory: Memory, now: Round) -> Tensor:
        return memory.kept["second"].to(x)
