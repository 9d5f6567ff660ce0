"""`train.optimizer = "adamw"` from the configuration to the model: torch.optim.AdamW per client,
plain averaging.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kairosfl.core.round import drive, rounds
from kairosfl.core.run import Run, Setup
from kairosfl.core.streams import stream
from kairosfl.detectors import FGN
from kairosfl.engines.batched import Batched
from kairosfl.engines.loop import Loop
from kairosfl.runs.config import resolve
from kairosfl.tasks.dataset import DataSet, Samples
from kairosfl.tasks.population import Population
from kairosfl.tasks.task import Task
from kairosfl.tasks.vector import flatten, load

SIZES, SEED = (3, 11, 6, 8, 5), 4
TRAIN = {
    "rounds": 3,
    "cohort": 3,
    "epochs": 2,
    "batch_size": 4,
    "schedule": "exponential",
    "gamma": 0.8,
}
ADAMW = {
    "optimizer": "adamw",
    "lr": 0.05,
    "weight_decay": 0.1,
    "beta1": 0.8,
    "beta2": 0.95,
    "eps": 1e-6,
    "clip": 0.5,
}


@pytest.fixture(scope="module")
def task() -> Task:
    rng = np.random.default_rng(0)
    n = sum(SIZES)
    samples = Samples(
        torch.from_numpy(rng.normal(size=(n, 5))), torch.from_numpy(rng.integers(0, 3, n))
    )
    clients = Population.from_lists(np.split(rng.permutation(n), np.cumsum(SIZES)[:-1]))
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    return Task(model, DataSet("small", samples, samples, classes=3), clients)


def by_hand(task: Task, start: Tensor, t: int, client: int) -> Tensor:
    """The weights of one client after its round, by torch's own optimizer."""
    model, mine = copy.deepcopy(task.model), task.clients[client]
    load(model, start)
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=0.05 * 0.8**t,
        betas=(0.8, 0.95),
        eps=1e-6,
        weight_decay=0.1,
        foreach=False,
    )
    order = stream(SEED, "batches", t, client)
    for _ in range(2):
        for rows in torch.from_numpy(mine[order.permutation(len(mine))]).split(4):
            optimizer.zero_grad()
            F.cross_entropy(
                model(task.dataset.train.inputs[rows]), task.dataset.train.targets[rows]
            ).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
    return flatten(model)


def averaged(task: Task, cohorts: Sequence[Sequence[int]]) -> list[Tensor]:
    """x after every round: the clients' mean by samples."""
    x, course = task.start(), []
    for t, ids in enumerate(cohorts):
        n = torch.tensor([SIZES[i] for i in ids], dtype=torch.float64)
        x = n / n.sum() @ torch.stack([by_hand(task, x, t, i) for i in ids])
        course.append(x)
    return course


@pytest.mark.parametrize("engine", [Loop, Batched])
def test_three_rounds_of_torchs_adamw_and_plain_averaging(
    task: Task, engine: type[Loop] | type[Batched]
) -> None:
    config = resolve({"train": TRAIN | ADAMW})
    setup = Setup(config.algorithm, config.train, len(SIZES), task.layout, detectors=(FGN(),))
    runs = list(drive(rounds(Run.start(task.start(), setup, seed=SEED), setup), engine(task)))
    cohorts = [run.record.ids.tolist() for run in runs if run.record]
    assert len({tuple(ids) for ids in cohorts}) > 1
    for run, x in zip(runs, averaged(task, cohorts), strict=True):
        assert (run.x - x).abs().max() < 1e-10
        assert run.record is not None
        assert run.record.rejected == ()
