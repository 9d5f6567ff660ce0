"""Uniform weights: every client of the cohort counts equally, as in FL-Simulator and in many
papers' analyses.

server  x ← x + Σ Δ_i / m    instead of    x + Σ n_i Δ_i / Σ n_i
"""

from __future__ import annotations

from dataclasses import dataclass

from kairosfl.core.rule import Rule


@dataclass(frozen=True, kw_only=True)
class Uniform(Rule):
    """Weights clients equally instead of by their samples, whatever it is added to. It has no
    options.
    """

    kind = "adaptive"
    reads = "direction"

    @property
    def uniform(self) -> bool:
        return True

    def conflicts_with(self, other: Rule) -> str | None:
        if other.uniform:
            return f"{other.name()} counts all clients equally already; leave uniform out"
        return None
