"""Briefs and Reports: what a cohort is told and what it answers, numbers only.

A brief is local training as data. Every step of a client is

    g = scale · ∇L(w; batch) + pull · (w − start) + push,    then weight decay, momentum, step,

and the correction alone tells FedAvg, FedProx, SCAFFOLD, VRL-SGD, FedDyn and FedCM apart.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor

SCORE_BEFORE, SCORE_AFTER, FISHER, FISHER_SAMPLED = "score_before", "score_after", "fisher", "fisher_sampled"


class Cohort:
    """Records of `[m, ...]` tensors, one row a client; the `vectors` may be `[d]`, the same for all."""

    vectors: ClassVar[frozenset[str]] = frozenset()

    def take(self, rows: Tensor) -> Self:
        """The same record for some of the clients, by their row numbers."""
        changes: dict[str, Any] = {}
        for name in (entry.name for entry in fields(self)):  # type: ignore[arg-type]
            value = getattr(self, name)
            if isinstance(value, Cohort):
                changes[name] = value.take(rows)
            elif isinstance(value, Tensor) and len(value) and not (name in self.vectors and value.ndim == 1):
                changes[name] = value[rows.to(value.device)]
        return replace(self, **changes)  # type: ignore[type-var]


@dataclass(frozen=True)
class Plan:
    """Who may train and how many of them. `ids` set: exactly these."""

    size: int
    eligible: np.ndarray | None = None  # client ids; None: everyone
    ids: np.ndarray | None = None


@dataclass(frozen=True)
class Stop(Cohort):
    """Stop when the features have turned away from a reference model's: cosine below the threshold (ALT)."""

    threshold: Tensor  # [m]
    statistic: str = "mean"  # of the cosines in a batch: "mean" or "min"
    per: str = "epoch"  # finish the "epoch", or stop at once after the "batch"
    reference: Tensor | None = None  # [m, d]; None: the start


@dataclass(frozen=True)
class Contrast(Cohort):
    """MOON's term: mu · CE([cos(z, z_start), cos(z, z_previous)] / temperature, 0) where there is a previous model."""

    mu: Tensor  # [m]; 0: no term
    temperature: float
    previous: Tensor  # [m, d]


@dataclass(frozen=True)
class Briefs(Cohort):
    """What each of m clients is told."""

    vectors: ClassVar[frozenset[str]] = frozenset({"start", "push"})

    seed: int
    round: int
    ids: Tensor  # [m] int64, ascending
    start: Tensor  # [d], or [m, d] when clients start from different models
    lr: Tensor  # [m] float64, as are the numbers below
    momentum: Tensor
    weight_decay: Tensor
    clip: Tensor  # largest norm of ∇L; inf: none
    batch_size: Tensor  # [m] int64
    epochs: Tensor  # [m] int64
    scale: Tensor
    pull: Tensor
    push: Tensor | None = None  # [d] or [m, d]
    drop_last: bool = False
    stop: Stop | None = None
    contrast: Contrast | None = None
    measure: frozenset[str] = frozenset()

    def __len__(self) -> int:
        return len(self.ids)

    def pushed(self, push: Tensor) -> Self:
        """With `push` added to whatever other rules push."""
        return replace(self, push=push if self.push is None else self.push + push)

    def measured(self, what: str) -> Self:
        """With one more measurement asked for."""
        return replace(self, measure=self.measure | {what})

    def each(self) -> Iterator[Brief]:
        """The brief of one client after another; vectors are views, not copies."""
        columns = [getattr(self, name).tolist() for name in NUMBERS]
        stop, contrast = self.stop, self.contrast
        thresholds = stop.threshold.tolist() if stop else []
        for row, (client, *numbers) in enumerate(zip(self.ids.tolist(), *columns, strict=True)):
            yield Brief(
                seed=self.seed,
                round=self.round,
                client=client,
                start=_row(self.start, row),
                **dict(zip(NUMBERS, numbers, strict=True)),
                push=None if self.push is None else _row(self.push, row),
                drop_last=self.drop_last,
                stop_below=thresholds[row] if stop else None,
                stop_statistic=stop.statistic if stop else "mean",
                stop_per=stop.per if stop else "epoch",
                stop_reference=None if stop is None or stop.reference is None else stop.reference[row],
                contrast=float(contrast.mu[row]) if contrast else 0.0,
                temperature=contrast.temperature if contrast else 1.0,
                previous=contrast.previous[row] if contrast and contrast.mu[row] else None,
                measure=self.measure,
            )

    def vectors_down(self) -> int:
        """Model-sized vectors that each client receives."""
        stop = self.stop is not None and self.stop.reference is not None
        return 1 + (self.push is not None) + (self.contrast is not None) + stop


NUMBERS = ("lr", "momentum", "weight_decay", "clip", "batch_size", "epochs", "scale", "pull")


def _row(vectors: Tensor, row: int) -> Tensor:
    return vectors if vectors.ndim == 1 else vectors[row]


