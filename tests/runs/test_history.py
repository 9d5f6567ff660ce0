"""Measures over a run's metrics, by hand."""

from __future__ import annotations

import numpy as np
import pytest

from kairosfl.runs.history import final_tenth, rounds_to

METRICS = [
    {"round": 1, "accuracy": 0.2},
    {"round": 2, "accuracy": None},
    {"round": 3, "accuracy": 0.6},
    {"round": 4, "accuracy": 0.5},
]


def test_a_target() -> None:
    assert rounds_to(METRICS, 0.2) == 1
    assert rounds_to(METRICS, 0.55) == 3
    assert rounds_to(METRICS, 0.7) is None
    assert rounds_to([], 0.1) is None


def test_the_final_tenth_is_at_least_one_value() -> None:
    assert final_tenth([0.2, 0.6, 0.5]) == [0.5]
    assert final_tenth([]) == []
    assert final_tenth(np.arange(40) / 100).mean() == pytest.approx(0.375)
    assert len(final_tenth([0] * 19)) == 1
    assert len(final_tenth([0] * 20)) == 2
