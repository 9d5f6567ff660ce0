"""APFL: Deng et al., "Adaptive Personalized Federated Learning", preprint 2020.

mixture  u_i = a_i v_i + (1 − a_i) w_i
client   v_i ← v_i − lr · a_i ∇f_i(u_i)
         a_i ← a_i − lr · ⟨∇f_i(u_i), v_i − w_i⟩    kept within 0 and 1
         w_i as FedAvg's, on the same batches
server   x as FedAvg's
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kairosfl.core.fields import Briefs
from kairosfl.core.rule import Memory, Rule
from kairosfl.core.run import Round
from kairosfl.core.traits import Traits


@dataclass(frozen=True, kw_only=True)
class APFL(Rule):
    """Every client mixes a model of its own with the shared one, and learns in which shares.

    Args:
        lr: Learning rate of the client's own model and of its share; 0: that of the clients.
    """

    lr: float = 0.0

    def __post_init__(self) -> None:
        self.check("lr", self.lr >= 0, "use a number above 0, or 0 for the clients' learning rate")

    def traits(self) -> Traits:
        return Traits(reads="direction", sums=True, late=True, keeps={"second", "mix"})

    def brief(self, briefs: Briefs, memory: Memory, now: Round) -> Briefs:
        rate = torch.full_like(briefs.lr, self.lr) if self.lr else briefs.lr
        return replace(briefs, second_lr=rate, second_when="batch", mixed=True)

    def personal(self, x: Tensor, ids: Tensor, memory: Memory, now: Round) -> Tensor:
        share = memory.kept["mix"].to(x)[:, None]
        return share * memory.kept["second"].to(x) + (1 - share) * x
