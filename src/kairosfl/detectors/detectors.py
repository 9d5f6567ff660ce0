"""Detectors of critical learning periods.

FGN: Yan et al., "Critical Learning Periods-Aware Adaptive Client Selection" (FedCL), Eq. 1 and 2;
PA3Fed (AAAI 2025), Eq. 4 to 6. FedFIM: Yan, Wang and Li, "Seizing Critical Learning Periods", AAAI
2022. `paired` and `smoothed` are ours (growth.py): the papers' detector compares different clients
with each other.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Collection
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from kairosfl.core.fields import FISHER, FISHER_SAMPLED
from kairosfl.core.rule import Detector, Memory, Round, State
from kairosfl.core.spec import Spec, parse
from kairosfl.detectors import growth
from kairosfl.errors import UserError

COMPARE = ("rounds", "visits", "levels")


def _rising(value: float, memory: Memory, delta: float) -> tuple[bool, Memory]:
    """Eq. 2: (v_t − v_{t−1}) / v_{t−1} ≥ delta. The first round is, and zero after zero is not."""
    before = float(memory.state["before"])
    first = math.isnan(before)
    critical = first or (value - before >= delta * before and max(value, before) > 0)
    return critical, memory.replace(state={"before": torch.tensor(value, dtype=torch.float64)})


def _mean(values: Tensor, n: Tensor, weighted: bool) -> float:
    """The mean over clients, by their samples or plain."""
    weights = n.double() if weighted else torch.ones(len(n), dtype=torch.float64)
    return float((weights / weights.sum()) @ values.double())


@dataclass(frozen=True, kw_only=True)
class _Growing(Detector):
    """A detector whose value is compared between rounds, as in the papers, or whose growth is."""

    delta: float = 0.01
    compare: str = "rounds"
    fall: float = 0.25
    pairs: int = 20

    def __post_init__(self) -> None:
        self.check("compare", self.compare in COMPARE, "use 'rounds', 'visits' or 'levels'")
        self.check("fall", 0 < self.fall < 1, "it is a share of the peak, above 0 and below 1")
        self.check("pairs", self.pairs >= 1, "use 1 or more; 20 is the default")

    @abstractmethod
    def of_clients(self, now: Round) -> Tensor:
        """The quantity of each reporter, `[m]`, whose growth is followed."""

    @abstractmethod
    def of_round(self, now: Round) -> float:
        """The papers' value of a round."""

    def server(self, now: Round) -> State:
        if self.compare == "rounds":
            return {"before": torch.tensor(float("nan"), dtype=torch.float64)}
        return growth.begun()

    def client(self, now: Round) -> State:
        if self.compare != "visits":
            return {}
        return growth.unseen()

    def value(self, memory: Memory, now: Round) -> float:
        """The papers' value, or the growth per round."""
        if self.compare == "rounds":
            return self.of_round(now)
        state = growth.pooled(growth.logs(self.of_clients(now)), memory, now.number)
        return growth.growth(state, now.number, self.pairs)

    def decide(self, value: float, memory: Memory, now: Round) -> tuple[bool, Memory]:
        if self.compare == "rounds":
            return _rising(value, memory, self.delta)
        levels = growth.logs(self.of_clients(now))
        state = growth.decided(value, growth.pooled(levels, memory, now.number), self.fall)
        rows = memory.rows
        if rows:  # each client is compared with its own last report
            rows = {"level": levels, "round": torch.full((len(levels),), now.number)}
        return bool(state["critical"]), memory.replace(state=state, rows=rows)


