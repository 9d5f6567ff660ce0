"""How long a window of averaged models should be, under three schedules of the learning rate.

    python benchmarks/averaging.py --out benchmarks/averaging.json

Digits over 40 clients by Dir(0.1), 100 rounds, 2 local epochs, FedAvg. Every run's models are kept, so that all windows
are compared on the same training. Test accuracy of the plain model, mean over the final 10 % of rounds, and of the
average at the end: over the final share of the rounds, over the final share of the sum of the learning rates, and
exponential averages.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import torch

from kairosfl import Batched, Recipe, Run, Setup, Task, drive, parse, rounds
from kairosfl.rules.average import opening
from kairosfl.tasks import models
from kairosfl.tasks.data import load
from kairosfl.tasks.partitions import partition

ROUNDS, CLIENTS, SEEDS = 100, 40, 4
SCHEDULES = {
    "constant": {},
    "× 0.97 a round": {"schedule": "exponential", "gamma": 0.97},
    "cosine": {"schedule": "cosine"},
}
SHARES, DECAYS = (0.05, 0.1, 0.15, 0.3), (0.9, 0.95)


def scores(schedule: str, cohort: int, seed: int) -> dict[str, float]:
    """The accuracy of every kind of average after one run."""
    dataset = load("digits")
    clients = partition(dataset, name="dirichlet", clients=CLIENTS, seed=seed, alpha=0.1)
    model = models.build("mlp", shape=dataset.shape, classes=dataset.classes, seed=seed)
    task = Task(model, dataset, clients)
    engine = Batched(task)
    recipe = Recipe(rounds=ROUNDS, cohort=cohort, epochs=2, batch_size=16, lr=0.1, **SCHEDULES[schedule])  # type: ignore[arg-type]
    setup = Setup(parse("fedavg"), recipe, CLIENTS, task.layout)
    course = drive(rounds(Run.start(engine.start(), setup, seed=seed), setup), engine)
    xs = torch.stack([run.x.double() for run in course])

    def accuracy(x: torch.Tensor) -> float:
        return 100 * engine.evaluate(x.float()).accuracy

    found = {"plain": float(np.mean([accuracy(x) for x in xs[-ROUNDS // 10 :]]))}
    for of in ("rounds", "lr"):
        for share in SHARES:
            found[f"{100 * share:g} % of {of}"] = accuracy(xs[opening(recipe, share, of) - 1 :].mean(0))
    for decay in DECAYS:
        weights = decay ** torch.arange(ROUNDS - 1, -1, -1).double()
        found[f"decay {decay}"] = accuracy(weights @ xs / weights.sum())
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="write all numbers here")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    whole: dict[str, dict[str, float]] = {}
    for schedule in SCHEDULES:
        for cohort in (3, 8):
            found = [scores(schedule, cohort, seed) for seed in range(chosen.seeds)]
            means = {name: round(float(np.mean([each[name] for each in found])), 2) for name in found[0]}
            whole[f"{schedule}, cohort {cohort}"] = means
            print(f"{schedule}, cohort {cohort}: " + ", ".join(f"{name} {value:.1f}" for name, value in means.items()))
    if chosen.out:
        chosen.out.write_text(json.dumps(whole, indent=1) + "\n")


if __name__ == "__main__":
    main()
