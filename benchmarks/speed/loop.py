"""The loop engine against a tight hand-written loop, and what a large population costs.

Ratios of CPU seconds, measured in one run.

    python benchmarks/speed/loop.py
"""

from __future__ import annotations

import argparse
import copy
import resource
import statistics
import time

import numpy as np
import torch
import torch.nn.functional as F

from kairosfl import Loop, Recipe, Run, Task, drive, models, parse, rounds
from kairosfl.core.run import Setup
from kairosfl.data import load
from kairosfl.detectors import FGN
from kairosfl.tasks.partitions import iid
from kairosfl.tasks.prepare import prepare


def task_of(
    model: str, clients: int, samples: int, shape: tuple[int, ...], **options: object
) -> Task:
    size = {"shape": shape} if len(shape) == 3 else {"features": shape[0]}
    dataset = load("synthetic", samples=samples * clients, classes=10, seed=0, **size)
    population = iid(dataset.train.targets.numpy(), clients, 0)
    return Task(
        models.build(model, shape=dataset.shape, classes=10, seed=0, **options), dataset, population
    )


def by_hand(task: Task, recipe: Recipe, count: int) -> float:
    """FedAvg as one would write it in a notebook when in a hurry for speed: seconds for `count`
    rounds.
    """
    model = copy.deepcopy(task.model)
    inputs, targets = task.dataset.train.inputs, task.dataset.train.targets
    x = torch.nn.utils.parameters_to_vector(model.parameters()).detach().clone()
    rng = np.random.default_rng(0)
    began = time.process_time()
    for _ in range(count):
        cohort = np.sort(rng.choice(len(task.clients), recipe.cohort, replace=False))
        sizes = torch.tensor([len(task.clients[int(c)]) for c in cohort], dtype=torch.float32)
        total = torch.zeros_like(x)
        for client, weight in zip(cohort, sizes / sizes.sum(), strict=True):
            torch.nn.utils.vector_to_parameters(x, model.parameters())
            optimiser = torch.optim.SGD(model.parameters(), lr=recipe.lr, momentum=recipe.momentum)
            mine = torch.from_numpy(task.clients[int(client)].astype(np.int64))
            for _ in range(recipe.epochs):
                for batch in mine[torch.randperm(len(mine))].split(recipe.batch_size):
                    loss = F.cross_entropy(
                        model(prepare(inputs[batch], task.dataset)), targets[batch]
                    )
                    optimiser.zero_grad()
                    loss.backward()
                    optimiser.step()
            total += weight * torch.nn.utils.parameters_to_vector(model.parameters()).detach()
        x = total
    return time.process_time() - began


def by_kairos(task: Task, recipe: Recipe, count: int) -> float:
    """The same rounds on the loop engine, signals and checks included."""
    engine, setup = (
        Loop(task),
        Setup(parse("fedavg"), recipe, len(task.clients), task.layout, detectors=(FGN(),)),
    )
    course = drive(rounds(Run.start(engine.start(), setup, seed=0), setup), engine)
    began = time.process_time()
    for _ in range(count):
        next(course)
    return time.process_time() - began


def side_by_side(task: Task, recipe: Recipe, count: int, repeats: int) -> tuple[float, float]:
    """Median seconds a round of both, taken in turns so that whatever else the machine does hits
    both.
    """
    hand, ours = [], []
    by_hand(task, recipe, 1), by_kairos(task, recipe, 1)
    for _ in range(repeats):
        hand.append(by_hand(task, recipe, count) / count)
        ours.append(by_kairos(task, recipe, count) / count)
    return statistics.median(hand), statistics.median(ours)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--clients", type=int, default=10**6, help="of the large population")
    options = parser.parse_args()

    torch.set_num_threads(options.threads)
    cnn = task_of("cnn", 100, 128, (3, 32, 32))
    recipe = Recipe(rounds=10**6, cohort=10, batch_size=64, lr=0.01, momentum=0.9)
    hand, ours = side_by_side(cnn, recipe, 1, options.repeats)
    print(
        f"2-conv CNN, 10 of 100 clients, batch 64: by hand {hand:.3f} s a round, loop {ours:.3f} s, "
        f"ratio {ours / hand:.3f}"
    )

    torch.set_num_threads(1)
    tiny = task_of("mlp", 1000, 10, (64,), hidden=(32,))
    recipe = Recipe(rounds=10**6, cohort=100, batch_size=10, lr=0.1)
    hand, ours = side_by_side(tiny, recipe, 10, options.repeats)
    print(
        f"tiny MLP, 100 of 1,000 clients: by hand {1e3 * hand:.1f} ms a round, loop {1e3 * ours:.1f} ms, "
        f"overhead {1e3 * (ours - hand) / 100:+.3f} ms a client"
    )

    small, large = (
        task_of("mlp", 1000, 4, (16,), hidden=(16,)),
        task_of("mlp", options.clients, 4, (16,), hidden=(16,)),
    )
    few, many = [], []
    for _ in range(options.repeats):
        few.append(by_kairos(small, recipe, 20) / 20)
        many.append(by_kairos(large, recipe, 20) / 20)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    ratio = statistics.median(many) / statistics.median(few)
    print(
        f"{options.clients:,} clients against 1,000, 100 a round: ratio of round times {ratio:.3f}; ",
        end="",
    )
    print(f"peak memory {peak:.2f} GiB")


if __name__ == "__main__":
    main()
