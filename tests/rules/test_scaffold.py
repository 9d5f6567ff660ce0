"""SCAFFOLD against the reference, minibatch SGD, and the optimum of heterogeneous quadratics."""

from __future__ import annotations

import numpy as np
import pytest
import reference
from problems import course, follow, settle, task
from reference import COHORTS, Cohort, Network, Quadratic, Setting

from kairosfl.core.recipe import Recipe
from kairosfl.core.round import rounds
from kairosfl.core.run import Run, Setup
from kairosfl.detectors import FGN
from kairosfl.errors import UserError
from kairosfl.rules import SCAFFOLD, parse
from kairosfl.testing import check_rule

EVERYONE = (Cohort((0, 1, 2, 3, 4)),) * 6


@pytest.mark.parametrize("problem", [Quadratic(), Network()], ids=["quadratic", "network"])
@pytest.mark.parametrize("weights", ["uniform", "samples", "models"])
@pytest.mark.parametrize("lr", [1.0, 0.7])
def test_six_rounds(problem: reference.Problem, weights: str, lr: float) -> None:
    expected = reference.scaffold(problem, Setting(), COHORTS, weights=weights, lr=lr)
    text = f"scaffold(weights='{weights}', lr={lr})"
    np.testing.assert_allclose(
        course(problem, Setting(), COHORTS, text), expected, rtol=0, atol=1e-13
    )


@pytest.mark.parametrize("problem", [Quadratic(), Network()], ids=["quadratic", "network"])
def test_the_papers_divisor(problem: reference.Problem) -> None:
    expected = reference.scaffold(problem, Setting(), COHORTS, divisor="steps")
    np.testing.assert_allclose(
        course(problem, Setting(), COHORTS, "scaffold(divisor='steps')"),
        expected,
        rtol=0,
        atol=1e-13,
    )
    assert np.linalg.norm(expected[-1] - reference.scaffold(problem, Setting(), COHORTS)[-1]) > 1e-3


@pytest.mark.parametrize("problem", [Quadratic(), Network()], ids=["quadratic", "network"])
@pytest.mark.parametrize("weights", ["uniform", "models"])
def test_steps_corrected_after_the_momentum(problem: reference.Problem, weights: str) -> None:
    """As in the released code of NIID-Bench, with models averaged by samples and c uniformly."""
    expected = reference.scaffold(
        problem, Setting(), COHORTS, weights=weights, divisor="steps", correct="steps"
    )
    text = f"scaffold(weights='{weights}', divisor='steps', correct='steps')"
    np.testing.assert_allclose(
        course(problem, Setting(), COHORTS, text), expected, rtol=0, atol=1e-13
    )
    other = reference.scaffold(problem, Setting(), COHORTS, weights=weights, divisor="steps")
    assert np.linalg.norm(expected[-1] - other[-1]) > 1e-3


def test_without_momentum_it_does_not_matter_what_is_corrected() -> None:
    setting, problem = Setting(momentum=0.0), Quadratic()
    one, other = (
        course(problem, setting, COHORTS, f"scaffold(divisor='steps', correct='{each}')")
        for each in ("gradients", "steps")
    )
    np.testing.assert_allclose(one, other, rtol=0, atol=1e-13)


def test_steps_are_corrected_only_where_that_is_defined() -> None:
    check_rule(SCAFFOLD(divisor="steps", correct="steps"))
    for text, why in (
        ("scaffold(correct='steps')", "it needs divisor = 'steps'"),
        ("scaffold(correct='models')", "use 'gradients' or 'steps'"),
        (
            "scaffold(divisor='steps', correct='steps') + feddyn",
            "one their steps and the other their gradients",
        ),
        (
            "fedcm + scaffold(divisor='steps', correct='steps')",
            "one their steps and the other their gradients",
        ),
    ):
        with pytest.raises(UserError, match=why):
            parse(text)
    job = task(Quadratic())
    how = Recipe(rounds=1, cohort=2, clip=1.0, clip_after=True)
    setup = Setup(
        parse("scaffold(divisor='steps', correct='steps')"), how, 5, job.layout, detectors=(FGN(),)
    )
    with pytest.raises(
        UserError, match=r"train\.clip_after = true cannot be used with a rule that corrects steps"
    ):
        next(rounds(Run.start(job.start(), setup, seed=0), setup))


def test_without_momentum_the_divisors_are_the_same() -> None:
    setting, problem = Setting(momentum=0.0, decay=0.0), Quadratic()
    one, other = (
        course(problem, setting, COHORTS, f"scaffold(divisor='{each}')")
        for each in ("mass", "steps")
    )
    np.testing.assert_allclose(one, other, rtol=0, atol=1e-13)


