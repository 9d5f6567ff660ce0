"""FedNova against the reference and the closed forms of its paper."""

from __future__ import annotations

import numpy as np
import pytest
import reference
from problems import course, settle
from reference import COHORTS, Cohort, Network, Quadratic, Setting


@pytest.mark.parametrize("problem", [Quadratic(), Network()], ids=["quadratic", "network"])
@pytest.mark.parametrize("mu", [0.0, 0.8])
@pytest.mark.parametrize("server_momentum", [0.0, 0.5])
def test_six_rounds_with_momentum_prox_and_decay(
    problem: reference.Problem, mu: float, server_momentum: float
) -> None:
    expected = reference.fednova(
        problem, Setting(), COHORTS, mu=mu, server_momentum=server_momentum
    )
    text = f"fedprox(mu={mu}) + fednova(momentum={server_momentum})"
    np.testing.assert_allclose(
        course(problem, Setting(), COHORTS, text), expected, rtol=0, atol=1e-13
    )


def test_the_papers_closed_form_with_momentum() -> None:
    """‖a_i‖₁ = [τ − ρ (1 − ρ^τ) / (1 − ρ)] / (1 − ρ)."""
    rho, problem = 0.6, Quadratic()

    def a(t: int, steps: int) -> float:
        return (steps - rho * (1 - rho**steps) / (1 - rho)) / (1 - rho)

    setting = Setting(momentum=rho, decay=0.0)
    expected = reference.fednova(problem, setting, COHORTS, a=a)
    np.testing.assert_allclose(
        course(problem, setting, COHORTS, "fednova"), expected, rtol=0, atol=1e-13
    )


def test_the_papers_closed_form_with_prox() -> None:
    """‖a_i‖₁ = [1 − (1 − η μ)^τ] / (η μ), τ_eff = Σ p_i τ_i."""
    mu, problem, setting = 0.8, Quadratic(), Setting(momentum=0.0, decay=0.0)

    def a(t: int, steps: int) -> float:
        return (1 - (1 - setting.lr_at(t) * mu) ** steps) / (setting.lr_at(t) * mu)

    expected = reference.fednova(problem, setting, COHORTS, mu=mu, a=a)
    np.testing.assert_allclose(
        course(problem, setting, COHORTS, f"fedprox(mu={mu}) + fednova"),
        expected,
        rtol=0,
        atol=1e-13,
    )


def test_plain_sgd_divides_by_steps() -> None:
    setting, problem = Setting(momentum=0.0, decay=0.0), Quadratic()
    expected = reference.fednova(problem, setting, COHORTS, a=lambda t, steps: steps)
    np.testing.assert_allclose(
        course(problem, setting, COHORTS, "fednova"), expected, rtol=0, atol=1e-13
    )


def test_equal_steps_are_fedavg() -> None:
    problem = Quadratic(sizes=(7, 8, 9, 7, 8))
    plain = course(problem, Setting(), COHORTS, "fedavg")
    np.testing.assert_allclose(
        course(problem, Setting(), COHORTS, "fednova"), plain, rtol=0, atol=1e-14
    )
    unequal = course(Quadratic(), Setting(), COHORTS, "fednova") - course(
        Quadratic(), Setting(), COHORTS, "fedavg"
    )
    assert np.abs(unequal).max() > 1e-3


@pytest.mark.parametrize("problem", [Quadratic(), Network()], ids=["quadratic", "network"])
def test_convex_weights_are_the_shares_by_unit_moves_divided_by_their_sum(
    problem: reference.Problem,
) -> None:
    x, expected = problem.x, []
    for t, cohort in enumerate(COHORTS):
        if ids := cohort.reported:
            locals_ = [reference.train(problem, Setting(), t, i, x) for i in ids]
            a = np.array([reference.unit_move(Setting(), t, local.steps) for local in locals_])
            weights = reference.shares(problem, ids, "samples") / a
            x = (weights / weights.sum()) @ np.array([local.w for local in locals_])
        expected.append(x)
    reached = course(problem, Setting(), COHORTS, "fednova(convex=True)")
    np.testing.assert_allclose(reached, expected, rtol=0, atol=1e-13)


def test_equal_steps_are_fedavg_with_convex_weights_too() -> None:
    problem = Quadratic(sizes=(7, 8, 9, 7, 8))
    plain = course(problem, Setting(), COHORTS, "fedavg")
    np.testing.assert_allclose(
        course(problem, Setting(), COHORTS, "fednova(convex=True)"), plain, rtol=0, atol=1e-14
    )


def test_equal_steps_change_nothing_beside_feddyn() -> None:
    """Its pull is no client's own: the way is not drawn out, as the paper does beside FedProx."""
    problem = Quadratic(sizes=(7, 8, 9, 7, 8))
    plain = course(problem, Setting(), COHORTS, "feddyn(alpha=1)")
    reached = course(problem, Setting(), COHORTS, "feddyn(alpha=1) + fednova")
    np.testing.assert_allclose(reached, plain, rtol=0, atol=1e-13)


def test_one_client_is_fedavg() -> None:
    alone, problem = (Cohort((0,)),) * 4, Quadratic(sizes=(6,))
    plain = course(problem, Setting(), alone, "fedavg")
    np.testing.assert_allclose(
        course(problem, Setting(), alone, "fednova"), plain, rtol=0, atol=1e-14
    )


def test_it_ends_nearer_the_weighted_optimum_than_fedavg() -> None:
    """Small steps: FedAvg's surrogate has weights p_i τ_i, FedNova's the true ones."""
    problem, steps = Quadratic(sizes=(2, 5, 9, 3, 12, 7)), (2, 8, 3, 1, 12, 2)
    optimum = problem.optimum(reference.shares(problem, range(6), "samples"), decay=0.01)
    ends = {
        text: settle(problem, text, steps=steps, cohort=6, rounds_=150, lr=0.003)
        for text in ("fednova", "fedavg")
    }
    away = {text: np.abs(end - optimum).max() for text, end in ends.items()}
    assert away["fednova"] < away["fedavg"] / 5


def test_with_mutants_only_the_clients_own_way_is_normalised() -> None:
    """x ← Σ p_i start_i + τ_eff Σ p_i (w_i − start_i) / a_i, and of the mutations what FedMut adds."""
    problem, setting, cohorts = Quadratic(), Setting(), (Cohort((0, 1, 2, 3)),) * 3
    x = last = problem.x
    expected, p = [], reference.shares(problem, (0, 1, 2, 3), "samples")
    for t in range(3):
        starts = reference.mutants(problem, setting, t, 4, x, last, alpha=2, rate=0.3, bound=50)
        locals_ = [reference.train(problem, setting, t, i, starts[i]) for i in range(4)]
        a = np.array([reference.unit_move(setting, t, local.steps) for local in locals_])
        own = np.array([local.w for local in locals_]) - starts
        kept = 1 - reference.undone(problem, starts - x, own)
        last, x = x, p @ starts + kept * (starts.mean(0) - p @ starts) + (p @ a) * (p / a) @ own
        expected.append(x)
    text = "fedmut(alpha=2, weights='samples') + fednova"
    np.testing.assert_allclose(
        course(problem, setting, cohorts, text), expected, rtol=0, atol=1e-12
    )
