"""Samples that are read when they are needed: random transforms, memory maps, chained clients,
other engines.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from kairosfl import simulate
from kairosfl.data.own import from_any
from kairosfl.engines.batched import Batched
from kairosfl.tasks.dataset import Samples
from kairosfl.tasks.population import Population
from kairosfl.tasks.streamed import Streamed, of_items, seeded
from kairosfl.tasks.task import Task

RANDOM = torch.Generator().manual_seed(0)
X, Y = torch.randn(60, 6, generator=RANDOM), torch.arange(60) % 3
PLAIN = TensorDataset(X, Y)
FEW: Any = {"engine": "loop", "progress": False}
SHORT: Any = {
    "clients": 5,
    "rounds": 2,
    "epochs": 2,
    "batch_size": 4,
    "cohort": 3,
    "progress": False,
}


class Noisy(Dataset[Any]):
    """Adds noise from every generator that transforms use."""

    def __init__(self, count: int = 60) -> None:
        self.count, self.reads = count, 0

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int) -> tuple[Tensor, int]:
        self.reads += 1
        return X[number % 60] + 0.1 * (torch.rand(6) + float(np.random.rand())), int(Y[number % 60])


def net() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))


@pytest.mark.parametrize("engine", ["loop", "batched"])
def test_reading_batch_by_batch_changes_no_bit(engine: str) -> None:
    wanted = simulate(net(), (X, Y), (X, Y), engine=engine, **SHORT)
    for lazy in (True, False):
        found = simulate(net(), PLAIN, (X, Y), engine=engine, lazy=lazy, **SHORT)
        assert torch.equal(found.x, wanted.x)


def test_random_transforms_are_drawn_anew_and_are_a_function_of_the_seed() -> None:
    data = from_any(Noisy(), (X, Y))
    assert isinstance(data.train, Streamed)  # without being asked for
    assert isinstance(from_any(PLAIN, (X, Y)).train, Samples)
    (once, again), rows = (
        ([data.train.read(torch.arange(3), torch.arange(3) + shift)[0] for shift in (0, 9)]),
        3,
    )
    assert not torch.equal(once, again)
    assert torch.equal(once, data.train.read(torch.arange(rows), torch.arange(rows))[0])
    loop, batched, other = (
        simulate(net(), Noisy(), (X, Y), engine=engine, seed=seed, **SHORT).x
        for engine, seed in (("loop", 0), ("batched", 0), ("loop", 1))
    )
    assert torch.allclose(loop, batched, rtol=1e-5, atol=1e-6)
    assert not torch.allclose(loop, other, rtol=1e-3)
    frozen = simulate(net(), Noisy(), (X, Y), lazy=False, engine="loop", **SHORT).x
    assert not torch.allclose(loop, frozen, rtol=1e-3)


def test_a_stopped_run_continues_to_the_same_bits(tmp_path: Path) -> None:
    settings = {**SHORT, "rounds": 4, "checkpoint_every": 1, "engine": "loop"}
    whole = simulate(net(), Noisy(), (X, Y), out=tmp_path / "whole", **settings)
    stop = {**settings, "on_round": lambda history: len(history.metrics) < 2}
    simulate(net(), Noisy(), (X, Y), out=tmp_path / "parts", **stop)
    assert torch.equal(
        simulate(net(), Noisy(), (X, Y), out=tmp_path / "parts", **settings).x, whole.x
    )


def test_a_memory_map_is_not_read_into_memory(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", X.numpy())
    mapped = np.load(tmp_path / "x.npy", mmap_mode="r")
    data = from_any((mapped, Y), (X, Y))
    assert isinstance(data.train, Streamed)
    assert data.labels_of_train is not None
    found = simulate(net(), (mapped, Y), (mapped, Y), engine="loop", **SHORT)
    assert torch.equal(found.x, simulate(net(), (X, Y), (X, Y), engine="loop", **SHORT).x)


def test_clients_that_are_read_lazily_are_chained() -> None:
    owners = [
        torch.arange(0, 25),
        torch.arange(25, 26),
        torch.arange(26, 60),
    ]  # one client has a single sample
    settings = {key: value for key, value in SHORT.items() if key != "clients"}
    parts = [TensorDataset(X[rows], Y[rows]) for rows in owners]
    found, wanted = (
        simulate(net(), parts, (X, Y), lazy=lazy, engine="loop", **settings).x
        for lazy in (True, False)
    )
    assert torch.equal(found, wanted)


def test_nothing_is_read_that_no_one_needs() -> None:
    data = Noisy(6000)
    lists = [np.arange(0, 30), np.arange(30, 60)]
    simulate(net(), data, (X, Y), clients=lists, rounds=1, cohort=1, epochs=1, classes=3, **FEW)
    assert data.reads < 150  # one client's samples, and a few to see what they are


def test_the_engine_says_what_reading_costs() -> None:
    streamed = of_items(
        PLAIN,
        lambda items: (torch.stack([x for x, _ in items]), torch.stack([y for _, y in items])),
    )
    data = from_any(streamed, (X, Y), classes=3)
    engine = Batched(Task(net(), data, Population.from_lists([np.arange(60)])))
    assert "samples are read batch by batch" in engine.why


def test_seeding_leaves_the_generators_as_they_were() -> None:
    before = torch.rand(1), np.random.rand()
    torch.manual_seed(7), np.random.seed(7)
    wanted = torch.rand(2), np.random.rand(2)
    torch.manual_seed(7), np.random.seed(7)
    found = [torch.rand(1)], [np.random.rand()]
    with seeded(3):
        torch.rand(5), np.random.rand(5)
    found[0].append(torch.rand(1)), found[1].append(np.random.rand())
    assert before is not None
    assert torch.equal(torch.cat(found[0]), wanted[0])
    assert found[1] == wanted[1].tolist()