def test_plain_sgd_has_the_papers_divisor() -> None:
    """Option II to the letter: c_i⁺ = c_i − c + (x − w_i) / (K · lr)."""
    setting, problem = Setting(momentum=0.0, decay=0.0), Quadratic()
    assert reference.unit_move(setting, 2, 7) == pytest.approx(7 * setting.lr_at(2), rel=1e-15)
    expected = reference.scaffold(problem, setting, COHORTS)
    np.testing.assert_allclose(
        course(problem, setting, COHORTS, "scaffold"), expected, rtol=0, atol=1e-13
    )


@pytest.mark.parametrize("weights", ["uniform", "samples"])
def test_one_local_step_with_everyone_is_minibatch_sgd(weights: str) -> None:
    """The corrections cancel in the mean exactly when c = Σ p_i c_i with the weights of the models."""
    setting, problem = Setting(batch=100, epochs=1), Quadratic()
    p, x, expected = reference.shares(problem, range(5), weights), problem.x, []
    for t in range(len(EVERYONE)):
        whole = sum(p[i] * problem.gradient(i, np.arange(problem.n[i]), x) for i in range(5))
        x = x - setting.lr_at(t) * (whole + setting.decay * x)
        expected.append(x)
    text = f"scaffold(weights='{weights}')"
    np.testing.assert_allclose(
        course(problem, setting, EVERYONE, text), expected, rtol=0, atol=1e-13
    )


@pytest.mark.parametrize("cohorts", [COHORTS, EVERYONE], ids=["some", "everyone"])
@pytest.mark.parametrize("weights", ["uniform", "samples"])
def test_the_server_variate_is_the_mean_of_the_clients(
    cohorts: tuple[Cohort, ...], weights: str
) -> None:
    problem = Quadratic()
    runs = follow(problem, Setting(), cohorts, f"scaffold(weights='{weights}')")
    state, table = runs[-1].states[1], runs[-1].tables[1]
    own = dict(
        zip(
            table.ids,
            np.concatenate([block.numpy() for block in table.column("vector")]),
            strict=True,
        )
    )
    assert sorted(own) == [0, 1, 2, 3, 4]
    mean = reference.shares(problem, sorted(own), weights) @ np.array([own[i] for i in sorted(own)])
    server = state["sum"].numpy() * float(state["seen"]) / (5 * float(state["n"]))
    np.testing.assert_allclose(server, mean, rtol=0, atol=1e-13)


@pytest.mark.parametrize("cohort", [3, 6])
@pytest.mark.parametrize("weights", ["uniform", "samples"])
@pytest.mark.parametrize("more", ["", " + pa3fed(always=True)"])
def test_it_reaches_the_weighted_optimum_with_momentum_decay_and_unequal_steps(
    more: str, weights: str, cohort: int
) -> None:
    problem, steps = Quadratic(sizes=(2, 5, 9, 3, 12, 7)), (2, 4, 3, 1, 5, 2)
    optimum = problem.optimum(reference.shares(problem, range(6), weights), decay=0.01)
    reached = settle(
        problem, f"scaffold(weights='{weights}'){more}", steps=steps, cohort=cohort, rounds_=250
    )
    assert np.abs(reached - optimum).max() < 1e-10


def test_variates_averaged_unlike_the_models_lead_elsewhere() -> None:
    """With one local step and everyone, the corrections no longer cancel in the mean unless sizes
    are equal.
    """
    setting, problem = Setting(batch=100, epochs=1), Quadratic()
    same, other = (
        course(problem, setting, EVERYONE, f"scaffold(weights='{each}')")
        for each in ("samples", "models")
    )
    np.testing.assert_array_equal(same[0], other[0])  # no variates yet
    assert np.linalg.norm(same[-1] - other[-1]) > 1e-3


def test_fedavg_does_not_reach_it() -> None:
    problem, steps = Quadratic(sizes=(2, 5, 9, 3, 12, 7)), (2, 4, 3, 1, 5, 2)
    optimum = problem.optimum(reference.shares(problem, range(6), "samples"), decay=0.01)
    assert (
        np.abs(settle(problem, "fedavg", steps=steps, cohort=6, rounds_=250) - optimum).max() > 1e-2
    )


def test_a_client_alone_is_not_corrected() -> None:
    alone, problem = (Cohort((0,)),) * 4, Quadratic(sizes=(6,))
    plain = course(problem, Setting(), alone, "fedavg")
    np.testing.assert_allclose(
        course(problem, Setting(), alone, "scaffold"), plain, rtol=0, atol=1e-13
    )


@pytest.mark.slow
def test_with_mutants_the_gradients_are_still_the_clients_own() -> None:
    """FedMut starts clients elsewhere than at x; what they moved themselves is counted from there."""
    problem, steps = Quadratic(sizes=(2, 5, 9, 3, 12, 7)), (1, 1, 1, 1, 1, 1)
    optimum = problem.optimum(np.full(6, 1 / 6), decay=0.01)
    reached = settle(problem, "scaffold + fedmut(alpha=0.5)", steps=steps, cohort=4, rounds_=1500)
    assert np.abs(reached - optimum).max() < 1e-10
