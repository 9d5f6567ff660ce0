"""What a brief can ask beyond plain training, each by a small rule, on the engines of one process."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from kairosfl.core.fields import SQUARED_LOSS, Briefs, Reports
from kairosfl.core.recipe import Recipe
from kairosfl.core.round import drive, personal, rounds
from kairosfl.core.rule import Algorithm, Memory, Plan, Round, Rule, State
from kairosfl.core.run import Run, Setup, upcoming
from kairosfl.core.traits import Traits
from kairosfl.engines.batched import Batched
from kairosfl.engines.loop import Loop
from kairosfl.errors import UserError
from kairosfl.runs.checkpoint import Checkpoints
from kairosfl.tasks.dataset import DataSet, Samples
from kairosfl.tasks.population import Population
from kairosfl.tasks.task import Task

SIZES = (3, 5, 4)
LR = 0.1
ENGINES: dict[str, Callable[[Task], Loop | Batched]] = {"loop": Loop, "batched": Batched}
engines = pytest.mark.parametrize("engine", ENGINES)


class Line(nn.Module):
    """y = (a · x + frozen) · b, squared error: gradients that can be worked out by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.tensor([0.5, -0.3], dtype=torch.float64))
        self.b = nn.Parameter(torch.tensor([1.2], dtype=torch.float64))
        self.frozen = nn.Parameter(torch.tensor([0.1], dtype=torch.float64), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.a + self.frozen) * self.b


@cache
def data() -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(7)
    return rng.standard_normal((sum(SIZES), 2)), rng.standard_normal(sum(SIZES))


