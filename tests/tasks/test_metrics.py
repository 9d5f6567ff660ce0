"""Which samples a classifier has right, with one logit as with many; a task of one logit on both
engines.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kairosfl.core.fields import FISHER, Briefs
from kairosfl.core.recipe import Recipe
from kairosfl.core.round import drive, rounds
from kairosfl.core.run import Run, Setup
from kairosfl.detectors import FGN
from kairosfl.engines.batched import Batched
from kairosfl.engines.loop import Loop
from kairosfl.errors import UserError
from kairosfl.rules import parse
from kairosfl.runs import experiment
from kairosfl.runs.config import resolve
from kairosfl.runs.files import read_lines
from kairosfl.tasks.dataset import DataSet, Samples
from kairosfl.tasks.metrics import correct, named
from kairosfl.tasks.population import Population
from kairosfl.tasks.task import Task


def test_the_highest_score_or_the_sign_of_the_only_one() -> None:
    targets = torch.tensor([0, 1, 0, 1])
    logits = torch.tensor([-2.0, 0.5, 3.0, -0.1])
    wanted = [True, True, False, False]
    assert correct(logits, targets).tolist() == wanted
    assert correct(logits[:, None], targets).tolist() == wanted
    assert correct(logits[:, None], targets.float()).tolist() == wanted
    assert correct(torch.stack([-logits, logits], 1), targets).tolist() == wanted


def test_no_metric_has_the_name_of_another_column(tmp_path: Path) -> None:
    """Every column of a run with rules that record numbers; a metric of that name would be
    overwritten.
    """
    tables = {"data": {"clients": 6}, "model": {"hidden": [4]}, "train": {"rounds": 1, "cohort": 2}}
    columns = {"loss", "hypothetical_epsilon"}
    for i, text in enumerate(("privacy(noise=1.0, quantile=0.5, epsilon=1e6)", "fedaware")):
        experiment.start(resolve({**tables, "algorithm": text}), tmp_path / str(i))
        columns |= {*next(read_lines(tmp_path / str(i) / "metrics.jsonl"))}
    for name in columns - {"accuracy"}:
        with pytest.raises(UserError, match=f"metrics cannot have the name '{name}'"):
            named({name: correct})


def binary(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.binary_cross_entropy_with_logits(
        outputs.flatten(), targets.to(outputs.dtype), reduction="none"
    )


def task_of(*last: nn.Module) -> Task:
    """Two groups of points, three clients; targets int64, one logit."""
    rng = np.random.default_rng(0)
    targets = torch.from_numpy(rng.integers(0, 2, 60))
    inputs = torch.from_numpy(rng.normal(size=(60, 3))) + 2 * targets[:, None]
    samples = Samples(inputs, targets)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1), *last).double()
    clients = Population.from_lists(np.split(np.arange(60), [10, 30]))
    return Task(model, DataSet("groups", samples, samples, 2), clients, loss=binary)


@pytest.mark.parametrize("last", [(), (nn.Flatten(0),)], ids=["[n, 1]", "[n]"])
def test_a_classifier_with_one_logit_from_end_to_end(last: tuple[nn.Module, ...]) -> None:
    task = task_of(*last)
    found = []
    for engine in (Loop(task), Batched(task)):
        algorithm, recipe = parse("fedprox"), Recipe(rounds=15, cohort=3, lr=0.2, batch_size=10)
        setup = Setup(algorithm, recipe, 3, task.layout, detectors=(FGN(),))
        run = Run.start(engine.start(), setup, seed=0)
        for after in drive(rounds(run, setup), engine):
            run = after
        scores = engine.evaluate(run.x)
        assert scores.accuracy > 0.9
        assert scores.loss < 0.3
        by_hand = (engine.predict(run.x, task.dataset.test.inputs).flatten() > 0) == (
            task.dataset.test.targets == 1
        )
        assert scores.accuracy == float(by_hand.double().mean())
        assert np.average(
            engine.evaluate_clients(run.x), weights=task.clients.sizes
        ) == pytest.approx(scores.accuracy)
        found.append(run.x)
    assert (found[0] - found[1]).norm() <= 1e-10 * found[0].norm()


@pytest.mark.parametrize("last", [(), (nn.Flatten(0),)], ids=["[n, 1]", "[n]"])
def test_the_fisher_trace_of_one_logit_is_that_of_a_coin(last: tuple[nn.Module, ...]) -> None:
    """E Σ_c p_c ‖∂ log p_c‖² = p (1 − p) ‖∂ logit‖²."""
    task = task_of(*last)
    briefs = Briefs(
        seed=0,
        round=0,
        ids=torch.arange(3),
        start=task.start(),
        **dict.fromkeys(("lr", "momentum", "weight_decay", "clip", "scale", "pull"), 0.1),
        **dict.fromkeys(("batch_size", "epochs"), 1),
    )
    briefs = replace(briefs, measure=frozenset({FISHER}))
    for client, trace in enumerate(Loop(task).train(briefs).fisher.tolist()):
        wanted = []
        for sample in task.clients[client]:
            logit = task.model(task.dataset.train.inputs[sample][None]).flatten()[0]
            slopes = torch.autograd.grad(logit, list(task.model.parameters()))
            p = float(logit.detach().sigmoid())
            wanted.append(p * (1 - p) * sum(float(slope.square().sum()) for slope in slopes))
        assert trace == pytest.approx(np.mean(wanted), rel=1e-10)
