"""A detector for runs with `privacy`: clipped gradient norms with noise that is accounted for.

v_k = min(lr_k · (Σ over batches of ‖∇L‖²) / epochs_k, clip)
value = (Σ v_k + noise · clip · N(0, 1)) / m,    m the planned size
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from kairosfl.core.rule import Detector, Memory, Round, State


@dataclass(frozen=True, kw_only=True)
class NoisedFGN(Detector):
    """The federated gradient norm with noise.

    It is the only detector by which a rule may decide in a run with `privacy`.

    Args:
        delta: The relative rise from which on a period is critical.
        clip: The largest value of a client that counts.
        noise: The noise multiplier of the sum: the more, the less it takes from the updates, and
            the less is detected.
    """

    private = True

    delta: float = 0.1
    clip: float = 1.0
    noise: float = 5.0

    def __post_init__(self) -> None:
        self.check("clip", self.clip > 0, "use a number above 0")
        self.check("noise", self.noise > 0, "use a number above 0")

    @property
    def multiplier(self) -> float:
        return self.noise

    def server(self, now: Round) -> State:
        return {"before": torch.tensor(float("nan"), dtype=torch.float64)}

    def value(self, memory: Memory, now: Round) -> float:
        privacy = _private(now)
        values = (now.briefs.lr * now.reports.grad_sq / now.reports.epochs).clamp(max=self.clip)
        draw = privacy.normal("detector", now, torch.zeros(1, dtype=torch.float64))
        noise = self.noise * self.clip * draw
        return float(values.sum() / now.size + noise / privacy.expected(now.size, now))

    def decide(self, value: float, memory: Memory, now: Round) -> tuple[bool, Memory]:
        before = float(memory.state["before"])
        first = math.isnan(before)
        critical = first or (value - before >= self.delta * before and max(value, before) > 0)
        return critical, memory.replace(state={"before": torch.tensor(value, dtype=torch.float64)})


def _private(now: Round) -> Any:
    """The rule of this run that promises privacy and draws its noise."""
    private = [traits.private for traits in now.algorithm.traits]
    return now.rules[private.index(True)]
