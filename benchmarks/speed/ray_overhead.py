"""What a round costs beyond its training on engine `ray`: a model of six numbers, one step a
client.

    python benchmarks/speed/ray_overhead.py [--actors 4] [--rounds 200] [--parameters 25_000_000]

With --parameters a random model of that size shows the cost of moving updates; the median round is
printed either way.
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np
import torch
from torch import nn

from kairosfl.core.recipe import Recipe
from kairosfl.core.round import rounds
from kairosfl.core.rule import Algorithm
from kairosfl.core.run import Run, Setup
from kairosfl.detectors import FGN
from kairosfl.engines.loop import Loop
from kairosfl.engines.protocol import Engine
from kairosfl.engines.ray import Ray
from kairosfl.tasks.dataset import DataSet, Samples
from kairosfl.tasks.population import Population
from kairosfl.tasks.task import Task


def task(parameters: int, clients: int) -> Task:
    """One sample a client, one linear layer."""
    width = max(1, parameters // 2 - 1)
    samples = Samples(torch.zeros(clients, width), torch.zeros(clients, dtype=torch.int64))
    population = Population(np.arange(clients), np.arange(clients + 1))
    return Task(nn.Linear(width, 2), DataSet("zeros", samples, samples, 2), population)


def seconds(engine: Engine, task: Task, x: torch.Tensor, cohort: int, count: int) -> list[float]:
    """What `engine.train` takes in each round."""
    recipe = Recipe(rounds=count, cohort=cohort, batch_size=1, lr=0.1)
    setup, taken = (
        Setup(Algorithm(), recipe, len(task.clients), task.layout, detectors=(FGN(),)),
        [],
    )
    course = rounds(Run.start(x, setup, seed=0), setup)
    _, briefs = next(course)
    while briefs is not None:
        began = time.perf_counter()
        reports = engine.train(briefs)
        taken.append(time.perf_counter() - began)
        _, briefs = course.send(reports)
    return taken


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--actors", type=int, default=4)
    parser.add_argument("--cohort", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--parameters", type=int, default=6)
    given = parser.parse_args()
    torch.set_num_threads(1)
    work = task(given.parameters, given.cohort)
    alone = statistics.median(seconds(Loop(work), work, work.start(), given.cohort, given.rounds))
    began = time.perf_counter()
    with Ray(work, actors=given.actors) as engine:
        up = time.perf_counter() - began
        taken = sorted(seconds(engine, work, engine.start(), given.cohort, given.rounds)[3:])
    median, tenth = 1e3 * statistics.median(taken), 1e3 * taken[len(taken) * 9 // 10]
    print(
        f"{given.actors} actors up in {up:.1f} s; {given.cohort} clients, {work.layout.size} parameters"
    )
    print(
        f"a round takes {median:.1f} ms (nine in ten below {tenth:.1f} ms), {1e3 * alone:.1f} ms on engine loop"
    )


if __name__ == "__main__":
    main()
