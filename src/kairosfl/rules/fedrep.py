"""FedRep: Collins et al., "Exploiting Shared Representations for Personalized Federated Learning",
ICML 2021.

    w = (body x, the client's own head h_i)
    head    h_i ← h_i − lr ∇_h f_i(x, h_i)      for `own_epochs`, the body still
    body    x_i ← x_i − lr ∇_x f_i(x_i, h_i)    for the local epochs, the head still
    server  x ← x + Σ p_i Δ_i                   of the bodies alone
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from kairosfl.core.fields import Briefs
from kairosfl.core.rule import Memory, Rule
from kairosfl.core.run import Round
from kairosfl.core.traits import Traits


@dataclass(frozen=True, kw_only=True)
class FedRep(Rule):
    """Trains each client's own part first, then the shared one while the own part stays still.

    Args:
        own_epochs: Epochs of the own part, 1 or more; the epochs of the run are those of the shared
            part.
    """

    own_epochs: int = 1

    def __post_init__(self) -> None:
        self.check("own_epochs", self.own_epochs >= 1, "use 1 or more")

    def traits(self) -> Traits:
        return Traits(reads="direction", sums=True, late=True, keeps={"own"})

    def brief(self, briefs: Briefs, memory: Memory, now: Round) -> Briefs:
        epochs = torch.full((len(briefs),), self.own_epochs)
        return replace(briefs, own_epochs=epochs, still=now.layout.own_numbers)
