"""Limits: what a single client may claim, whatever it reports.

    samples    n_i, at most `weight` / m of the sum
    update     Δ_i ← Δ_i · min(1, norm · median ‖Δ‖ / ‖Δ_i‖)
    numbers    Σ ‖∇L‖² per epoch and the Fisher trace, at most `numbers` times their medians
    weight     after all other rules: at most `weight` / m of the sum

over the m reports of the round. Where a rule uses mean gradients, Δ_i / mass_i is limited like Δ_i.
A cap T of a sum is the T with T = share · Σ min(v_i, T); values above it become T. The rule is
ours, and the template of a deployment has it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kairosfl.core.fields import Reports
from kairosfl.core.rule import Memory, Rule, about, acts
from kairosfl.core.run import Round
from kairosfl.core.traits import Traits
from kairosfl.detectors import squared_norms
from kairosfl.errors import UserError
from kairosfl.rules.robust import Guard, middle


@dataclass(frozen=True, kw_only=True)
class Limits(Guard):
    """Bounds the weight, the length and the numbers of every report by those of the cohort.

    Args:
        weight: Largest weight, in equal shares; 0: no limit.
        norm: Largest length of an update, in medians; 0: no limit.
        numbers: Largest squared gradient norm and Fisher trace, in medians; 0: no limit.
    """

    weight: float = 1.5
    norm: float = 1.5
    numbers: float = 10.0

    def __post_init__(self) -> None:
        for name in ("weight", "norm", "numbers"):
            value = getattr(self, name)
            self.check(name, value == 0 or value >= 1, "use 1 or more, or 0 for no limit")

    def traits(self) -> Traits:
        return replace(super().traits(), sums=True)

    def receive(self, reports: Reports, memory: Memory, now: Round) -> Reports:
        if not len(reports):
            return reports
        limited = self._numbers(reports)
        if self.weight:
            n = capped(reports.n.double(), self.weight / len(reports))
            limited["n"] = n.round().to(reports.n)
        if self.norm:
            limited["delta"] = self._updates(reports, now.rules)
        return replace(reports, **limited)

    def weigh(self, factors: Tensor, memory: Memory, now: Round) -> Tensor:
        for rule in reversed(now.rules):
            if isinstance(rule, Limits):
                break
            if acts(rule, "weigh"):
                raise UserError(
                    f"limits must be written after {rule.name()}, whose weights it limits; "
                    "put it last."
                )
        if not self.weight:
            return factors
        return capped(factors, self.weight / int((factors > 0).sum()))

    def _updates(self, reports: Reports, rules: Iterable[Rule]) -> Tensor:
        """The updates, none longer than `norm` medians."""
        lengths = squared_norms(reports.delta).double().sqrt().cpu()
        longest = self.norm * middle(lengths)
        if any("mass" in about(rule).needs for rule in rules):
            longest = (self.norm * middle(lengths / reports.mass) * reports.mass).minimum(longest)
        factors = torch.where(lengths > longest, longest / lengths, 1.0)
        return reports.delta * factors.to(reports.delta)[:, None]

    def _numbers(self, reports: Reports) -> dict[str, Any]:
        """The fields with numbers about clients' data, none above `numbers` medians."""
        if not self.numbers:
            return {}
        per_epoch = reports.grad_sq / reports.epochs  # as the detector reads it
        most = self.numbers * middle(per_epoch)
        grad_sq = torch.where(per_epoch > most, most * reports.epochs, reports.grad_sq)
        limited = {"grad_sq": grad_sq}
        if reports.fisher is not None:
            limited["fisher"] = reports.fisher.minimum(self.numbers * middle(reports.fisher))
        return limited


def capped(values: Tensor, share: float) -> Tensor:
    """`values` with none above this share of their sum: min(v, T) where T = share · Σ min(v, T)."""
    if not values.max() > share * values.sum():
        return values
    # Summed from below: next to one huge value the others would vanish.
    ordered = values.sort(descending=True).values
    rest = ordered.flip(0).cumsum(0).flip(0)
    for above, value in enumerate(ordered.tolist()):
        if above * share >= 1:
            break
        cap = share * rest[above] / (1 - above * share)
        if value <= cap:
            return values.minimum(cap)
    return values.clamp(max=float(ordered[-1]))
