"""Personal models sketched against the contract: FedPer and FedBN, FedRep, Ditto, APFL, pFedMe, IFCA."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from sketches import SHARES, course, trained
from test_visits import LR, START, engines, loss, slope, task
from torch import Tensor

from kairosfl.core.fields import Briefs
from kairosfl.core.recipe import Recipe
from kairosfl.core.round import personal
from kairosfl.core.rule import Algorithm, Memory, Plan, Round, Rule, State
from kairosfl.core.run import Run, Setup
from kairosfl.core.streams import stream
from kairosfl.core.traits import Traits

EVERYONE = torch.arange(3)


@dataclass(frozen=True, kw_only=True)
class Nothing(Rule):
    """FedPer is the task's `own` alone, and so is FedBN, whose own tensors are those of norms."""


@engines
def test_fedper(engine: str) -> None:
    shared, own = START[:2], np.full(3, START[2])
    for run in course(Nothing(), engine, own=("b",)):
        ends = [trained(np.append(shared, own[client]), client) for client in range(3)]
        shared = shared + SHARES @ [end[:2] - shared for end in ends]
        own = np.array([end[2] for end in ends])
        np.testing.assert_allclose(run.x, shared, atol=1e-14)
        np.testing.assert_allclose(run.kept.rows(EVERYONE)["own"][:, 0], own, atol=1e-14)


@dataclass(frozen=True, kw_only=True)
class FedRep(Rule):
    """Epochs of the head alone, then the body with the head still."""

    head_epochs: int = 2

    def brief(self, briefs: Briefs, memory: Memory, now: Round) -> Briefs:
        shared = len(now.layout.entries)
        head = frozenset(range(shared, len(now.layout.names)))
        epochs = torch.full((len(briefs),), self.head_epochs)
        return replace(briefs, own_epochs=epochs, still=head)


@engines
def test_fedrep(engine: str) -> None:
    shared, own = START[:2], np.full(3, START[2])
    for run in course(FedRep(), engine, own=("b",)):
        deltas = []
        for client in range(3):
            w = np.append(shared, own[client])
            for _ in range(2):
                w[2] -= LR * slope(w, client)[2]
            own[client] = w[2]
            deltas.append(-LR * slope(w, client)[:2])
        shared = shared + SHARES @ deltas
        np.testing.assert_allclose(run.x, shared, atol=1e-14)
        np.testing.assert_allclose(run.kept.rows(EVERYONE)["own"][:, 0], own, atol=1e-14)


@dataclass(frozen=True, kw_only=True)
class Ditto(Rule):
    """v_i ← v_i − lr (∇f(v_i) + λ (v_i − x)) beside plain training, on the same batches."""

    strength: float = 0.5
    lr: float = 0.05

    def traits(self) -> Traits:
        return Traits(sums=True, keeps=frozenset({"second"}))

    def brief(self, briefs: Briefs, memory: Memory, now: Round) -> Briefs:
        each = torch.ones(len(briefs), dtype=torch.float64)
        return replace(
            briefs,
            second_lr=self.lr * each,
            second_pull=self.strength * each,
            second_centre="start",
            second_when="batch",
        )


@engines
def test_ditto(engine: str) -> None:
    x, second = START, np.tile(START, (3, 1))
    for run in course(Ditto(), engine, epochs=2):
        for client, v in enumerate(second):
            for _ in range(2):
                v -= 0.05 * (slope(v, client) + 0.5 * (v - x))
        x = x + SHARES @ [trained(x, client, 2) - x for client in range(3)]
        np.testing.assert_allclose(run.x, x, atol=1e-14)
        np.testing.assert_allclose(run.kept.rows(EVERYONE)["second"], second, atol=1e-14)


@dataclass(frozen=True, kw_only=True)
class APFL(Rule):
    """The client's model is the mixture a v + (1 − a) w; v and a learn through it."""

    lr: float = 0.05

    def traits(self) -> Traits:
        return Traits(sums=True, keeps=frozenset({"second", "mix"}))

    def brief(self, briefs: Briefs, memory: Memory, now: Round) -> Briefs:
        each = torch.full((len(briefs),), self.lr, dtype=torch.float64)
        return replace(briefs, second_lr=each, second_when="batch", mixed=True)


@engines
def test_apfl(engine: str) -> None:
    x, second, mix = START, np.tile(START, (3, 1)), np.full(3, 0.5)
    for run in course(APFL(), engine, epochs=2):
        ends = []
        for client in range(3):
            w = x
            for _ in range(2):
                v, share = second[client].copy(), mix[client]
                gradient = slope(share * v + (1 - share) * w, client)
                second[client] -= 0.05 * share * gradient
                mix[client] = np.clip(share - 0.05 * gradient @ (v - w), 0, 1)
                w = trained(w, client)
            ends.append(w)
        x = x + SHARES @ (np.array(ends) - x)
        kept = run.kept.rows(EVERYONE)
        np.testing.assert_allclose(run.x, x, atol=1e-14)
        np.testing.assert_allclose(kept["second"], second, atol=1e-14)
        np.testing.assert_allclose(kept["mix"], mix, atol=1e-14)


