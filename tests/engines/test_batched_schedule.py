"""The order of samples, worked out a round ahead: the same run whether the guess holds or not."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from kairosfl.core.fields import Briefs
from kairosfl.core.recipe import Recipe
from kairosfl.core.round import drive, rounds
from kairosfl.core.run import Run, Setup
from kairosfl.engines.batched import Batched
from kairosfl.engines.batched import schedule as scheduling
from kairosfl.engines.batched.schedule import Draw, Schedule, Schedules
from kairosfl.engines.loop import Loop
from kairosfl.rules import parse
from kairosfl.tasks.dataset import DataSet, Samples
from kairosfl.tasks.models import build
from kairosfl.tasks.population import Population
from kairosfl.tasks.task import Task

CLIENTS = 12


@pytest.fixture
def task() -> Task:
    rng = np.random.default_rng(0)
    samples = Samples(torch.from_numpy(rng.normal(size=(90, 5)).astype(np.float32)), torch.arange(90) % 3)
    cuts = np.array([0, *np.sort(rng.choice(np.arange(1, 90), CLIENTS - 1, replace=False)), 90])
    model = build("mlp", shape=(5,), classes=3, seed=1, hidden=(4,))
    return Task(model, DataSet("random", samples, samples, 3), Population(rng.permutation(90), cuts))


def asked(schedules: Schedules, draw: Draw, monkeypatch: pytest.MonkeyPatch) -> tuple[Schedule, bool]:
    """A schedule, and whether it was known before."""
    made: list[Draw] = []
    whole = Schedules._made
    with monkeypatch.context() as patch:
        patch.setattr(Schedules, "_made", lambda self, draw: made.append(draw) or whole(self, draw))
        return schedules(draw), not made


def test_the_next_round_is_known_until_a_guess_is_wrong(task: Task, monkeypatch: pytest.MonkeyPatch) -> None:
    schedules = Schedules(torch.device("cpu"), drops=True)
    first = Draw(task, 3, 0, (0, 4, 7), (2,) * 3, (2,) * 3, False)
    for draw in (first, first.next(), first._replace(seed=4, round=9)):  # the last one belongs to another run
        schedules.foresee(draw)
        found, known = asked(schedules, draw.next(), monkeypatch)
        fresh, _ = asked(Schedules(torch.device("cpu"), drops=True), draw.next(), monkeypatch)
        assert known
        assert torch.equal(found.order, fresh.order)
        assert found.drops == fresh.drops
        schedules.foresee(draw)
    elsewhere = first._replace(seed=5)
    assert not asked(schedules, elsewhere, monkeypatch)[1]
    schedules.foresee(elsewhere)
    changed = elsewhere.next()._replace(epochs=(1, 2, 3))
    assert not asked(schedules, changed, monkeypatch)[1]
    schedules.foresee(changed)
    assert not asked(schedules, changed.next(), monkeypatch)[1]


@pytest.mark.parametrize("text", ["fedavg", "fedcl", "fedaware(explore=true)"])
def test_a_run_is_the_same_to_the_bit_without_guessing(task: Task, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = Recipe(rounds=6, cohort=4, epochs=2, batch_size=3, lr=0.05, drop_last=text == "fedcl")
    setup = Setup(parse(text), recipe, CLIENTS, task.layout)
    ends, right = [], []
    whole = Schedules.__call__

    def call(self: Schedules, draw: Draw) -> Schedule:
        right.append(self._ahead is not None and self._ahead[0] == draw)
        return whole(self, draw)

    monkeypatch.setattr(scheduling.Schedules, "__call__", call)
    for _ in range(2):
        engine = Batched(task)
        for seed in (5, 6):
            *_, end = drive(rounds(Run.start(engine.start(), setup, seed=seed), setup), engine)
            ends.append(end.x)
        monkeypatch.setattr(scheduling.Schedules, "foresee", lambda self, draw: None)
    assert torch.equal(torch.stack(ends[:2]), torch.stack(ends[2:]))
    assert not any(right[12:])
    if text == "fedavg":
        assert right[:12] == [False, *[True] * 5] * 2


def test_another_partition_has_its_own_order(task: Task, monkeypatch: pytest.MonkeyPatch) -> None:
    other = replace(task, clients=Population(task.clients.order[::-1].copy(), task.clients.offsets))
    schedules = Schedules(torch.device("cpu"), drops=False)
    draw = Draw(task, 3, 0, (0, 4, 7), (2,) * 3, (2,) * 3, False)
    schedules.foresee(draw)
    found, known = asked(schedules, draw.next()._replace(task=other), monkeypatch)
    assert not known
    assert [mine.tolist() for mine in found.mine] == [other.clients[client].tolist() for client in draw.next().clients]


@pytest.mark.parametrize(
    ("text", "changes", "options"),
    [
        ("fedavg", {}, {}),
        ("scaffold + average", {"momentum": 0.5}, {"slots": 3}),
        ("fedcl", {}, {"deterministic": True}),
        ("alt(reference='previous')", {"epochs": 3}, {}),
    ],
)
def test_a_cohort_that_begins_before_the_last_round_is_evaluated_is_the_same_to_the_bit(
    task: Task, text: str, changes: dict, options: dict
) -> None:
    recipe = Recipe(**{"rounds": 5, "cohort": 4, "epochs": 2, "batch_size": 5, "lr": 0.05, **changes})
    setup = Setup(parse(text), recipe, CLIENTS, task.layout)
    ends: list[list[torch.Tensor]] = []
    for overlaps in (False, True):
        engine = Batched(task, **options)
        engine._overlaps = overlaps  # as on a GPU
        ends.append([])
        for run in drive(rounds(Run.start(engine.start(), setup, seed=5), setup), engine):
            assert (engine._begun is not None) is (overlaps and run.round < 5)
            reports = run.record.reports
            ends[-1] += [run.x, reports.delta, reports.loss, torch.tensor(engine.evaluate(run.x).loss)]
    assert [each.numpy().tobytes() for each in ends[0]] == [each.numpy().tobytes() for each in ends[1]]


def test_a_cohort_that_was_begun_in_vain_is_in_nobodys_way(task: Task) -> None:
    engine = Batched(task)
    engine._overlaps = True
    told = [Briefs(seed=9, round=r, ids=torch.arange(5), start=task.start(), lr=0.1, batch_size=4) for r in range(4)]
    engine.train(told[0])
    engine.begin(told[1])
    other = engine.train(told[2])
    engine.begin(told[1])
    both = engine.train_many([(task, told[3]), (task, told[0])])
    for found, briefs in zip((other, *both), (told[2], told[3], told[0]), strict=True):
        torch.testing.assert_close(found.delta, Loop(task).train(briefs).delta)
    assert engine.stacks, engine.why
