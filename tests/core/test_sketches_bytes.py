"""Coded messages sketched against the contract: error feedback, EF21, and a coded downlink.

A codec's engine stands around another one and does at the client what is the client's: it codes the
update, and keeps what the list of fields marks as kept.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from sketches import trained
from test_visits import ENGINES, LR, START, engines, task
from torch import Tensor

from kairosfl.core.fields import Briefs, Reports
from kairosfl.core.recipe import Recipe
from kairosfl.core.round import drive, rounds
from kairosfl.core.rule import Algorithm, Memory, Round, Rule, State
from kairosfl.core.run import Run, Setup
from kairosfl.core.traits import Traits

ROUNDS = 8
COSTS = 12  # bytes of a coded update: a position and a number
REJECTED = {(1, 0), (2, 1), (3, 1), (5, 2)}  # (round, client): the report does not count
NEVER = {(2, 0), (4, 1), (5, 1)}  # the order is never executed


def largest(v: Tensor) -> Tensor:
    """The codec: of each row, the entry of the largest absolute value."""
    place = v.abs().argmax(1, keepdim=True)
    return torch.zeros_like(v).scatter(1, place, v.gather(1, place))


class Coded:
    """An engine whose clients code their updates; some reports are lost."""

    def __init__(self, engine: str) -> None:
        self.inner = ENGINES[engine](task())

    def train(self, briefs: Briefs) -> Reports:
        reports = self.inner.train(briefs.without_kept())
        reports = self.sent(briefs, reports)
        loss, done = reports.loss.clone(), []
        for row, client in enumerate(reports.ids.tolist()):
            if (briefs.newest, client) in REJECTED:
                loss[row] = float("nan")
            if (briefs.newest, client) not in NEVER:
                done.append(row)
        return replace(reports, loss=loss).take(torch.tensor(done))

    def sent(self, briefs: Briefs, reports: Reports) -> Reports:
        """The reports as they are sent, with what the clients keep."""
        counts = (briefs.owed_round == briefs.counted)[:, None]
        owed = torch.where(counts, briefs.owed - largest(briefs.owed), briefs.owed)
        v = reports.delta + owed
        coded = torch.full((len(reports),), COSTS)
        return replace(reports, delta=largest(v), owed=v, owed_round=briefs.round, coded=coded)


@dataclass(frozen=True, kw_only=True)
class Feedback(Rule):
    """What a code leaves out of an update is added to the client's next one."""

    def traits(self) -> Traits:
        return Traits(uniform=True, keeps=frozenset({"owed", "owed_round"}))


def runs(rule: Rule, engine: Coded) -> list[Run]:
    job = task()
    how = Recipe(rounds=ROUNDS, cohort=3, batch_size=8, lr=LR)
    setup = Setup(Algorithm((rule,)), how, 3, job.layout)
    return list(drive(rounds(Run.start(job.start(), setup, seed=0), setup), engine))


def top(v: np.ndarray) -> np.ndarray:
    coded = np.zeros_like(v)
    place = np.argmax(np.abs(v))
    coded[place] = v[place]
    return coded


@engines
def test_error_feedback(engine: str) -> None:
    """Nothing is lost and nothing counts twice, whatever becomes of reports and orders."""
    course = runs(Feedback(), Coded(engine))
    x, residual = START, np.zeros((3, 3))
    done, arrived = np.zeros(3), np.zeros(3)  # of all updates, and of all that counted
    for number, run in enumerate(course):
        counted = []
        for client in range(3):
            if (number, client) in NEVER:
                continue
            delta = trained(x, client) - x
            done += delta
            v = delta + residual[client]
            residual[client] = v
            if (number, client) not in REJECTED:
                residual[client] = v - top(v)
                counted.append(top(v))
        arrived += np.sum(counted, 0)
        x = x + np.mean(counted, 0)
        np.testing.assert_allclose(run.x, x, atol=1e-14)
        assert run.record.bytes_up == len(counted) * (COSTS + 8 * run.record.reports.numbers())
    np.testing.assert_allclose(arrived + residual.sum(0), done, atol=1e-14)


