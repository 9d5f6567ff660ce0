"""FedMut against the reference."""

from __future__ import annotations

import numpy as np
import pytest
import reference
import torch
from problems import course
from reference import COHORTS, Cohort, Network, Quadratic, Setting

from kairosfl.briefs import Briefs, column
from kairosfl.round import Round
from kairosfl.rules import FedMut
from kairosfl.signals import Signals
from kairosfl.tasks.vector import Entry, Layout


@pytest.mark.parametrize("weights", ["uniform", "samples"])
@pytest.mark.parametrize(("alpha", "bound"), [(4.0, 50), (1.5, 2)])
def test_six_rounds_with_cohorts_of_many_sizes(weights: str, alpha: float, bound: int) -> None:
    """Odd and even cohorts, a lost mutant, a lost round: the mutants are dealt anew for whoever is asked."""
    problem = Quadratic()
    expected = reference.fedmut(problem, Setting(), COHORTS, alpha=alpha, rate=0.3, bound=bound, weights=weights)
    text = f"fedmut(alpha={alpha}, bound={bound}, weights='{weights}')"
    np.testing.assert_allclose(course(problem, Setting(), COHORTS, text), expected, rtol=0, atol=1e-12)


def test_without_mutation_it_is_fedavg_to_the_bit() -> None:
    plain = course(Network(), Setting(), COHORTS, "fedavg")
    assert np.array_equal(course(Network(), Setting(), COHORTS, "fedmut(alpha=0, weights='samples')"), plain)


def test_a_client_alone_is_not_mutated() -> None:
    alone, problem = (Cohort((0,)),) * 4, Quadratic(sizes=(6,))
    plain = course(problem, Setting(), alone, "fedavg")
    np.testing.assert_allclose(course(problem, Setting(), alone, "fedmut"), plain, rtol=0, atol=1e-14)


@pytest.mark.parametrize(("number", "rho"), [(1, 0.3), (26, 0.15), (51, 0.0), (80, 0.0)])
def test_the_mutants_lean_forward_early_and_centre_later(number: int, rho: float) -> None:
    """Their mean is x + alpha · rho / 2 · Δ, and a tensor of a mutant lies at +alpha Δ or −alpha (1 − rho) Δ."""
    x, last, m = torch.arange(4.0, dtype=torch.float64), torch.full((4,), 0.5, dtype=torch.float64), 6
    briefs = Briefs(
        seed=0,
        round=number,
        ids=torch.arange(m),
        start=x,
        **{name: column(0.0, m) for name in ("lr", "momentum", "weight_decay", "clip", "scale", "pull")},
        **{name: column(1, m, torch.int64) for name in ("batch_size", "epochs")},
    )
    now = Round(
        number=number,
        rounds=100,
        clients=m,
        cohort=m,
        x=x,
        lr=0.1,
        layout=Layout((Entry("a", (3,), 0), Entry("b", (1,), 3))),
        signals=Signals(),
        rules=(),
        seed=0,
    )
    mutants = FedMut(alpha=4).brief(briefs, {"previous": last}, {}, now).start
    torch.testing.assert_close(mutants.mean(0), x + 4 * rho / 2 * (x - last), rtol=0, atol=1e-12)
    signs = (mutants - x) / (4 * (x - last))
    torch.testing.assert_close(signs[:, 0], signs[:, 2], rtol=0, atol=1e-12)  # one tensor, one sign
    for tensor in (signs[:, 0], signs[:, 3]):
        want = torch.tensor([-(1 - rho)] * 3 + [1.0] * 3, dtype=torch.float64)
        torch.testing.assert_close(tensor.sort().values, want, rtol=0, atol=1e-12)
