"""ALT and MOON compare features under one dropout mask: without drift they are the same, on both
engines.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from test_batched import make_briefs, make_task
from test_lifted import Sequence, Temperature, Tokens, filled
from torch import nn

import kairosfl
from kairosfl.core.fields import Briefs, Reports
from kairosfl.engines.batched import Batched
from kairosfl.engines.loop import Loop
from kairosfl.tasks.task import Task

SHAPE = (2, 6, 6)
ENGINES = (Loop, Batched)


def chain(dropout: float, width: int = 8) -> nn.Module:
    """Features that are zero in half of their places before any of them is dropped."""
    layers = [
        nn.Flatten(),
        nn.Linear(72, width),
        nn.ReLU(),
        nn.Dropout(dropout),
        nn.Linear(width, 3),
    ]
    return nn.Sequential(*layers)


def pooled(dropout: float) -> nn.Module:
    """A ReLU, a pooling and a dropout, which run as one, and further dropout behind a layer."""
    first = [
        nn.Conv2d(2, 4, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Dropout(dropout),
        nn.Flatten(),
    ]
    return nn.Sequential(*first, nn.Linear(36, 8), nn.Tanh(), nn.Dropout(dropout), nn.Linear(8, 3))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "chain": lambda: chain(0.5),
    "pooled": lambda: pooled(0.5),
    "attention": lambda: Tokens(dropout=0.5),
    "depth": lambda: Tokens(depth=0.5),
    "sequence": Sequence,
    "temperature": lambda: Temperature(0.5),
}


def followed(engine: type[Loop] | type[Batched], task: Task, briefs: Briefs) -> Reports:
    trains = engine(task)
    if isinstance(trains, Batched):
        assert trains.stacks, trains.why
    return trains.train(briefs)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("previous", [False, True])
@pytest.mark.parametrize("statistic", ["mean", "min"])
@pytest.mark.parametrize("name", MODELS)
def test_nobody_stops_without_drift(name: str, statistic: str, previous: bool, engine: Any) -> None:
    task = make_task(filled(MODELS[name]()), SHAPE)
    reference = task.start().expand(4, -1) if previous else None
    briefs = make_briefs(
        task,
        lr=1e-9,
        stop_below=0.9999,
        stop_statistic=statistic,
        stop_reference=reference,
        epochs=3,
    )
    reports = followed(engine, task, briefs)
    assert reports.epochs.tolist() == [3.0] * 4
    assert (reports.similarity - 1).abs().max() < 1e-6


@pytest.mark.parametrize("engine", ["loop", "batched"])
def test_alt_trains_all_epochs_where_the_model_does_not_move(engine: str) -> None:
    torch.manual_seed(0)
    data = torch.randn(80, *SHAPE), torch.arange(80) % 3
    recipe = {"clients": 8, "cohort": 4, "rounds": 5, "epochs": 3, "lr": 1e-9, "partition": "iid"}
    model = chain(0.5, width=32)
    history = kairosfl.simulate(
        model, data, data, algorithm="alt", engine=engine, progress=False, **recipe
    )
    assert [row["epochs"] for row in history.metrics] == [3.0] * 5


@pytest.mark.parametrize("engine", ENGINES)
def test_without_drift_a_contrast_is_what_it_is_without_dropout(engine: Any) -> None:
    """The features of the previous model are those of the start with another sign: cosines 1 and
    -1.
    """

    def contrast(dropout: float) -> torch.Tensor:
        model = nn.Sequential(
            nn.Flatten(), nn.Linear(72, 64, bias=False), nn.Dropout(dropout), nn.Linear(64, 3)
        )
        task = make_task(filled(model), SHAPE)
        plain = make_briefs(task, lr=1e-9, momentum=0.0)
        compared = replace(
            plain, contrast=torch.full((4,), 2.0), temperature=0.5, previous=-task.start()
        )
        return followed(engine, task, compared).loss - followed(engine, task, plain).loss

    wanted = torch.full((4,), 2 * math.log1p(math.exp(-2 / 0.5)), dtype=torch.float64)
    for dropout in (0.0, 0.5):
        torch.testing.assert_close(contrast(dropout), wanted, rtol=0, atol=1e-6)


@pytest.mark.parametrize("engine", ENGINES)
def test_both_passes_of_a_sharper_step_see_the_masks_of_the_features_they_are_compared_with(
    engine: Any,
) -> None:
    """At a tiny radius, the second pass is the first one."""
    task = make_task(filled(pooled(0.5)), SHAPE)
    generator = torch.Generator().manual_seed(0)
    previous = task.start() + 0.1 * torch.randn(
        len(task.start()), generator=generator, dtype=torch.float64
    )
    plain = make_briefs(
        task, epochs=1, batch_size=64, momentum=0.0, contrast=5.0, previous=previous
    )
    flat, sharp = (
        followed(engine, task, replace(plain, radius=torch.full((4,), r))) for r in (0.0, 1e-7)
    )
    assert (flat.delta - sharp.delta).norm() < 1e-4 * flat.delta.norm()


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_a_stop_rule_changes_no_mask_and_costs_models_without_dropout_no_pass(
    dropout: float,
) -> None:
    task = make_task(filled(chain(dropout)), SHAPE)
    loop, briefs = Loop(task), make_briefs(task)
    looking = replace(briefs, stop_below=torch.full((4,), -1.0))
    assert torch.equal(loop.train(looking).delta, loop.train(briefs).delta)

    passes: Counter[str] = Counter()
    loop.trainer.model[1].register_forward_hook(lambda *_: passes.update(["model"]))
    loop.trainer.still[1].register_forward_hook(lambda *_: passes.update(["still"]))
    steps = int(loop.train(looking).steps.sum())
    assert passes == ({"model": 2 * steps} if dropout else {"model": steps, "still": 4})
