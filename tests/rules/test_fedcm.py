"""FedCM against the reference."""

from __future__ import annotations

import numpy as np
import pytest
import reference
from problems import course, follow
from reference import COHORTS, Cohort, Network, Quadratic, Setting


@pytest.mark.parametrize("problem", [Quadratic(), Network()], ids=["quadratic", "network"])
@pytest.mark.parametrize("weights", ["uniform", "samples"])
@pytest.mark.parametrize(
    ("alpha", "lr", "decay"), [(0.1, 1.0, False), (0.4, 0.8, False), (0.4, 0.8, True)]
)
def test_six_rounds(
    problem: reference.Problem, weights: str, alpha: float, lr: float, decay: bool
) -> None:
    expected = reference.fedcm(
        problem, Setting(), COHORTS, alpha=alpha, lr=lr, weights=weights, decay=decay
    )
    text = f"fedcm(alpha={alpha}, lr={lr}, weights='{weights}', decay={decay})"
    np.testing.assert_allclose(
        course(problem, Setting(), COHORTS, text), expected, rtol=0, atol=1e-13
    )


def test_alpha_one_is_fedavg_to_the_bit() -> None:
    plain = course(Network(), Setting(), COHORTS, "fedavg")
    assert np.array_equal(
        course(Network(), Setting(), COHORTS, "fedcm(alpha=1, weights='samples')"), plain
    )


def test_plain_sgd_broadcasts_the_mean_gradient_per_step() -> None:
    """Δ = −(1/|S|) Σ Δ_i / (K_i · lr), as the paper has it."""
    problem, setting = Quadratic(), Setting(momentum=0.0, decay=0.0)
    run = follow(problem, setting, COHORTS[:1], "fedcm(alpha=0.5)")[0]
    locals_ = [
        reference.train(problem, setting, 0, i, problem.x, lambda g, w: 0.5 * g) for i in (0, 1, 2)
    ]
    want = np.mean([(problem.x - local.w) / (local.steps * setting.lr) for local in locals_], 0)
    np.testing.assert_allclose(run.states[1]["momentum"].numpy(), want, rtol=0, atol=1e-13)


def test_weight_decay_stays_out_of_the_broadcast_direction() -> None:
    """One step, so nothing but alpha · ∇f may be in it, whatever the decay."""
    problem, setting = Quadratic(), Setting(batch=100, epochs=1, decay=0.3)
    run = follow(problem, setting, (Cohort((0, 1)),), "fedcm(alpha=0.5)")[0]
    want = np.mean(
        [0.5 * problem.gradient(i, np.arange(problem.n[i]), problem.x) for i in (0, 1)], 0
    )
    np.testing.assert_allclose(run.states[1]["momentum"].numpy(), want, rtol=0, atol=1e-13)


def test_weight_decay_that_stays_in_it_grows_to_one_part_in_alpha() -> None:
    """Without a gradient and with little movement, Δ = (1 − alpha) Δ + decay · x settles at decay /
    alpha · x.
    """
    problem, setting = (
        Quadratic(),
        Setting(batch=100, epochs=1, decay=0.3, momentum=0.0, lr=1e-6, gamma=1.0),
    )
    ids = range(len(problem.n))
    plain, kept = (
        follow(problem, setting, (Cohort(tuple(ids)),) * 60, f"fedcm(alpha=0.2, decay={decay})")[
            -1
        ].states[1]
        for decay in ("false", "true")
    )
    added = kept["momentum"] - plain["momentum"]
    np.testing.assert_allclose(added.numpy(), 0.3 / 0.2 * problem.x, rtol=1e-3)


def test_nor_does_it_enter_from_mutants() -> None:
    """Clients that start elsewhere than at x decay from where they start."""
    problem, setting = Quadratic(), Setting(batch=100, epochs=1, decay=0.3, gamma=1.0)
    runs = follow(problem, setting, (Cohort((0, 1)),) * 2, "fedmut(alpha=3) + fedcm(alpha=0.5)")
    first = runs[0].states[2]["momentum"].numpy()
    starts = reference.mutants(
        problem, setting, 1, 2, runs[0].x.numpy(), problem.x, alpha=3, rate=0.3, bound=50
    )
    want = np.mean(
        [
            0.5 * problem.gradient(i, np.arange(problem.n[i]), starts[i]) + 0.5 * first
            for i in (0, 1)
        ],
        0,
    )
    np.testing.assert_allclose(runs[1].states[2]["momentum"].numpy(), want, rtol=0, atol=1e-12)
