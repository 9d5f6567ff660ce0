"""FedDyn against the reference, and the optimum of heterogeneous quadratics."""

from __future__ import annotations

import numpy as np
import pytest
import reference
from problems import course, settle
from reference import COHORTS, Network, Quadratic, Setting


@pytest.mark.parametrize("problem", [Quadratic(), Network()], ids=["quadratic", "network"])
@pytest.mark.parametrize("weights", ["uniform", "samples"])
@pytest.mark.parametrize("alpha", [0.5, 0.1])
def test_six_rounds(problem: reference.Problem, weights: str, alpha: float) -> None:
    expected = reference.feddyn(problem, Setting(), COHORTS, alpha=alpha, weights=weights)
    text = f"feddyn(alpha={alpha}, weights='{weights}')"
    np.testing.assert_allclose(
        course(problem, Setting(), COHORTS, text), expected, rtol=0, atol=1e-12
    )


def test_the_released_form_in_parameter_units() -> None:
    """h_i ← h_i + (w_i − x), gradient + alpha (w − x + h_i), x ← mean_S w_i + (1/N) Σ h_i over
    everyone.
    """
    problem, setting, alpha = Quadratic(), Setting(), 0.3
    x, h, expected = problem.x, np.zeros((5, 4)), []
    for t, cohort in enumerate(COHORTS):
        if ids := cohort.reported:
            ends = [
                reference.train(
                    problem, setting, t, i, x, lambda g, w, i=i, x=x: g + alpha * (w - x + h[i])
                ).w
                for i in ids
            ]
            for i, w in zip(ids, ends, strict=True):
                h[i] = h[i] + w - x
            x = np.mean(ends, 0) + h.mean(0)
        expected.append(x)
    np.testing.assert_allclose(
        course(problem, setting, COHORTS, f"feddyn(alpha={alpha})"), expected, rtol=0, atol=1e-12
    )


@pytest.mark.parametrize(("weights", "cohort"), [("uniform", 4), ("samples", 4), ("samples", 6)])
def test_it_reaches_the_weighted_optimum(weights: str, cohort: int) -> None:
    problem, steps = Quadratic(sizes=(2, 5, 9, 3, 12, 7)), (12, 14, 13, 11, 15, 12)
    optimum = problem.optimum(reference.shares(problem, range(6), weights), decay=0.01)
    text = f"feddyn(alpha=1.0, weights='{weights}')"
    reached = settle(problem, text, steps=steps, cohort=cohort, rounds_=120, lr=0.02)
    assert np.abs(reached - optimum).max() < 1e-9


@pytest.mark.parametrize("other", ["fedavgm", "fedadam", "fedams"])
def test_its_offset_is_not_gathered_by_a_server_that_steps_after_it(other: str) -> None:
    problem, steps = Quadratic(sizes=(5,) * 6), (12,) * 6
    first, second = (
        settle(problem, text, steps=steps, cohort=6, rounds_=240)
        for text in (f"feddyn(alpha=1) + {other}", f"{other} + feddyn(alpha=1)")
    )
    assert np.array_equal(first, second)
    assert np.abs(first - problem.optimum(np.full(6, 1 / 6), decay=0.01)).max() < 1e-4
