"""Random federations on the clock against a plain list of events."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import clock_reference as reference
import numpy as np
import pytest
import torch
from fleets import ENGINES

from kairosfl.core.clock import Fleet
from kairosfl.core.fields import Briefs, Reports
from kairosfl.core.layout import Entry, Layout
from kairosfl.core.recipe import Recipe
from kairosfl.core.round import drive, rounds
from kairosfl.core.rule import Algorithm, Memory, Plan, Round, Rule
from kairosfl.core.run import Run, Setup
from kairosfl.core.streams import stream
from kairosfl.core.traits import Traits
from kairosfl.core.waiting import Waiting
from kairosfl.runs.checkpoint import Checkpoints
from kairosfl.tasks.dataset import DataSet, Samples
from kairosfl.tasks.population import Population
from kairosfl.tasks.task import Task

SEED = 3
DIMENSION = 3
ROUNDS = 12
PLAIN: dict[str, Any] = {
    "size": 1,
    "over": 0.0,
    "concurrency": 0,
    "deadline": math.inf,
    "quorum": None,
    "late": "drop",
    "patience": math.inf,
    "max_age": math.inf,
    "ids": None,
    "eligible": None,
}
REASONS = {
    "offline": "its device went offline",
    "given up": "no answer within",
    "old": "rounds old",
    "quorum": "below the quorum",
    "could not train": "its data are gone",
}


@dataclass(frozen=True, eq=False)
class Windows:
    """A client is online for so many seconds of every period, until it is never again."""

    period: np.ndarray
    phase: np.ndarray
    on: np.ndarray  # as long as the period: always
    gone: np.ndarray  # never again from this instant on

    def next_online(self, clients: np.ndarray, time: float) -> np.ndarray:
        period, on = self.period[clients], self.on[clients]
        within = (time + self.phase[clients]) % period
        moments = np.where(within < on, time, time + period - within)
        moments = np.where(on == 0, math.inf, moments)
        return np.where(moments < self.gone[clients], moments, math.inf)

    def online_until(self, clients: np.ndarray, time: float) -> np.ndarray:
        period, on = self.period[clients], self.on[clients]
        within = (time + self.phase[clients]) % period
        ends = np.where(on == period, math.inf, time + on - within)
        return np.minimum(ends, self.gone[clients])


def lognormal(draw: np.random.Generator) -> float:
    return float(np.exp(0.5 * draw.standard_normal()))


@dataclass(frozen=True)
class Case:
    """A federation and its plans."""

    fleet: Fleet
    sizes: np.ndarray
    plans: list[dict[str, Any]]
    cannot_train: frozenset[tuple[int, int]]

    def seconds(self, round: int, client: int) -> float:
        factor = lognormal(stream(SEED, "order", round, client)) if self.fleet.varies else 1.0
        fleet: Any = self.fleet
        return float(fleet.latency[client] + self.sizes[client] * fleet.seconds[client] * factor)

    def drops(self, round: int, client: int, time: float, seconds: float) -> float:
        chance, share = stream(SEED, "dropping out", round, client).random(2)
        if chance >= self.fleet.dropout or seconds == math.inf:
            return math.inf
        return float(time + share * seconds)

    def next_online(self, client: int, time: float) -> float:
        return float(self.fleet.availability.next_online(np.array([client]), time)[0])

    def online_until(self, client: int, time: float) -> float:
        return float(self.fleet.availability.online_until(np.array([client]), time)[0])

    def prefers(self, round: int, plan: dict[str, Any]) -> list[int]:
        if plan["ids"] is not None:
            return list(plan["ids"])
        draw = stream(SEED, "select", round)
        among = np.arange(len(self.sizes)) if plan["eligible"] is None else plan["eligible"]
        first = draw.choice(among, size=min(plan["asks"], len(among)), replace=False)
        return [*first.tolist(), *draw.permutation(np.setdiff1d(among, first)).tolist()]

    def update(self, client: int, round: int, start: np.ndarray) -> np.ndarray | None:
        if (client, round) in self.cannot_train:
            return None
        return np.cos(np.arange(1, DIMENSION + 1) * (1 + client + 10 * round)) - start / 8

    def world(self) -> reference.Federation:
        return reference.Federation(
            np.zeros(DIMENSION),
            self.sizes,
            self.seconds,
            self.drops,
            self.next_online,
            self.online_until,
            self.prefers,
            self.update,
        )


@pytest.fixture(autouse=True)
def no_round_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bound on the steps of a round."""
    land = Waiting._land

    def counted(waiting: Waiting) -> bool:
        steps = vars(waiting).get("steps", 0) + 1
        assert steps < 1000
        vars(waiting)["steps"] = steps
        return land(waiting)

    monkeypatch.setattr(Waiting, "_land", counted)


