"""Algorithms that do not wait for everybody, sketched against the contract: FedBuff, FedAsync, CA2FL,
asynchronous SCAFFOLD and FedAWARE, and partial work at a deadline.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import combinations

import numpy as np
import torch
from sketches import SHARES, Hand, trained
from test_visits import SIZES, START, course, engines, updates
from torch import Tensor

from kairosfl.core.fields import Briefs
from kairosfl.core.mass import mean_gradients
from kairosfl.core.rule import Memory, Plan, Round, Rule, State
from kairosfl.core.traits import Traits
from kairosfl.rules.fedaware import FedAWARE

N = len(SIZES)


@dataclass(frozen=True, kw_only=True)
class FedBuff(Rule):
    """x ← x + lr / K · Σ s(age) Δ: a weighted sum that is divided by K, not by its weights."""

    buffer: int = 2
    concurrency: int = 3
    power: float = 0.5
    lr: float = 0.7

    def traits(self) -> Traits:
        return Traits(uniform=True, late=True)

    def select(self, plan: Plan, memory: Memory, now: Round) -> Plan:
        return replace(plan, size=self.buffer, concurrency=self.concurrency, late="keep")

    def weigh(self, factors: Tensor, memory: Memory, now: Round) -> Tensor:
        return factors * self._fresh(now)

    def step(self, direction: Tensor, memory: Memory, now: Round) -> tuple[Tensor, Memory]:
        return self.lr * float(self._fresh(now).sum()) / self.buffer * direction, memory

    def _fresh(self, now: Round) -> Tensor:
        return (1.0 + now.age.double()) ** -self.power


@engines
def test_fedbuff(engine: str) -> None:
    hand = Hand(FedBuff(), engine, size=2)
    x0 = hand.x
    first, second, third = (hand.send(client) for client in range(3))
    hand.land(second, first)
    x1 = hand.x
    deltas = [trained(x0, client) - x0 for client in range(3)]
    np.testing.assert_allclose(x1, x0 + 0.7 / 2 * (deltas[0] + deltas[1]), atol=1e-14)
    again = hand.send(0)
    hand.land(hand.send(1))  # a buffer in which the other report was rejected: it counts as zero
    x2 = hand.x
    np.testing.assert_allclose(x2, x1 + 0.7 / 2 * (trained(x1, 1) - x1), atol=1e-14)
    hand.land(third, again)  # two versions and one version old
    stale = 3**-0.5 * deltas[2] + 2**-0.5 * (trained(x1, 0) - x1)
    np.testing.assert_allclose(hand.x, x2 + 0.7 / 2 * stale, atol=1e-14)


def test_fedbuffs_plan() -> None:
    plan = FedBuff().select(Plan(10), Memory({}, {}, None), None)  # type: ignore[arg-type]
    assert plan.waiting() == ("concurrency", "late")
    assert plan.size == 2


@dataclass(frozen=True, kw_only=True)
class FedAsync(Rule):
    """x ← (1 − α s(age)) x + α s(age) w, for every client that lands."""

    alpha: float = 0.6
    power: float = 0.5
    rho: float = 0.2

    def traits(self) -> Traits:
        return Traits(late=True)

    def select(self, plan: Plan, memory: Memory, now: Round) -> Plan:
        return replace(plan, size=1, concurrency=plan.size, late="keep")

    def brief(self, briefs: Briefs, memory: Memory, now: Round) -> Briefs:
        return replace(briefs, pull=briefs.pull + self.rho)

    def combine(self, direction: Tensor, memory: Memory, now: Round) -> Tensor:
        shares = now.weights * self.alpha * (1.0 + now.age) ** -self.power
        return shares.to(now.x) @ (now.trained() - now.x)


@engines
def test_fedasync(engine: str) -> None:
    hand = Hand(FedAsync(), engine, size=1, epochs=2)
    x = hand.x
    began = {client: (hand.send(client), x, 0) for client in range(3)}
    for number, client in enumerate((1, 0, 1, 2)):
        order, version, at = began[client]
        hand.land(order)
        w = version.copy()
        for _ in range(2):  # pulled to the version that it was sent
            w = trained(w, client, push=0.2 * (w - version))
        share = 0.6 * (1 + number - at) ** -0.5
        x = (1 - share) * x + share * w
        np.testing.assert_allclose(hand.x, x, atol=1e-14)
        began[client] = (hand.send(client), x, number + 1)


@dataclass(frozen=True, kw_only=True)
class CA2FL(Rule):
    """x ← x + h + mean of (Δ_i − h_i); h_i is client i's last update, h their mean over everyone."""

    def traits(self) -> Traits:
        return Traits(uniform=True, late=True)

    def server(self, now: Round) -> State:
        return {"mean": torch.zeros_like(now.x)}

    def client(self, now: Round) -> State:
        return {"last": torch.zeros_like(now.x)}

    def combine(self, direction: Tensor, memory: Memory, now: Round) -> Tensor:
        return memory.state["mean"] + direction - memory.rows["last"].mean(0)

    def observe(self, memory: Memory, now: Round) -> Memory:
        changed = (now.reports.delta - memory.rows["last"]).sum(0) / now.population
        state = {"mean": memory.state["mean"] + changed}
        return memory.replace(state=state, rows={"last": now.reports.delta})


