"""Equal weights against the reference, alone and with other rules, and their identity."""

from __future__ import annotations

import numpy as np
import pytest
import reference
import torch
from problems import course
from reference import COHORTS, Network, Quadratic, Setting

from kairosfl.core.recipe import Recipe
from kairosfl.core.round import drive, rounds
from kairosfl.core.run import Run, Setup
from kairosfl.data import load
from kairosfl.detectors import FGN
from kairosfl.engines.batched import Batched
from kairosfl.engines.loop import Loop
from kairosfl.errors import UserError
from kairosfl.models import build
from kairosfl.rules import Uniform, parse
from kairosfl.tasks.population import Population
from kairosfl.tasks.task import Task
from kairosfl.testing import check_rule


@pytest.mark.parametrize("problem", [Quadratic(), Network()], ids=["quadratic", "network"])
def test_six_rounds(problem: reference.Problem) -> None:
    expected = reference.fedavg(problem, Setting(), COHORTS, weights="uniform")
    np.testing.assert_allclose(
        course(problem, Setting(), COHORTS, "uniform"), expected, rtol=0, atol=1e-13
    )
    expected = reference.fedprox(problem, Setting(), COHORTS, mu=0.3, weights="uniform")
    found = course(problem, Setting(), COHORTS, "fedprox(mu=0.3) + uniform")
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-13)


def test_it_is_refused_with_a_rule_that_weights_equally() -> None:
    for text in ("scaffold + uniform", "uniform + scaffold", "uniform + krum"):
        with pytest.raises(
            UserError, match="counts all clients equally already; leave uniform out"
        ):
            parse(text)
    assert len(parse("scaffold(weights='samples') + uniform").rules) == 2


@pytest.mark.parametrize("engine", [Loop, Batched])
@pytest.mark.parametrize("sizes", [(40,) * 6, (20, 60, 40, 40, 50, 30)])
def test_with_equal_sizes_it_is_fedavg_to_the_bit(
    engine: type[Loop | Batched], sizes: tuple[int, ...]
) -> None:
    data, clients = load("digits"), Population(np.arange(240), np.cumsum([0, *sizes]))
    task = Task(build("mlp", shape=data.shape, classes=data.classes, seed=0), data, clients)
    ended = []
    for text in ("fedavg", "uniform"):
        setup = Setup(
            parse(text),
            Recipe(rounds=2, cohort=4, lr=0.1),
            len(clients),
            task.layout,
            detectors=(FGN(),),
        )
        *_, run = drive(rounds(Run.start(task.start(), setup, seed=0), setup), engine(task))
        ended.append(run)
    assert torch.equal(ended[0].x, ended[1].x) == (len({*sizes}) == 1)
    assert ended[1].record.weights.tolist() == [0.25] * 4


def test_the_contract() -> None:
    check_rule(Uniform())
    assert str(parse("uniform")) == "uniform"
