"""Every pair of rules on non-IID digits: which ones train, against FedAvg with the same recipe.

    python benchmarks/pairs.py --out pairs.json --picture docs/assets/pairs.svg

Digits over 40 clients by Dir(0.3), cohorts of 8, 60 rounds, three seeds, every rule with its default options; the mean
test accuracy over the final 10 % of rounds. Pairs that are refused are left blank.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
from pathlib import Path

import numpy as np

SEEDS, ROUNDS, CLIENTS, COHORT = 3, 60, 40, 8
ALARM = 0.10  # below FedAvg by more than this needs a documented reason


def accuracy(job: tuple[str, int]) -> float | str:
    """Mean accuracy over the final tenth of the rounds of one run, or why it was refused or failed."""
    import torch

    from kairosfl import Batched, Recipe, Run, Setup, Task, UserError, drive, parse, rounds
    from kairosfl.core.round import result
    from kairosfl.tasks import models
    from kairosfl.tasks.data import load
    from kairosfl.tasks.partitions import partition

    torch.set_num_threads(1)
    text, seed = job
    dataset = load("digits")
    clients = partition(dataset, name="dirichlet", clients=CLIENTS, seed=seed, alpha=0.3)
    model = models.build("mlp", shape=dataset.shape, classes=dataset.classes, seed=seed)
    task = Task(model, dataset, clients)
    engine = Batched(task)
    try:
        recipe = Recipe(rounds=ROUNDS, cohort=COHORT, epochs=2, batch_size=16, lr=0.05)
        setup = Setup(parse(text), recipe, len(clients), task.layout)
        run = Run.start(engine.start(), setup, seed=seed)
        scores = [
            engine.evaluate(result(run, setup)).accuracy
            for run in drive(rounds(run, setup), engine)
            if run.round > ROUNDS - ROUNDS // 10
        ]
    except UserError as refused:
        return str(refused)
    return float(np.mean(scores))


def measure(processes: int) -> dict[str, list[float | str]]:
    """Every rule and every pair, over the seeds."""
    from kairosfl.rules import RULES

    texts = ["fedavg", *RULES, *(f"{one} + {other}" for one, other in itertools.combinations(RULES, 2))]
    jobs = [(text, seed) for text in texts for seed in range(SEEDS)]
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        found = pool.map(accuracy, jobs, chunksize=4)
    return {text: found[SEEDS * i : SEEDS * (i + 1)] for i, text in enumerate(texts)}


def draw(found: dict[str, list[float | str]], path: Path) -> None:
    """A matrix of means, rules alone on the diagonal; dashes: refused."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = [text for text in found if "+" not in text and text != "fedavg"]
    matrix = np.full((len(names), len(names)), np.nan)
    for i, j in itertools.product(range(len(names)), repeat=2):
        text = names[i] if i == j else f"{names[min(i, j)]} + {names[max(i, j)]}"
        if not any(isinstance(value, str) for value in found[text]):
            matrix[i, j] = 100 * float(np.mean(found[text]))
    base = 100 * float(np.mean(found["fedavg"]))
    figure, axes = plt.subplots(figsize=(9, 8))
    image = axes.imshow(matrix, cmap="RdYlGn", vmin=base - 20, vmax=base + 20)
    axes.set_xticks(range(len(names)), names, rotation=60, ha="right")
    axes.set_yticks(range(len(names)), names)
    for i, j in itertools.product(range(len(names)), repeat=2):
        text = "–" if np.isnan(matrix[i, j]) else f"{matrix[i, j]:.0f}"
        axes.text(j, i, text, ha="center", va="center", fontsize=7)
    figure.colorbar(image, label=f"accuracy, % (FedAvg: {base:.1f})", shrink=0.8)
    figure.tight_layout()
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument("--out", type=Path, help="write all numbers here")
    parser.add_argument("--read", type=Path, help="draw these numbers instead of measuring")
    parser.add_argument("--picture", type=Path)
    chosen = parser.parse_args()
    found = json.loads(chosen.read.read_text()) if chosen.read else measure(chosen.processes)
    if chosen.out:
        chosen.out.write_text(json.dumps(found, indent=1) + "\n")
    if chosen.picture:
        draw(found, chosen.picture)
    base = float(np.mean(found["fedavg"]))
    refused = [text for text, values in found.items() if any(isinstance(value, str) for value in values)]
    means = {text: float(np.mean(values)) for text, values in found.items() if text not in refused}
    print(f"fedavg {base:.3f}; {len(means)} trained, {len(refused)} refused")
    for text in refused:
        print(f"refused: {text}: {next(value for value in found[text] if isinstance(value, str))}")
    for text, value in sorted(means.items(), key=lambda entry: entry[1]):
        if value < base - ALARM:
            print(f"below fedavg by more than ten points: {text} {value:.3f} {[round(v, 3) for v in found[text]]}")


if __name__ == "__main__":
    main()
