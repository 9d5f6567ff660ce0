"""FedAvgM against the reference."""

from __future__ import annotations

import numpy as np
import pytest
import reference
from problems import course
from reference import COHORTS, Network, Quadratic, Setting


@pytest.mark.parametrize("problem", [Quadratic(), Network()], ids=["quadratic", "network"])
@pytest.mark.parametrize("nesterov", [False, True])
def test_six_rounds(problem: reference.Problem, nesterov: bool) -> None:
    velocity = np.zeros_like(problem.x)

    def step(direction: np.ndarray) -> np.ndarray:
        nonlocal velocity
        velocity = 0.7 * velocity + direction
        return 0.6 * (direction + 0.7 * velocity if nesterov else velocity)

    expected = reference.server_side(problem, Setting(), COHORTS, step)
    text = f"fedavgm(beta=0.7, lr=0.6, nesterov={nesterov})"
    np.testing.assert_allclose(
        course(problem, Setting(), COHORTS, text), expected, rtol=0, atol=1e-13
    )


@pytest.mark.parametrize("nesterov", [False, True])
def test_without_momentum_it_is_fedavg_to_the_bit(nesterov: bool) -> None:
    plain = course(Network(), Setting(), COHORTS, "fedavg")
    assert np.array_equal(
        course(Network(), Setting(), COHORTS, f"fedavgm(beta=0, nesterov={nesterov})"), plain
    )


def test_an_idle_round_does_not_move_the_model() -> None:
    moved = course(Quadratic(), Setting(), COHORTS, "fedavgm")
    assert np.array_equal(moved[4], moved[3])
