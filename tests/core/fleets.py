"""A small task, and runs of it on a fleet."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from kairosfl.core.clock import Fleet
from kairosfl.core.recipe import Recipe
from kairosfl.core.round import drive, rounds
from kairosfl.core.rule import Algorithm, Memory, Plan, Rule
from kairosfl.core.run import Round, Run, Setup
from kairosfl.core.traits import Traits
from kairosfl.engines.batched import Batched
from kairosfl.engines.loop import Loop
from kairosfl.engines.protocol import Engine
from kairosfl.tasks.dataset import DataSet, Samples
from kairosfl.tasks.population import Population
from kairosfl.tasks.task import Task

CLIENTS = 12
SIZES = np.array([4, 9, 6, 12, 5, 8, 7, 10, 3, 11, 6, 9])


def task() -> Task:
    """Unequal clients of three classes."""
    draw = np.random.default_rng(0)
    count = int(SIZES.sum())
    targets = torch.from_numpy(draw.integers(0, 3, count))
    inputs = torch.from_numpy(draw.standard_normal((count, 5))).float()
    inputs[torch.arange(count), targets] += 2
    samples = Samples(inputs, targets)
    model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))
    start = torch.from_numpy(draw.standard_normal(39)).float() / 2
    nn.utils.vector_to_parameters(start, model.parameters())
    clients = Population.from_lists(np.split(np.arange(count), np.cumsum(SIZES)[:-1]))
    return Task(model, DataSet("fleet", samples, samples, classes=3), clients)


ENGINES: dict[str, Callable[[Task], Engine]] = {
    "loop": Loop,
    "batched": lambda job: Batched(job, deterministic=True),
}


def lognormal(**changes: Any) -> Fleet:
    """Devices of very different speeds."""
    speeds = np.exp(np.random.default_rng(7).standard_normal(CLIENTS))
    return Fleet(CLIENTS, **{"seconds": speeds, **changes})


@dataclass(frozen=True, kw_only=True)
class Waits(Rule):
    """Plans how the server waits, with these words of the plan."""

    words: tuple[tuple[str, Any], ...] = ()

    def traits(self) -> Traits:
        return Traits(late=True)

    def select(self, plan: Plan, memory: Memory, now: Round) -> Plan:
        return replace(plan, **dict(self.words))


def waits(**words: Any) -> Algorithm:
    """An algorithm that only plans how the server waits."""
    return Algorithm((Waits(words=tuple(words.items())),))


def setup_of(algorithm: Algorithm, fleet: Fleet | None, number: int = 8, **recipe: Any) -> Setup:
    """A run of the task on a fleet."""
    job = task()
    settings = {"cohort": 4, "epochs": 2, "batch_size": 4, "lr": 0.2, **recipe}
    return Setup(
        algorithm,
        Recipe(rounds=number, **settings),
        CLIENTS,
        job.layout,
        sizes=job.clients.sizes,
        fleet=fleet,
    )


def runs_of(
    algorithm: Algorithm,
    fleet: Fleet | None,
    engine: str = "loop",
    number: int = 8,
    run: Run | None = None,
    **recipe: Any,
) -> list[Run]:
    """The run after every round."""
    job = task()
    setup = setup_of(algorithm, fleet, number, **recipe)
    begin = run or Run.start(job.start(), setup, seed=5)
    return list(drive(rounds(begin, setup), ENGINES[engine](job)))


def landings(runs: list[Run]) -> list[tuple[float, list[int]]]:
    """When every round ended, and who landed in it."""
    return [(run.time, run.record.ids.tolist()) for run in runs if run.record]
