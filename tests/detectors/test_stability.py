"""PA3Fed's five measures by hand, inside and outside critical periods."""

from __future__ import annotations

import math
from dataclasses import astuple

import numpy as np
import pytest

from kairosfl.detectors.stability import Stability, average, courses, measure, stability

METRICS = [{"round": t, "critical": t in (1, 2, 5)} for t in range(1, 7)]
CLIENTS = [
    {"round": 1, "ids": [0, 2], "loss": [4.0, 1.0], "score": None},
    {"round": 2, "ids": [0, 1], "loss": [2.0, 7.0], "score": None},
    {"round": 3, "ids": [0, 2], "loss": [3.0, None], "score": [0.5, 0.6]},
    {"round": 4, "ids": [], "rejected": [[1, "lost"]]},
    {"round": 5, "ids": [0, 1, 2], "loss": [1.0, 5.0, 2.0], "score": None},
    {"round": 6, "ids": [0, 2], "loss": [6.0, 2.0], "score": [0.25, 0.1]},
]


def test_five_measures_by_hand() -> None:
    found = measure([4, 2, 3, 1, 5], window=2)
    assert found.standard_deviation == pytest.approx(math.sqrt(2))
    assert found.moving_deviation == pytest.approx(np.std([3, 2.5, 2, 3]))
    assert found.mean_absolute_deviation == pytest.approx(6 / 5)
    assert found.range == 4
    assert found.largest_change == 4


def test_a_steady_course_and_short_ones() -> None:
    assert astuple(measure([0.3] * 20)) == pytest.approx((0, 0, 0, 0, 0), abs=1e-15)
    assert all(math.isnan(value) for value in astuple(measure([1.0])))
    short = measure([1.0, 2.0, 4.0])
    assert math.isnan(short.moving_deviation)  # no two moving averages of ten in three values
    assert short.largest_change == 2


def test_courses() -> None:
    assert courses(CLIENTS) == {0: [4, 2, 3, 1, 6], 1: [7, 5], 2: [1, 2, 2]}
    assert courses(CLIENTS, "score") == {0: [0.5, 0.25], 2: [0.6, 0.1]}
    assert courses(CLIENTS, rounds=[1, 2, 5]) == {0: [4, 2, 1], 1: [7, 5], 2: [1, 2]}


def test_inside_and_outside_critical_periods() -> None:
    found = stability(CLIENTS, METRICS, window=1)
    assert found.whole[0] == measure([4, 2, 3, 1, 6], 1)
    assert found.inside == {0: measure([4, 2, 1], 1), 1: measure([7, 5], 1), 2: measure([1, 2], 1)}
    assert found.outside == {0: measure([3, 6], 1)}  # the others have one value there, which says nothing


def test_average_over_clients() -> None:
    found = average([Stability(1, math.nan, 2, 3, 4), Stability(3, 5, 4, 5, 0)])
    assert found == Stability(2, 5, 3, 4, 2)
    assert all(math.isnan(value) for value in astuple(average([])))
