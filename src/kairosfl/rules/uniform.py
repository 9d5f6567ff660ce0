"""Uniform weights: every client of the cohort counts equally, as in FL-Simulator and in many
papers' analyses.

server  x ← x + Σ Δ_i / m    instead of    x + Σ n_i Δ_i / Σ n_i
"""

from __future__ import annotations

from dataclasses import dataclass

from kairosfl.core.rule import Rule
from kairosfl.core.traits import Traits


@dataclass(frozen=True, kw_only=True)
class Uniform(Rule):
    """Weights clients equally, not by their samples, whatever it is added to. It has no options."""

    def traits(self) -> Traits:
        return Traits(
            adapts=True,
            reads="direction",
            uniform=True,
            sums=True,
            late=True,
            changes={"counts"},
        )
