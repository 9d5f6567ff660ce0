"""The reference's problems as tasks, and runs over given cohorts in which given clients fail."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from reference import Cohort, Problem, Quadratic, Setting
from torch import Tensor, nn

from kairosfl.core.fields import Briefs, Report, Reports
from kairosfl.core.recipe import Recipe
from kairosfl.core.round import drive, rounds
from kairosfl.core.rule import Algorithm, Memory, Plan, Rule
from kairosfl.core.run import Round, Run, Setup
from kairosfl.detectors import FGN
from kairosfl.engines.loop import Loop
from kairosfl.rules import parse
from kairosfl.tasks.dataset import DataSet, Samples
from kairosfl.tasks.kinds import cross_entropy
from kairosfl.tasks.population import Population
from kairosfl.tasks.task import Task


class Bowl(nn.Module):
    """½ (w − b)ᵀ A (w − b) for samples that hold A and b; w lies in two tensors."""

    def __init__(self, x: np.ndarray, tensors: Sequence[int]) -> None:
        super().__init__()
        parts = torch.from_numpy(x).split(list(tensors))
        self.parts = nn.ParameterList(nn.Parameter(part.clone()) for part in parts)

    def forward(self, samples: Tensor) -> Tensor:
        w = torch.cat(list(self.parts))
        A, b = samples[:, :-1], samples[:, -1]
        away = w - b
        return torch.einsum("sj,sjk,sk->s", away, A, away)[:, None] / 2


def task(problem: Problem) -> Task:
    """A float64 task with the same losses."""
    population = Population.from_lists(
        np.split(np.arange(problem.n.sum()), np.cumsum(problem.n)[:-1])
    )
    if isinstance(problem, Quadratic):
        inputs = np.concatenate(
            [
                np.concatenate([np.tile(A, (len(b), 1, 1)), b[:, None]], 1)
                for A, b in zip(problem.A, problem.b, strict=True)
            ]
        )
        targets = np.zeros(len(inputs), dtype=np.int64)
        model: nn.Module = Bowl(problem.x, problem.tensors)
    else:
        inputs, targets = np.concatenate(problem.inputs), np.concatenate(problem.targets)
        model = nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)).double()
        nn.utils.vector_to_parameters(torch.from_numpy(problem.x), model.parameters())
    samples = Samples(torch.from_numpy(inputs), torch.from_numpy(targets))
    loss = (
        (lambda outputs, targets: outputs[:, 0])
        if isinstance(problem, Quadratic)
        else cross_entropy
    )
    return Task(model, DataSet("reference", samples, samples, classes=3), population, loss=loss)


@dataclass(frozen=True, kw_only=True)
class Cohorts(Rule):
    """These clients in these rounds."""

    ids: tuple[tuple[int, ...], ...]

    def select(self, plan: Plan, memory: Memory, now: Round) -> Plan:
        return replace(plan, ids=np.array(self.ids[now.number]))


@dataclass
class Flaky:
    """An engine whose clients fail in given rounds."""

    engine: Loop
    lost: Sequence[tuple[int, ...]]

    def train(self, briefs: Briefs) -> Reports:
        reports = self.engine.train(briefs)
        lost = self.lost[briefs.newest]
        kept = torch.tensor(
            [row for row, client in enumerate(reports.ids.tolist()) if client not in lost],
            dtype=torch.int64,
        )
        return replace(reports.take(kept), failed=tuple((client, "lost") for client in lost))


def recipe(setting: Setting, cohorts: Sequence[Cohort]) -> Recipe:
    return Recipe(
        rounds=len(cohorts),
        cohort=len(cohorts[0].asked),
        epochs=setting.epochs,
        batch_size=setting.batch,
        lr=setting.lr,
        momentum=setting.momentum,
        weight_decay=setting.decay,
        clip=setting.clip if np.isfinite(setting.clip) else 0.0,
        schedule="exponential",
        gamma=setting.gamma,
    )


def follow(
    problem: Problem, setting: Setting, cohorts: Sequence[Cohort], algorithm: str | Algorithm
) -> list[Run]:
    """The run after every round, on the loop engine."""
    made = parse(algorithm) if isinstance(algorithm, str) else algorithm
    steered = Algorithm((Cohorts(ids=tuple(cohort.asked for cohort in cohorts)), *made.rules))
    job = task(problem)
    engine = Flaky(Loop(job), [cohort.lost for cohort in cohorts])
    setup = Setup(steered, recipe(setting, cohorts), len(problem.n), job.layout, detectors=(FGN(),))
    start = Run.start(job.start(), setup, seed=setting.seed)
    return list(drive(rounds(start, setup), engine))


def course(
    problem: Problem, setting: Setting, cohorts: Sequence[Cohort], algorithm: str | Algorithm
) -> np.ndarray:
    """x after every round, `[rounds, d]`."""
    return np.array([run.x.numpy() for run in follow(problem, setting, cohorts, algorithm)])


@dataclass
class FullGradient:
    """An engine in numpy that follows briefs on a quadratic with full gradients and a number of
    steps per client.
    """

    problem: Quadratic
    steps: Sequence[int]

    def train(self, briefs: Briefs) -> Reports:
        reports = []
        for brief in briefs.each():
            i, start = brief.client, brief.start.numpy()
            w, v, grad_sq = start, 0.0, 0.0
            push = 0.0 if brief.push is None else brief.push.numpy()
            centre = self.problem.b[i].mean(0)
            for _ in range(self.steps[i]):
                g = self.problem.A[i] @ (w - centre)
                grad_sq += float(g @ g)
                g = brief.scale * g + brief.pull * (w - start) + push + brief.weight_decay * w
                v = brief.momentum * v + g
                w = w - brief.lr * v
            loss = self.problem.loss(i, w)
            reports.append(
                Report(
                    client=i,
                    n=int(self.problem.n[i]),
                    steps=self.steps[i],
                    epochs=1.0,
                    delta=torch.from_numpy(w - start),
                    loss=loss,
                    grad_sq=grad_sq,
                    seconds=0.0,
                    score_before=self.problem.loss(i, start),
                    score_after=loss,
                )
            )
        return Reports.stack(reports, torch.stack([report.delta for report in reports]))


def settling(
    problem: Quadratic,
    algorithm: str,
    *,
    steps: Sequence[int],
    cohort: int,
    rounds_: int,
    lr: float = 0.02,
) -> np.ndarray:
    """x after every one of many rounds with momentum 0.9 and weight decay 0.01, `[rounds, d]`."""
    how = Recipe(rounds=rounds_, cohort=cohort, lr=lr, momentum=0.9, weight_decay=0.01)
    setup = Setup(parse(algorithm), how, len(problem.n), task(problem).layout, detectors=(FGN(),))
    start = Run.start(torch.from_numpy(problem.x), setup, seed=0)
    return np.array(
        [run.x.numpy() for run in drive(rounds(start, setup), FullGradient(problem, steps))]
    )


def settle(problem: Quadratic, algorithm: str, **options: Any) -> np.ndarray:
    """x after many rounds."""
    return np.asarray(settling(problem, algorithm, **options)[-1])
