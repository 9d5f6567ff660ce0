"""Local differential privacy: every client adds Gaussian noise to its update before it is sent.

    client      Δ_i ← Δ_i · min(1, C / ‖Δ_i‖) + σ · N(0, 1) in every entry
    noise       the smallest σ for which Φ(s/2σ − εσ/s) − e^ε Φ(−s/2σ − εσ/s) ≤ δ,    s = 2C

Balle and Wang, "Improving the Gaussian Mechanism for Differential Privacy", ICML 2018, Theorem 8:
exact, not a bound. k reports of a client cost what one with σ / √k does (Dong, Roth and Su,
"Gaussian Differential Privacy", JRSS-B 2022).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from kairosfl.core.fields import Briefs, Reports
from kairosfl.core.rule import Memory, Rule, State
from kairosfl.core.run import Round
from kairosfl.core.traits import Traits
from kairosfl.rules import accounting


@dataclass(frozen=True, kw_only=True)
class LocalPrivacy(Rule):
    """Clients clip their updates and add noise before they send them.

    It holds against the server as well, for any two sets of data that a client could have.

    Args:
        epsilon: ε of one report, with `delta`.
        delta: δ of one report, a small probability.
        clip: The largest norm C of an update.
    """

    epsilon: float = 8.0
    delta: float = 1e-6
    clip: float = 1.0

    def __post_init__(self) -> None:
        self.check("epsilon", self.epsilon > 0, "use a number above 0")
        self.check("delta", 0 < self.delta < 1, "use a small probability, such as 1e-6")
        self.check(
            "clip", self.clip > 0, "use a number above 0, about the norm of a typical update"
        )

    def traits(self) -> Traits:
        return Traits(
            adapts=True,
            constraint=True,
            reads="direction",
            promises={"epsilon", "delta"},
            sums=True,
            late=True,
            changes={"noise"},
        )

    def server(self, now: Round) -> State:
        sigma = 2 * self.clip * accounting.library().get_sigma_gaussian(self.epsilon, self.delta)
        return {"noise": torch.tensor(sigma, dtype=torch.float64), "most": torch.tensor(0)}

    def client(self, now: Round) -> State:
        return {"reports": torch.tensor(0)}

    def brief(self, briefs: Briefs, memory: Memory, now: Round) -> Briefs:
        clip = torch.full((len(briefs),), self.clip, dtype=torch.float64)
        noise = memory.state["noise"].expand(len(briefs))
        return replace(briefs, update_clip=clip, update_noise=noise)

    def receive(self, reports: Reports, memory: Memory, now: Round) -> Reports:
        return replace(reports, loss=torch.full_like(reports.loss, math.nan))  # nobody told it

    def observe(self, memory: Memory, now: Round) -> Memory:
        reports = memory.rows["reports"] + 1
        most = torch.cat([memory.state["most"][None], reports]).max()
        return memory.replace(state={**memory.state, "most": most}, rows={"reports": reports})

    def record(self, memory: Memory, now: Round) -> dict[str, float]:
        spent = self.total(float(memory.state["noise"]), int(memory.state["most"]))
        return {"local_epsilon": spent}

    def verdict(self, memory: Memory, now: Round) -> str | None:
        most = int(memory.state["most"])
        spent = self.total(float(memory.state["noise"]), most)
        return (
            f"localprivacy: epsilon = {self.epsilon:g} is for one report; the client with the "
            f"most, {most}, spent {spent:.3g}"
        )

    def total(self, noise: float, reports: int) -> float:
        """The ε of all reports of a client, at the same δ."""
        if not reports:
            return 0.0
        multiplier = noise / (2 * self.clip * math.sqrt(reports))
        return float(accounting.library().get_epsilon_gaussian(multiplier, self.delta))
