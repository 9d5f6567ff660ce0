"""FedBABU: Oh et al., "FedBABU: Toward Enhanced Representation for Federated Image Classification",
ICLR 2022.

    w = (body x, head h as it is before training)
    local   x_i ← x_i − lr ∇_x f_i(x_i, h)    the head still, the same on all clients
    server  x ← x + Σ p_i Δ_i                 of the bodies alone
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from kairosfl.core.fields import Briefs
from kairosfl.core.rule import Memory, Rule
from kairosfl.core.run import Round
from kairosfl.core.traits import Traits


@dataclass(frozen=True, kw_only=True)
class FedBABU(Rule):
    """Trains the shared part alone: the own part stays as it is before training."""

    def traits(self) -> Traits:
        return Traits(reads="direction", sums=True, late=True, keeps={"own"})

    def brief(self, briefs: Briefs, memory: Memory, now: Round) -> Briefs:
        return replace(briefs, still=now.layout.own_numbers)
