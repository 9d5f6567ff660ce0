"""PA3Fed against the reference."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import reference
import torch
from problems import course, follow, task
from reference import COHORTS, Network, Quadratic, Setting

from kairosfl.core.fields import Reports
from kairosfl.core.recipe import Recipe
from kairosfl.core.round import drive, rounds
from kairosfl.core.rule import Memory
from kairosfl.core.run import Run, Setup
from kairosfl.core.table import Table
from kairosfl.detectors import FGN, Signals
from kairosfl.engines.loop import Loop
from kairosfl.errors import UserError
from kairosfl.rules import PA3Fed, parse
from kairosfl.testing import check_rule


@pytest.mark.parametrize("problem", [Quadratic(), Network()], ids=["quadratic", "network"])
@pytest.mark.parametrize(("score", "sign"), [("log_likelihood", 1.0), ("loss", -1.0)])
@pytest.mark.parametrize("at", ["after", "before"])
@pytest.mark.parametrize("always", [False, True])
def test_six_rounds(
    problem: reference.Problem, score: str, sign: float, at: str, always: bool
) -> None:
    expected, weights, periods = reference.pa3fed(
        problem, Setting(), COHORTS, 0.8, sign, at, always
    )
    runs = follow(
        problem,
        Setting(),
        COHORTS,
        f"pa3fed(beta=0.8, score='{score}', at='{at}', always={always})",
    )
    np.testing.assert_allclose([run.x.numpy() for run in runs], expected, rtol=0, atol=1e-12)
    busy = [run for run in runs if run.record.reports is not None]
    for run, want in zip(busy, weights, strict=True):
        np.testing.assert_allclose(run.record.weights.numpy(), want, rtol=0, atol=1e-13)
    assert [run.signals.critical for run in busy] == periods


@pytest.mark.parametrize("at", ["after", "before"])
@pytest.mark.parametrize("always", [False, True])
def test_accuracy_as_the_score(at: str, always: bool) -> None:
    """Eq. 9 in place of Eq. 8 over six rounds: accuracy rises, so Eq. 10 is taken as it is printed."""
    problem = Network()
    expected, weights, _ = reference.pa3fed(
        problem, Setting(), COHORTS, 0.8, -1.0, at, always, score=problem.accuracy
    )
    runs = follow(
        problem,
        Setting(),
        COHORTS,
        f"pa3fed(beta=0.8, score='accuracy', at='{at}', always={always})",
    )
    np.testing.assert_allclose([run.x.numpy() for run in runs], expected, rtol=0, atol=1e-12)
    busy = [run for run in runs if run.record.reports is not None]
    for run, want in zip(busy, weights, strict=True):
        np.testing.assert_allclose(run.record.weights.numpy(), want, rtol=0, atol=1e-13)
    plain = [
        reference.shares(problem, cohort.reported, "samples")
        for cohort in COHORTS
        if cohort.reported
    ]
    assert max(np.abs(a - b).max() for a, b in zip(weights, plain, strict=True)) > 1e-3


def test_accuracy_by_hand() -> None:
    """Accuracies 0.5 → 1 and 1 → 0.5 with beta 2 ln 2: factors 2 and 1/2; the newcomer has 1."""
    found = _weights([0.5, 1, float("nan")], [1, 0.5, 0.1], 2 * float(np.log(2)), "accuracy")
    np.testing.assert_allclose(found, np.array([2, 0.5, 1]) / 3.5, rtol=1e-14)
    check_rule(PA3Fed(score="accuracy", always=True))
    with pytest.raises(
        UserError,
        match="score = 'recall' is not allowed; use 'log_likelihood', 'loss' or 'accuracy'",
    ):
        PA3Fed(score="recall")


def test_accuracy_needs_a_task_that_has_one() -> None:
    job = replace(task(Network()), metrics={"margin": lambda outputs, targets: outputs[:, 0]})
    setup = Setup(
        PA3Fed(score="accuracy") + parse("fedavg"),
        Recipe(rounds=1, cohort=2, lr=0.1),
        5,
        job.layout,
        detectors=(FGN(),),
    )
    with pytest.raises(
        UserError, match="needs a task with the metric accuracy, and this one has margin; have"
    ):
        next(drive(rounds(Run.start(job.start(), setup, seed=0), setup), Loop(job)))


def test_the_setting_has_both_kinds_of_periods() -> None:
    _, weights, periods = reference.pa3fed(Quadratic(), Setting(), COHORTS, 0.8)
    assert True in periods[1:]
    assert False in periods
    plain = [
        reference.shares(Quadratic(), cohort.reported, "samples")
        for cohort in COHORTS
        if cohort.reported
    ]
    differs = [np.abs(a - b).max() > 1e-3 for a, b in zip(weights, plain, strict=True)]
    assert differs == [
        False,
        True,
        False,
        True,
        False,
    ]  # no history in round 0, no critical period in 2 and 5


@pytest.mark.parametrize("always", [False, True])
def test_beta_zero_is_fedavg_to_the_bit(always: bool) -> None:
    plain = course(Network(), Setting(), COHORTS, "fedavg")
    assert np.array_equal(
        course(Network(), Setting(), COHORTS, f"pa3fed(beta=0, always={always})"), plain
    )


def _weights(
    before: list[float],
    after: list[float],
    beta: float = 0.3,
    score: str = "log_likelihood",
    change: str = "better",
) -> np.ndarray:
    m = len(before)
    rule = PA3Fed(beta=beta, always=True, score=score, change=change)
    reports = Reports(
        ids=torch.arange(m),
        n=torch.ones(m, dtype=torch.int64),
        steps=torch.ones(m, dtype=torch.int64),
        epochs=torch.ones(m),
        delta=torch.zeros(m, 1),
        loss=torch.zeros(m),
        grad_sq=torch.zeros(m),
        seconds=torch.zeros(m),
        **{
            "accuracy_after" if score == "accuracy" else "score_after": torch.tensor(
                after, dtype=torch.float64
            )
        },
    )
    sign = -1.0 if score == "log_likelihood" else 1.0
    rows = {"score": sign * torch.tensor(before, dtype=torch.float64)}
    now = SimpleNamespace(signals=Signals(), reports=reports)
    factors = rule.weigh(torch.ones(m, dtype=torch.float64), Memory({}, rows, Table({})), now)  # type: ignore[arg-type]
    return (factors / factors.sum()).numpy()


def test_by_hand() -> None:
    """Losses 2 → 1 and 1 → 2 with beta ln 2: factors 2 and 1/2; the newcomer has 1."""
    nan = float("nan")
    beta = float(np.log(2))
    np.testing.assert_allclose(
        _weights([2, 1, nan], [1, 2, 7], beta), np.array([2, 0.5, 1]) / 3.5, rtol=1e-14
    )
    inverse = _weights([2, 1, nan], [1, 2, 7], beta, "loss")
    np.testing.assert_allclose(inverse, np.array([0.5, 2, 1]) / 3.5, rtol=1e-14)


@pytest.mark.parametrize("score", ["log_likelihood", "loss"])
def test_stability_as_a_small_change(score: str) -> None:
    """Losses 2 → 1, 1 → 2 and 1 → 3 with beta ln 2: factors 1/2, 1/2 and 1/4, whatever the sign;
    the newcomer has 1.
    """
    found = _weights([2, 1, 1, float("nan")], [1, 2, 3, 7], float(np.log(2)), score, "small")
    np.testing.assert_allclose(found, np.array([0.5, 0.5, 0.25, 1]) / 2.25, rtol=1e-14)
    np.testing.assert_allclose(
        _weights([1.0, 1.0], [1e5, 1.0], change="small"), [0.0, 1.0], rtol=0, atol=1e-15
    )
    check_rule(PA3Fed(change="small", always=True))
    with pytest.raises(UserError, match="change = 'large' is not allowed"):
        PA3Fed(change="large")


@pytest.mark.parametrize(
    ("before", "after", "want"),
    [
        ([1e5, 1.0], [1.0, 1.0], [1.0, 0.0]),  # exp(30,000) alone would overflow
        ([1.0, 1.0], [1e5, 1e5], [0.5, 0.5]),  # both would underflow to 0 / 0
        ([1.0, float("nan")], [1e6, 3.0], [0.0, 1.0]),
        ([1e300, 1.0], [1.0, 1e300], [1.0, 0.0]),
    ],
)
def test_scores_that_exploded_give_finite_weights(
    before: list[float], after: list[float], want: list[float]
) -> None:
    np.testing.assert_allclose(_weights(before, after), want, rtol=0, atol=1e-15)
