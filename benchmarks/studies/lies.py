"""One client of ten lies: what it costs without limits, and with those of the deployment's
template.

    python benchmarks/studies/lies.py --out benchmarks/studies/lies.json

Digits over ten clients, all of them in every round, 25 rounds of one epoch, batch 32, lr 0.2, an
`mlp`; mean test accuracy over the final tenth of the rounds. Prints the tables of docs/trust.md.
Runs that the file already has are not repeated; `--only-print` trains none.
"""

from __future__ import annotations

import argparse
import json
import sys
import tomllib
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np
import torch

from kairosfl import Batched
from kairosfl.core.fields import Briefs, Reports
from kairosfl.core.round import result
from kairosfl.deploy.templates import RUN
from kairosfl.tasks.hostile import flip_labels
from kairosfl.tasks.population import Population

sys.path.insert(0, str(Path(__file__).parents[1]))
from setting import LIES as SETTING
from setting import begin

CLIENTS = SETTING.clients
ROUNDS = SETTING.rounds
LONG = 60
LIAR = 3
TEMPLATE = str(tomllib.loads(RUN)["algorithm"])  # of `kairosfl deploy new`
BARE, _, LIMITS = TEMPLATE.rpartition(" + ")  # its last rule are the limits
PA3FED = f"{BARE} + pa3fed(always=True)"
BASES = {
    "template": BARE,
    "template + pa3fed": PA3FED,
    "fedavg": "fedavg",
    "fedyogi": "fedyogi",
    "scaffold": "scaffold",
}
VALUES = (
    "1.5, 1.5",
    "1.5, 1.2",
    "1.2, 1.5",
    "1.25, 1.25",
    "1.2, 1.25",
    "1.1, 1.1",
    "1.0, 1.25",
)  # weight, norm
FEW, CHOSEN, OTHERS = (
    range(3),
    range(6),
    range(6, 10),
)  # seeds; the template's values were chosen on `CHOSEN`


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
    "none": (),
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
                reports = lie(reports, row, briefs.newest + 1)
        return reports


@dataclass(frozen=True)
class Case:
    """A run. `flipped` are the clients with wrong labels; `unequal` sizes differ tenfold."""

    algorithm: str
    lie: str = "none"
    seed: int = 0
    data: str = "iid"
    length: int = ROUNDS
    unequal: bool = False
    flipped: tuple[int, ...] = ()


@cache
def accuracy(case: Case) -> float:
    """Over the final tenth of the rounds."""
    torch.set_num_threads(1)
    setting = SETTING
    if case.data == "dirichlet":
        setting = replace(SETTING, alpha=0.1)
    clients = setting.population(case.seed)
    if case.unequal:  # a tenth of the samples to all of them
        parts = np.geomspace(0.1, 1, CLIENTS)
        kept = [
            each[: max(4, int(part * len(each)))] for each, part in zip(clients, parts, strict=True)
        ]
        clients = Population.from_lists(kept)
    task = setting.task(case.seed, clients)
    if case.flipped:
        task = flip_labels(task, case.flipped)
    engine = Batched(task)
    recipe = setting.recipe(rounds=case.length)
    lying = Lying(engine, LIES[case.lie])
    setup, course = begin(engine, case.algorithm, recipe, case.seed, through=lying)
    scores = [
        engine.evaluate(result(run, setup)).accuracy
        for run in course
        if run.round > 0.9 * case.length
    ]
    return float(np.mean(scores))


class Measured:
    """Accuracies by case, kept in a file."""

    def __init__(self, path: Path | None, train: bool = True) -> None:
        self.path, self.train = path, train
        self.found: dict[str, float] = (
            json.loads(path.read_text()) if path and path.exists() else {}
        )

    def __call__(self, case: Case) -> float:
        """In percent; NaN where it was not measured and nothing is to be trained."""
        name = repr(case)
        if name not in self.found:
            if not self.train:
                return float("nan")
            self.found[name] = accuracy(case)
            if self.path:
                self.path.write_text(json.dumps(self.found, indent=1) + "\n")
        return 100 * self.found[name]

    def mean(self, cases: Iterable[Case]) -> float:
        return float(np.mean([self(case) for case in cases]))

    def lost(self, honest: Case, other: Case) -> float:
        """Points lost in `other`."""
        return self(honest) - self(other)


def by_lie(measured: Measured) -> None:
    """A row per lie: accuracy without limits and with them by algorithm, and what the template
    loses at most.
    """
    print(f"| lie | {' | '.join(f'`{name}`' for name in BASES)} | template: lost | with pa3fed |")
    print(f"|---|{'---|' * (len(BASES) + 2)}")
    for lie in LIES:
        cells = []
        for base in BASES.values():
            ends = [
                measured.mean(Case(text, lie, seed) for seed in FEW)
                for text in (base, f"{base} + {LIMITS}")
            ]
            cells.append(" → ".join(f"{end:.1f}" for end in ends))
        for base in (BARE, PA3FED):
            lost = [
                measured.lost(Case(TEMPLATE, seed=seed), Case(f"{base} + {LIMITS}", lie, seed))
                for seed in (*CHOSEN, *OTHERS)
            ]
            cells.append(f"{np.mean(lost):.1f}, {max(lost):.1f}")
        print(f"| {lie} | {' | '.join(cells)} |", flush=True)


def by_limits(measured: Measured, lie: str = "samples, turned") -> None:
    """A row per choice of limits: points lost by the worst lie, and by honest clients that differ."""
    print(f"\n| weight, norm | {lie}, seeds 0 to 5 | 6 to 9 | honest, Dir(0.1) | honest, unequal |")
    print("|---|---|---|---|---|")
    for values in VALUES:
        weight, norm = values.split(", ")
        text = f"{BARE} + limits(weight={weight}, norm={norm})"
        cells = []
        for seeds in (CHOSEN, OTHERS if text == TEMPLATE else ()):
            lost = [measured.lost(Case(text, seed=seed), Case(text, lie, seed)) for seed in seeds]
            cells.append(", ".join(f"{value:.1f}" for value in lost))
        for unequal in (False, True):
            lost = [
                measured.lost(
                    *(Case(each, "none", seed, "dirichlet", LONG, unequal) for each in (BARE, text))
                )
                for seed in (range(4) if text == TEMPLATE else range(2))
            ]
            cells.append(", ".join(f"{value:.1f}" for value in lost) + f": {np.mean(lost):.2f}")
        print(f"| {values} | {' | '.join(cells)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="accuracies are kept here after every run")
    parser.add_argument("--only-print", action="store_true", help="train nothing")
    chosen = parser.parse_args()
    measured = Measured(chosen.out, not chosen.only_print)
    by_lie(measured)
    by_limits(measured)


if __name__ == "__main__":
    main()
