"""Small rules that ask clients for what a brief can ask beyond plain training, and a task of three
clients on which every number is worked out by hand in tests/core/test_visits.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from kairosfl.core.fields import Briefs, Reports, fields
from kairosfl.core.recipe import Recipe
from kairosfl.core.round import drive, rounds
from kairosfl.core.rule import Algorithm, Memory, Plan, Round, Rule
from kairosfl.core.run import Run, Setup
from kairosfl.core.traits import Traits
from kairosfl.tasks.dataset import DataSet, Samples
from kairosfl.tasks.population import Population
from kairosfl.tasks.task import Task

SIZES = (3, 5, 4)
EVERYONE = torch.arange(3)


class Line(nn.Module):
    """y = (a · x + frozen) · b."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Parameter(torch.tensor([0.5, -0.3], dtype=torch.float64))
        self.b = nn.Parameter(torch.tensor([1.2], dtype=torch.float64))
        self.frozen = nn.Parameter(torch.tensor([0.1], dtype=torch.float64), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.a + self.frozen) * self.b


def squares(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs - targets).square()


def line(own: tuple[str, ...] = ()) -> Task:
    rng = np.random.default_rng(7)
    x = torch.from_numpy(rng.standard_normal((sum(SIZES), 2)))
    samples = Samples(x, torch.from_numpy(rng.standard_normal(sum(SIZES))))
    clients = Population.from_lists(np.split(np.arange(len(x)), np.cumsum(SIZES)[:-1]))
    dataset = DataSet("line", samples, samples, classes=0)
    return Task(Line(), dataset, clients, loss=squares, metrics={}, own=own)


@dataclass(frozen=True, kw_only=True)
class Told(Rule):
    """Writes fields of the brief; the cohort of round 1 lacks client 0, and that of round 2 has
    client 0 and 2.
    """

    told: Callable[[Briefs, Round], dict[str, Any]]
    keeps: frozenset[str] = frozenset()

    def traits(self) -> Traits:
        return Traits(keeps=self.keeps)

    def select(self, plan: Plan, memory: Memory, now: Round) -> Plan:
        return replace(plan, ids=np.array([[0, 1, 2], [1, 2], [0, 2]][now.number % 3]))

    def brief(self, briefs: Briefs, memory: Memory, now: Round) -> Briefs:
        return replace(briefs, **self.told(briefs, now))


class Late(Told):
    """Clients 1 and 2 come later than client 0."""

    def select(self, plan: Plan, memory: Memory, now: Round) -> Plan:
        return replace(plan, ids=np.array([[0], [0, 1], [0, 1, 2]][now.number % 3]))


class Rebases(Told):
    """Moves what is frozen."""

    def rebase(self, base: Tensor, memory: Memory, now: Round) -> Tensor:
        return base + 0.25


class Asks(Told):
    """Measures everyone first, and trains the two clients with the highest loss."""

    def select(self, plan: Plan, memory: Memory, now: Round) -> Plan:
        if now.measured is None:
            return replace(plan, first=np.arange(3), measure=frozenset({"score_before"}))
        order = np.argsort(-now.measured.score_before.numpy(), kind="stable")
        return replace(plan, ids=now.measured.ids.numpy()[order[:2]])


def nothing(briefs: Briefs, now: Round) -> dict[str, Any]:
    return {}


def fewer_steps(briefs: Briefs, now: Round) -> dict[str, Any]:
    return {"max_steps": 1 + briefs.ids}


def still(briefs: Briefs, now: Round) -> dict[str, Any]:
    return {"still": frozenset({now.number % 2})}


def head_first(briefs: Briefs, now: Round) -> dict[str, Any]:
    return {"own_epochs": torch.full((len(briefs),), 2), "still": frozenset({1})}


def candidates(briefs: Briefs, now: Round) -> dict[str, Any]:
    far = torch.tensor([0.6, 0.2, 0.9], dtype=torch.float64)
    return {"candidates": torch.stack([now.x, now.x + far / 2, now.x - far])}


def squared(briefs: Briefs, now: Round) -> dict[str, Any]:
    return {"measure": briefs.measure | {"squared_loss", "score_before", "score_after"}}


def second(**terms: Any) -> Callable[[Briefs, Round], dict[str, Any]]:
    def told(briefs: Briefs, now: Round) -> dict[str, Any]:
        ones = torch.ones(len(briefs), dtype=torch.float64)
        numbers = {"second_lr": 0.05, "second_pull": 0.5}
        words = {"second_when": "batch", "second_centre": "start"} | terms
        for name in ("second_pull", "second_draw", "scale"):
            if name in words:
                numbers[name] = words.pop(name)
        return {name: number * ones for name, number in numbers.items()} | words

    return told


DITTO = second(second_centre="start", second_when="before")
PFEDME = second(second_centre="w", second_inner=3, second_pull=2.0, second_draw=2.0, scale=0.0)
APFL = second(mixed=True, second_pull=0.0)
ONE, BOTH = frozenset({"second"}), frozenset({"second", "mix"})
# The rule, and the own part of the model.
ASKED: dict[str, tuple[Rule, tuple[str, ...]]] = {
    "max_steps": (Told(told=fewer_steps), ()),
    "still": (Told(told=still), ()),
    "own": (Told(told=nothing), ("b",)),
    "own_epochs": (Told(told=head_first), ("b",)),
    "ditto": (Told(told=DITTO, keeps=ONE), ()),
    "pfedme": (Told(told=PFEDME, keeps=ONE), ()),
    "apfl": (Told(told=APFL, keeps=BOTH), ()),
    "late": (Late(told=APFL, keeps=BOTH), ()),
    "candidates": (Told(told=candidates), ()),
    "base": (Rebases(told=nothing), ()),
    "first": (Asks(told=nothing), ()),
    "squared_loss": (Told(told=squared), ()),
}


def setup_of(rule: Rule, task: Task, number: int = 3, **more: Any) -> Setup:
    recipe = Recipe(rounds=number, cohort=3, epochs=2, batch_size=2, lr=0.1, momentum=0.5)
    return Setup(Algorithm((rule,)), recipe, 3, task.layout, own=task.own_start(), **more)


def course(rule: Rule, task: Task, engine: Any, number: int = 3, **more: Any) -> list[Run]:
    """The runs after every round, over three clients."""
    setup = setup_of(rule, task, number, **more)
    return list(drive(rounds(Run.start(task.start(), setup, seed=3), setup), engine))


def check_same(ours: list[Run], theirs: list[Run]) -> None:
    """The same models and reports to the bit."""
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one.x, other.x)
        assert one.record.rejected == other.record.rejected == ()
        check_reports(one.record.reports, other.record.reports)
        if one.record.first is not None:
            check_reports(one.record.first[1], other.record.first[1])
    assert not torch.equal(ours[0].x, ours[-1].x)


def check_reports(one: Reports, other: Reports) -> None:
    for entry in fields(Reports):
        if entry.name not in ("seconds", "failed"):
            column, same = getattr(one, entry.name), getattr(other, entry.name)
            assert (column is None) == (same is None), entry.name
            if column is not None and not (entry.name == "mass" and not len(column)):
                assert torch.equal(column, same), entry.name
