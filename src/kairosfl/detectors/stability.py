"""How steady a client's training is: the five measures of PA3Fed's Table 1 over the losses of a run (AAAI 2025).

A client's course is the value that it reported each time it took part, in `clients.jsonl`; whether a round lay in a
critical period stands in `metrics.jsonl`. The paper names the measures and prints no formula; these are our readings.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from kairosfl.runs.history import known

WINDOW = 10  # turns in a moving average


@dataclass(frozen=True)
class Stability:
    """Lower is steadier. NaN: too few values."""

    standard_deviation: float
    moving_deviation: float  # standard deviation of the moving average
    mean_absolute_deviation: float  # mean distance from the mean
    range: float  # largest minus smallest
    largest_change: float  # between two turns in a row


def measure(values: Sequence[float], window: int = WINDOW) -> Stability:
    """The five measures of one course of values; NaN for fewer than two, the moving one for fewer than `window` + 1."""
    course = np.asarray(values, dtype=np.float64)
    if len(course) < 2:
        return Stability(*[float("nan")] * 5)
    smooth = np.convolve(course, np.full(window, 1 / window), "valid") if len(course) > window else np.array([np.nan])
    return Stability(
        standard_deviation=float(course.std()),
        moving_deviation=float(smooth.std()),
        mean_absolute_deviation=float(np.abs(course - course.mean()).mean()),
        range=float(np.ptp(course)),
        largest_change=float(np.abs(np.diff(course)).max()),
    )


def courses(
    clients: Iterable[dict[str, Any]], key: str = "loss", rounds: Iterable[int] | None = None
) -> dict[int, list[float]]:
    """Every client's values of `key` in the order of its turns, of these rounds alone if they are given."""
    wanted = None if rounds is None else set(rounds)
    found: dict[int, list[float]] = {}
    for row in clients:
        if wanted is None or row["round"] in wanted:
            for client, value in zip(row["ids"], row.get(key) or [], strict=False):
                if known(value):
                    found.setdefault(client, []).append(value)
    return found


@dataclass(frozen=True)
class Periods:
    """Stability by client over a whole run, inside its critical periods and outside them."""

    whole: dict[int, Stability]
    inside: dict[int, Stability]
    outside: dict[int, Stability]


def stability(
    clients: Sequence[dict[str, Any]], metrics: Sequence[dict[str, Any]], key: str = "loss", window: int = WINDOW
) -> Periods:
    """The measures of every client with at least two values. Inside and outside join the periods' values end to end."""

    def of(rounds: Iterable[int] | None) -> dict[int, Stability]:
        turns = courses(clients, key, rounds).items()
        return {client: measure(values, window) for client, values in sorted(turns) if len(values) > 1}

    return Periods(
        whole=of(None),
        inside=of(row["round"] for row in metrics if row["critical"]),
        outside=of(row["round"] for row in metrics if not row["critical"]),
    )


def average(of: Iterable[Stability]) -> Stability:
    """The mean of each measure over the clients for which it is known, as the paper's Figure 5 has it."""
    rows = list(of)

    def mean(name: str) -> float:
        values = [value for row in rows if known(value := getattr(row, name))]
        return float(np.mean(values)) if values else float("nan")

    return Stability(*(mean(field.name) for field in fields(Stability)))
