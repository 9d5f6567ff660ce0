"""How steady a client's training is: the five measures of PA3Fed's Table 1 (AAAI 2025).

The paper names the measures and gives no formula; these are our readings. Nor does it give the
window of the moving average. Ours is five turns: with the paper's cohorts of 10 out of 50 clients,
about 25 of its 250 rounds.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

WINDOW = 5  # turns in a moving average


@dataclass(frozen=True)
class Stability:
    """Lower is steadier. NaN: too few values."""

    standard_deviation: float
    moving_deviation: float  # standard deviation of the moving average
    mean_absolute_deviation: float  # mean distance from the mean
    range: float  # largest minus smallest
    largest_change: float  # between two consecutive turns


def measure(values: Sequence[float], window: int = WINDOW) -> Stability:
    """The five measures of one client's values.

    They are NaN for fewer than two values, the moving one for fewer than `window` + 1.
    """
    curve = np.asarray(values, dtype=np.float64)
    if len(curve) < 2:
        return Stability(*[math.nan] * 5)
    smooth = np.array([np.nan])
    if len(curve) > window:
        smooth = np.convolve(curve, np.full(window, 1 / window), "valid")
    return Stability(
        standard_deviation=float(curve.std()),
        moving_deviation=float(smooth.std()),
        mean_absolute_deviation=float(np.abs(curve - curve.mean()).mean()),
        range=float(np.ptp(curve)),
        largest_change=float(np.abs(np.diff(curve)).max()),
    )


def losses(
    clients: Iterable[dict[str, Any]],
    keys: Sequence[str] = ("score", "loss"),
    rounds: Iterable[int] | None = None,
) -> dict[int, list[float]]:
    """Every client's values in the order of its turns, from the lines of `clients.jsonl`.

    A line counts by the first of `keys` that it has. If `rounds` are given, only these count.
    """
    counted = None if rounds is None else set(rounds)
    curves: dict[int, list[float]] = {}
    for row in clients:
        if counted is not None and row["round"] not in counted:
            continue
        values: Sequence[float | None] = next((row[key] for key in keys if row.get(key)), [])
        for client, value in zip(row["ids"], values, strict=False):
            if value is not None and math.isfinite(value):
                curves.setdefault(client, []).append(value)
    return curves


def average(of: Iterable[Stability]) -> Stability:
    """The mean of each measure over the clients that have it, as in the paper's Figure 5."""
    rows = list(of)
    means = {}
    for field in fields(Stability):
        values = [getattr(row, field.name) for row in rows]
        finite = [value for value in values if math.isfinite(value)]
        means[field.name] = float(np.mean(finite)) if finite else math.nan
    return Stability(**means)
