"""Engine `ray`: the same bits as one process, and what a dead or raising actor costs."""

from __future__ import annotations

import copy
import os
import signal
import socket
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch
from asking import ASKED, EVERYONE, check_same, course, line
from torch import nn

from kairosfl.core.fields import AFTER, BEFORE, FISHER, Briefs, Reports
from kairosfl.core.recipe import Recipe
from kairosfl.core.round import drive, result, rounds
from kairosfl.core.run import Run, Setup
from kairosfl.detectors import FGN
from kairosfl.engines.cluster import Cluster
from kairosfl.engines.loop import Loop
from kairosfl.engines.ray import Ray, expected_steps, shards
from kairosfl.errors import UserError
from kairosfl.rules import parse
from kairosfl.tasks.dataset import DataSet, Samples
from kairosfl.tasks.population import Population
from kairosfl.tasks.task import Task

CLIENTS = 8


@pytest.fixture(scope="module")
def task() -> Task:
    """Eight clients with 3, 6, ... 24 points of three classes in the plane."""
    generator = np.random.default_rng(0)
    sizes = [3 * (i + 1) for i in range(CLIENTS)]
    inputs = torch.from_numpy(generator.normal(size=(sum(sizes), 2)).astype(np.float32))
    targets = torch.from_numpy(generator.integers(0, 3, sum(sizes)))
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    samples = Samples(inputs, targets)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 3))
    return Task(
        model, DataSet("points", samples, samples, 3), Population(np.arange(sum(sizes)), offsets)
    )


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    """One small Ray for all tests, and one torch thread as in the actors."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for name in (__name__, "asking"):  # which actors cannot import
        ray.cloudpickle.register_pickle_by_value(sys.modules[name])
    for last in (False, False, True):
        try:
            ray.init(
                num_cpus=8,
                include_dashboard=False,
                log_to_driver=False,
                object_store_memory=100 << 20,
            )
            break
        except Exception:  # Ray gives itself 30 s, which a busy machine may not have
            ray.shutdown()
            if last:
                raise
    yield
    ray.shutdown()
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def engine(task: Task) -> Iterator[Ray]:
    with Ray(task, actors=2) as engine:
        yield engine


def orders(task: Task, ids: list[int], epochs: int = 2) -> Briefs:
    return Briefs(
        seed=1,
        round=3,
        ids=torch.tensor(ids),
        start=task.start(),
        lr=0.1,
        momentum=0.9,
        weight_decay=0.0,
        clip=float("inf"),
        batch_size=4,
        epochs=epochs,
        scale=1.0,
        pull=0.0,
    )


def same(a: Reports, b: Reports) -> None:
    for name in (
        "ids",
        "n",
        "steps",
        "epochs",
        "delta",
        "loss",
        "grad_sq",
        "similarity",
        "fisher",
        *BEFORE,
        *AFTER,
    ):
        left, right = getattr(a, name), getattr(b, name)
        assert (left is None) == (right is None), name
        assert left is None or torch.equal(left, right), name


def test_shards_are_balanced_by_steps() -> None:
    # Longest first to the lightest: 9 | 7; 7+4 | 9; 9+3 | 11; 11+2 | 12; 12+1 | 13.
    parts = shards(np.array([1, 9, 4, 3, 7, 2]), 2)
    assert [part.tolist() for part in parts] == [[0, 1, 3], [2, 4, 5]]


def test_no_more_shards_than_clients() -> None:
    assert [part.tolist() for part in shards(np.array([2, 1]), 4)] == [[0], [1]]


def test_expected_steps(task: Task) -> None:
    # Clients 0, 2 and 7 have 3, 9 and 24 samples: 1, 3 and 6 batches of 4, twice.
    assert expected_steps(orders(task, [0, 2, 7]), task.clients.sizes).tolist() == [2, 6, 12]


@pytest.mark.parametrize(
    "text",
    [
        "scaffold + fedcl + alt + pa3fed",
        "budget(share=0.7) + average(share=1)",
        "moon",
        "fedmut",
        "fedyogi",
        "fedavgm + privacy(clip=0.1)",
        "scaffold + localprivacy(clip=0.1)",
    ],
)
def test_the_bits_of_the_loop_engine(task: Task, engine: Ray, text: str) -> None:
    algorithm = parse(text)
    recipe = Recipe(rounds=4, cohort=5, epochs=3, batch_size=4, lr=0.1, momentum=0.5)
    setup, ends = Setup(algorithm, recipe, CLIENTS, task.layout, detectors=(FGN(),)), []
    for one in (Loop(task), engine):
        run = Run.start(one.start(), setup, seed=2)
        course = rounds(run, setup)
        ends.append([(result(run, setup), run.record.rejected) for run in drive(course, one)])
    for (x, rejected), (y, also) in zip(*ends, strict=True):
        assert torch.equal(x, y)
        assert rejected == also == ()
    assert not torch.equal(y, task.start())


@pytest.mark.parametrize(
    "changes", [{"optimizer": "adamw", "weight_decay": 0.1, "beta1": 0.5}, {"momentum": 0.5}]
)
def test_adamw_and_a_radius_arrive(task: Task, engine: Ray, changes: dict[str, Any]) -> None:
    recipe = Recipe(rounds=2, cohort=5, epochs=2, batch_size=4, lr=0.1, clip=0.5, **changes)
    ends = []
    for one, text in (
        (Loop(task), "fedsam(rho=0.3)"),
        (engine, "fedsam(rho=0.3)"),
        (engine, "fedavg"),
    ):
        setup = Setup(parse(text), recipe, CLIENTS, task.layout, detectors=(FGN(),))
        *_, run = drive(rounds(Run.start(one.start(), setup, seed=2), setup), one)
        ends.append(run.x)
    assert torch.equal(ends[0], ends[1])
    assert not torch.equal(ends[1], ends[2])


@pytest.mark.slow
def test_a_frozen_part_is_every_actors_and_stays_as_it_is(task: Task) -> None:
    model = copy.deepcopy(task.model)
    model[0].requires_grad_(False)
    part = replace(task, model=model)
    briefs = orders(part, list(range(CLIENTS)))
    with Ray(part, actors=2) as engine:
        found, x = engine.train(briefs), engine.start()
        assert found.delta.shape == (CLIENTS, 18)
        assert torch.equal(found.delta, Loop(part).train(briefs).delta)
        assert engine.evaluate(x) == Loop(part).evaluate(x)


@pytest.mark.parametrize(
    "asked", [{*BEFORE, *AFTER}, pytest.param({FISHER}, marks=pytest.mark.slow)]
)
def test_measurements(task: Task, engine: Ray, asked: set[str]) -> None:
    briefs = replace(orders(task, [1, 3, 4, 6]), measure=frozenset(asked))
    same(Loop(task).train(briefs), engine.train(briefs))


def test_evaluation(task: Task, engine: Ray) -> None:
    loop, x = Loop(task), task.start()
    assert loop.evaluate(x) == engine.evaluate(x)
    assert np.array_equal(loop.evaluate_clients(x), engine.evaluate_clients(x))


class Dies(Loop):
    """Dies on client 7: at the first try only, or at every try while the file `always` is there."""

    def __init__(self, task: Task, device: torch.device, *, marks: Path) -> None:
        self.marks = marks
        super().__init__(task, device)

    def train(self, briefs: Briefs) -> Reports:
        if 7 in briefs.ids and (
            (self.marks / "always").exists() or not (self.marks / "died").exists()
        ):
            (self.marks / "died").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        return super().train(briefs)


class Raises(Loop):
    """Raises on client 7, and on anybody who is to train five epochs."""

    def train(self, briefs: Briefs) -> Reports:
        if 7 in briefs.ids or (briefs.epochs == 5).any():
            raise ArithmeticError("seven is too many\nand a second line")
        return super().train(briefs)


class Refuses(Loop):
    def __init__(self, task: Task, device: torch.device) -> None:
        raise UserError("this engine is closed.")


@pytest.mark.slow
def test_a_killed_actor_costs_only_its_shard(task: Task, tmp_path: Path) -> None:
    briefs, loop = orders(task, [0, 2, 5, 7]), Loop(task)
    with Ray(task, actors=2, make=partial(Dies, marks=tmp_path)) as engine:
        same(loop.train(briefs), engine.train(briefs))  # died once, done elsewhere
        (tmp_path / "always").touch()
        reports = engine.train(briefs)
        # 7 takes 12 steps; 5 (10), 2 (6) and 0 (2) balance as 7, 0 against 5, 2.
        assert reports.failed == (
            (0, "its actor died (second try)"),
            (7, "its actor died (second try)"),
        )
        same(loop.train(orders(task, [2, 5])), reports)
        (tmp_path / "always").unlink()
        same(loop.train(briefs), engine.train(briefs))  # both actors were replaced


@pytest.mark.slow
def test_a_raising_shard_fails_and_the_others_go_on(task: Task) -> None:
    with Ray(task, actors=2, make=Raises) as engine:
        reports = engine.train(orders(task, [0, 2, 5, 7]))
        reason = "it raised ArithmeticError: seven is too many (second try)"
        assert reports.failed == ((0, reason), (7, reason))
        same(Loop(task).train(orders(task, [2, 5])), reports)
        with pytest.raises(ArithmeticError, match="seven is too many"):
            engine.train(orders(task, [1, 2], epochs=5))


def test_a_cluster_that_is_lost_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket(socket.AF_UNIX) as raylet, socket.socket() as head:
        raylet.bind(str(tmp_path / "raylet"))
        raylet.listen()
        head.bind(("127.0.0.1", 0))
        head.listen()
        address = f"127.0.0.1:{head.getsockname()[1]}"
        cluster = Cluster({"raylet_socket_name": str(tmp_path / "raylet"), "gcs_address": address})
        cluster.check()
        head.close()
        cluster.check()  # it may be restarting
        monkeypatch.setattr("kairosfl.engines.cluster.SILENT", 0.0)
        with pytest.raises(
            UserError,
            match=rf"Ray cluster at {address} is lost: its head node has not answered for 0 s",
        ):
            cluster.check()
        cluster.check(now=False)  # looked a moment ago
    with pytest.raises(
        UserError,
        match=r"the raylet, does not answer; .* `kairosfl resume` continues from the last",
    ):
        cluster.check()


@pytest.mark.slow
def test_mistakes_reach_the_user(task: Task) -> None:
    with pytest.raises(UserError, match=r"this engine is closed\."):
        Ray(task, actors=1, make=Refuses)
    with pytest.raises(UserError, match=r"run\.actors = 0 must"):
        Ray(task, actors=0)
    with pytest.raises(
        UserError, match=r"run\.actors = 2 with 0\.5 GPUs each need 1 GPUs, but the cluster has 0"
    ):
        Ray(task, actors=2, gpus=0.5)


@pytest.mark.parametrize("own", [(), ("b",)])
def test_what_a_brief_can_ask_beyond_plain_training(own: tuple[str, ...]) -> None:
    task = line(own)
    with Ray(task, actors=2) as engine:
        for name, (rule, parts) in ASKED.items():
            if parts != own:
                continue
            loop = course(rule, task, Loop(task))
            actors = course(rule, task, engine)
            check_same(loop, actors)
            for field, rows in loop[-1].kept.rows(EVERYONE).items():
                assert torch.equal(rows, actors[-1].kept.rows(EVERYONE)[field]), (name, field)
