"""What the robust rules share: how many liars they expect, and whose reports take part."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from kairosfl.core.rule import Memory, Rule, about, acts
from kairosfl.core.run import Round
from kairosfl.core.traits import Traits

PART = 1 << 22  # numbers that are sorted at a time


class Guard(Rule):
    """A rule that limits what a lying client can do.

    It changes no objective, so FedAWARE treats it as adaptive.
    """

    def traits(self) -> Traits:
        return Traits(adapts=True, constraint=True, late=True, changes={"outliers"})

    def verdict(self, memory: Memory, now: Round) -> str | None:
        first = next(rule for rule in now.rules if isinstance(rule, Guard))
        exposed = [rule.name() for rule in now.rules if _learns_from_each(rule)]
        if not exposed or first is not self:
            return None
        return (
            f"{exposed[0]} learns from what every single client reported in all rounds, which no "
            "rule bounds: one lying client can ruin the run; without it, the direction is protected"
        )


def _learns_from_each(rule: Rule) -> bool:
    """Whether a rule tells clients what it made of their own updates."""
    return "histories" in about(rule).changes and acts(rule, "brief")


class Robust(Guard):
    """A rule that replaces the mean of the cohort.

    Clients count equally, since what they claim may be a lie. It protects the direction alone.
    Reports of weight zero take no part, so that buckets count once.
    """

    def traits(self) -> Traits:
        guard = super().traits()
        return replace(guard, uniform=True, changes=guard.changes | {"mean"})


def liars(share: float, reports: int, inputs: int) -> int:
    """How many of `inputs` vectors may be lies when a share of the reports is: below half."""
    minority = (inputs - 1) // 2
    return max(min(math.ceil(share * reports - 1e-9), minority), 0)


def taking_part(now: Round) -> tuple[Tensor, Tensor]:
    """The updates of weight above zero, `[k, d]`, and their weights, the largest of which is 1."""
    kept = now.weights > 0
    weights = now.weights[kept] / now.weights.max()
    updates = now.reports.delta
    if not bool(kept.all()):  # else they are not copied
        updates = updates[kept.to(updates.device)]
    return updates, weights


def distances(vectors: Tensor) -> Tensor:
    """‖v_i − v_j‖ in float64 on the CPU, `[k, k]`."""
    # By differences, since the form with products cancels.
    return torch.cdist(vectors, vectors, compute_mode="donot_use_mm_for_euclid_dist").double().cpu()


def nearest(values: Tensor, ids: Tensor) -> Tensor:
    """Rows in ascending order of their values; of equal ones, the lower client id first."""
    order = ids.argsort()
    return order[values[order].argsort(stable=True)]


def middle(values: Tensor) -> Tensor:
    """The median; of two middle values their mean."""
    return torch.quantile(values, 0.5)
