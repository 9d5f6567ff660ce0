"""Accuracy by rule and attack with 10, 20 and 30 % liars, on IID and on non-IID digits.

    python benchmarks/attacks.py --out benchmarks/attacks.json --picture docs/assets/attacks.svg

Digits over ten clients, all of them in every round, 25 rounds of one epoch, batch 32, lr 0.2, an `mlp`; mean test
accuracy over the final three rounds. Runs that the file already has are not repeated.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np

CLIENTS, ROUNDS, LAST = 10, 25, 3
RULES = {
    "fedavg": "fedavg",
    "limits": "limits",
    "normclipping": "normclipping",
    "centeredclipping": "centeredclipping",
    "geometricmedian": "geometricmedian",
    "median": "median",
    "trimmedmean": "trimmedmean(share=0.3)",
    "krum.multi": "krum(share=0.3, keep=0)",
    "bucketing + median": "bucketing + median",
    "nnm + median": "nnm(share=0.3) + median",
}
LIES = ("none", "sign", "scaled", "random", "little", "inner", "labels")
SHARES = (0.3, 0.2, 0.1)
DATA = ("iid", "dirichlet")


def train(rule: str, lie: str, share: float, data: str, seed: int) -> float:
    """One run."""
    import torch

    from kairosfl import Batched, Recipe, Run, Setup, Task, drive, parse, rounds
    from kairosfl.core.round import result
    from kairosfl.rules.attack import liars
    from kairosfl.tasks import models
    from kairosfl.tasks.data import load
    from kairosfl.tasks.hostile import flip_labels
    from kairosfl.tasks.partitions import partition

    torch.set_num_threads(1)
    dataset = load("digits")
    clients = partition(dataset, name=data, clients=CLIENTS, seed=seed, **({"alpha": 0.1} if data != "iid" else {}))
    task = Task(models.build("mlp", shape=dataset.shape, classes=dataset.classes, seed=seed), dataset, clients)
    if lie == "labels":
        task = flip_labels(task, liars(seed, CLIENTS, share))
    elif lie != "none":
        rule = f"attack(lie='{lie}', share={share}) + {rule}"
    engine = Batched(task)
    recipe = Recipe(rounds=ROUNDS, cohort=CLIENTS, epochs=1, batch_size=32, lr=0.2)
    setup = Setup(parse(rule), recipe, CLIENTS, task.layout)
    course = drive(rounds(Run.start(engine.start(), setup, seed=seed), setup), engine)
    scores = [engine.evaluate(result(run, setup)).accuracy for run in course if run.round > ROUNDS - LAST]
    return float(np.mean(scores))


def key(rule: str, lie: str, share: float, data: str, seed: int) -> str:
    return f"{data} {0.0 if lie == 'none' else share} {lie} {rule} {seed}"


def measure(found: dict[str, float], out: Path | None, seeds: int) -> None:
    """What is missing, the most liars first."""
    jobs = [
        (rule, lie, share, data, seed)
        for seed in range(seeds)
        for share in SHARES
        for data in DATA
        for lie in LIES
        for rule in RULES
    ]
    for rule, lie, share, data, seed in jobs:
        name = key(rule, lie, share, data, seed)
        if name not in found:
            found[name] = train(RULES[rule], lie, share, data, seed)
            if out:
                out.write_text(json.dumps(found, indent=1) + "\n")


def mean(found: dict[str, float], rule: str, lie: str, share: float, data: str, seeds: int) -> float:
    return 100 * float(np.mean([found.get(key(rule, lie, share, data, seed), np.nan) for seed in range(seeds)]))


def shares(found: dict[str, float], seeds: int) -> list[float]:
    """Those that were measured completely."""
    every = [(rule, lie, data) for rule in RULES for lie in LIES for data in DATA]
    return [
        share
        for share in SHARES[::-1]
        if not any(np.isnan(mean(found, rule, lie, share, data, seeds)) for rule, lie, data in every)
    ]


def show(found: dict[str, float], seeds: int) -> None:
    """A table in Markdown for each partition and share."""
    for data in DATA:
        for share in shares(found, seeds):
            print(f"\n{data}, {share:.0%} liars\n\n| rule | {' | '.join(LIES)} |\n|---|{'---|' * len(LIES)}")
            for rule in RULES:
                values = (f"{mean(found, rule, lie, share, data, seeds):.1f}" for lie in LIES)
                print(f"| `{rule}` | {' | '.join(values)} |")


def draw(found: dict[str, float], path: Path, seeds: int) -> None:
    """A matrix for each partition and share."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "attacks"  # the same numbers give the same file
    import matplotlib.pyplot as plt

    columns = shares(found, seeds)
    size = (3 + 3.5 * len(columns), 8)
    figure, grid = plt.subplots(
        2, len(columns), figsize=size, layout="constrained", sharex=True, sharey=True, squeeze=False
    )
    for axes, data in zip(grid, DATA, strict=True):
        for ax, share in zip(axes, columns, strict=True):
            matrix = np.array([[mean(found, rule, lie, share, data, seeds) for lie in LIES] for rule in RULES])
            image = ax.imshow(matrix, cmap="RdYlBu", vmin=0, vmax=100, aspect="auto")
            ax.set_title(f"{'IID' if data == 'iid' else 'Dir(0.1)'}, {share:.0%} liars", fontsize=10)
            ax.set_xticks(range(len(LIES)), LIES, rotation=40, ha="right", rotation_mode="anchor")
            ax.set_yticks(range(len(RULES)), RULES)
            for i, j in np.ndindex(matrix.shape):
                ax.text(j, i, f"{matrix[i, j]:.0f}", ha="center", va="center", fontsize=8)
    figure.colorbar(image, ax=grid, shrink=0.6, label="test accuracy, %")
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="numbers are kept here after every run")
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--only-draw", action="store_true", help="measure nothing")
    chosen = parser.parse_args()
    found = json.loads(chosen.out.read_text()) if chosen.out and chosen.out.exists() else {}
    if not chosen.only_draw:
        measure(found, chosen.out, chosen.seeds)
    show(found, chosen.seeds)
    if chosen.picture:
        draw(found, chosen.picture, chosen.seeds)


if __name__ == "__main__":
    main()