# --- drawing cases ---


def drawn_case(number: int) -> Case:
    """A small federation; its times are often the same whole numbers."""
    draw = np.random.default_rng(number)
    clients = int(draw.integers(3, 13))
    sizes = draw.integers(1, 4, clients)
    ties = draw.random() < 0.6
    speeds = draw.integers(1, 5, clients) / 1.0 if ties else draw.lognormal(0, 1, clients)
    if draw.random() < 0.15:
        speeds = np.ones(clients)
        sizes = np.full(clients, 2)
    latency = draw.integers(0, 3, clients) * 1.0
    if draw.random() < 0.1:
        speeds[draw.random(clients) < 0.5] = 0.0
    if draw.random() < 0.3:
        speeds[draw.random(clients) < 0.3] = math.inf
    fleet = Fleet(
        clients,
        seconds=speeds,
        latency=latency,
        varies=lognormal if draw.random() < 0.2 else None,
        dropout=float(draw.choice([0.0, 0.0, 0.3, 0.9])),
    )
    if draw.random() < 0.5:
        fleet = replace(fleet, availability=drawn_windows(draw, clients))
    changing = draw.random() < 0.5
    plans = [drawn_plan(draw, clients)]
    for _ in range(ROUNDS - 1):
        plans.append(drawn_plan(draw, clients) if changing else plans[0])
    faulty = draw.random() < 0.3
    pairs = [
        (c, r) for c in range(clients) for r in range(ROUNDS) if faulty and draw.random() < 0.2
    ]
    return Case(fleet, sizes, plans, frozenset(pairs))


def drawn_windows(draw: np.random.Generator, clients: int) -> Windows:
    period = draw.integers(4, 30, clients) * 1.0
    on = np.ceil(period * draw.choice([0.3, 0.6, 1.0], clients))
    if draw.random() < 0.3:
        on[draw.random(clients) < 0.4] = 0.0
    gone = np.full(clients, math.inf)
    if draw.random() < 0.3:
        gone[draw.random(clients) < 0.5] = 40.0
    return Windows(period, draw.integers(0, 20, clients) * 1.0, on, gone)


def drawn_plan(draw: np.random.Generator, clients: int) -> dict[str, Any]:
    """What a round plans; `asks` and `wants` are what that means."""
    plan = dict(PLAIN, size=int(draw.integers(1, clients + 2)))
    if draw.random() < 0.4:
        plan["over"] = float(draw.choice([0.1, 0.3, 0.5, 1.0]))
    if draw.random() < 0.5:
        plan["concurrency"] = int(draw.integers(1, clients + 2))
    if draw.random() < 0.4:
        plan["deadline"] = float(draw.choice([1.0, 3.0, 6.0, 10.0]))
        if draw.random() < 0.4:
            plan["quorum"] = float(draw.choice([0.25, 0.5, 1.0]))
    if draw.random() < 0.5:
        plan["late"] = "keep"
    if draw.random() < 0.4:
        plan["patience"] = float(draw.choice([1.0, 4.0, 8.0]))
    if draw.random() < 0.3:
        plan["max_age"] = int(draw.integers(0, 4))
    among = draw.permutation(clients)[: draw.integers(1, clients + 1)]
    chance = draw.random()
    if chance < 0.25:
        plan["ids"] = among.tolist()
    elif chance < 0.5:
        plan["eligible"] = np.sort(among)

    # --- what this means ---
    plan["asks"] = math.ceil(round(plan["size"] * (1 + plan["over"]), 6))
    plan["wants"] = plan["size"]
    if plan["ids"] is not None and not plan["concurrency"]:  # exactly these
        plan["asks"] = len(plan["ids"])
        plan["wants"] = plan["size"] if plan["over"] else plan["asks"]
    return plan


# --- the same with the package ---


