"""Median, TrimmedMean: Yin, Chen, Ramchandran and Bartlett, "Byzantine-Robust Distributed
Learning", ICML 2018.

    median          x[k] ← x[k] + the middle of {Δ_i[k]}                         (Definition 1)
    trimmed mean    x[k] ← x[k] + the mean of {Δ_i[k]} without its extremes      (Definition 2)

for every coordinate k. Of two middle values it is their mean; the extremes are the f largest and
the f smallest, with f = ⌈share · m⌉ of m reports. Where another rule has weighed the reports, the
middle is that of the weight: at most half of it lies below and above, and f / m of it is trimmed on
either side.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from kairosfl.core.rule import Memory
from kairosfl.core.run import Round
from kairosfl.rules.robust import PART, Robust, liars, taking_part

ROUNDING = 1e-12  # of sums of weights
ByWeight = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class Median(Robust):
    """The median of every coordinate, whatever fewer than half of the clients report."""

    def combine(self, direction: Tensor, memory: Memory, now: Round) -> Tensor:
        return by_coordinate(_middle, now).to(direction)


@dataclass(frozen=True, kw_only=True)
class TrimmedMean(Robust):
    """The mean of every coordinate without its extremes.

    Args:
        share: The share of liars to withstand, at least 0 and below 0.5; the number in a round is
            rounded up.
    """

    share: float = 0.2

    def __post_init__(self) -> None:
        self.check("share", 0 <= self.share < 0.5, "use at least 0 and below 0.5")

    def combine(self, direction: Tensor, memory: Memory, now: Round) -> Tensor:
        inputs = int((now.weights > 0).sum())
        f = liars(self.share, len(now.reports), inputs)

        def trimmed(values: Tensor, upto: Tensor) -> Tensor:
            low = upto[-1] * (f / inputs)
            high = upto[-1] * (1 - f / inputs)
            below = torch.cat([torch.zeros_like(upto[:1]), upto[:-1]])
            inside = (upto.minimum(high) - below.maximum(low)).clamp(min=0)
            return (values * (inside / inside.sum(0)).to(values)).sum(0)

        return by_coordinate(trimmed, now).to(direction)


def by_coordinate(statistic: ByWeight, now: Round) -> Tensor:
    """A statistic of every coordinate, from its sorted values and the weight up to each, `[d]`."""
    updates, weights = taking_part(now)
    weights = weights.to(updates.device)
    statistics = []
    for part in updates.split(max(PART // len(updates), 1), dim=1):
        values, order = part.sort(dim=0, stable=True)  # [k, part]
        statistics.append(statistic(values, weights[order].cumsum(0)))
    return torch.cat(statistics)


def _middle(values: Tensor, upto: Tensor) -> Tensor:
    half = upto[-1] / 2
    low = (upto < half * (1 - ROUNDING)).sum(0, keepdim=True)
    high = (upto <= half * (1 + ROUNDING)).sum(0, keepdim=True)
    return (values.gather(0, low) + values.gather(0, high)).squeeze(0) / 2
