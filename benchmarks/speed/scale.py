"""A simulated federation of 100,000 clients in rotation: time, memory, and what a client's row
costs.

    python benchmarks/speed/scale.py [--clients 100000] [--cohort 500] [--algorithm scaffold]

Every client trains once: clients / cohort rounds. The model is a linear layer on 60 features, as
for the synthetic data of the FedProx paper; 20 samples a client. A checkpoint is written and
measured at the end.
"""

from __future__ import annotations

import argparse
import resource
import time
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch
from torch import nn

from kairosfl.core.recipe import Recipe
from kairosfl.core.round import rounds
from kairosfl.core.rule import Memory, Plan, Rule
from kairosfl.core.run import Round, Run, Setup
from kairosfl.detectors import FGN
from kairosfl.engines.loop import Loop
from kairosfl.rules import parse
from kairosfl.runs.checkpoint import Checkpoints
from kairosfl.tasks.dataset import DataSet, Samples
from kairosfl.tasks.population import Population
from kairosfl.tasks.task import Task

FEATURES, CLASSES, EACH = 60, 10, 20


@dataclass(frozen=True)
class Rotation(Rule):
    """Clients train in turn."""

    def select(self, plan: Plan, memory: Memory, now: Round) -> Plan:
        first = now.number * now.cohort
        return replace(plan, ids=np.arange(first, first + now.cohort) % now.population)


def federation(clients: int) -> Task:
    """Every client has its own linear labels, as a mixture of ten kinds of clients."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(clients * EACH, FEATURES, generator=generator)
    kinds = torch.randn(10, FEATURES, CLASSES, generator=generator)
    kind = torch.arange(clients).repeat_interleave(EACH) % 10
    targets = torch.empty(clients * EACH, dtype=torch.int64)
    for i in range(10):
        mine = kind == i
        targets[mine] = (inputs[mine] @ kinds[i]).argmax(1)
    train = Samples(inputs, targets)
    test = Samples(inputs[: 500 * EACH], targets[: 500 * EACH])
    population = Population(
        np.arange(clients * EACH, dtype=np.int32), np.arange(clients + 1) * EACH
    )
    torch.manual_seed(0)
    return Task(nn.Linear(FEATURES, CLASSES), DataSet("mixture", train, test, CLASSES), population)


def resident() -> float:
    """Mebibytes of memory that this process holds."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS"):
            return int(line.split()[1]) / 1024  # KiB
    return float("nan")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, default=100_000)
    parser.add_argument("--cohort", type=int, default=500)
    parser.add_argument("--algorithm", default="scaffold")
    given = parser.parse_args()
    torch.set_num_threads(1)
    began = time.perf_counter()
    task = federation(given.clients)
    engine = Loop(task)
    algorithm = Rotation() + parse(given.algorithm)
    recipe = Recipe(
        rounds=given.clients // given.cohort, cohort=given.cohort, batch_size=10, lr=0.05
    )
    setup = Setup(algorithm, recipe, given.clients, task.layout, detectors=(FGN(),))
    run = Run.start(engine.start(), setup, seed=0)
    print(
        f"{given.clients} clients, {len(task.dataset.train)} samples, {task.layout.size} parameters, {algorithm}"
    )
    print(f"ready in {time.perf_counter() - began:.1f} s, {resident():.0f} MiB resident")
    before, training, serving = resident(), 0.0, 0.0
    course = rounds(run, setup)
    run, briefs = next(course)
    while briefs is not None:
        began = time.perf_counter()
        reports = engine.train(briefs)
        middle = time.perf_counter()
        run, briefs = course.send(reports)
        training, serving = training + middle - began, serving + time.perf_counter() - middle
        if run.round % max(1, recipe.rounds // 5) == 0:
            scores = engine.evaluate(run.x)
            rows = sum(len(table) for table in run.tables)
            print(
                f"round {run.round:5d}: accuracy {scores.accuracy:.3f}, {rows} rows, {resident():.0f} MiB resident"
            )
    trained = recipe.rounds * given.cohort
    print(
        f"training {1e3 * training / trained:.2f} ms a client, server {1e6 * serving / trained:.0f} us a report"
    )
    print(f"memory grew by {1024 * (resident() - before) / trained:.2f} KiB a client")
    with TemporaryDirectory() as folder:
        checkpoints = Checkpoints(Path(folder))
        for which in ("all rows", "no new rows"):
            began = time.perf_counter()
            checkpoints.save(run, {})
            size = sum(path.stat().st_size for path in Path(folder).iterdir()) / 1e6
            print(
                f"checkpoint with {which}: {time.perf_counter() - began:.1f} s, {size:.0f} MB on disk"
            )
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"peak memory {peak:.0f} MiB")


if __name__ == "__main__":
    main()
