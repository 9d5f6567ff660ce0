"""What the lines of a run's `metrics.jsonl` say about the whole run."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

Values = TypeVar("Values", list[Any], NDArray[np.float64])


def final_tenth(values: Values) -> Values:
    """The final 10 % of a list or array, at least one; given the evaluated rounds, what FedAWARE's
    tables average.
    """
    return values[-max(1, len(values) // 10) :]


def ending(values: Values, averaged: Sequence[bool]) -> Values:
    """The evaluations that score a run: the final 10 %, or only the last if models are averaged
    since one of them.

    With a constant rate the rule `average` begins there, and a mean over these rounds would hold
    little averaging.
    """
    tenth = final_tenth(list(averaged))
    return values[-1:] if tenth and tenth[-1] and not all(tenth) else final_tenth(values)


def main_value(row: dict[str, Any]) -> float | None:
    """The main metric in a line of metrics; None if the round was not evaluated."""
    value: float | None = row[row.get("metric", "accuracy")]
    return value


def rounds_to(
    metrics: Sequence[dict[str, Any]], target: float, *, higher: bool = True
) -> int | None:
    """The first round whose model reached this value of the main metric, among those evaluated;
    None: never.
    """
    scored = ((row["round"], value) for row in metrics if (value := main_value(row)) is not None)
    sign = 1 if higher else -1
    return next(
        (
            number
            for number, value in scored
            if math.isfinite(value) and sign * (value - target) >= 0
        ),
        None,
    )


def spent(columns: Iterable[str]) -> list[str]:
    """Those of these columns that say what of a promise of privacy is used up."""
    return [name for name in columns if name == "epsilon" or name.endswith("_epsilon")]
