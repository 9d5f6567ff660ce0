"""Detectors of critical learning periods.

FGN: Yan et al., "Critical Learning Periods-Aware Adaptive Client Selection" (FedCL), Eq. 1 and 2;
PA3Fed (AAAI 2025), Eq. 4 to 6. FedFIM: Yan, Wang and Li, "Seizing Critical Learning Periods", AAAI 2022.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import torch
from torch import Tensor

from kairosfl.core.fields import FISHER, FISHER_SAMPLED
from kairosfl.core.rule import Memory, State
from kairosfl.core.spec import Spec, parse
from kairosfl.errors import UserError

if TYPE_CHECKING:
    from kairosfl.core.run import Round


class Detector(Spec, ABC):
    """A value for each round, and whether that round lies in a critical period."""

    @property
    def measure(self) -> str | None:
        """What the clients must measure for it, if anything beyond what they always report."""
        return None

    @abstractmethod
    def server(self, now: Round) -> State:
        """Its state before the first round."""

    def client(self, now: Round) -> State:
        """What it remembers about a client, before it has seen the client."""
        return {}

    @abstractmethod
    def value(self, memory: Memory, now: Round) -> float:
        """This round's value, from what the clients reported."""

    @abstractmethod
    def decide(self, value: float, memory: Memory, now: Round) -> tuple[bool, Memory]:
        """Whether the period is critical, and what to remember; rows that are replaced are stored."""


def _rising(value: float, memory: Memory, delta: float) -> tuple[bool, Memory]:
    """Eq. 2: (v_t − v_{t−1}) / v_{t−1} ≥ delta; the first round is critical, and zero after zero is not."""
    before = float(memory.state["before"])
    critical = before != before or (value - before >= delta * before and max(value, before) > 0)
    return critical, memory.replace(state={"before": torch.tensor(value, dtype=torch.float64)})


def _mean(values: Tensor, n: Tensor, weighted: bool) -> float:
    weights = n.double() if weighted else torch.ones(len(n), dtype=torch.float64)
    return float((weights / weights.sum()) @ values.double())


@dataclass(frozen=True, kw_only=True)
class FGN(Detector):
    """Federated gradient norm: Σ_k p_k · lr_k · (Σ over batches of ‖∇L‖²) / epochs_k, and its rise.

    Args:
        delta: The relative rise from which on a period is critical.
        include_lr: Whether the learning rate is part of the value.
        weighted: Whether clients count by their samples.
        window: 0 compares consecutive rounds (Eq. 2); otherwise means over so many checks are compared, on a history
            that starts as zeros.
        every: Rounds between two checks of a window.
        forced: Checks of a window that count as critical at the start.
    """

    delta: float = 0.01
    include_lr: bool = True
    weighted: bool = True
    window: int = 0
    every: int = 1
    forced: int = 0

    @classmethod
    def released(cls) -> Self:
        """The authors' code: window 10, checked every second round, the first five checks critical, plain mean."""
        return cls(window=10, every=2, forced=5, weighted=False)

    def __post_init__(self) -> None:
        self.check("window", self.window >= 0, "0 compares consecutive rounds, 10 is the released window")
        self.check("every", self.every >= 1, "check every round (1) or every few")

    def server(self, now: Round) -> State:
        if not self.window:
            return {"before": torch.tensor(float("nan"), dtype=torch.float64)}
        return {
            "history": torch.zeros(self.window + 1, dtype=torch.float64),
            "checks": torch.tensor(0),
            "critical": torch.tensor(True),
        }

    def value(self, memory: Memory, now: Round) -> float:
        norms = now.reports.grad_sq / now.reports.epochs
        return _mean(now.briefs.lr * norms if self.include_lr else norms, now.reports.n, self.weighted)

    def decide(self, value: float, memory: Memory, now: Round) -> tuple[bool, Memory]:
        if not self.window:
            return _rising(value, memory, self.delta)
        state = memory.state
        if now.number % self.every:
            return bool(state["critical"]), memory
        history = torch.cat([state["history"][1:], torch.tensor([value], dtype=torch.float64)])
        checks = int(state["checks"]) + 1
        old, new = max(float(history[:-1].mean()), 1e-7), float(history[1:].mean())
        critical = (new - old) / old > self.delta or checks <= self.forced
        state = {"history": history, "checks": torch.tensor(checks), "critical": torch.tensor(critical)}
        return critical, memory.replace(state=state)


@dataclass(frozen=True, kw_only=True)
class FedFIM(Detector):
    """Trace of the Fisher information of the model as sent out, Σ_k p_k · tr F_k, and its rise.

    Args:
        delta: The relative rise from which on a period is critical.
        exact: Whether the trace sums over the classes; otherwise one label per sample is drawn from the model's own
            distribution.
    """

    delta: float = 0.01
    exact: bool = True

    @property
    def measure(self) -> str:
        return FISHER if self.exact else FISHER_SAMPLED

    def server(self, now: Round) -> State:
        return {"before": torch.tensor(float("nan"), dtype=torch.float64)}

    def value(self, memory: Memory, now: Round) -> float:
        if now.reports.fisher is None:
            raise UserError("The engine reported no Fisher trace; use an engine that measures it, or detector = 'fgn'.")
        return _mean(now.reports.fisher, now.reports.n, weighted=True)

    def decide(self, value: float, memory: Memory, now: Round) -> tuple[bool, Memory]:
        return _rising(value, memory, self.delta)


DETECTORS: dict[str, type[Spec]] = {"fgn": FGN, "fedfim": FedFIM}


def parse_detectors(text: str, allow: Collection[str] = ()) -> tuple[Detector, ...]:
    """`"fgn"`, `"fgn.released()"`, or several to record together, `"fgn + fedfim"`; the first one decides."""
    return tuple(spec for spec in parse("detector", text, DETECTORS, allow) if isinstance(spec, Detector))