@dataclass(frozen=True, kw_only=True)
class Planned(Rule):
    """Plans every round as the case says, and notes who was asked."""

    case: Case
    asked: list[tuple[int, list[int]]]

    def traits(self) -> Traits:
        return Traits(late=True)

    def select(self, plan: Plan, memory: Memory, now: Round) -> Plan:
        words = {name: self.case.plans[now.number][name] for name in PLAIN}
        return replace(plan, **words)

    def brief(self, briefs: Briefs, memory: Memory, now: Round) -> Briefs:
        self.asked.append((now.number, briefs.ids.tolist()))
        return briefs


class FakeEngine:
    """Trains as the case says, and nobody twice for one order."""

    def __init__(self, case: Case) -> None:
        self.case = case
        self.trained: list[tuple[int, int]] = []

    def train(self, briefs: Briefs) -> Reports:
        good, deltas, failed = [], [], []
        for row, client in enumerate(briefs.ids.tolist()):
            number = int(briefs.round[row])
            assert (client, number) not in self.trained
            self.trained.append((client, number))
            start = briefs.start if briefs.start.ndim == 1 else briefs.start[row]
            delta = self.case.update(client, number, start.numpy())
            if delta is None:
                failed.append((client, "its data are gone"))
            else:
                good.append(client)
                deltas.append(delta)
        return reports(good, deltas, self.case.sizes, tuple(failed))


def reports(
    ids: list[int],
    deltas: list[np.ndarray],
    sizes: np.ndarray,
    failed: tuple[tuple[int, str], ...],
) -> Reports:
    """Of clients that did one step each."""
    ones = torch.ones(len(ids), dtype=torch.float64)
    delta = torch.from_numpy(np.array(deltas).reshape(-1, DIMENSION))
    return Reports(
        ids=torch.tensor(ids, dtype=torch.int64),
        n=torch.from_numpy(sizes[np.array(ids, dtype=np.int64)]),
        steps=ones.long(),
        epochs=ones,
        delta=delta,
        loss=ones,
        grad_sq=ones,
        seconds=ones,
        failed=failed,
    )


def setup_of(case: Case) -> tuple[Setup, Planned]:
    rule = Planned(case=case, asked=[])
    clients = len(case.sizes)
    setup = Setup(
        Algorithm((rule,)),
        Recipe(rounds=ROUNDS, cohort=1, batch_size=8),
        clients,
        Layout((Entry("w", (DIMENSION,), 0),)),
        sizes=case.sizes,
        fleet=case.fleet,
    )
    return setup, rule


def begun(setup: Setup) -> Run:
    return Run.start(torch.zeros(DIMENSION, dtype=torch.float64), setup, seed=SEED)


# --- comparing ---


def summary(happened: reference.Happened) -> dict[str, Any]:
    """What a round of the reference says."""
    return {
        "asked": happened.asked,
        "landed": [order.client for order in happened.landed],
        "ages of versions": [order.round for order in happened.landed],
        "took": np.array([order.due - order.began for order in happened.landed]),
        "rejected": happened.rejected,
        "time": happened.time,
        "device seconds": happened.device_seconds,
        "wasted seconds": happened.wasted_seconds,
        "x": happened.x,
        "flight": [(client, number, counts) for client, number, *_, counts in happened.flight],
        "flight's times": np.array([order[2:4] for order in happened.flight]),
    }


def summary_of(run: Run, asked: list[tuple[int, list[int]]]) -> dict[str, Any]:
    """The same of a round of the package."""
    record = run.record
    assert record is not None
    assert record.clock is not None
    ages = record.clock.ages.tolist()
    orders = run.flight.orders
    return {
        "asked": [ids for number, ids in asked if number == run.round - 1],
        "landed": record.ids.tolist(),
        "ages of versions": [run.round - 1 - age for age in ages],
        "took": record.clock.took.numpy(),
        "rejected": sorted((client, kind_of(reason)) for client, reason in record.rejected),
        "time": run.time,
        "device seconds": record.clock.device_seconds,
        "wasted seconds": record.clock.wasted_seconds,
        "x": run.x.numpy().copy(),
        "flight": [(order.client, order.round, order.counts) for order in orders],
        "flight's times": np.array([(order.began, order.due) for order in orders]),
    }


def kind_of(reason: str) -> str:
    """Which of the reasons it is."""
    return next(kind for kind, words in REASONS.items() if words in reason)


