"""Attack: a share of the clients lies about its updates, in simulations only.

    lie       what is reported                        strength by default
    sign      −strength · Δ_i                         1
    scaled    strength · Δ_i                          10
    random    strength · N(0, 1) in every coordinate  1
    little    μ + strength · σ                        z_max
    inner     −strength · μ                           0.5
    swapped   Δ_j of another liar j of the round      –

μ and σ are the mean and the deviation of the honest updates of the round, coordinate by coordinate:
these liars see what the honest clients send. Of m reports with f liars z_max = Φ⁻¹((m − f − s) / (m
− f)), s = ⌊m / 2 + 1⌋ − f. A deployed server refuses the rule.

sign: Li et al., "RSA", AAAI 2019. scaled: Bagdasaryan et al., "How to Backdoor FL", AISTATS 2020.
random: Blanchard et al., NeurIPS 2017. little: Baruch et al., "A Little Is Enough", NeurIPS 2019.
inner: Xie et al., "Fall of Empires", UAI 2019. swapped: the server of FedAWARE's released code, by
mistake.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from statistics import NormalDist

import numpy as np
import torch
from torch import Tensor

from kairosfl.core.fields import Reports
from kairosfl.core.rule import Memory, Rule, acts
from kairosfl.core.run import Round
from kairosfl.core.streams import stream
from kairosfl.core.traits import Traits
from kairosfl.errors import UserError

STRENGTH = {"sign": 1.0, "scaled": 10.0, "random": 1.0, "little": 0.0, "inner": 0.5, "swapped": 0.0}


@dataclass(frozen=True, kw_only=True)
class Attack(Rule):
    """The same clients lie in every round, drawn by the seed of the run.

    It must be written before every other rule that acts on reports.

    Args:
        lie: What they report: "sign", "scaled", "random", "little", "inner" or "swapped".
        share: Share of the population that lies, at least 0 and below 1; with "swapped" also 1.
        strength: Of the lie; 0: its default. "swapped" has none.
    """

    lie: str = "sign"
    share: float = 0.2
    strength: float = 0.0

    def __post_init__(self) -> None:
        self.check("lie", self.lie in STRENGTH, f"use one of {', '.join(map(repr, STRENGTH))}")
        swapped = self.lie == "swapped"
        within = 0 <= self.share < 1 or (swapped and self.share == 1)
        self.check("share", within, "use at least 0 and below 1; only with lie='swapped' also 1")
        self.check(
            "strength", self.strength >= 0, "use a number above 0, or 0 for the default of the lie"
        )
        self.check(
            "strength",
            not (swapped and self.strength),
            "leave it out: swapped updates stay as they are",
        )

    def traits(self) -> Traits:
        return Traits(
            adapts=True,
            constraint=True,  # trials without the liars would look better
            undeployable="attack is for simulations only; leave it out",
            late=True,
        )

    def receive(self, reports: Reports, memory: Memory, now: Round) -> Reports:
        first = next(rule for rule in now.rules if acts(rule, "receive"))
        if not isinstance(first, Attack):
            raise UserError(
                f"attack must be written before {first.name()}, which acts on reports too; "
                "put it first."
            )
        liar_ids = liars(now.seed, now.population, self.share)
        lying = torch.from_numpy(np.isin(reports.ids.numpy(), liar_ids))
        if not lying.any():
            return reports

        delta = reports.delta.clone()
        liar_rows = lying.to(delta.device)
        own = reports.delta[liar_rows]
        honest = reports.delta[~liar_rows]
        if not len(honest):  # the liars see one another
            honest = own
        delta[liar_rows] = self._lies(own, honest, now, reports.ids[lying])
        return replace(reports, delta=delta)

    def _lies(self, own: Tensor, honest: Tensor, now: Round, ids: Tensor) -> Tensor:
        """What the liars report, `[f, d]`, in the place of their own updates, `[f, d]`."""
        if self.lie == "swapped":
            order = torch.from_numpy(now.stream("swap").permutation(len(own)))
            return own[order.to(own.device)]
        strength = self._strength(len(own) + len(honest), len(own))
        if self.lie == "sign":
            return -strength * own
        if self.lie == "scaled":
            return strength * own
        if self.lie == "random":
            draws = []
            for client in ids:
                rng = now.stream("attack", int(client))
                draws.append(rng.standard_normal(own.shape[1]))
            return strength * torch.from_numpy(np.stack(draws)).to(own)
        if self.lie == "inner":
            return (-strength * honest.mean(0)).expand_as(own)
        spread = torch.zeros_like(honest[0])
        if len(honest) > 1:
            spread = honest.std(0)
        return (honest.mean(0) + strength * spread).expand_as(own)

    def _strength(self, reports: int, lying: int) -> float:
        """The strength of the lie; that of "little" depends on how many lie."""
        if self.strength:
            return self.strength
        if self.lie == "little":
            return quantile(reports, lying)
        return STRENGTH[self.lie]


def quantile(reports: int, lying: int) -> float:
    """z_max: so few deviations from the mean that a majority still looks more extreme."""
    needed = reports // 2 + 1 - lying
    within = (reports - lying - needed) / max(reports - lying, 1)
    return NormalDist().inv_cdf(min(max(within, 0.5), 0.999))


def liars(seed: int, population: int, share: float) -> np.ndarray:
    """The ids of the clients that lie in a run with this seed."""
    return np.sort(stream(seed, "attack").permutation(population)[: round(share * population)])
