"""What a run came to, from its lines of `metrics.jsonl`: what a target accuracy took, and means over the rounds."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any

Rows = Sequence[dict[str, Any]]


def known(value: float | None) -> bool:
    """Whether a number was measured: files write null for what was not, rows in memory may hold NaN."""
    return value is not None and math.isfinite(value)


def rounds_to(metrics: Rows, target: float) -> int | None:
    """The first round whose model reached this test accuracy, of those that were evaluated; None: never."""
    return next((row["round"] for row in metrics if known(row["accuracy"]) and row["accuracy"] >= target), None)


def bytes_to(metrics: Rows, target: float) -> int | None:
    """Bytes sent in both directions until then; None: never reached."""
    last = rounds_to(metrics, target)
    return None if last is None else bytes_in(row for row in metrics if row["round"] <= last)


def bytes_in(metrics: Iterable[dict[str, Any]]) -> int:
    """Bytes sent in both directions in these rounds."""
    return sum(row["bytes_down"] + row["bytes_up"] for row in metrics)


def mean_elud(metrics: Rows) -> float:
    """Mean empirical local update diversity over the rounds, FedAWARE's e-LUDD."""
    return _mean([row["elud"] for row in metrics])


def average_cohort(metrics: Rows) -> float:
    """Mean number of clients asked in a round."""
    return _mean([row["cohort"] for row in metrics])


def cumulative_epochs(metrics: Rows) -> list[float]:
    """Local epochs of all clients together, up to and including each round."""
    return list(accumulate(row["epochs_total"] for row in metrics))


def last_tenth(metrics: Rows) -> float:
    """Mean test accuracy over the last tenth of the evaluated rounds, the figure that FedAWARE prints."""
    scored = [row["accuracy"] for row in metrics if known(row["accuracy"])]
    return _mean(scored[-max(1, len(scored) // 10) :])


def _mean(values: list[float | None]) -> float:
    numbers = [value for value in values if value is not None and math.isfinite(value)]
    return math.fsum(numbers) / len(numbers) if numbers else float("nan")
