"""What the lines of a run's `metrics.jsonl` say about the whole run."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

Values = TypeVar("Values", list[Any], NDArray[np.float64])


def final_tenth(values: Values) -> Values:
    """The final 10 % of a list or array, at least one; given the evaluated rounds, what FedAWARE's tables average."""
    return values[-max(1, len(values) // 10) :]


def rounds_to(metrics: Sequence[dict[str, Any]], target: float) -> int | None:
    """The first round whose model reached this test accuracy, among those that were evaluated; None: never."""
    scored = ((row["round"], row["accuracy"]) for row in metrics if row["accuracy"] is not None)
    return next((number for number, accuracy in scored if math.isfinite(accuracy) and accuracy >= target), None)
