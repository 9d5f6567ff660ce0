"""FedProx against the reference."""

from __future__ import annotations

import numpy as np
import pytest
import reference
from problems import course
from reference import COHORTS, Network, Quadratic, Setting

from kairosfl.errors import UserError
from kairosfl.rules import FedProx


@pytest.mark.parametrize("problem", [Quadratic(), Network()], ids=["quadratic", "network"])
@pytest.mark.parametrize("mu", [0.01, 1.5])
def test_six_rounds(problem: reference.Problem, mu: float) -> None:
    expected = reference.fedprox(problem, Setting(), COHORTS, mu=mu)
    np.testing.assert_allclose(
        course(problem, Setting(), COHORTS, f"fedprox(mu={mu})"), expected, rtol=0, atol=1e-13
    )


@pytest.mark.parametrize("problem", [Quadratic(), Network()], ids=["quadratic", "network"])
def test_fedavg_itself(problem: reference.Problem) -> None:
    expected = reference.fedavg(problem, Setting(), COHORTS)
    np.testing.assert_allclose(
        course(problem, Setting(), COHORTS, "fedavg"), expected, rtol=0, atol=1e-13
    )


def test_without_a_pull_it_is_fedavg_to_the_bit() -> None:
    plain = course(Network(), Setting(), COHORTS, "fedavg")
    assert np.array_equal(course(Network(), Setting(), COHORTS, "fedprox(mu=0)"), plain)


def test_a_strong_pull_holds_the_clients_back() -> None:
    still = Setting(momentum=0.0, decay=0.0, lr=0.01)
    moved = [
        np.abs(
            course(Quadratic(), still, COHORTS[:1], f"fedprox(mu={mu})")[0] - Quadratic().x
        ).max()
        for mu in (0, 5, 50)
    ]
    assert moved[0] > moved[1] > moved[2]


def test_a_negative_mu_is_refused() -> None:
    with pytest.raises(UserError, match=r"fedprox: mu = -1 is not allowed; use 0 or more\."):
        FedProx(mu=-1)