@engines
def test_ca2fl(engine: str) -> None:
    hand = Hand(CA2FL(), engine, size=2)
    x, last = hand.x, np.zeros((N, 3))
    began = {client: (hand.send(client), x) for client in range(3)}
    for landing in ((0, 1), (0, 2), (1, 2)):
        deltas = {
            client: trained(began[client][1], client) - began[client][1] for client in landing
        }
        hand.land(*(began[client][0] for client in landing))
        x = x + last.mean(0) + np.mean([deltas[client] - last[client] for client in landing], 0)
        for client in landing:
            last[client] = deltas[client]
        np.testing.assert_allclose(hand.x, x, atol=1e-14)
        began |= {client: (hand.send(client), x) for client in landing}


@dataclass(frozen=True, kw_only=True)
class SCAFFOLD(Rule):
    """c_i ← c_i − c + mean gradient, with the c that the client was sent, not the one at landing."""

    def traits(self) -> Traits:
        return Traits(uniform=True, late=True, needs=frozenset({"mass"}))

    def server(self, now: Round) -> State:
        return {"c": torch.zeros_like(now.x)}

    def client(self, now: Round) -> State:
        return {"c": torch.zeros_like(now.x)}

    def brief(self, briefs: Briefs, memory: Memory, now: Round) -> tuple[Briefs, State]:
        c = memory.state["c"].expand(len(briefs), -1)
        return briefs.pushed(c - memory.rows["c"]), {"c": c}

    def observe(self, memory: Memory, now: Round) -> Memory:
        mine = memory.rows["c"] - memory.sent["c"] + mean_gradients(now)
        c = memory.state["c"] + (mine - memory.rows["c"]).sum(0) / now.population
        return memory.replace(state={"c": c}, rows={"c": mine})


@engines
def test_asynchronous_scaffold(engine: str) -> None:
    hand = Hand(SCAFFOLD(), engine, size=2, epochs=2)
    x, c, mine = hand.x, np.zeros(3), np.zeros((N, 3))
    began = {client: (hand.send(client), x, c) for client in range(3)}
    for landing in ((0, 1), (1, 2), (0, 2), (0, 1)):
        hand.land(*(began[client][0] for client in landing))
        deltas, moved = [], np.zeros(3)
        for client in landing:
            _, version, sent = began[client]
            w = trained(version, client, 2, push=sent - mine[client])
            after = mine[client] - sent + (version - w) / (2 * 0.1)
            moved += (after - mine[client]) / N
            mine[client] = after
            deltas.append(w - version)
        x, c = x + np.mean(deltas, 0), c + moved
        np.testing.assert_allclose(hand.x, x, atol=1e-13)
        np.testing.assert_allclose(hand.run.states[0]["c"], c, atol=1e-13)
        began |= {client: (hand.send(client), x, c) for client in landing}


@engines
def test_asynchronous_fedaware(engine: str) -> None:
    """The library's rule as it is: its rows are of updates, whatever version they are from."""
    hand = Hand(FedAWARE(normalise=False, lr=0.5), engine, size=2)
    x, averages = hand.x, dict[int, np.ndarray]()
    began = {client: (hand.send(client), x) for client in range(3)}
    for landing in ((0, 1), (0, 2), (1, 2)):
        hand.land(*(began[client][0] for client in landing))
        for client in landing:
            delta = trained(began[client][1], client) - began[client][1]
            averages[client] = 0.5 * averages.get(client, np.zeros(3)) + 0.5 * delta
        x = x + 0.5 * shortest(np.stack([*averages.values()]))
        np.testing.assert_allclose(hand.x, x, atol=1e-7)  # its rows are float32
        began |= {client: (hand.send(client), x) for client in landing}


def shortest(points: np.ndarray) -> np.ndarray:
    """The shortest convex combination, by trying every set of points with positive weights."""
    best = points[0]
    for size in range(1, len(points) + 1):
        for chosen in combinations(points, size):
            face = np.stack(chosen)
            gram = np.pad(face @ face.T, (0, 1), constant_values=1.0)
            gram[-1, -1] = 0
            weights = np.linalg.lstsq(gram, np.eye(size + 1)[-1], rcond=None)[0][:-1]
            candidate = weights @ face
            if (weights >= -1e-12).all() and candidate @ candidate < best @ best:
                best = candidate
    return best


@dataclass(frozen=True, kw_only=True)
class PartialWork(Rule):
    """Clients do as many steps as the deadline leaves them; `pace` is their seconds a sample."""

    seconds: float = 1.0
    pace: float = 0.1

    def brief(self, briefs: Briefs, memory: Memory, now: Round) -> Briefs:
        assert now.sizes is not None
        samples = torch.from_numpy(now.sizes)[briefs.ids]
        steps = (self.seconds / (self.pace * samples)).long().clamp(min=1)
        return replace(briefs, max_steps=steps)


@engines
def test_partial_work(engine: str) -> None:
    (run,) = course(PartialWork(), engine, epochs=3)
    steps = [3, 2, 2]  # 10 samples in all, for clients of 3, 5 and 4
    assert run.record.reports.steps.tolist() == steps
    deltas = np.array([trained(START, client, steps[client]) - START for client in range(3)])
    np.testing.assert_allclose(updates(run), deltas, atol=1e-14)
    np.testing.assert_allclose(run.x, START + SHARES @ deltas, atol=1e-14)