@dataclass(frozen=True, kw_only=True)
class EF21(Rule):
    """Client and server keep g_i; the client sends C(Δ_i − g_i), and both add it to g_i."""

    def traits(self) -> Traits:
        return Traits(uniform=True, keeps=frozenset({"second", "owed", "owed_round"}))

    def client(self, now: Round) -> State:
        return {"g": torch.zeros_like(now.x)}

    def receive(self, reports: Reports, memory: Memory, now: Round) -> Reports:
        return replace(reports, delta=reports.delta + memory.rows["g"])

    def observe(self, memory: Memory, now: Round) -> Memory:
        return memory.replace(rows={"g": now.reports.delta})


class Coded21(Coded):
    """Clients that keep g as it was before (`second`) and after (`owed`) their last report."""

    def sent(self, briefs: Briefs, reports: Reports) -> Reports:
        counts = (briefs.owed_round == briefs.counted)[:, None]
        new = (briefs.counted < 0)[:, None]
        g = torch.where(counts, briefs.owed, briefs.second)
        g = torch.where(new, torch.zeros_like(g), g)
        sent = torch.where(new, reports.delta, largest(reports.delta - g))
        coded = torch.where(new[:, 0], 24, COSTS)
        return replace(
            reports, delta=sent, second=g, owed=g + sent, owed_round=briefs.round, coded=coded
        )


@engines
def test_ef21(engine: str) -> None:
    course = runs(EF21(), Coded21(engine))
    x, g = START, dict[int, np.ndarray]()
    for number, run in enumerate(course):
        counted = []
        for client in range(3):
            if (number, client) in NEVER | REJECTED:
                continue
            delta = trained(x, client) - x
            g[client] = g[client] + top(delta - g[client]) if client in g else delta
            counted.append(g[client])
        x = x + np.mean(counted, 0)
        np.testing.assert_allclose(run.x, x, atol=1e-14)
    for client, row in g.items():
        kept = course[-1].tables[0].rows(torch.tensor([client]))["g"][0]
        np.testing.assert_allclose(kept, row, atol=1e-14)


@dataclass(frozen=True, kw_only=True)
class CodedDownlink(Rule):
    """Everybody holds x̂, which follows x by coded differences: x̂ ← x̂ + C(x − x̂). A client that
    missed some gets them all.
    """

    def traits(self) -> Traits:
        return Traits(idle=True)

    def server(self, now: Round) -> State:
        return {"held": now.x.clone()}

    def client(self, now: Round) -> State:
        return {"at": torch.tensor(-1)}

    def brief(self, briefs: Briefs, memory: Memory, now: Round) -> Briefs:
        missed = now.number - memory.rows["at"]
        return replace(briefs, version=self._next(memory, now), coded=COSTS * missed)

    def observe(self, memory: Memory, now: Round) -> Memory:
        at = torch.full_like(memory.rows["at"], now.number)
        return memory.replace(state={"held": self._next(memory, now)}, rows={"at": at})

    def _next(self, memory: Memory, now: Round) -> Tensor:
        held = memory.state["held"]
        return held + largest((now.x - held)[None])[0]


class Plain(Coded):
    """An engine that loses the same reports."""

    def sent(self, briefs: Briefs, reports: Reports) -> Reports:
        return reports


@engines
def test_a_coded_downlink(engine: str) -> None:
    course = runs(CodedDownlink(), Plain(engine))
    x, held, at = START, START.copy(), np.full(3, -1)
    for number, run in enumerate(course):
        held = held + top(x - held)
        came = [c for c in range(3) if (number, c) not in NEVER | REJECTED]
        samples = np.array([3, 5, 4])[came]
        deltas = np.array([trained(held, client) - held for client in came])
        down = COSTS * int((number - at).sum())
        x = x + samples / samples.sum() @ deltas
        at[came] = number
        np.testing.assert_allclose(run.x, x, atol=1e-14)
        assert run.record.bytes_down == down + 3 * 8 * _numbers(run)


def _numbers(run: Run) -> int:
    return Briefs(seed=0, round=0, ids=torch.arange(1), start=run.x, lr=0.1).numbers()
