"""A detector for runs with `privacy`: the federated gradient norm of clipped values, with noise
that is accounted for.

value = (Σ min(lr_k · (Σ over batches of ‖∇L‖²) / epochs_k, clip) + noise · clip · N(0, 1)) / m,    m the planned size
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from kairosfl.core.rule import Detector, Memory, Round, State


@dataclass(frozen=True, kw_only=True)
class NoisedFGN(Detector):
    """The federated gradient norm with noise, the only detector by which a rule may decide in a run
    with `privacy`.

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
        rule: Any = next(
            rule
            for rule, traits in zip(now.rules, now.algorithm.traits, strict=True)
            if traits.private
        )
        values = (now.briefs.lr * now.reports.grad_sq / now.reports.epochs).clamp(max=self.clip)
        noise = (
            self.noise
            * self.clip
            * rule.normal("detector", now, torch.zeros(1, dtype=torch.float64))
        )
        return float(values.sum() / now.size + noise / rule.expected(now.size, now))

    def decide(self, value: float, memory: Memory, now: Round) -> tuple[bool, Memory]:
        before = float(memory.state["before"])
        critical = before != before or (
            value - before >= self.delta * before and max(value, before) > 0
        )
        return critical, memory.replace(state={"before": torch.tensor(value, dtype=torch.float64)})