@dataclass(frozen=True, kw_only=True)
class PFedMe(Rule):
    """Everybody trains; w follows θ, which takes `inner` steps on each batch, pulled to w; the w of
    a few are averaged, and x ← (1 − β) x + β · their mean.
    """

    strength: float = 2.0
    lr: float = 0.05
    inner: int = 3
    beta: float = 1.5
    few: int = 2

    def traits(self) -> Traits:
        return Traits(uniform=True, keeps=frozenset({"second"}))

    def select(self, plan: Plan, memory: Memory, now: Round) -> Plan:
        return replace(plan, ids=np.arange(now.population))

    def largest_cohort(self, cohort: int, population: int) -> int:
        return population

    def brief(self, briefs: Briefs, memory: Memory, now: Round) -> Briefs:
        each = torch.ones(len(briefs), dtype=torch.float64)
        return replace(
            briefs,
            scale=0 * each,
            second_lr=self.lr * each,
            second_pull=self.strength * each,
            second_draw=self.strength * each,
            second_centre="w",
            second_inner=self.inner,
            second_when="batch",
        )

    def weigh(self, factors: Tensor, memory: Memory, now: Round) -> Tensor:
        few = now.stream("pfedme").choice(now.population, self.few, replace=False)
        averaged = np.isin(now.reports.ids.numpy(), few)
        return factors * torch.from_numpy(averaged).double()

    def step(self, direction: Tensor, memory: Memory, now: Round) -> tuple[Tensor, Memory]:
        return self.beta * direction, memory


@engines
def test_pfedme(engine: str) -> None:
    x, second = START, np.tile(START, (3, 1))
    for number, run in enumerate(course(PFedMe(), engine, epochs=2)):
        ends = []
        for client, theta in enumerate(second):
            w = x
            for _ in range(2):
                for _ in range(3):
                    theta -= 0.05 * (slope(theta, client) + 2.0 * (theta - w))
                w = w - LR * 2.0 * (w - theta)
            ends.append(w)
        few = stream(0, "pfedme", number).choice(3, 2, replace=False)
        x = (1 - 1.5) * x + 1.5 * np.mean([ends[client] for client in few], 0)
        np.testing.assert_allclose(run.x, x, atol=1e-14)
        np.testing.assert_allclose(run.kept.rows(EVERYONE)["second"], second, atol=1e-14)


@dataclass(frozen=True, kw_only=True)
class IFCA(Rule):
    """Each client trains the one of k models that fits it best, and is evaluated with it; x is their
    mean.
    """

    clusters: int = 4
    spread: float = 0.5

    def traits(self) -> Traits:
        return Traits(needs={"choice"})

    def server(self, now: Round) -> State:
        draws = now.stream("ifca").standard_normal((self.clusters, len(now.x)))
        return {"models": now.x + self.spread * torch.from_numpy(draws).to(now.x)}

    def client(self, now: Round) -> State:
        return {"choice": torch.tensor(-1)}

    def brief(self, briefs: Briefs, memory: Memory, now: Round) -> Briefs:
        return replace(briefs, candidates=memory.state["models"])

    def observe(self, memory: Memory, now: Round) -> Memory:
        models, choice = memory.state["models"].clone(), now.reports.choice
        for cluster in choice.unique().tolist():
            models[cluster] = now.trained()[choice == cluster].mean(0)
        return memory.replace(state={"models": models}, rows={"choice": choice})

    def step(self, direction: Tensor, memory: Memory, now: Round) -> tuple[Tensor, Memory]:
        return memory.state["models"].mean(0) - now.x, memory

    def personal(self, x: Tensor, ids: Tensor, memory: Memory, now: Round) -> Tensor:
        choice = memory.rows["choice"]
        return torch.where((choice < 0)[:, None], x, memory.state["models"][choice])


@engines
def test_ifca(engine: str) -> None:
    models = START + 0.5 * stream(0, "ifca", 0).standard_normal((4, 3))
    job, rule = task(), IFCA()
    setup = Setup(Algorithm((rule,)), Recipe(rounds=3, cohort=3, lr=LR), 3, job.layout)
    fresh = Run.start(job.start(), setup, seed=0)
    assert torch.equal(personal(fresh, setup, EVERYONE), fresh.x.expand(3, -1))
    for run in course(rule, engine):
        choice = [int(np.argmin([loss(model, client) for model in models])) for client in range(3)]
        ends = np.array([trained(models[choice[client]], client) for client in range(3)])
        for cluster in set(choice):
            models[cluster] = ends[np.array(choice) == cluster].mean(0)
        np.testing.assert_allclose(run.x, models.mean(0), atol=1e-13)
        np.testing.assert_allclose(personal(run, setup, EVERYONE), models[choice], atol=1e-13)
    assert choice == [1, 3, 3]  # the second client changed its cluster
