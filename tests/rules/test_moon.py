"""MOON against the reference, whose gradient of the contrastive term is worked out by hand."""

from __future__ import annotations

import numpy as np
import pytest
import reference
from problems import course, follow
from reference import COHORTS, Network, Quadratic, Setting

from kairosfl.errors import UserError


@pytest.mark.parametrize(("mu", "temperature"), [(1.0, 0.5), (5.0, 0.2)])
def test_six_rounds(mu: float, temperature: float) -> None:
    problem = Network()
    expected = reference.moon(problem, Setting(), COHORTS, mu=mu, temperature=temperature)
    text = f"moon(mu={mu}, temperature={temperature})"
    np.testing.assert_allclose(
        course(problem, Setting(), COHORTS, text), expected, rtol=0, atol=1e-12
    )
    assert np.abs(np.array(expected) - reference.fedavg(problem, Setting(), COHORTS)).max() > 1e-3


def test_mu_zero_is_fedavg_to_the_bit() -> None:
    plain = course(Network(), Setting(), COHORTS, "fedavg")
    assert np.array_equal(course(Network(), Setting(), COHORTS, "moon(mu=0)"), plain)


def test_a_first_turn_is_fedavg_to_the_bit() -> None:
    plain = course(Network(), Setting(), COHORTS[:1], "fedavg")
    assert np.array_equal(course(Network(), Setting(), COHORTS[:1], "moon(mu=5)"), plain)


def test_the_last_local_models_are_kept_of_those_who_reported() -> None:
    problem, setting = Network(), Setting()
    table = follow(problem, setting, COHORTS[:2], "moon")[-1].tables[1]
    assert table.ids == [0, 1, 2, 3]  # client 1 from round 0; its second report was lost
    first = reference.train(problem, setting, 0, 1, problem.x).w
    kept = np.concatenate([block.numpy() for block in table.column("model")])
    np.testing.assert_allclose(kept[1], first, rtol=0, atol=1e-13)


def test_a_model_without_features_is_refused() -> None:
    with pytest.raises(UserError, match=r"has no nn\.Linear"):
        course(Quadratic(), Setting(), COHORTS, "moon")
