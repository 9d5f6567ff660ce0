"""Bucketing: Karimireddy, He and Jaggi, "Byzantine-Robust Learning on Heterogeneous Datasets via
Bucketing", ICLR 2022. NNM: Allouah et al., "Fixing by Mixing: A Recipe for Optimal Byzantine ML
under Heterogeneity", AISTATS 2023.

    bucketing    the reports in random order in buckets of `size`; a bucket is one report, the mean
                 of its own, with their weight
    NNM          Δ_i ← the mean of the m − f reports nearest to Δ_i, itself among them

with f = ⌈share · m⌉. Honest clients with different data look like liars to a median. Both make the
updates more alike before a robust rule.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kairosfl.core.fields import Reports
from kairosfl.core.rule import Memory, Rule, acts
from kairosfl.core.run import Round
from kairosfl.core.traits import Traits
from kairosfl.rules.attack import Attack
from kairosfl.rules.localprivacy import LocalPrivacy
from kairosfl.rules.robust import Guard, distances, liars

USELESS = "the mean of bucketing's means is that of all reports"


class Mixing(Guard):
    """Updates become means of several clients' updates."""

    def traits(self) -> Traits:
        guard = super().traits()
        return replace(guard, changes=guard.changes | {"mixture"})


@dataclass(frozen=True, kw_only=True)
class Bucketing(Mixing):
    """Means of reports drawn at random take their place. Without a robust rule it is FedAvg.

    Args:
        size: Reports in a bucket.
    """

    size: int = 2

    def __post_init__(self) -> None:
        self.check("size", self.size >= 1, "use 2 or more, or 1 for no buckets")

    def conflicts_among(self, rules: Sequence[Rule]) -> str | None:
        alone = len(rules) == 1  # as a verdict says
        unknown = any("." in rule.name() for rule in rules)  # of the user's own: it may do anything
        if alone or unknown or self._serves(rules):
            return None
        return f"{USELESS}; add median, krum or another robust rule"

    def verdict(self, memory: Memory, now: Round) -> str | None:
        if not self._serves(now.rules):
            return f"{USELESS}, so this run equals one without it"
        return super().verdict(memory, now)

    def _serves(self, rules: Sequence[Rule]) -> bool:
        """Whether another rule treats the buckets otherwise than by their mean."""
        others = [rule for rule in rules if not isinstance(rule, Bucketing | Attack | LocalPrivacy)]
        return any(acts(rule, hook) for rule in others for hook in ("receive", "weigh", "combine"))

    def receive(self, reports: Reports, memory: Memory, now: Round) -> Reports:
        if not len(reports):
            return reports
        bucket = self._buckets(reports.ids, now)
        counts = now.counts()
        empty = torch.zeros(int(bucket.max()) + 1, dtype=torch.float64)
        total = empty.index_add(0, bucket, counts)

        # [buckets, m]: the share of each report in the mean of its bucket.
        shares = torch.zeros(len(total), len(counts), dtype=torch.float64)
        shares[bucket, torch.arange(len(counts))] = counts / total[bucket]
        means = shares.to(reports.delta) @ reports.delta
        return replace(reports, delta=means[bucket.to(means.device)])

    def weigh(self, factors: Tensor, memory: Memory, now: Round) -> Tensor:
        # All reports of a bucket are its mean: the one with the lowest id has their weight.
        ids = now.reports.ids
        bucket = self._buckets(ids, now)
        summed = torch.zeros_like(factors)
        for number in range(int(bucket.max()) + 1):
            members = (bucket == number).nonzero().squeeze(1)
            first = members[ids[members].argmin()]
            summed[first] = factors[members].sum()
        return summed

    def _buckets(self, ids: Tensor, now: Round) -> Tensor:
        """The bucket of each report, whatever their order: the same in `receive` and `weigh`."""
        drawn = torch.from_numpy(now.stream("bucketing").permutation(len(ids)) // self.size)
        ranks = ids.argsort().argsort()
        return drawn[ranks]


@dataclass(frozen=True, kw_only=True)
class NNM(Mixing):
    """Every update becomes the mean of its nearest neighbours.

    Args:
        share: The share of liars to withstand, at least 0 and below 0.5; the number in a round is
            rounded up.
    """

    share: float = 0.2

    def __post_init__(self) -> None:
        self.check("share", 0 <= self.share < 0.5, "use at least 0 and below 0.5")

    def receive(self, reports: Reports, memory: Memory, now: Round) -> Reports:
        m = len(reports)
        if not m:
            return reports
        kept = m - liars(self.share, m, m)
        near = distances(reports.delta).sort(dim=1, stable=True).indices[:, :kept]
        shares = torch.zeros(m, m, dtype=torch.float64).scatter(1, near, 1 / kept)
        return replace(reports, delta=shares.to(reports.delta) @ reports.delta)
