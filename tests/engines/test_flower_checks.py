"""Trust: what a report may say, given its brief."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

from kairosfl.core.fields import ACCURACY_AFTER, FISHER, SCORE_AFTER, SCORE_BEFORE, Brief, Report
from kairosfl.engines.flower.checks import Trust, check
from kairosfl.errors import UserError

BRIEF = Brief(seed=0, round=4, client=7, start=torch.zeros(4), lr=0.1, batch_size=16, epochs=3)
# 40 samples are 3 batches of at most 16, three times.
REPORT = Report(
    client=7,
    n=40,
    steps=9,
    epochs=3.0,
    delta=torch.tensor([0.0, 3.0, -4.0, 0.0]),
    loss=1.0,
    grad_sq=2.0,
    seconds=0.1,
)


def outcome(
    brief: dict[str, Any], report: dict[str, Any], round: int = 4, **trust: float
) -> Report | str:
    report = {"delta": REPORT.delta.clone()} | report
    return check(replace(REPORT, **report), round, replace(BRIEF, **brief), Trust(**trust))  # type: ignore[arg-type]


def test_an_honest_report_is_taken_as_it_is() -> None:
    assert check(REPORT, 4, BRIEF, Trust()) is REPORT


@pytest.mark.parametrize(
    ("brief", "report", "reason"),
    [
        ({}, {"client": 8}, "it answered as client 8"),
        ({}, {"loss": math.nan}, "its loss is nan"),
        ({}, {"loss": -1e7}, "its loss is -1e+07"),
        ({}, {"grad_sq": math.inf}, "its grad_sq is inf"),
        ({}, {"grad_sq": -1.0}, "its grad_sq is -1"),
        ({}, {"seconds": -1.0}, "its seconds is -1"),
        ({}, {"epochs": math.nan}, "its number of epochs is nan"),
        ({}, {"n": 0}, "its number of samples is 0 (deploy.max_samples = 10000000)"),
        ({}, {"n": -40}, "its number of samples is -40 (deploy.max_samples = 10000000)"),
        ({}, {"n": 10**9}, "its number of samples is 1000000000 (deploy.max_samples = 10000000)"),
        ({}, {"steps": 8}, "it did 8 steps, where 9 were ordered for its 40 samples"),
        ({}, {"steps": 90}, "it did 90 steps, where 9 were ordered for its 40 samples"),
        ({}, {"n": 400}, "it did 9 steps, where 75 were ordered for its 400 samples"),
        ({"drop_last": True}, {}, "it did 9 steps, where 6 were ordered for its 40 samples"),
        ({}, {"epochs": 2.0}, "its 2 epochs do not fit its 9 steps"),
        ({"stop_below": 0.5}, {"similarity": 0.9, "steps": 0}, "its number of steps is 0"),
        (
            {"stop_below": 0.5},
            {"similarity": 0.9, "steps": 10},
            "it did 10 steps, where at most 9 were ordered for",
        ),
        (
            {"stop_below": 0.5},
            {"similarity": 0.9, "steps": 4},
            "its 3 epochs do not fit its 4 steps",
        ),
        ({"stop_below": 0.5}, {"similarity": 1.1}, "its similarity is 1.1"),
        ({"stop_below": 0.5}, {}, "it did not report similarity"),
        ({}, {"similarity": 0.9}, "it reported similarity, which was not asked for"),
        ({"measure": frozenset({SCORE_BEFORE})}, {}, "it did not report score_before"),
        (
            {"measure": frozenset({SCORE_AFTER})},
            {"score_after": math.inf},
            "its score_after is inf",
        ),
        (
            {"measure": frozenset({ACCURACY_AFTER})},
            {"accuracy_after": 1.01},
            "its accuracy_after is 1.01",
        ),
        (
            {"measure": frozenset({ACCURACY_AFTER})},
            {"accuracy_after": -0.5},
            "its accuracy_after is -0.5",
        ),
        ({"measure": frozenset({FISHER})}, {"fisher": -1.0}, "its fisher is -1"),
        ({}, {"score_after": 1.0}, "it reported score_after, which was not asked for"),
        ({}, {"delta": torch.tensor([0.0, math.nan, 0.0, 0.0])}, "its update is not finite"),
        ({}, {"delta": torch.tensor([0.0, math.inf, 0.0, 0.0])}, "its update is not finite"),
        (
            {},
            {"delta": torch.tensor([1e6, 0.0, 0.0, 0.0])},
            "its update has the norm 1e+06, above deploy.max_norm = 1",
        ),
    ],
)
def test_refused_with_one_line(brief: dict[str, Any], report: dict[str, Any], reason: str) -> None:
    said = outcome(brief, report)
    assert isinstance(said, str)
    assert said.startswith(reason)


def test_another_rounds_report() -> None:
    assert outcome({}, {}, round=3) == "its report is of round 4, not 5"


def test_early_stops_and_measurements_pass() -> None:
    early = {"similarity": 0.3, "steps": 4, "epochs": 4 / 3}
    assert isinstance(outcome({"stop_below": 0.5}, early), Report)
    assert isinstance(outcome({"drop_last": True}, {"steps": 6}), Report)
    assert isinstance(
        outcome(
            {"measure": frozenset({FISHER, SCORE_BEFORE})},
            {"fisher": 0.0, "fisher_seconds": 0.1, "fisher_bytes": 0, "score_before": 2.0},
        ),
        Report,
    )
    assert isinstance(
        outcome({"batch_size": 100}, {"steps": 3}), Report
    )  # a batch is never more than the samples


def test_the_norm_is_clipped() -> None:
    clipped = outcome({}, {}, clip_norm=2.5)  # the norm is 5
    assert isinstance(clipped, Report)
    assert clipped.delta.tolist() == [0.0, 1.5, -2.0, 0.0]
    assert (
        outcome({}, {}, clip_norm=2.5, max_norm=4.0)
        == "its update has the norm 5, above deploy.max_norm = 4"
    )


def test_a_huge_update_does_not_overflow_its_norm() -> None:
    said = outcome({}, {"delta": torch.full((4,), 1e30)})
    assert said == "its update has the norm 2e+30, above deploy.max_norm = 10000"


@pytest.mark.parametrize("name", ["max_norm", "clip_norm", "max_samples", "max_loss"])
def test_trust_is_above_zero(name: str) -> None:
    with pytest.raises(UserError, match=rf"deploy\.{name} = 0 must be above 0"):
        Trust(**{name: 0})


@pytest.mark.parametrize(
    ("report", "trust", "reason"),
    [
        ({"loss": -0.1}, {}, "its loss is -0.1 (deploy.min_loss = 0)"),
        (
            {"n": 45},
            {"samples": (1,) * 7 + (40,)},
            "it claims 45 samples and enrolled with 40 (deploy.samples)",
        ),
    ],
)
def test_what_a_client_may_not_claim(
    report: dict[str, Any], trust: dict[str, Any], reason: str
) -> None:
    assert outcome({}, report, **trust) == reason
    assert isinstance(outcome({}, {"loss": -0.1}, min_loss=-math.inf), Report)
    assert isinstance(outcome({}, {}, samples=(1,) * 7 + (40,)), Report)


def test_a_falling_negative_score_is_rejected() -> None:
    found = outcome({"measure": frozenset({SCORE_AFTER})}, {"score_after": -5.0})
    assert found == "its score_after is -5 (deploy.min_loss = 0)"


def test_enrolled_samples_are_numbers() -> None:
    with pytest.raises(UserError, match="must be numbers of samples, each 1 or more"):
        Trust(samples=(3, 0))
