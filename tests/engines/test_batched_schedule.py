"""The order of samples, worked out a round ahead: the same run whether the guess holds or not."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from kairosfl.core.fields import Briefs, Reports
from kairosfl.core.recipe import Recipe
from kairosfl.core.round import drive, rounds
from kairosfl.core.run import Run, Setup
from kairosfl.detectors import FGN
from kairosfl.engines.batched import Batched
from kairosfl.engines.batched import engine as batched_engine
from kairosfl.engines.batched import schedule as scheduling
from kairosfl.engines.batched.ahead import identical
from kairosfl.engines.batched.jobs import Ticket
from kairosfl.engines.batched.schedule import Draw, Schedule, Schedules
from kairosfl.engines.loop import Loop
from kairosfl.models import build
from kairosfl.rules import parse
from kairosfl.tasks.dataset import DataSet, Samples
from kairosfl.tasks.population import Population
from kairosfl.tasks.task import Task

CLIENTS = 12


@pytest.fixture
def task() -> Task:
    rng = np.random.default_rng(0)
    samples = Samples(
        torch.from_numpy(rng.normal(size=(90, 5)).astype(np.float32)), torch.arange(90) % 3
    )
    cuts = np.array([0, *np.sort(rng.choice(np.arange(1, 90), CLIENTS - 1, replace=False)), 90])
    model = build("mlp", shape=(5,), classes=3, seed=1, hidden=(4,))
    return Task(
        model, DataSet("random", samples, samples, 3), Population(rng.permutation(90), cuts)
    )


def asked(
    schedules: Schedules, draw: Draw, monkeypatch: pytest.MonkeyPatch
) -> tuple[Schedule, bool]:
    """A schedule, and whether it was known before."""
    made: list[Draw] = []
    whole = Schedules._made
    with monkeypatch.context() as patch:
        patch.setattr(Schedules, "_made", lambda self, draw: made.append(draw) or whole(self, draw))
        return schedules(draw), not made


def test_the_next_round_is_known_until_guesses_are_wrong(
    task: Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    schedules = Schedules(torch.device("cpu"), drops=True)
    first = Draw(task, 3, (0,) * 3, (0, 4, 7), (2,) * 3, (2,) * 3, False)
    for draw in (first, first.next(), first._replace(seed=4, rounds=(9,) * 3)):
        schedules.foresee(draw)
        found, known = asked(schedules, draw.next(), monkeypatch)
        fresh, _ = asked(Schedules(torch.device("cpu"), drops=True), draw.next(), monkeypatch)
        assert known
        assert torch.equal(found.order, fresh.order)
        assert found.drops == fresh.drops
    for changes in ({"seed": 5}, {"epochs": (1, 2, 3)}, {"clients": (0, 1, 2)}):
        assert schedules.foresee(first) is not None
        assert not asked(schedules, first.next()._replace(**changes), monkeypatch)[1]
    assert schedules.foresee(first) is None
    assert not asked(schedules, first.next(), monkeypatch)[1]


@pytest.mark.parametrize("text", ["fedavg", "fedcl", "fedaware(explore=true)"])
def test_a_run_is_the_same_to_the_bit_without_guessing(
    task: Task, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = Recipe(rounds=4, cohort=4, epochs=2, batch_size=5, lr=0.05, drop_last=text == "fedcl")
    setup = Setup(parse(text), recipe, CLIENTS, task.layout, detectors=(FGN(),))
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
    assert not any(right[8:])
    if text == "fedavg":
        assert right[:8] == [False, *[True] * 3] * 2


def test_another_partition_has_its_own_order(task: Task, monkeypatch: pytest.MonkeyPatch) -> None:
    other = replace(task, clients=Population(task.clients.order[::-1].copy(), task.clients.offsets))
    schedules = Schedules(torch.device("cpu"), drops=False)
    draw = Draw(task, 3, (0,) * 3, (0, 4, 7), (2,) * 3, (2,) * 3, False)
    schedules.foresee(draw)
    found, known = asked(schedules, draw.next()._replace(task=other), monkeypatch)
    assert not known
    assert [mine.tolist() for mine in found.mine] == [
        other.clients[client].tolist() for client in draw.next().clients
    ]


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
    recipe = Recipe(
        **{"rounds": 5, "cohort": 4, "epochs": 2, "batch_size": 5, "lr": 0.05, **changes}
    )
    setup = Setup(parse(text), recipe, CLIENTS, task.layout, detectors=(FGN(),))
    ends: list[list[torch.Tensor]] = []
    for overlaps in (False, True):
        engine = Batched(task, **options)
        engine._overlaps = overlaps  # as on a GPU
        ends.append([])
        for run in drive(rounds(Run.start(engine.start(), setup, seed=5), setup), engine):
            assert (engine._begun is not None) is overlaps or run.round == 5
            reports = run.record.reports
            ends[-1] += [
                run.x,
                reports.delta,
                reports.loss,
                torch.tensor(engine.evaluate(run.x).loss),
            ]
    assert [each.numpy().tobytes() for each in ends[0]] == [
        each.numpy().tobytes() for each in ends[1]
    ]


def test_a_cohort_that_was_begun_in_vain_is_in_nobodys_way(task: Task) -> None:
    engine = Batched(task)
    engine._overlaps = True
    told = [
        Briefs(seed=9, round=r, ids=torch.arange(5), start=task.start(), lr=0.1, batch_size=4)
        for r in range(4)
    ]
    engine.train(told[0])
    engine.begin(told[1])
    other = engine.train(told[2])
    engine.begin(told[1])
    both = engine.train_many([(task, told[3]), (task, told[0])])
    for found, briefs in zip((other, *both), (told[2], told[3], told[0]), strict=True):
        torch.testing.assert_close(found.delta, Loop(task).train(briefs).delta)
    assert engine.stacks, engine.why


class Losing(Batched):
    """Loses the first client's report in every third round, so that the server's model is not the
    guessed one.
    """

    def train(self, briefs: Briefs) -> Reports:
        reports = super().train(briefs)
        if briefs.newest % 3 != 1:
            return reports
        return replace(
            reports.take(torch.arange(1, len(reports))), failed=((int(briefs.ids[0]), "lost"),)
        )


# algorithm, recipe, options of the engine, cohorts that were trained ahead in two runs of 5 rounds
CASES = {
    "plain": ("fedavg", {}, {}, 7),
    "pull": ("fedprox(mu=0.1)", {"momentum": 0.5}, {}, 7),
    "few slots": ("fedavg", {}, {"slots": 3}, 7),
    "fixed slots": ("fedavg", {}, {"deterministic": True}, 7),
    "adamw": ("fedavg", {"optimizer": "adamw", "lr": 0.01}, {}, 7),
    "stops": ("alt", {}, {}, 0),
    "server optimizer": ("fedavgm", {}, {}, 0),
    "schedule": ("fedavg", {"schedule": "cosine"}, {}, 7),
    "selection": ("fedcl", {}, {}, None),
    "vectors": ("scaffold", {}, {}, 0),
    "noise": ("localprivacy", {}, {}, 0),
}


IN_CI = ("plain", "few slots", "schedule", "server optimizer")


@pytest.mark.parametrize(
    ("case", "kind"),
    [
        *(
            pytest.param(case, Batched, marks=[pytest.mark.slow] * (case not in IN_CI))
            for case in CASES
        ),
        ("plain", Losing),
    ],
)
def test_a_run_is_the_same_to_the_bit_when_cohorts_begin_before_they_are_asked_for(
    task: Task, case: str, kind: type[Batched]
) -> None:
    text, changes, options, ahead = CASES[case]
    recipe = Recipe(**{"rounds": 5, "cohort": 4, "batch_size": 5, "lr": 0.05, **changes})
    setup = Setup(parse(text), recipe, CLIENTS, task.layout, detectors=(FGN(),))
    engine = kind(task, **options)
    ends, hits, claim = [], [], engine._claim

    def claimed(briefs: Briefs) -> Ticket | None:
        guessed = engine._begun is not None and engine._begun.briefs is not briefs
        found = claim(briefs)
        hits.append(guessed and found is not None)
        return found

    engine._claim = claimed
    for overlaps, seed in ((False, 5), (False, 6), (True, 5), (True, 6)):
        engine._overlaps = overlaps
        for run in drive(rounds(Run.start(engine.start(), setup, seed=seed), setup), engine):
            reports = run.record.reports
            ends += [
                run.x,
                reports.delta,
                reports.loss,
                reports.grad_sq,
                torch.tensor(run.signals.elud),
            ]
            if run.round == 3:
                engine.evaluate(run.x)
    half = len(ends) // 2
    assert [each.numpy().tobytes() for each in ends[:half]] == [
        each.numpy().tobytes() for each in ends[half:]
    ]
    assert 0 < sum(hits) < 7 if kind is Losing else ahead in (None, sum(hits))
    cohorts = [(task, told(task, round)) for round in (0, 1)]
    both = engine.train_many(cohorts)  # with a cohort in the slots that nobody will ask for
    for found, (_, briefs) in zip(both, cohorts, strict=True):
        torch.testing.assert_close(found.delta, Loop(task).train(briefs).delta)
    assert engine.stacks, engine.why


def test_only_short_rounds_begin_before_they_are_asked_for_and_all_their_steps_are_launched(
    task: Task,
) -> None:
    engine = Batched(task)
    engine._overlaps = True
    setup = Setup(
        parse("fedavg"),
        Recipe(rounds=8, cohort=4, batch_size=2, lr=0.05),
        CLIENTS,
        task.layout,
        detectors=(FGN(),),
    )
    course = rounds(Run.start(engine.start(), setup, seed=5), setup)
    _, briefs = next(course)
    _, briefs = course.send(engine.train(briefs))
    assert engine._begun is None  # not before a guess of the clients was right
    _, briefs = course.send(engine.train(briefs))
    assert engine._begun is not None
    jobs = engine._begun.jobs
    assert len({job.total for job in jobs}) > 1
    assert all(job.done >= job.total for job in jobs)
    engine._steps._seconds = {jobs[0].kind: 1.0}
    course.send(engine.train(briefs))
    assert engine._begun is None


def told(task: Task, round: int, clients: int = 5, batch_size: int = 4, **more: object) -> Briefs:
    ids = torch.arange(clients)
    return Briefs(
        seed=9, round=round, ids=ids, start=task.start(), lr=0.1, batch_size=batch_size, **more
    )


def test_what_is_told_is_compared_to_the_bit(task: Task) -> None:
    briefs = told(task, 0)
    assert identical(briefs, told(task, 0))
    zero = replace(briefs, start=torch.zeros_like(briefs.start))
    assert not identical(zero, replace(zero, start=-zero.start))
    others = [
        {"round": 1},
        {"lr": 0.2},
        {"stop_below": 0.5},
        {"push": briefs.start},
        {"start": briefs.start.double()},
    ]
    for changes in (
        *others,
        {"ids": torch.arange(1, 6)},
        {"drop_last": True},
        {"temperature": 2.0},
    ):
        assert not identical(briefs, replace(briefs, **changes)), changes


def test_a_model_that_is_not_finite_is_not_guessed(task: Task) -> None:
    """The server rejects a client's update that is not finite; to train the plain average before
    that may fail.
    """

    def strict(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        assert outputs.isfinite().all()
        return torch.nn.functional.cross_entropy(outputs, targets, reduction="none")

    engine = Batched(replace(task, loss=strict))
    engine._overlaps = True
    setup = Setup(
        parse("fedavg"),
        Recipe(rounds=6, cohort=4, batch_size=50, lr=0.05),
        CLIENTS,
        task.layout,
        detectors=(FGN(),),
    )
    spoil, take = [], Ticket.take

    def spoiled(
        ticket: Ticket, rows: object, layout: object, weights: torch.Tensor, numbers: torch.Tensor
    ) -> None:
        if ticket.briefs.newest == 3 and not spoil:
            spoil.append(weights := weights.clone())
            weights[0] = torch.nan
        take(ticket, rows, layout, weights, numbers)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Ticket, "take", spoiled)
        *_, end = drive(rounds(Run.start(engine.start(), setup, seed=5), setup), engine)
    assert spoil
    assert end.round == 6
    assert engine.stacks, engine.why


def test_collecting_what_was_begun_leaves_nothing_to_wait_for(task: Task) -> None:
    engine = Batched(task)
    engine._overlaps = True
    first = engine.submit(task, told(task, 0))
    engine.begin(told(task, 1))
    assert first in (engine.collect(), engine.collect())
    engine.train(told(task, 2))
    assert engine.stacks, engine.why


def test_a_large_batch_is_not_padded_beyond_the_largest_client(task: Task) -> None:
    engine = Batched(task)
    briefs = told(task, 0, batch_size=10**9)
    ticket = engine.submit(task, briefs)
    assert (
        {job.batch for job in ticket.jobs}
        == {task.clients.largest}
        == {int(task.clients.sizes.max())}
    )
    while engine.collect() is not ticket:
        pass
    torch.testing.assert_close(ticket.reports().delta, Loop(task).train(briefs).delta)


@pytest.mark.parametrize("where", ["scores", "take"])
def test_memory_that_runs_out_while_clients_leave_the_slots(task: Task, where: str) -> None:
    engine, failed = Batched(task), []

    def failing(whole: object) -> object:
        def call(*given: object) -> object:
            if len(failed) < 2:
                failed.append(1)
                if len(failed) == 2:
                    raise torch.OutOfMemoryError
            return whole(*given)

        return call

    briefs = told(task, 0, measure=frozenset({"score_after"}))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batched_engine, "PASS", 1)  # one client after another
        if where == "scores":
            patch.setattr(batched_engine, "scores", failing(batched_engine.scores))
        else:
            patch.setattr(Ticket, "take", failing(Ticket.take))
        found = engine.train(briefs)
    wanted = Loop(task).train(briefs)
    torch.testing.assert_close(found.delta, wanted.delta)
    torch.testing.assert_close(found.score_after, wanted.score_after)


def test_widths_do_not_depend_on_the_first_cohort(task: Task) -> None:
    """A resumed run begins with another cohort, and the bits of a step may depend on its width."""
    widths = []
    for clients in (12, 9):
        engine = Batched(task, cohorts=(11,))
        engine.train(told(task, 0, clients))
        engine.train(told(task, 1, 12))
        engine._slots._any = False  # as on a GPU
        widths.append([engine._slots._width(used) for used in range(1, 13)])
    assert widths[0] == widths[1] == [1, 2, 3, 4, 5, 6, 7, 8, 10, 10, 11, 12]
