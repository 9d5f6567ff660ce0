"""An engine that is dropped frees its memory, however its model runs: a sweep has many, one after
another.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
from test_batched import MODELS, _variants, make_briefs, make_task, named
from test_batched_fallbacks import BatchStatistics, Branches
from test_batched_sequences import _task as sequence
from test_batched_sequences import _Weights
from test_lifted import SHAPE, Functional, Loops, Tokens, filled

import zoo
from kairosfl.engines.batched import Batched
from kairosfl.tasks.task import Task

WAYS: dict[str, Callable[[], Task]] = {
    "tokens": lambda: make_task(filled(Tokens()), SHAPE),
    "checkpointed": lambda: make_task(filled(Tokens(again=True)), SHAPE),
    "functional": lambda: make_task(filled(Functional()), SHAPE),
    "loops": lambda: make_task(filled(Loops()), (zoo.LENGTH,), tokens=zoo.VOCABULARY),
    "vmap": lambda: sequence(_Weights()),
    "batch statistics": lambda: make_task(BatchStatistics().double(), SHAPE),
    "branches": lambda: make_task(Branches().double(), SHAPE),
}


LARGE = ("alexnet", "vgg11", "resnet50", "checkpointed")  # not part of CI


def trained(task: Task, **changes: Any) -> list[weakref.ref[Any]]:
    """What must be gone with the engine."""
    engine = Batched(task)
    reports = engine.train(make_briefs(task, **changes))
    engine.evaluate(task.start())
    held: list[Any] = [engine, reports.delta]
    if engine._slots is not None:
        held += [engine._slots.state, engine._slots.state.w]
    return [weakref.ref(each) for each in held]


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * (name in LARGE)) for name in (*MODELS, *WAYS)],
)
def test_every_model_is_freed(name: str) -> None:
    held = trained(WAYS[name]() if name in WAYS else named(name))
    gc.collect()
    assert all(each() is None for each in held)


@pytest.mark.parametrize("variant", list(_variants(named("cnn"))))
def test_every_brief_is_freed(variant: str) -> None:
    held = trained(task := named("cnn"), **_variants(task)[variant])
    gc.collect()
    assert all(each() is None for each in held)
