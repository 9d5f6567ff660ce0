"""FedAdagrad, FedAdam and FedYogi against the reference."""

from __future__ import annotations

import numpy as np
import pytest
import reference
from problems import course
from reference import COHORTS, Network, Quadratic, Setting

SECOND = {
    "fedadagrad": lambda v, square, beta2: v + square,
    "fedadam": lambda v, square, beta2: beta2 * v + (1 - beta2) * square,
    "fedyogi": lambda v, square, beta2: v - (1 - beta2) * square * np.sign(v - square),
}


def expected(
    problem: reference.Problem,
    name: str,
    *,
    lr: float,
    beta1: float,
    beta2: float,
    tau: float,
    corrected: bool = False,
) -> list[np.ndarray]:
    """Algorithm 2 of Reddi et al.; corrected: Adam's own m / (1 − β1^t) and v / (1 − β2^t), both
    from 0.
    """
    m, v, t = np.zeros_like(problem.x), np.full_like(problem.x, 0 if corrected else tau**2), 0

    def step(direction: np.ndarray) -> np.ndarray:
        nonlocal m, v, t
        t += 1
        m = beta1 * m + (1 - beta1) * direction
        v = SECOND[name](v, direction**2, beta2)
        a, b = (1 - beta1**t, 1 - beta2**t) if corrected else (1, 1)
        return lr * (m / a) / (np.sqrt(v / b) + tau)

    return reference.server_side(problem, Setting(), COHORTS, step)


@pytest.mark.parametrize("problem", [Quadratic(), Network()], ids=["quadratic", "network"])
@pytest.mark.parametrize("name", SECOND)
def test_six_rounds(problem: reference.Problem, name: str) -> None:
    options = {"lr": 0.05, "beta1": 0.8, "tau": 0.02}
    beta2 = "" if name == "fedadagrad" else ", beta2=0.95"
    text = f"{name}(lr=0.05, beta1=0.8, tau=0.02{beta2})"
    want = expected(problem, name, beta2=0.95, **options)
    np.testing.assert_allclose(course(problem, Setting(), COHORTS, text), want, rtol=0, atol=1e-13)


@pytest.mark.parametrize(
    ("name", "lr", "beta1"),
    [("fedadagrad", 0.1, 0.0), ("fedadam", 0.1, 0.9), ("fedyogi", 0.01, 0.9)],
)
def test_the_defaults(name: str, lr: float, beta1: float) -> None:
    want = expected(Quadratic(), name, lr=lr, beta1=beta1, beta2=0.99, tau=1e-3)
    np.testing.assert_allclose(
        course(Quadratic(), Setting(), COHORTS, name), want, rtol=0, atol=1e-13
    )


@pytest.mark.parametrize("name", ["fedadam", "fedyogi"])
def test_bias_correction_starts_from_zero(name: str) -> None:
    want = expected(Quadratic(), name, lr=0.1, beta1=0.9, beta2=0.99, tau=1e-3, corrected=True)
    text = f"{name}(lr=0.1, bias_correction=True)"
    np.testing.assert_allclose(
        course(Quadratic(), Setting(), COHORTS, text), want, rtol=0, atol=1e-13
    )


def test_bias_corrected_adam_moves_every_number_by_lr_at_first() -> None:
    """m̂ = Δ and v̂ = Δ² after one round: x moves by lr · Δ / (|Δ| + tau)."""
    moved = course(
        Quadratic(), Setting(), COHORTS[:1], "fedadam(lr=0.1, tau=1e-12, bias_correction=True)"
    )[0]
    np.testing.assert_allclose(np.abs(moved - Quadratic().x), 0.1, rtol=1e-9)
