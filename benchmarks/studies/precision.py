"""Whether a precision costs accuracy: the same runs in float32, tf32 and bfloat16, several seeds of
each.

    KAIROSFL_DATA=... python benchmarks/studies/precision.py

CIFAR-10, Dir(0.1), 100 clients, 10 a round, the 2-convolution CNN, 50 rounds; all runs are one
sweep on one GPU.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from pathlib import Path
from typing import Any

from kairosfl.runs.config import resolve
from kairosfl.runs.sweep import Member, sweep

PRECISIONS = ("float32", "tf32", "bfloat16")


def member(
    name: str, algorithm: str, seed: int, options: argparse.Namespace, run: dict[str, Any]
) -> Member:
    """A run of the setting above on the batched engine."""
    tables = {
        "algorithm": algorithm,
        "seed": seed,
        "data": {"name": options.data, "clients": 100, "alpha": 0.1, "minimum": 10},
        "model": {"name": options.model},
        "train": {
            "rounds": options.rounds,
            "cohort": 10,
            "epochs": 2,
            "batch_size": 64,
            "lr": 0.02,
        },
        "run": {"engine": "batched", "device": options.device, "checkpoint_every": 10**6, **run},
    }
    return Member(f"{name}-seed{seed}", {"name": name, "seed": seed}, resolve(tables))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", default="cifar10")
    parser.add_argument("--model", default="cnn")
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    members = [
        member(precision, "fedavgm", seed, options, {"precision": precision})
        for precision in PRECISIONS
        for seed in range(options.seeds)
    ]
    with tempfile.TemporaryDirectory() as folder:
        summaries = sweep(members, Path(folder))
    print(
        f"{options.model} on {options.data}, {options.rounds} rounds, {options.seeds} seeds, final 10 % of rounds\n"
    )
    print("| precision | accuracy | against float32, seed by seed |")
    print("|---|---|---|")
    accuracy = {
        precision: [
            100 * summaries[f"{precision}-seed{seed}"]["last_tenth_accuracy"]
            for seed in range(options.seeds)
        ]
        for precision in PRECISIONS
    }
    for precision, values in accuracy.items():
        apart = [ours - theirs for ours, theirs in zip(values, accuracy["float32"], strict=True)]
        print(f"| {precision} | {spread(values)} | {spread(apart)} |")


def spread(values: list[float]) -> str:
    return (
        f"{statistics.fmean(values):.2f} ± {statistics.stdev(values):.2f}"
        if len(values) > 1
        else f"{values[0]:.2f}"
    )


if __name__ == "__main__":
    main()
