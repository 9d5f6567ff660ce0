"""FedAvg on Kairos, engine `loop` or `batched`; a rule of three lines says who trains."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from peers.common import CLASSES, Job, measure
from torch import Tensor

from kairosfl import (
    Algorithm,
    DataSet,
    Loop,
    Population,
    Recipe,
    Round,
    Rule,
    Run,
    Samples,
    Task,
    drive,
    rounds,
)
from kairosfl.core.rule import Memory, Plan
from kairosfl.core.run import Setup
from kairosfl.detectors import FGN


@dataclass(frozen=True)
class Given(Rule):
    """The cohorts of the comparison."""

    cohorts: np.ndarray = field(repr=False)

    def select(self, plan: Plan, memory: Memory, now: Round) -> Plan:
        return replace(plan, ids=self.cohorts[now.number])


def train(job: Job, tick: Callable[[], None]) -> Iterable[Tensor]:
    parser = argparse.ArgumentParser()
    parser.add_argument("--engine", choices=("loop", "batched"), default="loop")
    name = parser.parse_known_args()[0].engine
    work = job.work
    test = Samples(torch.from_numpy(job.test_inputs), torch.from_numpy(job.test_targets))
    dataset = DataSet("peers", Samples(*job.train_tensors), test, CLASSES)
    task = Task(job.model(), dataset, Population.from_lists(list(job.parts)))
    if name == "batched":
        from kairosfl.engines.batched import Batched

        engine: Loop | Batched = Batched(task)
    else:
        engine = Loop(task)
    algorithm = Algorithm((Given(job.cohorts),))
    recipe = Recipe(rounds=job.rounds, cohort=work.cohort, batch_size=work.batch, lr=work.lr)
    setup = Setup(algorithm, recipe, work.clients, task.layout, detectors=(FGN(),))
    course = rounds(Run.start(engine.start(), setup, seed=0), setup)
    for run in drive(course, engine):  # noqa: B007
        tick()
    return [view for _, view in task.layout.views(run.x)]


if __name__ == "__main__":
    measure(train)
