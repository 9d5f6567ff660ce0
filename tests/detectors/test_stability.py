"""PA3Fed's five measures by hand, inside and outside critical periods."""

from __future__ import annotations

import json
import math
from dataclasses import astuple

import numpy as np
import pytest

from kairosfl.detectors.stability import Stability, average, losses, measure
from kairosfl_reproductions.measures import MEASURES, RecordedRun

CRITICAL = {1, 2, 5}
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
    assert math.isnan(short.moving_deviation)  # no two moving averages of five in three values
    assert short.largest_change == 2


def test_losses_of_each_client_in_the_order_of_its_turns() -> None:
    assert losses(CLIENTS, ["loss"]) == {0: [4, 2, 3, 1, 6], 1: [7, 5], 2: [1, 2, 2]}
    assert losses(CLIENTS, ["score"]) == {0: [0.5, 0.25], 2: [0.6, 0.1]}
    assert losses(CLIENTS) == {0: [4, 2, 0.5, 1, 0.25], 1: [7, 5], 2: [1, 0.6, 2, 0.1]}


def test_inside_and_outside_critical_periods() -> None:
    assert losses(CLIENTS, ["loss"], CRITICAL) == {0: [4, 2, 1], 1: [7, 5], 2: [1, 2]}
    assert losses(CLIENTS, ["loss"], {3, 4, 6}) == {0: [3, 6], 2: [2]}


def test_average_over_clients() -> None:
    found = average([Stability(1, math.nan, 2, 3, 4), Stability(3, 5, 4, 5, 0)])
    assert found == Stability(2, 5, 3, 4, 2)
    assert all(math.isnan(value) for value in astuple(average([])))


def test_the_reproduction_of_table_1_uses_these_measures(tmp_path) -> None:
    values = [4.0, 2, 3, 1, 5, 2, 6]
    lines = [{"round": t, "ids": [0], "loss": [value]} for t, value in enumerate(values, 1)]
    (tmp_path / "clients.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    names = ("loss_std", "loss_moving", "loss_mad", "loss_range", "loss_change")
    assert tuple(MEASURES[name].of(RecordedRun(tmp_path)) for name in names) == astuple(
        measure(values)
    )
    assert measure(values).moving_deviation == pytest.approx(
        np.std([3, 2.6, 3.4])
    )  # over five turns