def differences(expected: dict[str, Any], actual: dict[str, Any]) -> list[str]:
    """What differs, as text."""
    differing = []
    for name, wanted in expected.items():
        if isinstance(wanted, float | np.ndarray):
            same = np.shape(wanted) == np.shape(actual[name])
            same = same and np.allclose(wanted, actual[name], rtol=1e-9, atol=1e-9)
        else:
            same = wanted == actual[name]
        if not same:
            differing.append(f"{name}: {actual[name]}, and not {wanted}")
    return differing


def check(number: int) -> None:
    """The package does in every round what the reference does."""
    case = drawn_case(number)
    setup, rule = setup_of(case)
    expected = reference.simulate(case.world(), case.plans)
    runs = drive(rounds(begun(setup), setup), FakeEngine(case))
    for run, happened in zip(runs, expected, strict=True):
        differing = differences(summary(happened), summary_of(run, rule.asked))
        assert not differing, (number, run.round, case.plans[run.round - 1], differing)


@pytest.mark.parametrize("tens", range(6))
def test_rounds_on_the_clock_are_those_of_a_plain_list_of_events(tens: int) -> None:
    for number in range(10 * tens, 10 * tens + 10):
        check(number)


@pytest.mark.slow
def test_three_hundred_federations_are_those_of_a_plain_list_of_events() -> None:
    for number in range(300):
        check(number)


# --- interrupted ---


def bits(run: Run) -> tuple[Any, ...]:
    """All that a run says and holds, but for the reports."""
    record = run.record
    assert record is not None
    assert record.clock is not None
    orders = [(o.key, o.client, o.round, o.began, o.counts, o.fault) for o in run.flight.orders]
    clock = record.clock
    costs = (clock.seconds, clock.device_seconds, clock.wasted_seconds, clock.took.tolist())
    landed = (record.ids.tolist(), record.weights.tolist(), clock.ages.tolist())
    return run.x.tolist(), run.time, orders, costs, landed, record.rejected, record.asked


def interrupted(number: int, every: int, folder: Path) -> None:
    """A run that is saved and loaded after every so many rounds repeats the bits, and trains nobody
    twice.
    """
    case = drawn_case(number)
    setup, _ = setup_of(case)
    expected = [bits(run) for run in drive(rounds(begun(setup), setup), FakeEngine(case))]
    checkpoints, engine = Checkpoints(folder / str(number)), FakeEngine(case)
    checkpoints.folder.mkdir()
    run = begun(setup)
    while run.round < ROUNDS:
        for after in drive(rounds(run, setup), engine):
            run = after
            assert bits(run) == expected[run.round - 1]
            if run.round % every == 0:
                break
        checkpoints.save(run, {})
        run, _ = Checkpoints(checkpoints.folder).load(begun(setup))


@pytest.mark.parametrize("tens", [2, 3])
def test_runs_that_are_interrupted_repeat_the_bits(tens: int, tmp_path: Path) -> None:
    for number in range(10 * tens, 10 * tens + 10):
        interrupted(number, 5, tmp_path)


@pytest.mark.slow
def test_runs_that_are_interrupted_after_every_round_repeat_the_bits(tmp_path: Path) -> None:
    for number in range(300):
        interrupted(number, 1, tmp_path)


# --- engines ---


def lands(case: Case, engine: str) -> list[tuple[Any, ...]]:
    """What every round says with this engine, but for the model."""
    draw = np.random.default_rng(0)
    count = int(case.sizes.sum())
    targets = torch.from_numpy(draw.integers(0, 3, count))
    samples = Samples(torch.from_numpy(draw.standard_normal((count, 4))).float(), targets)
    clients = Population.from_lists(np.split(np.arange(count), np.cumsum(case.sizes)[:-1]))
    model = torch.nn.Linear(4, 3)
    torch.nn.init.zeros_(model.weight)
    torch.nn.init.zeros_(model.bias)
    task = Task(model, DataSet("clock", samples, samples, classes=3), clients)
    setup = replace(setup_of(case)[0], layout=task.layout)
    begin = Run.start(task.start(), setup, seed=SEED)
    runs = drive(rounds(begin, setup), ENGINES[engine](task))
    return [bits(run)[1:] for run in runs]


def test_the_same_lands_on_every_engine() -> None:
    for number in range(6):
        case = drawn_case(number)
        assert lands(case, "loop") == lands(case, "batched")


@pytest.mark.slow
def test_the_same_lands_on_every_engine_in_sixty_federations() -> None:
    for number in range(60):
        case = drawn_case(number)
        assert lands(case, "loop") == lands(case, "batched")
