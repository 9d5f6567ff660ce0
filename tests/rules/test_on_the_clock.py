"""Rules that need a clock, each against numpy, on devices of very different speeds: with answers of
many ages, unequal samples, answers that are rejected, and orders that are given up or lost.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch

from kairosfl.core.clock import Fleet
from kairosfl.core.fields import Briefs, Report, Reports
from kairosfl.core.layout import Entry, Layout
from kairosfl.core.recipe import Recipe
from kairosfl.core.round import drive, rounds
from kairosfl.core.rule import Algorithm, Memory, Plan, Rule
from kairosfl.core.run import Round, Run, Setup
from kairosfl.core.traits import Traits
from kairosfl.errors import UserError
from kairosfl.rules import RULES, parse

CLIENTS, D, LR = 15, 3, 0.2
N = np.random.default_rng(3).integers(1, 30, CLIENTS)
SECONDS = np.exp(np.random.default_rng(4).standard_normal(CLIENTS))
TARGETS = np.random.default_rng(5).standard_normal((CLIENTS, D))
LAYOUT = Layout((Entry("w", (D,), 0),))
BAD = {(7, 3), (11, 2)}  # (client, version) whose answer is not finite


def trained(start: np.ndarray, client: int, pull: float = 0.0) -> np.ndarray:
    """Three steps towards the client's own target, with a pull back to the start."""
    w = start.copy()
    for _ in range(3):
        w = w - LR * (w - TARGETS[client] + pull * (w - start))
    return w


@dataclass
class Targets:
    """An engine whose clients go towards a target each; it notes how many train together."""

    passes: list[int] = field(default_factory=list)

    def train(self, briefs: Briefs) -> Reports:
        self.passes.append(len(briefs))
        reports = []
        for brief in briefs.each():
            start = brief.start.numpy()
            delta = trained(start, brief.client, brief.pull) - start
            if (brief.client, brief.round) in BAD:
                delta = delta * np.nan
            reports.append(
                Report(
                    client=brief.client,
                    n=int(N[brief.client]),
                    steps=3,
                    epochs=1.0,
                    delta=torch.from_numpy(delta),
                    loss=1.0,
                    grad_sq=1.0,
                    seconds=0.1,
                )
            )
        rows = [report.delta for report in reports]
        delta = torch.stack(rows) if rows else torch.empty(0, D, dtype=torch.float64)
        return Reports.stack(reports, delta)


@dataclass(frozen=True, kw_only=True)
class InOrder(Rule):
    """Prefers clients in a known order, another one in every round."""

    asks: int = CLIENTS

    def traits(self) -> Traits:
        return Traits(late=True)

    def select(self, plan: Plan, memory: Memory, now: Round) -> Plan:
        return replace(plan, ids=np.roll(np.arange(CLIENTS), -3 * now.number)[: self.asks])


def course(text: str, number: int = 40, asks: int = CLIENTS, **fleet: Any) -> list[Run]:
    """The rounds of these rules; an order takes its client's seconds for every sample."""
    algorithm = Algorithm((InOrder(asks=asks),)) + parse(text)
    recipe = Recipe(rounds=number, cohort=6, batch_size=64, lr=LR)
    devices = Fleet(CLIENTS, **{"seconds": SECONDS, **fleet})
    setup = Setup(algorithm, recipe, CLIENTS, LAYOUT, sizes=N, fleet=devices)
    start = torch.zeros(D, dtype=torch.float64)
    return list(drive(rounds(Run.start(start, setup, seed=1), setup), Targets()))


Step = Callable[[np.ndarray, list[tuple[int, int, np.ndarray]]], np.ndarray]


def reference(
    step: Step,
    k: int,
    concurrency: int,
    number: int = 40,
    patience: float = np.inf,
    max_age: float = np.inf,
    pull: float = 0.0,
) -> tuple[list[np.ndarray], list[float], int, int]:
    """The models and times of an asynchronous run, the highest age, and how many did not count.

    `step` gives the new model from the old one and the buffer: (client, age, w_i − x_i) of each
    answer that counts.
    """
    x, moment = np.zeros(D), 0.0
    # (when it ends, client, version, when it began, start, whether it still counts)
    flying: list[tuple[float, int, int, float, np.ndarray, list[bool]]] = []
    models, times, oldest, useless = [], [], 0, 0
    for version in range(number):
        landed: list[tuple[int, int, np.ndarray]] = []
        full, closed = 0, set[int]()
        while True:
            # --- what ends now ---
            while flying and flying[0][0] <= moment:
                if flying[0][5][0] and full == k:
                    break
                _, client, sent, _, start, counts = heapq.heappop(flying)
                closed.add(client)
                if not counts[0]:
                    continue
                if version - sent > max_age:
                    useless += 1
                    continue
                full += 1
                if (client, sent) in BAD:
                    useless += 1
                    continue
                landed.append((client, version - sent, trained(start, client, pull) - start))
                oldest = max(oldest, version - sent)
            for _, client, _, began, _, counts in flying:
                if counts[0] and began + patience <= moment:
                    counts[0] = False
                    closed.add(client)
                    useless += 1
            if full == k:
                break
            # --- who is asked ---
            at_work = sum(order[5][0] for order in flying)
            for client in np.roll(np.arange(CLIENTS), -3 * version).tolist():
                away = {order[1] for order in flying}
                if at_work < concurrency and client not in away | closed:
                    end = moment + SECONDS[client] * N[client]
                    heapq.heappush(flying, (end, client, version, moment, x, [True]))
                    closed.add(client)
                    at_work += 1
            if not at_work:
                break
            patient = [order[3] + patience for order in flying if order[5][0]]
            moment = min(flying[0][0], *patient)
        if landed:
            x = step(x, sorted(landed, key=lambda answer: answer[0]))
        models.append(x)
        times.append(moment)
    return models, times, oldest, useless


