"""Krum: Blanchard, El Mhamdi, Guerraoui and Stainer, "Machine Learning with Adversaries", NeurIPS
2017.

    score      s_i = Σ ‖Δ_i − Δ_j‖² over the m − f − 2 reports j nearest to i
    Krum       the report with the lowest score                                keep = 1
    multi-     the mean of the m − f reports with the lowest scores            keep = 0

with f = ⌈share · m⌉ of m reports. The others get the weight zero.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

import torch
from torch import Tensor

from kairosfl.core.rule import Memory
from kairosfl.core.run import Round
from kairosfl.core.traits import Traits
from kairosfl.rules.robust import Robust, distances, liars, nearest


@dataclass(frozen=True, kw_only=True)
class Krum(Robust):
    """Only the reports closest to their neighbours count.

    Args:
        share: The share of liars to withstand, at least 0 and below 0.5; the number in a round is
            rounded up.
        keep: Reports to average; 0: all but the presumed liars (multi-Krum).
    """

    share: float = 0.2
    keep: int = 1

    @classmethod
    def multi(cls) -> Self:
        """Multi-Krum, which averages all but the presumed liars."""
        return cls(keep=0)

    def __post_init__(self) -> None:
        self.check("share", 0 <= self.share < 0.5, "use at least 0 and below 0.5")
        self.check("keep", self.keep >= 0, "use 1 for Krum, more, or 0 for multi-Krum")

    def traits(self) -> Traits:
        robust = super().traits()
        if self.keep != 1:
            return robust
        more = "use keep = 0, or 2 and more"
        instead = {"units": more, "weights": more}
        return replace(robust, changes=robust.changes | {"one report"}, instead=instead)

    def weigh(self, factors: Tensor, memory: Memory, now: Round) -> Tensor:
        taking = (factors > 0).nonzero().squeeze(1)
        k = len(taking)
        if k < 3:  # two reports cannot say which of them lies
            return factors
        f = liars(self.share, len(now.reports), k)
        updates = now.reports.delta
        if k < len(factors):
            updates = updates[taking.to(updates.device)]

        # The nearest report to each is itself, at distance zero.
        squares = distances(updates).square()
        neighbours = max(k - f - 2, 1)
        scores = squares.sort(dim=1).values[:, 1 : 1 + neighbours].sum(1)

        keep = self.keep or k - f
        kept = nearest(scores, now.reports.ids[taking])[:keep]
        mask = torch.zeros_like(factors)
        mask[taking[kept]] = 1
        return factors * mask
