"""VRL-SGD against the reference, the paper's literal formula for equal steps, and the optimum of
quadratics.
"""

from __future__ import annotations

import numpy as np
import pytest
import reference
from problems import course, follow, settle
from reference import COHORTS, Cohort, Network, Quadratic, Setting, train


@pytest.mark.parametrize("problem", [Quadratic(), Network()], ids=["quadratic", "network"])
@pytest.mark.parametrize("rate", [1.0, 0.005])
def test_six_rounds(problem: reference.Problem, rate: float) -> None:
    expected = reference.vrlsgd(problem, Setting(), COHORTS, rate=rate)
    np.testing.assert_allclose(
        course(problem, Setting(), COHORTS, f"vrlsgd(rate={rate})"), expected, rtol=0, atol=1e-13
    )


def test_equal_steps_of_everyone_are_the_papers_formula() -> None:
    """Δ_i ← Δ_i + (x̂ − w_i) / (k · lr), with as many steps and samples everywhere and plain SGD."""
    problem, setting = Quadratic(sizes=(6, 6, 6)), Setting(momentum=0.0, decay=0.0)
    x, own, expected = problem.x, np.zeros((3, 4)), []
    for t in range(5):
        ends = [
            train(problem, setting, t, i, x, lambda g, w, own=own[i]: g - own).w for i in range(3)
        ]
        x = np.mean(ends, 0)
        own = own + (x - np.array(ends)) / (4 * setting.lr_at(t))
        expected.append(x)
    everyone = (Cohort((0, 1, 2)),) * 5
    np.testing.assert_allclose(
        course(problem, setting, everyone, "vrlsgd"), expected, rtol=0, atol=1e-13
    )


@pytest.mark.parametrize("more", ["", " + pa3fed(always=True)"])
def test_the_corrections_sum_to_zero_by_samples_whoever_took_part(more: str) -> None:
    problem = Quadratic()
    table = follow(problem, Setting(), COHORTS, f"vrlsgd{more}")[-1].tables[1]
    own = np.concatenate([block.numpy() for block in table.column("delta")])
    np.testing.assert_allclose(problem.n[table.ids] @ own, 0, atol=1e-12)
    assert np.abs(own).max() > 0.1


@pytest.mark.parametrize("text", ["vrlsgd", "vrlsgd + pa3fed(always=True)"])
@pytest.mark.parametrize("cohort", [3, 6])
def test_it_reaches_the_weighted_optimum_with_momentum_decay_and_unequal_steps(
    text: str, cohort: int
) -> None:
    problem, steps = Quadratic(sizes=(2, 5, 9, 3, 12, 7)), (2, 4, 3, 1, 5, 2)
    optimum = problem.optimum(reference.shares(problem, range(6), "samples"), decay=0.01)
    reached = settle(problem, text, steps=steps, cohort=cohort, rounds_=250)
    assert np.abs(reached - optimum).max() < 1e-10


def test_rate_zero_is_fedavg_to_the_bit() -> None:
    plain = course(Network(), Setting(), COHORTS, "fedavg")
    assert np.array_equal(course(Network(), Setting(), COHORTS, "vrlsgd(rate=0)"), plain)


def test_a_client_alone_is_not_corrected() -> None:
    alone, problem = (Cohort((0,)),) * 4, Quadratic(sizes=(6,))
    plain = course(problem, Setting(), alone, "fedavg")
    np.testing.assert_allclose(
        course(problem, Setting(), alone, "vrlsgd"), plain, rtol=0, atol=1e-13
    )
