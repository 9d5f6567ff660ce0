"""FedSAM and MoFedSAM against the reference."""

from __future__ import annotations

import numpy as np
import pytest
import reference
from problems import course, follow
from reference import COHORTS, Cohort, Network, Quadratic, Setting, ascended

from kairosfl.errors import UserError
from kairosfl.rules import FedSAM

# The library divides by ‖∇f‖ + 1e-12, so that a gradient of zero stays where it is.
CLOSE = {"rtol": 0, "atol": 1e-12}
problems = pytest.mark.parametrize(
    "problem", [Quadratic(), Network()], ids=["quadratic", "network"]
)


@problems
@pytest.mark.parametrize("rho", [0.05, 0.8])
@pytest.mark.parametrize("clip", [np.inf, 0.3])
def test_six_rounds(problem: reference.Problem, rho: float, clip: float) -> None:
    setting = Setting(clip=clip)
    expected = reference.fedsam(problem, setting, COHORTS, rho=rho)
    np.testing.assert_allclose(
        course(problem, setting, COHORTS, f"fedsam(rho={rho})"), expected, **CLOSE
    )


@problems
@pytest.mark.parametrize("clip", [np.inf, 0.3])
def test_with_fedcm_it_is_mofedsam(problem: reference.Problem, clip: float) -> None:
    setting = Setting(clip=clip)
    expected = reference.mofedsam(problem, setting, COHORTS, rho=0.3, beta=0.4)
    for text in ("fedsam(rho=0.3) + fedcm(alpha=0.4)", "fedcm(alpha=0.4) + fedsam(rho=0.3)"):
        np.testing.assert_allclose(course(problem, setting, COHORTS, text), expected, **CLOSE)


def test_a_radius_of_zero_is_fedavg_to_the_bit() -> None:
    plain = course(Network(), Setting(), COHORTS, "fedavg")
    assert np.array_equal(course(Network(), Setting(), COHORTS, "fedsam(rho=0)"), plain)
    assert not np.array_equal(course(Network(), Setting(), COHORTS, "fedsam(rho=1e-3)"), plain)


def _loss(problem: reference.Problem, i: int, rows: np.ndarray, w: np.ndarray) -> float:
    """Mean over these samples."""
    if isinstance(problem, Network):
        return float(
            -np.log(
                problem.probabilities(i, rows, w)[np.arange(len(rows)), problem.targets[i][rows]]
            ).mean()
        )
    away = w - problem.b[i][rows]
    return float(np.einsum("sj,jk,sk->s", away, problem.A[i], away).mean() / 2)


def _replay(
    problem: reference.Problem, setting: Setting, i: int, rho: float
) -> tuple[float, float]:
    """Client i's first round: its mean loss, and Σ ‖∇f‖², of every batch at the weights before its
    step.
    """
    losses, squares, counts = [], [], []

    def slope(rows: np.ndarray, w: np.ndarray) -> np.ndarray:
        losses.append(_loss(problem, i, rows, w))
        squares.append(np.sum(problem.gradient(i, rows, w) ** 2))
        counts.append(len(rows))
        return ascended(problem, i, rho)(rows, w)

    reference.train(problem, setting, 0, i, problem.x, gradient=slope)
    return float(np.average(losses, weights=counts)), sum(squares)


@problems
@pytest.mark.parametrize("clip", [np.inf, 0.3])
def test_reported_loss_and_squared_gradients_are_those_at_w(
    problem: reference.Problem, clip: float
) -> None:
    """Not those at the sharpest point nearby; clipping, of the gradient that is used, does not
    change them.
    """
    setting = Setting(clip=clip)
    record = follow(problem, setting, (Cohort((0, 1, 2)),), "fedsam(rho=0.5)")[0].record
    assert record is not None
    assert record.reports is not None
    for i in range(3):
        loss, grad_sq = _replay(problem, setting, i, rho=0.5)
        assert float(record.reports.loss[i]) == pytest.approx(loss, rel=1e-12)
        assert float(record.reports.grad_sq[i]) == pytest.approx(grad_sq, rel=1e-12)


def test_the_first_step_goes_further_along_sharp_directions() -> None:
    """On ½ Σ a_k w_k² the gradient at the sharpest point is a_k w_k (1 + rho · a_k / ‖a w‖): more
    along large a_k.
    """
    problem, setting = Quadratic(sizes=(2,)), Setting(momentum=0.0, decay=0.0, batch=2, epochs=1)
    problem.A[0], problem.b[0][:] = np.diag([4.0, 1.0, 0.25, 1.0]), 0.0
    a, w, rho = np.diag(problem.A[0]), problem.x, 0.5
    moved = course(problem, setting, (Cohort((0,)),), f"fedsam(rho={rho})")[0] - w
    np.testing.assert_allclose(
        moved, -setting.lr * a * w * (1 + rho * a / np.linalg.norm(a * w)), **CLOSE
    )


@pytest.mark.parametrize("rho", [-0.1, float("inf"), float("nan")])
def test_other_radii_are_refused(rho: float) -> None:
    with pytest.raises(
        UserError,
        match=rf"fedsam: rho = {rho} is not allowed; use 0 \(FedAvg\) or more, and finite",
    ):
        FedSAM(rho=rho)
