"""FedMut against the reference."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import reference
import torch
from problems import course, settle, settling
from reference import COHORTS, Cohort, Network, Quadratic, Setting

from kairosfl.core.fields import Briefs
from kairosfl.core.layout import Entry, Layout
from kairosfl.core.recipe import Recipe
from kairosfl.core.rule import Algorithm, Memory
from kairosfl.core.run import Run, Setup, upcoming
from kairosfl.core.table import Table
from kairosfl.detectors import FGN
from kairosfl.rules import FedMut
from kairosfl.rules.fedmut import undone


@pytest.mark.parametrize("weights", ["uniform", "samples"])
@pytest.mark.parametrize(("alpha", "bound"), [(4.0, 50), (1.5, 2)])
def test_six_rounds_with_cohorts_of_many_sizes(weights: str, alpha: float, bound: int) -> None:
    """Odd and even cohorts, a lost mutant, a lost round: the mutants are dealt anew for whoever is
    asked.
    """
    problem = Quadratic()
    expected = reference.fedmut(
        problem, Setting(), COHORTS, alpha=alpha, rate=0.3, bound=bound, weights=weights
    )
    text = f"fedmut(alpha={alpha}, bound={bound}, weights='{weights}')"
    np.testing.assert_allclose(
        course(problem, Setting(), COHORTS, text), expected, rtol=0, atol=1e-12
    )


def test_the_mean_of_the_trained_mutants_while_nobody_fails() -> None:
    """The paper's own line, by hand."""
    problem, setting, everyone = Quadratic(), Setting(), (0, 1, 2, 3, 4)
    x = last = problem.x
    expected = []
    for t in range(4):
        starts = reference.mutants(problem, setting, t, 5, x, last, alpha=2, rate=0.3, bound=50)
        last, x = (
            x,
            np.mean([reference.train(problem, setting, t, i, starts[i]).w for i in everyone], 0),
        )
        expected.append(x)
    reached = course(problem, setting, (Cohort(everyone),) * 4, "fedmut(alpha=2)")
    np.testing.assert_allclose(reached, expected, rtol=0, atol=1e-12)


STEPS = (2, 4, 3, 1, 5, 2)


@pytest.mark.parametrize(
    ("text", "alone"),
    [
        ("fedmut(weights='samples')", "fedavg"),
        ("fedmut + pa3fed(always=True)", "fedmut(alpha=0)"),
    ],
)
@pytest.mark.parametrize(
    "steps", [STEPS, pytest.param((40,) * 6, marks=pytest.mark.slow)]
)  # clients who hardly move, and who forget where they began
def test_it_does_not_run_away_where_weights_differ(
    text: str, alone: str, steps: tuple[int, ...]
) -> None:
    problem = Quadratic(sizes=(2, 5, 9, 3, 12, 7))
    reached, plain = (
        settle(problem, each, steps=steps, cohort=6, rounds_=300) for each in (text, alone)
    )
    np.testing.assert_allclose(reached, plain, rtol=0, atol=1e-9)


@pytest.mark.parametrize(
    "momentum", ["fedavgm(beta=0.9)", pytest.param("fednova(momentum=0.9)", marks=pytest.mark.slow)]
)
def test_momentum_does_not_gather_what_mutants_lean_forward(momentum: str) -> None:
    """The lean of 0.6 Δ and a momentum of 0.9 would be more than the last step."""
    problem = Quadratic(sizes=(5,) * 6)
    alone, *both = (
        settling(problem, text, steps=(2,) * 6, cohort=6, rounds_=250, lr=0.005)
        for text in (momentum, f"fedmut + {momentum}", f"{momentum} + fedmut")
    )
    for reached in both:
        assert np.abs(reached[[9, 19, 29, 39, -1]]).max() < 3 * np.abs(problem.x).max()
        np.testing.assert_allclose(reached[-1], alone[-1], rtol=0, atol=1e-3)


def test_what_training_undid_is_found_by_least_squares() -> None:
    away = torch.tensor([[4.0, 4.0], [-2.0, -2.0], [0.0, 0.0]], dtype=torch.float64)
    for part in (0.0, 0.3, 1.0):
        assert undone(away, -part * away + 5.0) == pytest.approx(part)
    assert undone(away, -2.0 * away) == 1.0
    assert undone(away, away) == 0.0
    assert undone(away[:1], -0.3 * away[:1]) == pytest.approx(0.3)  # one reporter
    assert undone(torch.zeros(2, 2).double(), away[:2]) == 0.0


@pytest.mark.parametrize("rule", ["vrlsgd", "scaffold"])
def test_beside_rules_that_correct_drift_the_optimum_is_reached_whatever_the_weights(
    rule: str,
) -> None:
    problem = Quadratic(sizes=(2, 5, 9, 3, 12, 7))
    reached = settle(problem, f"{rule} + fedmut + pa3fed", steps=STEPS, cohort=6, rounds_=250)
    optimum = problem.optimum(reference.shares(problem, range(6), "uniform"), decay=0.01)
    assert np.abs(reached - optimum).max() < 1e-10


def test_without_mutation_it_is_fedavg_to_the_bit() -> None:
    plain = course(Network(), Setting(), COHORTS, "fedavg")
    assert np.array_equal(
        course(Network(), Setting(), COHORTS, "fedmut(alpha=0, weights='samples')"), plain
    )


def test_a_client_alone_is_not_mutated() -> None:
    alone, problem = (Cohort((0,)),) * 4, Quadratic(sizes=(6,))
    plain = course(problem, Setting(), alone, "fedavg")
    np.testing.assert_allclose(
        course(problem, Setting(), alone, "fedmut"), plain, rtol=0, atol=1e-14
    )


@pytest.mark.parametrize(("number", "rho"), [(1, 0.3), (26, 0.15), (51, 0.0), (80, 0.0)])
def test_the_mutants_lean_forward_early_and_centre_later(number: int, rho: float) -> None:
    """Their mean is x + alpha · rho / 2 · Δ, and a tensor of a mutant lies at +alpha Δ or −alpha (1
    − rho) Δ.
    """
    x, last, m = (
        torch.arange(4.0, dtype=torch.float64),
        torch.full((4,), 0.5, dtype=torch.float64),
        6,
    )
    layout = Layout((Entry("a", (3,), 0), Entry("b", (1,), 3)))
    setup = Setup(Algorithm(), Recipe(rounds=100, cohort=m), m, layout, detectors=(FGN(),))
    now = upcoming(replace(Run.start(x, setup, seed=0), round=number), setup)
    briefs = Briefs(seed=0, round=number, ids=torch.arange(m), start=x, lr=0.1)
    mutants = FedMut(alpha=4).brief(briefs, Memory({"previous": last}, {}, Table({})), now)
    mutants = x + mutants.offset
    torch.testing.assert_close(mutants.mean(0), x + 4 * rho / 2 * (x - last), rtol=0, atol=1e-12)
    signs = (mutants - x) / (4 * (x - last))
    torch.testing.assert_close(signs[:, 0], signs[:, 2], rtol=0, atol=1e-12)  # one tensor, one sign
    for tensor in (signs[:, 0], signs[:, 3]):
        want = torch.tensor([-(1 - rho)] * 3 + [1.0] * 3, dtype=torch.float64)
        torch.testing.assert_close(tensor.sort().values, want, rtol=0, atol=1e-12)
