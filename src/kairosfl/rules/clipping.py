"""CenteredClipping: Karimireddy, He and Jaggi, "Learning from History for Byzantine Robust
Optimization", ICML 2021. NormClipping: Sun, Kairouz, Suresh and McMahan, "Can You Really Backdoor
Federated Learning?", 2019.

    centred    v ← v + Σ p_i (Δ_i − v) · min(1, tau / ‖Δ_i − v‖)
    norm       Δ_i ← Δ_i · min(1, norm / ‖Δ_i‖)

Centred clipping begins at the last round's v and does this `iterations` times. Both act when
reports are received: of the last iteration, v + the clipped Δ_i − v takes the place of Δ_i, and the
mean of these is the new v. So whatever a rule remembers about single clients is bounded too.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kairosfl.core.fields import Reports
from kairosfl.core.rule import Memory, State
from kairosfl.core.run import Round
from kairosfl.core.traits import Reads, Traits
from kairosfl.detectors import squared_norms
from kairosfl.rules.robust import Guard, middle


@dataclass(frozen=True, kw_only=True)
class NormClipping(Guard):
    """No update is longer than a given length, or than the cohort's median.

    Args:
        norm: The largest length; 0: the median of the cohort's lengths.
    """

    norm: float = 0.0

    def traits(self) -> Traits:
        guard = super().traits()
        # A given length depends on nobody else; the median does.
        reads: Reads = "direction" if self.norm else "clients"
        return replace(guard, reads=reads, sums=True, changes=guard.changes | {"lengths"})

    def __post_init__(self) -> None:
        self.check("norm", self.norm >= 0, "use a length above 0, or 0 for the cohort's median")

    def receive(self, reports: Reports, memory: Memory, now: Round) -> Reports:
        if not len(reports):
            return reports
        return replace(reports, delta=clipped(reports.delta, self.norm))


@dataclass(frozen=True, kw_only=True)
class CenteredClipping(Guard):
    """No update is further from the last direction than a given distance, or than the median.

    The paper's 10 is a length of its gradients with momentum; updates of other models have other
    lengths.

    Args:
        tau: The largest distance; 0: the median of the cohort's distances.
        iterations: Clippings in every round, each around the mean of the last.
        weights: "uniform", as in the paper, or by "samples".
    """

    tau: float = 0.0
    iterations: int = 1
    weights: str = "uniform"

    def __post_init__(self) -> None:
        self.check("tau", self.tau >= 0, "use a distance above 0, or 0 for the cohort's median")
        self.check("iterations", self.iterations >= 1, "use 1 or more; the paper uses 1")
        self.check("weights", self.weights in ("uniform", "samples"), "use 'uniform' or 'samples'")

    def traits(self) -> Traits:
        guard = super().traits()
        uniform = self.weights == "uniform"
        return replace(guard, uniform=uniform, changes=guard.changes | {"lengths"})

    def server(self, now: Round) -> State:
        return {"center": torch.zeros_like(now.x)}

    def receive(self, reports: Reports, memory: Memory, now: Round) -> Reports:
        if not len(reports):
            return reports
        center = memory.state["center"].to(reports.delta)
        shares = now.counts().to(reports.delta)
        for _ in range(self.iterations):
            delta = center + clipped(reports.delta - center, self.tau)
            center = shares / shares.sum() @ delta
        return replace(reports, delta=delta)

    def observe(self, memory: Memory, now: Round) -> Memory:
        updates = now.reports.delta
        return memory.replace(state={"center": now.weights.to(updates) @ updates})


def clipped(vectors: Tensor, longest: float = 0.0) -> Tensor:
    """The vectors `[m, d]` scaled down to a length, or to the median of their lengths."""
    lengths = squared_norms(vectors).double().sqrt()
    if longest:
        limit = torch.tensor(longest, dtype=torch.float64)
    else:
        limit = middle(lengths)
    factors = torch.where(lengths > limit, limit.to(lengths) / lengths, 1.0)
    return vectors * factors.to(vectors)[:, None]
