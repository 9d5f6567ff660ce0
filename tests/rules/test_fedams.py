"""FedAMS and FedAMSGrad against the reference."""

from __future__ import annotations

import numpy as np
import pytest
import reference
from problems import course
from reference import COHORTS, Network, Quadratic, Setting


@pytest.mark.parametrize("problem", [Quadratic(), Network()], ids=["quadratic", "network"])
@pytest.mark.parametrize("option", [1, 2])
@pytest.mark.parametrize("corrected", [False, True])
def test_six_rounds(problem: reference.Problem, option: int, corrected: bool) -> None:
    lr, beta1, beta2, eps, t = 0.05, 0.8, 0.6, 0.03, 0
    m = v = top = np.zeros_like(problem.x)

    def step(direction: np.ndarray) -> np.ndarray:
        nonlocal m, v, top, t
        t += 1
        m = beta1 * m + (1 - beta1) * direction
        v = beta2 * v + (1 - beta2) * direction**2
        top = np.maximum(np.maximum(top, v), eps) if option == 1 else np.maximum(top, v)
        a, b = (1 - beta1**t, 1 - beta2**t) if corrected else (1, 1)
        return lr * (m / a) / (np.sqrt(top / b) + (eps if option == 2 else 0))

    expected = reference.server_side(problem, Setting(), COHORTS, step)
    text = f"fedams(lr={lr}, beta1={beta1}, beta2={beta2}, eps={eps}, option={option}, bias_correction={corrected})"
    np.testing.assert_allclose(
        course(problem, Setting(), COHORTS, text), expected, rtol=0, atol=1e-13
    )


def test_a_large_eps_makes_it_server_momentum() -> None:
    """max(v̂, eps) = eps everywhere: x moves by lr / √eps · m."""
    m = np.zeros_like(Quadratic().x)

    def step(direction: np.ndarray) -> np.ndarray:
        nonlocal m
        m = 0.9 * m + 0.1 * direction
        return m / 100

    expected = reference.server_side(Quadratic(), Setting(), COHORTS, step)
    np.testing.assert_allclose(
        course(Quadratic(), Setting(), COHORTS, "fedams(eps=1e4)"), expected, rtol=0, atol=1e-13
    )


def test_the_second_moment_never_falls() -> None:
    """A round of large updates followed by small ones: FedAMS keeps the small steps, FedAdam
    forgets.
    """
    setting = Setting(gamma=0.1)
    slow = course(Quadratic(), setting, COHORTS[:4], "fedams(beta1=0, beta2=0, eps=1e-9, lr=0.1)")
    fast = course(Quadratic(), setting, COHORTS[:4], "fedadam(beta1=0, beta2=0, tau=1e-9, lr=0.1)")
    assert np.abs(np.diff(slow[2:], axis=0)).max() < 0.05
    np.testing.assert_allclose(np.abs(np.diff(fast[2:], axis=0)), 0.1, rtol=1e-4)