def agrees(runs: list[Run], models: list[np.ndarray], times: list[float]) -> None:
    for run, x, moment in zip(runs, models, times, strict=True):
        assert run.time == pytest.approx(moment, rel=1e-12)
        assert run.x.numpy() == pytest.approx(x, rel=1e-10, abs=1e-12)


SETTINGS: list[dict[str, Any]] = [{}, {"patience": 30.0}, {"max_age": 3}]


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_buffers_by_samples(setting: dict[str, Any]) -> None:
    def step(x: np.ndarray, answers: list[tuple[int, int, np.ndarray]]) -> np.ndarray:
        total = sum(N[client] for client, _, _ in answers)
        return x + sum(N[client] / total * delta for client, _, delta in answers)

    options = "".join(f", {name}={value}" for name, value in setting.items())
    models, times, oldest, useless = reference(step, 3, 8, **setting)
    assert oldest >= 3
    assert useless >= 1
    agrees(course(f"buffered(k=3, concurrency=8{options})"), models, times)


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_answers_count_less_with_age(setting: dict[str, Any]) -> None:
    """Σ p_i (1 + τ_i)^−power Δ_i, where the p_i are by samples and sum to 1."""

    def step(x: np.ndarray, answers: list[tuple[int, int, np.ndarray]]) -> np.ndarray:
        total = sum(N[client] for client, _, _ in answers)
        weighted = [N[client] / total * (1 + age) ** -0.7 * d for client, age, d in answers]
        return x + sum(weighted)

    options = "".join(f", {name}={value}" for name, value in setting.items())
    models, times, oldest, _ = reference(step, 2, 8, **setting)
    assert oldest >= 3
    agrees(course(f"buffered(k=2, concurrency=8{options}) + stale(power=0.7)"), models, times)


@pytest.mark.parametrize("max_age", [np.inf, 3])
@pytest.mark.parametrize(("k", "concurrency"), [(1, 5), (3, 8), (5, 5), (4, 12)])
def test_fedbuff(k: int, concurrency: int, max_age: float) -> None:
    """(1/k) Σ s(τ_i) Δ_i, the divisor being k whatever was rejected."""

    def step(x: np.ndarray, answers: list[tuple[int, int, np.ndarray]]) -> np.ndarray:
        return x + 0.8 / k * sum(delta / np.sqrt(1 + age) for _, age, delta in answers)

    models, times, oldest, _ = reference(step, k, concurrency, max_age=max_age)
    assert oldest >= (1 if k == concurrency else 2)
    limit = "" if max_age == np.inf else f", max_age={max_age}"
    text = f"fedbuff(k={k}, concurrency={concurrency}, lr=0.8{limit})"
    agrees(course(text), models, times)


def test_fedbuff_with_momentum_on_the_server() -> None:
    velocity = np.zeros(D)

    def step(x: np.ndarray, answers: list[tuple[int, int, np.ndarray]]) -> np.ndarray:
        nonlocal velocity
        mean = 1 / 3 * sum(delta / np.sqrt(1 + age) for _, age, delta in answers)
        velocity = 0.5 * velocity + mean
        return x + velocity

    models, times, _, _ = reference(step, 3, 8)
    for text in (
        "fedbuff(k=3, concurrency=8) + fedavgm(beta=0.5)",
        "fedavgm(beta=0.5) + fedbuff(k=3, concurrency=8)",
    ):
        agrees(course(text), models, times)


FALLS: dict[str, Callable[[float], float]] = {
    "falls='constant'": lambda age: 1.0,
    "falls='poly', a=0.5": lambda age: (age + 1) ** -0.5,
    "falls='hinge', a=10.0, b=2.0": lambda age: 1.0 if age <= 2 else 1 / (10 * (age - 2) + 1),
}


@pytest.mark.parametrize("falls", list(FALLS))
def test_fedasync(falls: str) -> None:
    """x ← (1 − α s(τ)) x + α s(τ) w_i, where w_i was trained from an older model."""
    runs = course(f"fedasync(alpha=0.6, concurrency=8, mu=0.1, {falls})", 60)
    _, times, _, _ = reference(lambda x, answers: x, 1, 8, 60, pull=0.1)
    # An answer that is rejected makes a round without a step: versions are counted by rounds.
    x, oldest = np.zeros(D), 0
    history = [x]
    for number, run in enumerate(runs):
        record = run.record
        assert record is not None
        assert record.clock is not None
        for client, age in zip(record.ids.tolist(), record.clock.ages.tolist(), strict=True):
            begun = history[number - age]
            share = 0.6 * FALLS[falls](age)
            x = (1 - share) * x + share * trained(begun, client, 0.1)
            oldest = max(oldest, age)
        history.append(x)
    assert oldest >= 5
    agrees(runs, history[1:], times)