@dataclass(frozen=True, kw_only=True)
class FGN(_Growing):
    """Federated gradient norm: Σ_k p_k · lr_k · (Σ over batches of ‖∇L‖²) / epochs_k, and its rise.

    Args:
        delta: The relative rise from which on a period is critical.
        compare: "rounds" compares values of rounds, as in the papers. "visits" follows the growth
            of each client's squared gradient per batch since its last report, "levels" that of the
            cohorts' medians; both are without the learning rate, and no option but `fall` and
            `pairs` applies to them.
        fall: The share of its peak below which growth ends the period.
        pairs: Pairs of visits that are needed; with fewer, "visits" is as "levels".
        include_lr: Whether the learning rate is part of the value.
        weighted: Whether clients count by their samples.
        window: 0 compares consecutive rounds (Eq. 2); otherwise means over so many checks are
            compared, on a history that starts as zeros.
        every: Rounds between two checks of a window.
        forced: Checks of a window that count as critical at the start.
    """

    include_lr: bool = True
    weighted: bool = True
    window: int = 0
    every: int = 1
    forced: int = 0

    @classmethod
    def paired(cls) -> Self:
        """Each client against its own last report."""
        return cls(compare="visits")

    @classmethod
    def smoothed(cls) -> Self:
        """The cohorts' medians, smoothed over the rounds; nothing is kept about clients."""
        return cls(compare="levels")

    @classmethod
    def released(cls) -> Self:
        """The authors' code: plain means over a window of ten, checked every second round."""
        return cls(window=10, every=2, forced=5, weighted=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.check(
            "window", self.window >= 0, "0 compares consecutive rounds, 10 is the released window"
        )
        self.check(
            "window",
            not self.window or self.compare == "rounds",
            "it needs compare = 'rounds'; leave it out",
        )
        self.check("every", self.every >= 1, "check every round (1) or every few")
        self.check("forced", self.forced >= 0, "use 0 or more")
        self.check(
            "every",
            self.window > 0 or self.every == 1,
            "it needs a window; set one, or leave it out",
        )
        self.check(
            "forced",
            self.window > 0 or self.forced == 0,
            "it needs a window; set one, or leave it out",
        )

    def server(self, now: Round) -> State:
        if not self.window or self.compare != "rounds":
            return super().server(now)
        return {
            "history": torch.zeros(self.window + 1, dtype=torch.float64),
            "checks": torch.tensor(0),
            "critical": torch.tensor(True),
        }

    def of_clients(self, now: Round) -> Tensor:
        return now.reports.grad_sq / now.reports.steps

    def of_round(self, now: Round) -> float:
        norms = now.reports.grad_sq / now.reports.epochs
        if self.include_lr:
            norms = now.briefs.lr * norms
        return _mean(norms, now.reports.n, self.weighted)

    def decide(self, value: float, memory: Memory, now: Round) -> tuple[bool, Memory]:
        if not self.window or self.compare != "rounds":
            return super().decide(value, memory, now)
        state = memory.state
        if now.number % self.every:
            return bool(state["critical"]), memory
        history = torch.cat([state["history"][1:], torch.tensor([value], dtype=torch.float64)])
        checks = int(state["checks"]) + 1
        old = max(float(history[:-1].mean()), 1e-7)
        new = float(history[1:].mean())
        critical = (new - old) / old > self.delta or checks <= self.forced
        state = {
            "history": history,
            "checks": torch.tensor(checks),
            "critical": torch.tensor(critical),
        }
        return critical, memory.replace(state=state)


@dataclass(frozen=True, kw_only=True)
class FedFIM(_Growing):
    """Trace of the Fisher information of the model as sent out, Σ_k p_k · tr F_k, and its rise.

    Args:
        delta: The relative rise from which on a period is critical.
        compare: "rounds" compares consecutive rounds; "visits" each client's trace with that of its
            last report; "levels" the cohorts' medians, smoothed.
        fall: The share of its peak below which growth ends the period.
        pairs: Pairs of visits that are needed; with fewer, "visits" is as "levels".
        exact: Whether the trace sums over the classes; otherwise one label per sample is drawn from
            the model's own distribution.
    """

    exact: bool = True

    @classmethod
    def paired(cls) -> Self:
        """Each client against its own last report."""
        return cls(compare="visits")

    @classmethod
    def smoothed(cls) -> Self:
        """The cohorts' medians, smoothed over the rounds; nothing is kept about clients."""
        return cls(compare="levels")

    @property
    def measure(self) -> str:
        return FISHER if self.exact else FISHER_SAMPLED

    def of_clients(self, now: Round) -> Tensor:
        if now.reports.fisher is None:
            raise UserError(
                "The engine reported no Fisher trace; use an engine that measures it, or "
                "detector = 'fgn'."
            )
        return now.reports.fisher

    def of_round(self, now: Round) -> float:
        return _mean(self.of_clients(now), now.reports.n, weighted=True)


DETECTORS: dict[str, type[Spec]] = {"fgn": FGN, "fedfim": FedFIM}


def parse_detectors(text: str, allow: Collection[str] = ()) -> tuple[Detector, ...]:
    """`"fgn"`, or several to record, `"fgn.released() + fedfim"`, of which the first decides."""
    specs = parse("detector", text, DETECTORS, allow)
    return tuple(spec for spec in specs if isinstance(spec, Detector))