def squares(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square()


def task(own: tuple[str, ...] = ()) -> Task:
    x, y = data()
    samples = Samples(torch.from_numpy(x), torch.from_numpy(y))
    clients = Population.from_lists(np.split(np.arange(len(x)), np.cumsum(SIZES)[:-1]))
    return Task(
        Line(),
        DataSet("line", samples, samples, classes=0),
        clients,
        loss=squares,
        metrics={},
        own=own,
    )


def slope(w: np.ndarray, client: int, frozen: float = 0.1) -> np.ndarray:
    """The gradient of the mean loss on all samples of a client at (a, b)."""
    x, y = samples_of(client)
    inner = x @ w[:2] + frozen
    error = 2 * (inner * w[2] - y) / len(y)
    return np.concatenate([(error * w[2]) @ x, [error @ inner]])


def samples_of(client: int) -> tuple[np.ndarray, np.ndarray]:
    x, y = data()
    begin = sum(SIZES[:client])
    return x[begin : begin + SIZES[client]], y[begin : begin + SIZES[client]]


def loss(w: np.ndarray, client: int) -> float:
    x, y = samples_of(client)
    return float(np.mean(((x @ w[:2] + 0.1) * w[2] - y) ** 2))


START = np.array([0.5, -0.3, 1.2])


def course(
    rule: Rule,
    engine: str,
    own: tuple[str, ...] = (),
    number: int = 1,
    *,
    alone: bool = False,
    **recipe: object,
) -> list[Run]:
    """The runs after every round; each client has one batch an epoch.

    Engine `batched` says in `why` whether it trained them `alone`, one after another.
    """
    job = task(own)
    runner = ENGINES[engine](job)
    how = Recipe(rounds=number, cohort=3, batch_size=8, lr=LR, **recipe)  # type: ignore[arg-type]
    setup = Setup(
        Algorithm((rule,)), how, 3, job.layout, own=job.own_start(), sizes=job.clients.sizes
    )
    runs = list(drive(rounds(Run.start(job.start(), setup, seed=0), setup), runner))
    assert ("one client after another" in runner.why) == (alone and engine == "batched")
    return runs


def updates(run: Run) -> np.ndarray:
    assert run.record is not None
    assert run.record.reports is not None
    return run.record.reports.delta.numpy()


@dataclass(frozen=True, kw_only=True)
class Tells(Rule):
    """Writes one field of the brief; without `value`, nothing."""

    field: str = ""
    value: object = None

    def brief(self, briefs: Briefs, memory: Memory, now: Round) -> Briefs:
        return replace(briefs, **{self.field: self.value}) if self.field else briefs


@engines
def test_a_client_stops_after_its_last_allowed_step(engine: str) -> None:
    (run,) = course(Tells(field="max_steps", value=[1, 2, 9]), engine, epochs=3)
    for client, steps in enumerate((1, 2, 3)):
        w = START.copy()
        for _ in range(steps):
            w -= LR * slope(w, client)
        np.testing.assert_allclose(updates(run)[client], w - START, atol=1e-14)
    assert run.record.reports.steps.tolist() == [1, 2, 3]
    assert run.record.reports.epochs.tolist() == [1.0, 2.0, 3.0]


@engines
def test_a_client_reports_the_mean_squared_loss_of_its_first_epoch(engine: str) -> None:
    """Oort's utility."""

    @dataclass(frozen=True, kw_only=True)
    class Asks(Rule):
        def brief(self, briefs: Briefs, memory: Memory, now: Round) -> Briefs:
            return briefs.measured(SQUARED_LOSS)

    (run,) = course(Asks(), engine, epochs=2)
    wanted = []
    for client in range(3):
        x, y = samples_of(client)
        losses = ((x @ START[:2] + 0.1) * START[2] - y) ** 2
        wanted.append(np.mean(losses**2))
    np.testing.assert_allclose(run.record.reports.squared_loss, wanted, rtol=1e-13)


@engines
def test_tensors_that_are_still_do_not_move_and_the_others_do(engine: str) -> None:
    (run,) = course(
        Tells(field="still", value=frozenset({1})), engine, weight_decay=0.1, momentum=0.5
    )
    for client in range(3):
        gradient = slope(START, client) + 0.1 * START
        gradient[2] = 0
        np.testing.assert_allclose(updates(run)[client], -LR * gradient, atol=1e-14)


@engines
def test_a_clients_own_part_stays_with_it_and_is_there_again_in_the_next_round(engine: str) -> None:
    first, second = course(Tells(), engine, own=("b",), number=2)
    assert updates(first).shape == (3, 2)
    own, shared = np.full(3, START[2]), START[:2].copy()
    for run in (first, second):
        moved = [slope(np.append(shared, own[client]), client) for client in range(3)]
        np.testing.assert_allclose(
            updates(run), [-LR * gradient[:2] for gradient in moved], atol=1e-14
        )
        own -= LR * np.array([gradient[2] for gradient in moved])
        shared = run.x.numpy()
    np.testing.assert_allclose(second.kept.rows(torch.arange(3))["own"][:, 0], own, atol=1e-14)
    assert second.record.reports.own is None  # no rule sees it
    assert second.record.bytes_up == 3 * (2 * 8 + second.record.reports.numbers() * 8)


@engines
def test_the_own_part_may_train_alone_first(engine: str) -> None:
    """FedRep: some epochs of the head alone, then the body with the head still."""

    @dataclass(frozen=True, kw_only=True)
    class FedRep(Rule):
        def brief(self, briefs: Briefs, memory: Memory, now: Round) -> Briefs:
            return replace(briefs, own_epochs=torch.full((len(briefs),), 2), still=frozenset({1}))

    (run,) = course(FedRep(), engine, own=("b",))
    for client in range(3):
        w = START.copy()
        for _ in range(2):
            w[2] -= LR * slope(w, client)[2]
        np.testing.assert_allclose(
            run.kept.rows(torch.tensor([client]))["own"][0], w[2:], atol=1e-14
        )
        np.testing.assert_allclose(updates(run)[client], -LR * slope(w, client)[:2], atol=1e-14)


@engines
def test_the_client_chooses_the_candidate_with_the_lowest_loss(engine: str) -> None:
    others = np.stack(
        [START, START + np.array([0.4, 0.1, -0.2]), START - np.array([0.6, 0.2, 0.9])]
    )
    (run,) = course(Tells(field="candidates", value=torch.from_numpy(others)), engine, alone=True)
    choices = [int(np.argmin([loss(w, client) for w in others])) for client in range(3)]
    assert run.record.reports.choice.tolist() == choices
    for client, choice in enumerate(choices):
        np.testing.assert_allclose(
            updates(run)[client], -LR * slope(others[choice], client), atol=1e-14
        )
    assert run.record.bytes_down == 3 * ((1 + 3) * 3 * 8 + 8 * _numbers(run))


def _numbers(run: Run) -> int:
    """Numbers beside the vectors in a brief of this test, which rules do not change."""
    return Briefs(seed=0, round=0, ids=torch.arange(1), start=run.x, lr=0.1).numbers()


@dataclass(frozen=True, kw_only=True)
class Second(Rule):
    """Clients keep a second model."""

    centre: str = "start"
    when: str = "batch"
    inner: int = 1
    pull: float = 0.5
    draw: float = 0.0
    scale: float = 1.0
    mixed: bool = False

    def traits(self) -> Traits:
        return Traits(keeps=frozenset({"second", "mix"} if self.mixed else {"second"}))

    def brief(self, briefs: Briefs, memory: Memory, now: Round) -> Briefs:
        each = torch.ones(len(briefs), dtype=torch.float64)
        return replace(
            briefs,
            scale=self.scale * each,
            second_lr=0.05 * each,
            second_pull=self.pull * each,
            second_centre=self.centre,
            second_when=self.when,
            second_inner=self.inner,
            second_draw=self.draw * each,
            mixed=self.mixed or None,
        )


@engines
def test_ditto_trains_a_second_model_that_is_pulled_to_the_start(engine: str) -> None:
    first, last = course(Second(when="before"), engine, number=2, epochs=2, alone=True)
    seconds = np.tile(START, (3, 1))
    x = START
    for run in (first, last):
        for client in range(3):
            for _ in range(2):
                seconds[client] -= 0.05 * (
                    slope(seconds[client], client) + 0.5 * (seconds[client] - x)
                )
            w = x.copy()
            for _ in range(2):
                w -= LR * slope(w, client)
            np.testing.assert_allclose(updates(run)[client], w - x, atol=1e-14)  # as without it
        x = run.x.numpy()
    np.testing.assert_allclose(last.kept.rows(torch.arange(3))["second"], seconds, atol=1e-14)


@engines
def test_pfedme_draws_w_towards_a_second_model_of_several_steps(engine: str) -> None:
    rule = Second(centre="w", inner=3, pull=2.0, draw=2.0, scale=0.0)
    (run,) = course(rule, engine, epochs=2, alone=True)
    for client in range(3):
        w, second = START.copy(), START.copy()
        for _ in range(2):
            for _ in range(3):
                second -= 0.05 * (slope(second, client) + 2.0 * (second - w))
            w -= LR * 2.0 * (w - second)
        np.testing.assert_allclose(updates(run)[client], w - START, atol=1e-14)
        np.testing.assert_allclose(
            run.kept.rows(torch.tensor([client]))["second"][0], second, atol=1e-14
        )


@engines
def test_apfl_learns_how_much_of_the_second_model_to_mix_in(engine: str) -> None:
    (run,) = course(Second(mixed=True, pull=0.0), engine, epochs=2, alone=True)
    for client in range(3):
        w, second, mix = START.copy(), START.copy(), 0.5
        for _ in range(2):
            gradient = slope(mix * second + (1 - mix) * w, client)
            along = gradient @ (second - w)
            second = second - 0.05 * mix * gradient
            mix = min(max(mix - 0.05 * along, 0.0), 1.0)
            w = w - LR * slope(w, client)
        rows = run.kept.rows(torch.tensor([client]))
        np.testing.assert_allclose(rows["second"][0], second, atol=1e-14)
        np.testing.assert_allclose(rows["mix"][0], mix, atol=1e-14)
        np.testing.assert_allclose(updates(run)[client], w - START, atol=1e-14)


@engines
def test_a_rule_moves_what_is_frozen_and_clients_train_on_it(engine: str) -> None:
    @dataclass(frozen=True, kw_only=True)
    class Rebases(Rule):
        def rebase(self, base: Tensor, memory: Memory, now: Round) -> Tensor:
            assert not torch.equal(now.moved, now.x)
            return base + 0.25

    first, second = course(Rebases(), engine, number=2, alone=True)
    np.testing.assert_allclose(
        updates(first), [-LR * slope(START, client) for client in range(3)], atol=1e-14
    )
    x = first.x.numpy()
    moved = [-LR * slope(x, client, frozen=0.35) for client in range(3)]
    np.testing.assert_allclose(updates(second), moved, atol=1e-7)  # the base moves in float32
    assert second.base.tolist() == [0.5]
    assert second.record.bytes_down - first.record.bytes_down == 3 * 8  # one frozen number more


@dataclass(frozen=True, kw_only=True)
class Asks(Rule):
    """Measures everyone first, and trains the two clients with the highest loss (power of choice)."""

    def select(self, plan: Plan, memory: Memory, now: Round) -> Plan:
        if now.measured is None:
            return replace(
                plan, first=np.arange(now.population), measure=frozenset({"score_before"})
            )
        order = np.argsort(-now.measured.score_before.numpy(), kind="stable")
        return replace(plan, ids=now.measured.ids.numpy()[order[:2]])


@engines
def test_clients_are_measured_before_the_cohort_is_chosen(engine: str) -> None:
    (run,) = course(Asks(), engine)
    losses = [loss(START, client) for client in range(3)]
    assert run.record.ids.tolist() == sorted(np.argsort(losses)[::-1][:2].tolist())
    asked, answers = run.record.first
    np.testing.assert_allclose(answers.score_before, losses, atol=1e-14)
    assert answers.delta.shape == (3, 0)
    orders, count = _numbers(run), answers.numbers()
    assert run.record.bytes_down == (3 + 2) * (3 * 8 + 8 * orders)
    assert run.record.bytes_up == 3 * 8 * count + 2 * (3 * 8 + 8 * run.record.reports.numbers())
    assert asked.epochs.tolist() == [0, 0, 0]
    measured = answers.work(asked).passes(answers.steps.numpy())
    assert measured.forward.tolist() == list(SIZES)  # of every client, on all its samples
    assert measured.total == sum(SIZES)


@engines
def test_a_rule_finds_what_it_sent_along_for_those_who_report(engine: str) -> None:
    seen: list[tuple[list[int], list[float]]] = []

    @dataclass(frozen=True, kw_only=True)
    class Remembers(Rule):
        def brief(self, briefs: Briefs, memory: Memory, now: Round) -> tuple[Briefs, State]:
            return briefs, {"number": briefs.ids.double() + 10}

        def observe(self, memory: Memory, now: Round) -> Memory:
            seen.append((now.reports.ids.tolist(), memory.sent["number"].tolist()))
            return memory

    class Loses:
        """An engine that loses the second client."""

        def __init__(self, inner: Loop | Batched) -> None:
            self.inner = inner

        def train(self, briefs: Briefs) -> Reports:
            return self.inner.train(briefs).take(torch.tensor([2, 0]))

    job = task()
    setup = Setup(Algorithm((Remembers(),)), Recipe(rounds=1, cohort=3, lr=LR), 3, job.layout)
    list(drive(rounds(Run.start(job.start(), setup, seed=0), setup), Loses(ENGINES[engine](job))))
    assert seen == [([0, 2], [10.0, 12.0])]


@engines
def test_a_client_learns_which_of_its_reports_counted_last(engine: str) -> None:
    told: list[list[int]] = []

    @dataclass(frozen=True, kw_only=True)
    class Watches(Second):
        def select(self, plan: Plan, memory: Memory, now: Round) -> Plan:
            return replace(plan, ids=np.array([[0, 1], [1, 2], [0, 1, 2]][now.number]))

        def observe(self, memory: Memory, now: Round) -> Memory:
            told.append(now.briefs.counted.tolist())
            return memory

    course(Watches(), engine, number=3, alone=True)
    assert told == [[-1, -1], [0, -1], [0, 1, 1]]


@engines
def test_what_clients_keep_survives_a_checkpoint(engine: str, tmp_path) -> None:
    rule = Second(mixed=True)
    whole = course(rule, engine, number=4, alone=True)
    setup = Setup(
        Algorithm((rule,)), Recipe(rounds=4, cohort=3, batch_size=8, lr=LR), 3, task().layout
    )
    (tmp_path / "a").mkdir()
    run = Run.start(task().start(), setup, seed=0)
    going = drive(rounds(run, setup), ENGINES[engine](task()))
    for _ in range(2):
        run = next(going)
    Checkpoints(tmp_path / "a").save(run, {})
    loaded, passed = Checkpoints(tmp_path / "a").load(Run.start(task().start(), setup, seed=0))
    assert not passed
    *_, last = drive(rounds(loaded, setup), ENGINES[engine](task()))
    assert torch.equal(last.x, whole[-1].x)
    for name, value in whole[-1].kept.rows(torch.arange(3)).items():
        assert torch.equal(last.kept.rows(torch.arange(3))[name], value)


def test_a_base_that_moved_survives_a_checkpoint(tmp_path) -> None:
    setup = Setup(Algorithm(), Recipe(rounds=4, cohort=3, lr=LR), 3, task().layout)
    run = replace(
        Run.start(task().start(), setup, seed=0), base=torch.tensor([0.25]), round=1, time=2.5
    )
    Checkpoints(tmp_path).save(run, {})
    loaded, _ = Checkpoints(tmp_path).load(Run.start(task().start(), setup, seed=0))
    assert (loaded.base.tolist(), loaded.time) == ([0.25], 2.5)


def test_a_rule_says_with_which_vector_a_client_is_evaluated() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Clusters(Rule):
        def client(self, now: Round) -> State:
            return {"shift": torch.tensor(0.0, dtype=torch.float64)}

        def observe(self, memory: Memory, now: Round) -> Memory:
            return memory.replace(rows={"shift": now.reports.ids.double()})

        def personal(self, x: Tensor, ids: Tensor, memory: Memory, now: Round) -> Tensor:
            return x + memory.rows["shift"][:, None]

    (run,) = course(Clusters(), "loop")
    setup = Setup(Algorithm((Clusters(),)), Recipe(rounds=1, cohort=3, lr=LR), 3, task().layout)
    rows = personal(run, setup, torch.tensor([0, 2]))
    assert torch.equal(rows, torch.stack([run.x, run.x + 2]))


def test_how_to_wait_needs_something_to_wait_for() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Waits(Rule):
        def select(self, plan: Plan, memory: Memory, now: Round) -> Plan:
            return replace(plan, deadline=30.0, over=0.5)

    with pytest.raises(
        UserError,
        match=r"plans how to wait for clients \(over = 0.5, deadline = 30.0\), which needs",
    ):
        course(Waits(), "loop")
    job = task()
    setup = Setup(
        Algorithm((Waits(),)),
        Recipe(rounds=1, cohort=2, lr=LR),
        3,
        job.layout,
        waits={"quorum": 0.5},
    )
    going = rounds(Run.start(job.start(), setup, seed=0), setup)
    _, briefs = next(going)
    assert len(briefs) == 3  # two and half as many again
    assert (briefs.plan.size, briefs.plan.quorum, briefs.plan.deadline) == (2, 0.5, 30.0)


def test_the_age_of_an_answer_and_the_model_it_was_sent() -> None:
    job = task()
    setup = Setup(Algorithm(), Recipe(rounds=9, cohort=2, lr=LR), 3, job.layout)
    now = upcoming(replace(Run.start(job.start(), setup, seed=0), round=5), setup)
    starts = torch.stack([now.x + 1, now.x])
    briefs = Briefs(seed=0, round=[3, 5], ids=torch.tensor([0, 2]), start=starts, lr=LR)
    delta = torch.ones(2, 3, dtype=torch.float64)
    now = replace(now, briefs=briefs, reports=replace(_reports(), delta=delta))
    assert now.age.tolist() == [2, 0]
    assert torch.equal(now.trained(), starts + 1)
    placed = replace(briefs, offset=starts - now.x, version=now.x)
    assert torch.equal(replace(now, briefs=placed).trained(), now.x + delta)


def _reports() -> Reports:
    numbers = torch.ones(2, dtype=torch.float64)
    return Reports(
        ids=torch.tensor([0, 2]),
        n=numbers.long(),
        steps=numbers.long(),
        epochs=numbers,
        delta=torch.zeros(2, 3),
        loss=numbers,
        grad_sq=numbers,
        seconds=numbers,
    )


def test_cohorts_are_joined_and_taken_apart_again() -> None:
    start = torch.zeros(3)
    briefs = Briefs(
        seed=0, round=[1, 2, 3], ids=torch.tensor([1, 4, 6]), start=start, lr=[0.1, 0.2, 0.3]
    )
    briefs = replace(
        briefs, push=torch.arange(9.0).view(3, 3), own=torch.ones(3, 2), candidates=torch.ones(4, 3)
    )
    parts = [briefs.take(torch.tensor([2])), briefs.take(torch.tensor([0, 1]))]
    joined = Briefs.join(parts)
    for name, value in briefs.tensors()[0].items():
        assert torch.equal(getattr(joined, name), value), name
    again = Briefs.from_tensors(*joined.tensors())
    assert again.tensors()[1] == briefs.tensors()[1]
    for name, value in briefs.tensors()[0].items():
        assert torch.equal(getattr(again, name), value), name


@pytest.mark.parametrize("drop_last", [False, True])
def test_the_work_that_a_brief_asks_for(drop_last: bool) -> None:
    briefs = Briefs(
        seed=0,
        round=0,
        ids=torch.arange(3),
        start=torch.zeros(1),
        lr=0.1,
        batch_size=4,
        epochs=3,
        drop_last=drop_last,
    )
    work = briefs.work([3, 8, 10])
    assert work.epoch.size.tolist() == [3, 4, 4]
    assert work.epoch.used.tolist() == ([3, 8, 8] if drop_last else [3, 8, 10])
    assert work.epoch.steps.tolist() == ([1, 2, 2] if drop_last else [1, 2, 3])
    assert work.steps.tolist() == ([3, 6, 6] if drop_last else [3, 6, 9])
    assert work.samples(np.array([2, 3, 4])).tolist() == ([6, 12, 16] if drop_last else [6, 12, 14])
    limited = replace(briefs, max_steps=torch.tensor([1, 9, 4]))
    assert limited.work([3, 8, 10]).steps.tolist() == [1, 6, 4]