@dataclass(frozen=True)
class Brief:
    """What one client is told: one row of `Briefs`, as plain numbers and vectors `[d]`."""

    seed: int
    round: int
    client: int
    start: Tensor
    lr: float
    momentum: float = 0.0
    weight_decay: float = 0.0
    clip: float = float("inf")
    batch_size: int = 32
    epochs: int = 1
    scale: float = 1.0
    pull: float = 0.0
    push: Tensor | None = None
    drop_last: bool = False
    stop_below: float | None = None
    stop_statistic: str = "mean"
    stop_per: str = "epoch"
    stop_reference: Tensor | None = None
    contrast: float = 0.0
    temperature: float = 1.0
    previous: Tensor | None = None
    measure: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Report:
    """What one client answers: one row of `Reports`."""

    client: int
    n: int
    steps: int
    epochs: float
    delta: Tensor
    loss: float
    grad_sq: float
    seconds: float
    similarity: float | None = None
    score_before: float | None = None
    score_after: float | None = None
    fisher: float | None = None
    fisher_seconds: float = 0.0
    fisher_bytes: int = 0  # most memory that it took, counted on a GPU


@dataclass(frozen=True)
class Reports(Cohort):
    """What m clients answered. `delta` is w − start."""

    ids: Tensor  # [m] int64, ascending
    n: Tensor  # [m] int64: samples
    steps: Tensor  # [m] int64
    epochs: Tensor  # [m] float64: really trained, a part of one when stopped inside it
    delta: Tensor  # [m, d]
    loss: Tensor  # [m] float64: mean training loss
    grad_sq: Tensor  # [m] float64: Σ over all batches of ‖∇L‖², clipped as trained
    seconds: Tensor  # [m] float64
    similarity: Tensor | None = None  # [m]: last statistic that a stop rule looked at
    score_before: Tensor | None = None  # [m]: mean loss on all local data at the start
    score_after: Tensor | None = None  # [m]: the same after training
    fisher: Tensor | None = None  # [m]: trace of the Fisher information at the start
    fisher_seconds: float = 0.0
    fisher_bytes: int = 0
    failed: tuple[tuple[int, str], ...] = ()  # (client, reason); for rules also those whose report was rejected
    mass: Tensor = field(default_factory=lambda: torch.empty(0))  # [m] float64, by the server: see `mass`

    def __len__(self) -> int:
        return len(self.ids)

    @classmethod
    def stack(cls, reports: Sequence[Report], delta: Tensor, failed: tuple[tuple[int, str], ...] = ()) -> Self:
        """One record from many; `delta` holds their updates, `[m, d]`."""

        def numbers(name: str, dtype: torch.dtype = torch.float64) -> Tensor:
            return torch.tensor([getattr(report, name) for report in reports], dtype=dtype)

        def measured(name: str) -> Tensor | None:
            return numbers(name) if reports and getattr(reports[0], name) is not None else None

        return cls(
            ids=numbers("client", torch.int64),
            n=numbers("n", torch.int64),
            steps=numbers("steps", torch.int64),
            epochs=numbers("epochs"),
            delta=delta,
            loss=numbers("loss"),
            grad_sq=numbers("grad_sq"),
            seconds=numbers("seconds"),
            similarity=measured("similarity"),
            score_before=measured("score_before"),
            score_after=measured("score_after"),
            fisher=measured("fisher"),
            fisher_seconds=sum(report.fisher_seconds for report in reports),
            fisher_bytes=max((report.fisher_bytes for report in reports), default=0),
            failed=failed,
        )


def strides(briefs: Briefs, reports: Reports, x: Tensor) -> Tensor:
    """w − start of each client, `[m, d]`: what its own steps did, also where it did not start from x."""
    return reports.delta if briefs.start.ndim == 1 else reports.delta - (briefs.start - x)


def mean_gradients(briefs: Briefs, reports: Reports, x: Tensor) -> Tensor:
    """The mean of the gradients that each client followed, `[m, d]`, weight decay at its start included."""
    return strides(briefs, reports, x) / -reports.mass.to(reports.delta)[:, None]


def mass(briefs: Briefs, reports: Reports) -> Tensor:
    """How far a constant unit gradient would have moved each client's weights, `[m]` float64.

    −(w − start) / mass is then the client's mean local gradient, whatever its momentum, pull, weight decay and steps.
    The server works it out from what it ordered and the steps done; a client's word would be an attackable divisor.
    """
    rows = zip(
        reports.steps.tolist(),
        briefs.lr.tolist(),
        briefs.momentum.tolist(),
        (briefs.pull + briefs.weight_decay).tolist(),
        strict=True,
    )
    return torch.tensor([_mass(*row) for row in rows], dtype=torch.float64)


@lru_cache(maxsize=1 << 16)
def _mass(steps: int, lr: float, momentum: float, pull: float) -> float:
    # One step on (u, v, 1): v ← momentum·v + pull·u + 1, u ← u − lr·v; the mass is −u after all steps.
    velocity = np.array([pull, momentum, 1.0])
    step = np.stack([np.array([1.0, 0.0, 0.0]) - lr * velocity, velocity, np.array([0.0, 0.0, 1.0])])
    return -float(np.linalg.matrix_power(step, steps)[0, 2])


def column(values: Sequence[float] | float, m: int, dtype: torch.dtype = torch.float64) -> Tensor:
    """`[m]` on the CPU from one number or from m of them."""
    if isinstance(values, int | float):
        return torch.full((m,), values, dtype=dtype)
    return torch.as_tensor(values, dtype=dtype).expand(m).clone()
