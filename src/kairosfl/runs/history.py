"""What the lines of a run's `metrics.jsonl` say about the whole run."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

Values = TypeVar("Values", list[Any], NDArray[np.float64])


def final_tenth(values: Values) -> Values:
    """The final 10 %, at least one; of the evaluated rounds, what FedAWARE's tables average."""
    return values[-max(1, len(values) // 10) :]


def ending(values: Values, averaged: Sequence[bool]) -> Values:
    """The evaluations that score a run: the final 10 %, or the last where averaging began in them.

    With a constant rate the rule `average` begins there, and a mean over these rounds would hold
    little averaging.
    """
    tenth = final_tenth(list(averaged))
    if tenth and tenth[-1] and not all(tenth):
        return values[-1:]
    return final_tenth(values)


def main_value(row: dict[str, Any]) -> float | None:
    """The main metric in a line of metrics; None if the round was not evaluated."""
    value: float | None = row[row.get("metric", "accuracy")]
    return value


def rounds_to(
    metrics: Sequence[dict[str, Any]], target: float, *, higher: bool = True
) -> int | None:
    """The first evaluated round whose main metric reached this value; None: none did."""
    sign = 1 if higher else -1
    for row in metrics:
        value = main_value(row)
        if value is None or not math.isfinite(value):
            continue
        if sign * (value - target) >= 0:
            number: int = row["round"]
            return number
    return None


def spent(columns: Iterable[str]) -> list[str]:
    """Those of these columns that say what of a promise of privacy is used up."""
    return [name for name in columns if name == "epsilon" or name.endswith("_epsilon")]
