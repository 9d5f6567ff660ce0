"""What the robust rules share: how many liars they expect, whose reports take part, and what they
refuse.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from kairosfl.core.rule import Memory, Rule, acts
from kairosfl.core.run import Round
from kairosfl.rules.fedaware import FedAWARE
from kairosfl.rules.feddyn import FedDyn
from kairosfl.rules.fedmut import FedMut
from kairosfl.rules.scaffold import SCAFFOLD
from kairosfl.rules.vrlsgd import VRLSGD

PART = 1 << 22  # numbers that are sorted at a time


class Guard(Rule):
    """A rule that limits what a lying client can do. It changes no objective, so FedAWARE treats it
    as adaptive.
    """

    kind = "adaptive"
    constraint = True

    def conflicts_with(self, other: Rule) -> str | None:
        if isinstance(other, FedMut):
            return (
                "FedMut's clients start on opposite sides of the model, which looks like an attack, and only the plain "
                "mean of all of them leads back to it"
            )
        if other.private and self.reads == "clients":
            return (
                f"{self.name()} treats a report by what others sent, so one client could change them all, which noise "
                f"for one update does not hide; leave {self.name()} out, since {other.name()} clips every update by "
                "itself and counts all clients equally"
            )
        return None

    def verdict(self, memory: Memory, now: Round) -> str | None:
        first = next(rule for rule in now.rules if isinstance(rule, Guard))
        exposed = [
            rule.name() for rule in now.rules if isinstance(rule, SCAFFOLD | VRLSGD | FedDyn)
        ]
        if not exposed or first is not self:
            return None
        return (
            f"{exposed[0]} learns from what every single client reported in all rounds, which no rule bounds: one "
            "lying client can ruin the run; without it, the direction is protected"
        )


class Robust(Guard):
    """A rule that replaces the mean of the cohort. Clients count equally, since what they claim may
    be a lie.

    It protects the direction alone. Reports of weight zero take no part, so that buckets count
    once.
    """

    @property
    def uniform(self) -> bool:
        return True

    def conflicts_with(self, other: Rule) -> str | None:
        if reason := super().conflicts_with(other):
            return reason
        if isinstance(other, Robust):
            return "both replace the mean of the cohort's updates; leave one of them out"
        if isinstance(other, FedAWARE):
            return (
                "FedAWARE steps along the updates that it remembers of every client, so a robust mean of this round's "
                "has no effect; use centeredclipping or normclipping"
            )
        if acts(self, "combine") and acts(other, "combine"):
            return f"{other.name()} corrects the weighted mean, which {self.name()} replaces"
        return None


def liars(share: float, reports: int, inputs: int) -> int:
    """How many of `inputs` vectors may be lies when a share of the reports is: always fewer than
    half.
    """
    return max(min(math.ceil(share * reports - 1e-9), (inputs - 1) // 2), 0)


def taking_part(now: Round) -> tuple[Tensor, Tensor]:
    """The updates with a weight above zero, `[k, d]`, and their weights, the largest of which is 1."""
    kept = now.weights > 0
    weights = now.weights[kept] / now.weights.max()
    updates = now.reports.delta
    return updates if bool(kept.all()) else updates[kept.to(updates.device)], weights


def distances(vectors: Tensor) -> Tensor:
    """‖v_i − v_j‖ in float64 on the CPU, `[k, k]`; by differences, since the form with products
    cancels.
    """
    return torch.cdist(vectors, vectors, compute_mode="donot_use_mm_for_euclid_dist").double().cpu()


def nearest(values: Tensor, ids: Tensor) -> Tensor:
    """Rows in ascending order of their values; of equal ones, the lower client id first."""
    order = ids.argsort()
    return order[values[order].argsort(stable=True)]


def middle(values: Tensor) -> Tensor:
    """The median; of two middle values their mean."""
    return torch.quantile(values, 0.5)
