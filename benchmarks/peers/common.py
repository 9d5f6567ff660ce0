"""What the frameworks compared here share: two workloads, their models, and how a run is measured.

Everyone gets the same samples, the same partition, the same initial weights and the same cohorts,
and is judged by the same code at the end. A script defines `train(job, tick)`, calls `tick()` after
every round and returns the weights.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import sys
import time
import zlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from unittest.mock import MagicMock

import numpy as np
import torch
from torch import Tensor, nn

CLASSES = 10
TEST_SAMPLES = 2000


@dataclass(frozen=True)
class Workload:
    """FedAvg with plain SGD, one local epoch, every client with the same number of samples."""

    shape: tuple[int, ...]
    clients: int
    samples: int  # of one client
    cohort: int
    rounds: int
    batch: int
    lr: float
    separation: float  # how far the classes lie apart
    noise: float = 0.0  # share of the labels, of the test samples too, that say nothing


WORKLOADS = {
    "tiny": Workload(
        shape=(64,),
        clients=1000,
        samples=10,
        cohort=100,
        rounds=50,
        batch=10,
        lr=0.1,
        separation=3.0,
    ),
    "cnn": Workload(
        shape=(3, 32, 32),
        clients=100,
        samples=128,
        cohort=10,
        rounds=6,
        batch=64,
        lr=0.05,
        separation=45.0,
        noise=0.2,
    ),
}


@dataclass(frozen=True)
class Job:
    """Data of a workload, from a fixed seed. Client i owns the samples `parts[i]`; in round r train
    `cohorts[r]`.
    """

    work: Workload
    rounds: int
    inputs: np.ndarray = field(repr=False)
    targets: np.ndarray = field(repr=False)
    test_inputs: np.ndarray = field(repr=False)
    test_targets: np.ndarray = field(repr=False)
    parts: np.ndarray = field(repr=False)
    cohorts: np.ndarray = field(repr=False)

    @classmethod
    def make(cls, work: Workload, rounds: int) -> Job:
        rng = np.random.Generator(np.random.Philox(key=5))
        centres = _centres(rng, work.shape) * work.separation
        total = work.clients * work.samples
        targets = rng.integers(0, CLASSES, total + TEST_SAMPLES)
        inputs = rng.standard_normal((len(targets), *work.shape), dtype=np.float32)
        inputs += centres[targets]
        parts = rng.permutation(total).reshape(work.clients, work.samples)
        cohorts = [
            np.sort(rng.choice(work.clients, work.cohort, replace=False)) for _ in range(rounds)
        ]
        rng = np.random.Generator(
            np.random.Philox(key=6)
        )  # another: the labels must not depend on the rounds
        wrong = rng.random(len(targets)) < work.noise
        targets[wrong] = rng.integers(0, CLASSES, int(wrong.sum()))
        return cls(
            work,
            rounds,
            inputs[:total],
            targets[:total],
            inputs[total:],
            targets[total:],
            parts,
            np.stack(cohorts),
        )

    def model(self) -> nn.Sequential:
        """A new model, always with the same weights."""
        torch.manual_seed(0)
        if len(self.work.shape) == 1:
            return nn.Sequential(nn.Linear(*self.work.shape, 32), nn.ReLU(), nn.Linear(32, CLASSES))
        features = (
            nn.Conv2d(3, 32, 5),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 5),
            nn.ReLU(),
            nn.MaxPool2d(2),
        )
        return nn.Sequential(
            *features, nn.Flatten(), nn.Linear(1600, 512), nn.ReLU(), nn.Linear(512, CLASSES)
        )

    @cached_property
    def train_tensors(self) -> tuple[Tensor, Tensor]:
        return torch.from_numpy(self.inputs), torch.from_numpy(self.targets)

    @torch.no_grad()
    def accuracy(self, weights: Iterable[Tensor]) -> float:
        """On the test samples."""
        model = self.model()
        for parameter, value in zip(model.parameters(), weights, strict=True):
            parameter.copy_(torch.as_tensor(value))
        outputs = torch.cat(
            [model(chunk) for chunk in torch.from_numpy(self.test_inputs).split(500)]
        )
        return float((outputs.argmax(1) == torch.from_numpy(self.test_targets)).double().mean())

    def checksum(self) -> int:
        """Of all that is the same for everyone."""
        arrays = (
            self.inputs,
            self.targets,
            self.test_inputs,
            self.test_targets,
            self.parts,
            self.cohorts,
        )
        value = 0
        for array in (*arrays, *(p.detach().numpy() for p in self.model().parameters())):
            value = zlib.crc32(np.ascontiguousarray(array).data, value)
        return value


def _centres(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Directions in which the classes lie; of images as squares of 8 by 8 pixels, which a
    convolution can see.
    """
    side = 8 if len(shape) == 3 else 1
    coarse = shape if side == 1 else (shape[0], shape[1] // side, shape[2] // side)
    centres = rng.standard_normal((CLASSES, *coarse), dtype=np.float32)
    centres /= np.sqrt((centres**2).sum(tuple(range(1, centres.ndim)), keepdims=True)) * side
    for axis in range(2, centres.ndim):
        centres = centres.repeat(side, axis)
    return centres


def without_torchvision() -> None:
    """Let a framework import torchvision, of which nothing is used here, where it is not installed."""
    for name in ("", ".datasets", ".models", ".models.resnet", ".transforms", ".utils"):
        sys.modules["torchvision" + name] = MagicMock()


def descendants() -> list[Path]:
    """The folders in /proc of the processes that this one started, directly or not."""
    parents: dict[int, list[int]] = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(entry.read_text().rpartition(")")[2].split()[1])
        except OSError:  # it has ended meanwhile
            continue
        parents.setdefault(parent, []).append(int(entry.parent.name))
    found, todo = [], [os.getpid()]
    while todo:
        children = parents.get(todo.pop(), [])
        found += children
        todo += children
    return [Path("/proc", str(pid)) for pid in found]


def cpu_seconds() -> float:
    """User and system time of this process and of all its descendants, ended or not."""
    total = 0.0
    for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN):
        usage = resource.getrusage(who)
        total += usage.ru_utime + usage.ru_stime
    for process in descendants():
        try:
            fields = (process / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        total += sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")
    return total


def peak_mebibytes() -> float:
    """The largest memory of this process and of its living descendants, summed."""
    total = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    for process in descendants():
        try:
            lines = (process / "status").read_text().splitlines()
        except OSError:
            continue
        total += sum(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmHWM"))
    return total


Train = Callable[[Job, Callable[[], None]], Iterable[Tensor]]


def measure(train: Train) -> None:
    """Run `train` as the command line says and write what it took.

    A round's cost is counted from the end of the first round, so that compiling, connecting and the
    first touch of the memory stand under start-up: seconds from the start of the process to the end
    of the first round.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("workload", choices=WORKLOADS)
    parser.add_argument("out", type=Path)
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--began", type=float, default=time.time())
    options, _ = parser.parse_known_args()
    torch.set_num_threads(options.threads)
    work = WORKLOADS[options.workload]
    job = Job.make(work, options.rounds or work.rounds)
    ends: list[tuple[float, float, float]] = []
    ticks = 0

    def tick() -> None:
        nonlocal ticks
        ticks += 1
        if ticks in (1, job.rounds):
            ends.append((cpu_seconds(), time.time(), peak_mebibytes()))

    weights = [torch.as_tensor(value).detach() for value in train(job, tick)]
    if ticks != job.rounds:
        raise RuntimeError(f"{ticks} rounds were run instead of {job.rounds}.")
    (cpu_first, wall_first, _), (cpu_last, wall_last, memory) = ends
    result = {
        "cpu_seconds_per_round": (cpu_last - cpu_first) / (job.rounds - 1),
        "wall_seconds_per_round": (wall_last - wall_first) / (job.rounds - 1),
        "start_up_seconds": wall_first - options.began,
        "start_up_cpu_seconds": cpu_first,
        "peak_mebibytes": memory,
        "accuracy": job.accuracy(weights),
        "checksum": job.checksum(),
    }
    partial = options.out.with_suffix(".partial")
    partial.write_text(json.dumps(result))
    os.replace(partial, options.out)
