"""Every pair of rules but attacks and guards on non-IID digits: which ones train, against FedAvg
with the same recipe.

    python benchmarks/studies/pairs.py --out benchmarks/studies/pairs.json --picture docs/assets/pairs.svg
    python benchmarks/studies/pairs.py --read benchmarks/studies/pairs.json --add --out benchmarks/studies/pairs.json
    python benchmarks/studies/pairs.py --only "fedmut + fedavgm" "fedmut(alpha=0.4) + fedavgm"

Digits over 40 clients by Dir(0.3), cohorts of 8, 60 rounds, three seeds, every rule with its
default options; the mean test accuracy over the final 10 % of rounds. Pairs that are refused stay
grey. With `--add`, only what the file lacks is measured, such as the pairs of a new rule.
"""

from __future__ import annotations

import argparse
import itertools
import json
import multiprocessing
import os
import sys
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
from setting import PAIRS, begin

SEEDS = 3
ALARM = 0.10  # below FedAvg by more than this needs a documented reason


def train(
    text: str, seed: int, length: int = PAIRS.rounds, cohort: int = PAIRS.cohort
) -> tuple[float, float]:
    """One run: mean accuracy over the final tenth of its rounds, and the mean length of the model's
    steps.
    """
    import torch

    from kairosfl import Batched
    from kairosfl.core.round import result

    torch.set_num_threads(1)
    engine = Batched(PAIRS.task(seed))
    setup, course = begin(engine, text, PAIRS.recipe(rounds=length, cohort=cohort), seed)
    x = engine.start()
    steps = []
    scores = []
    for run in course:
        steps.append(float((run.x - x).norm()))
        x = run.x.clone()
        if run.round > length - length // 10:
            scores.append(engine.evaluate(result(run, setup)).accuracy)
    return float(np.mean(scores)), float(np.mean(steps))


def accuracy(job: tuple[str, int]) -> float | str:
    """The accuracy of one run, or why it was refused or failed."""
    from kairosfl import UserError

    try:
        return train(*job)[0]
    except UserError as refused:
        return str(refused)


def measure(processes: int, known: dict[str, list[float | str]]) -> dict[str, list[float | str]]:
    """Every rule and every pair, over the seeds, without noise, attacks and the rules against them
    (guards); those that are known are kept."""
    from kairosfl.rules import RULES
    from kairosfl.rules.attack import Attack
    from kairosfl.rules.localprivacy import LocalPrivacy
    from kairosfl.rules.robust import Guard

    left_out = [
        name
        for name, rule in RULES.items()
        if rule().traits().private or issubclass(rule, Guard | Attack | LocalPrivacy)
    ]
    names = [name for name in RULES if name not in left_out]
    texts = [
        "fedavg",
        *names,
        *(f"{one} + {other}" for one, other in itertools.combinations(names, 2)),
    ]
    missing = [text for text in texts if text not in known]
    jobs = [(text, seed) for text in missing for seed in range(SEEDS)]
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        found = pool.map(accuracy, jobs, chunksize=4)
    known = known | {text: found[SEEDS * i : SEEDS * (i + 1)] for i, text in enumerate(missing)}
    return {text: known[text] for text in texts}


def draw(found: dict[str, list[float | str]], path: Path) -> None:
    """A matrix of means, rules alone on the diagonal; grey: refused."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "pairs"  # the same numbers give the same file
    import matplotlib.pyplot as plt
    from matplotlib.colors import TwoSlopeNorm

    names = [text for text in found if "+" not in text and text != "fedavg"]
    matrix = np.full((len(names), len(names)), np.nan)
    for i, j in itertools.product(range(len(names)), repeat=2):
        text = names[i] if i == j else f"{names[min(i, j)]} + {names[max(i, j)]}"
        if not any(isinstance(value, str) for value in found[text]):
            matrix[i, j] = 100 * float(np.mean(found[text]))
    base = 100 * float(np.mean(found["fedavg"]))
    figure, axes = plt.subplots(figsize=(9, 8), layout="constrained")
    colours = TwoSlopeNorm(base, base - 20, 100)
    axes.set_facecolor("0.85")
    image = axes.imshow(matrix, cmap="RdBu", norm=colours)
    axes.set_xticks(range(len(names)), names, rotation=60, ha="right", rotation_mode="anchor")
    axes.set_yticks(range(len(names)), names)
    for i, j in itertools.product(range(len(names)), repeat=2):
        if i == j:
            axes.add_patch(
                plt.Rectangle((i - 0.47, i - 0.47), 0.94, 0.94, fill=False, linewidth=1.2)
            )
        text = "–" if np.isnan(matrix[i, j]) else f"{matrix[i, j]:.0f}"
        dark = abs(colours(matrix[i, j]) - 0.5) > 0.3
        axes.text(
            j, i, text, ha="center", va="center", fontsize=9, color="white" if dark else "black"
        )
    bar = figure.colorbar(
        image, shrink=0.8, label=f"accuracy, % (white: FedAvg's {base:.1f}; grey: refused)"
    )
    bar.set_ticks([70, 75, 80, 85, 90, 95, 100])
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def show(texts: list[str], length: int, cohort: int) -> None:
    """A line for each of these algorithms."""
    for text in texts:
        scores, steps = zip(
            *(train(text, seed, length, cohort) for seed in range(SEEDS)), strict=True
        )
        each = " ".join(f"{100 * score:.1f}" for score in scores)
        print(
            f"{text}: {100 * np.mean(scores):.1f} ({each}), steps of length {np.mean(steps):.3f}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, default=os.cpu_count())
    parser.add_argument("--out", type=Path, help="write all numbers here")
    parser.add_argument("--read", type=Path, help="draw these numbers instead of measuring")
    parser.add_argument("--add", action="store_true", help="measure what --read does not have")
    parser.add_argument("--picture", type=Path)
    parser.add_argument(
        "--only",
        nargs="+",
        metavar="ALGORITHM",
        help="just these, and how long the model's steps are",
    )
    parser.add_argument("--rounds", type=int, default=PAIRS.rounds, help="with --only")
    parser.add_argument("--cohort", type=int, default=PAIRS.cohort, help="with --only")
    chosen = parser.parse_args()
    if chosen.only:
        return show(chosen.only, chosen.rounds, chosen.cohort)
    found = json.loads(chosen.read.read_text()) if chosen.read else {}
    if chosen.add or not chosen.read:
        found = measure(chosen.processes, found)
    if chosen.out:
        chosen.out.write_text(json.dumps(found, indent=1) + "\n")
    if chosen.picture:
        draw(found, chosen.picture)
    base = float(np.mean(found["fedavg"]))
    refused = [
        text for text, values in found.items() if any(isinstance(value, str) for value in values)
    ]
    means = {text: float(np.mean(values)) for text, values in found.items() if text not in refused}
    print(f"fedavg {base:.3f}; {len(means)} trained, {len(refused)} refused")
    for text in refused:
        print(f"refused: {text}: {next(value for value in found[text] if isinstance(value, str))}")
    for text, value in sorted(means.items(), key=lambda entry: entry[1]):
        if value < base - ALARM:
            print(
                f"below fedavg by more than ten points: {text} {value:.3f} {[round(v, 3) for v in found[text]]}"
            )


if __name__ == "__main__":
    main()
