"""Measures over a run's metrics, by hand."""

from __future__ import annotations

import math

import pytest

from kairosfl.runs.history import (
    average_cohort,
    bytes_to,
    cumulative_epochs,
    last_tenth,
    mean_elud,
    rounds_to,
)

METRICS = [
    {"round": 1, "accuracy": 0.2, "cohort": 4, "elud": 1.0, "epochs_total": 8.0, "bytes_down": 40, "bytes_up": 30},
    {"round": 2, "accuracy": None, "cohort": 8, "elud": 2.0, "epochs_total": 15.5, "bytes_down": 80, "bytes_up": 70},
    {"round": 3, "accuracy": 0.6, "cohort": 4, "elud": None, "epochs_total": 0.0, "bytes_down": 40, "bytes_up": 0},
    {"round": 4, "accuracy": 0.5, "cohort": 2, "elud": math.inf, "epochs_total": 4.0, "bytes_down": 20, "bytes_up": 9},
]


def test_a_target() -> None:
    assert rounds_to(METRICS, 0.2) == 1
    assert rounds_to(METRICS, 0.55) == 3
    assert rounds_to(METRICS, 0.7) is None
    assert bytes_to(METRICS, 0.2) == 70
    assert bytes_to(METRICS, 0.55) == 260
    assert bytes_to(METRICS, 0.7) is None


def test_means_and_sums() -> None:
    assert mean_elud(METRICS) == 1.5
    assert average_cohort(METRICS) == 4.5
    assert cumulative_epochs(METRICS) == [8.0, 23.5, 23.5, 27.5]
    assert last_tenth(METRICS) == 0.5
    assert last_tenth([{"accuracy": t / 100} for t in range(40)]) == pytest.approx(0.375)


def test_a_run_without_rounds() -> None:
    assert rounds_to([], 0.1) is None
    assert math.isnan(mean_elud([]))
    assert cumulative_epochs([]) == []
