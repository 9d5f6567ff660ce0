"""One client of ten lies, 25 rounds on digits: what the deployment's template withstands, and FedAvg does not.

python tests/test_lies.py 0 1 2 3 4 5        the table of docs/trust.md, for these seeds
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import pytest
import torch

from kairosfl.core.fields import Briefs, Reports
from kairosfl.core.recipe import Recipe
from kairosfl.core.round import drive, rounds
from kairosfl.core.run import Run, Setup
from kairosfl.engines.batched import Batched
from kairosfl.rules import parse
from kairosfl.rules.attack import liars
from kairosfl.tasks import models
from kairosfl.tasks.data import load
from kairosfl.tasks.partitions import partition
from kairosfl.tasks.population import Population
from kairosfl.tasks.task import Task

CLIENTS, ROUNDS, LIAR = 10, 25, 3
HARM = 0.03


def template() -> str:
    """The algorithm of `kairosfl deploy new`."""
    templates = pytest.importorskip("kairosfl.engines.flower.templates")
    return str(tomllib.loads(templates.RUN)["algorithm"])


def bare() -> str:
    """The same without its limits, which are its last rule."""
    return template().rpartition(" + limits")[0]


def many_samples(reports: Reports, row: int, round: int) -> Reports:
    n = reports.n.clone()
    n[row] = 10_000_000  # what deploy.max_samples lets pass
    return replace(reports, n=n)


def turned(reports: Reports, row: int, round: int) -> Reports:
    delta = reports.delta.clone()
    delta[row] *= -5
    return replace(reports, delta=delta)


def noise(reports: Reports, row: int, round: int) -> Reports:
    delta, draw = reports.delta.clone(), torch.Generator().manual_seed(round)
    drawn = torch.randn(delta.shape[1], generator=draw)
    delta[row] = 9_999 * drawn / drawn.norm()  # what deploy.max_norm lets pass
    return replace(reports, delta=delta)


def falling_score(reports: Reports, row: int, round: int) -> Reports:
    if reports.score_after is None:
        return reports
    score = reports.score_after.clone()
    score[row] = -1e5 * round
    return replace(reports, score_after=score)


Lie = Callable[[Reports, int, int], Reports]
LIES: dict[str, tuple[Lie, ...]] = {
    "samples": (many_samples,),
    "turned": (turned,),
    "noise": (noise,),
    "samples, turned": (many_samples, turned),
    "samples, noise": (many_samples, noise),
    "score, turned": (falling_score, turned),
}


@dataclass
class Lying:
    """An engine in which one client sends something else."""

    engine: Batched
    lies: tuple[Lie, ...]

    def train(self, briefs: Briefs) -> Reports:
        reports = self.engine.train(briefs)
        for row in (reports.ids == LIAR).nonzero().flatten().tolist():
            for lie in self.lies:
                reports = lie(reports, row, briefs.round + 1)
        return reports


@cache
def accuracy(
    text: str, lies: tuple[Lie, ...] = (), data: str = "iid", seed: int = 0, length: int = ROUNDS, unequal: bool = False
) -> float:
    """Over the final tenth of the rounds."""
    dataset = load("digits")
    options = {} if data == "iid" else {"alpha": 0.1}
    clients = partition(dataset, name=data, clients=CLIENTS, seed=seed, **options)
    if unequal:  # a tenth of the samples to all of them
        parts = np.geomspace(0.1, 1, CLIENTS)
        kept = [each[: max(4, int(part * len(each)))] for each, part in zip(clients, parts, strict=True)]
        clients = Population.from_lists(kept)
    task = Task(models.build("mlp", shape=dataset.shape, classes=dataset.classes, seed=seed), dataset, clients)
    engine = Batched(task)
    recipe = Recipe(rounds=length, cohort=CLIENTS, epochs=1, batch_size=32, lr=0.2)
    setup = Setup(parse(text), recipe, CLIENTS, task.layout)
    course = drive(rounds(Run.start(engine.start(), setup, seed=seed), setup), Lying(engine, lies))
    return float(np.mean([engine.evaluate(run.x).accuracy for run in course if run.round > 0.9 * length]))


@pytest.mark.parametrize("lie", ["noise", "samples, turned"])
def test_no_client_of_ten_moves_the_template_by_more_than_three_points(lie: str) -> None:
    honest = accuracy(template())
    assert honest > 0.93
    assert accuracy(template(), LIES[lie]) > honest - HARM


def test_without_limits_the_same_lie_ruins_the_run() -> None:
    assert bare()
    assert accuracy(bare(), LIES["samples, turned"]) < 0.2


@pytest.mark.slow
@pytest.mark.parametrize("lie", LIES)
@pytest.mark.parametrize("seed", [0, 1, 3, 8])  # the last two cost most: of those chosen on, and of the others
def test_every_lie(lie: str, seed: int) -> None:
    for text in (template(), template().replace("+ limits", "+ pa3fed(always=True) + limits")):
        assert accuracy(text, LIES[lie], seed=seed) > accuracy(template(), seed=seed) - HARM


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["median", "centeredclipping"])
@pytest.mark.parametrize("lie", ["sign", "scaled", "random", "little", "inner"])
def test_three_of_ten_on_iid_digits(rule: str, lie: str) -> None:
    assert len(liars(0, CLIENTS, 0.3)) == 3
    assert accuracy(f"attack(lie='{lie}', share=0.3) + {rule}") > accuracy("fedavg") - HARM


@pytest.mark.slow
@pytest.mark.parametrize("unequal", [False, True])
def test_honest_clients_with_different_data_lose_less_than_a_point(unequal: bool) -> None:
    lost = [
        accuracy(bare(), (), "dirichlet", seed, 60, unequal) - accuracy(template(), (), "dirichlet", seed, 60, unequal)
        for seed in range(2)
    ]
    assert np.mean(lost) < 0.01


def table(seeds: list[int]) -> None:
    """Points lost by each lie: the algorithm of the template, and with pa3fed; a column for each seed."""
    honest = {seed: accuracy(template(), seed=seed) for seed in seeds}
    print(f"{'no lie, accuracy':>28}", *(f"{100 * value:6.2f}" for value in honest.values()), flush=True)
    for name, lies in LIES.items():
        for text in (template(), template().replace("+ limits", "+ pa3fed(always=True) + limits")):
            lost = [100 * (honest[seed] - accuracy(text, lies, seed=seed)) for seed in seeds]
            label = f"{name} (pa3fed)" if "pa3fed" in text else name
            print(f"{label:>28}", *(f"{value:+6.2f}" for value in lost), f"  worst {max(lost):+.2f}", flush=True)


if __name__ == "__main__":
    import sys

    table([int(seed) for seed in sys.argv[1:]])