def test_a_fresh_answer_counts_as_without_the_rule_to_the_bit() -> None:
    equal = {"seconds": 0.0, "latency": 1.0}
    plain = course("buffered(k=6, concurrency=6)", 6, **equal)
    for text in (
        "buffered(k=6, concurrency=6) + stale(power=2.0)",
        "stale + buffered(k=6, concurrency=6)",
    ):
        for one, other in zip(plain, course(text, 6, **equal), strict=True):
            assert torch.equal(one.x, other.x)
    uniform = course("uniform", 2, asks=6, **equal)  # before an answer is rejected
    for one, other in zip(uniform, course("fedbuff(k=6, concurrency=6)", 2, **equal), strict=True):
        assert torch.equal(one.x, other.x)


def middle(values: np.ndarray, weights: np.ndarray) -> float:
    """The value of which at most half of the weight lies below, and at most half above."""
    order = np.argsort(values)
    upto = np.cumsum(weights[order]) / weights.sum()
    return float(values[order][np.searchsorted(upto, 0.5)])


def test_a_robust_step_is_shortened_by_what_age_takes() -> None:
    """The median is that of the updates as they are; each counts by its age, and so does the step."""
    runs = course("buffered(k=3, concurrency=9) + stale(power=1.0) + median", 30)
    compared = 0
    for before, run in pairwise(runs):
        record = run.record
        assert record is not None
        assert record.clock is not None
        share = 1 / (1.0 + record.clock.ages.double().numpy())
        if record.reports is None or len(set(share)) < 3:  # half of the weight on each side
            continue
        columns = record.reports.delta.numpy().T
        median = np.array([middle(column, share) for column in columns])
        assert (run.x - before.x).numpy() == pytest.approx(share.mean() * median)
        compared += 1
    assert compared >= 5


# --- rounds with an end ---


def test_overcommit_drops_the_slowest() -> None:
    times = SECONDS * N
    runs = course("overcommit(over=0.5)", 1, asks=9)
    first = sorted(range(9), key=lambda client: (times[client], client))[:6]
    assert runs[0].record is not None
    assert runs[0].time == pytest.approx(max(times[first]))
    assert runs[0].record.ids.tolist() == sorted(first)


@pytest.mark.parametrize("partial", [False, True])
def test_deadline(partial: bool) -> None:
    times = SECONDS * N
    (run,) = course(f"deadline(seconds=12.0, partial={partial})", 1, asks=6)
    assert run.record is not None
    assert run.time == 12.0
    # All samples are one batch here: there is no part of the work to do.
    assert run.record.ids.tolist() == np.flatnonzero(times[:6] <= 12.0).tolist()
    (run,) = course("deadline(seconds=12.0, quorum=0.9)", 1, asks=6)
    assert run.record is not None
    assert not len(run.record.ids)
    late = course("deadline(seconds=12.0, keep=True)", 6, asks=6)
    ages = [age for run in late if run.record and run.record.clock for age in run.record.clock.ages]
    assert max(ages) >= 1


# --- what is refused ---


@pytest.mark.parametrize(
    "name", ["overcommit", "deadline", "buffered", "stale", "fedbuff", "fedasync"]
)
def test_they_need_a_clock(name: str) -> None:
    recipe = Recipe(rounds=1, cohort=2)
    with pytest.raises(UserError, match=rf"{name} needs a clock: give Setup\.fleet"):
        Setup(parse(name), recipe, CLIENTS, LAYOUT, sizes=N)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("fedmut + buffered", "fedmut needs the answers of all clients that it placed"),
        ("fedmut + overcommit", "fedmut needs the answers of all clients that it placed"),
        ("fedcl + buffered", "both choose the size of the cohort"),
        ("fedbuff + stale", "both weigh answers by their age"),
        ("fedbuff + fedasync", "both choose how the server waits"),
        ("privacy + overcommit", "whether a client's answer counts depends on when others answer"),
        ("privacy + buffered", "whether a client's answer counts depends on when others answer"),
        ("privacy + deadline(quorum=0.5)", "whether or when a client's answer counts depends"),
        ("privacy + deadline(keep=true)", "whether or when a client's answer counts depends"),
        ("privacy + stale", "may act on reports or rows of single clients"),
    ],
)
def test_refused(text: str, why: str) -> None:
    with pytest.raises(UserError, match=why):
        parse(text)


LATE = sorted(name for name, rule in RULES.items() if rule().traits().late)  # type: ignore[attr-defined]


def test_which_rules_take_late_answers() -> None:
    """The others are right for this round's answers alone, or pay for those that are asked."""
    assert RULES.keys() - set(LATE) == {"fedmut", "budget", "privacy"}
