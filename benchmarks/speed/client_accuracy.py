"""What measuring every client after the last round costs a small run: `python
benchmarks/speed/client_accuracy.py`.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from itertools import product
from pathlib import Path
from unittest.mock import patch

import numpy as np
from torch import Tensor

from kairosfl.engines.evaluate import Evaluator
from kairosfl.runs import experiment
from kairosfl.runs.config import RunConfig, resolve

spent: list[float] = []
measure = Evaluator.evaluate_clients


def timed(self: Evaluator, x: Tensor) -> np.ndarray:
    """The measurement itself, with its seconds kept."""
    began = time.perf_counter()
    accuracies = measure(self, x)
    spent.append(time.perf_counter() - began)
    return accuracies


def share(config: RunConfig) -> tuple[float, float]:
    """The seconds of a run, and how many percent of the others the measurement adds; 0 if it was
    too dear to take.
    """
    spent.clear()
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        with patch.object(Evaluator, "evaluate_clients", timed):
            experiment.start(config, Path(folder) / "run")
        took = time.perf_counter() - began
    once = sum(spent)  # in the last round, and only there
    return took, 100 * once / (took - once)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, nargs="+", default=[21, 100])
    parser.add_argument("--repeats", type=int, default=7)
    chosen = parser.parse_args()
    for engine, rounds in product(("loop", "batched"), chosen.rounds):
        config = resolve({"train": {"rounds": rounds}, "run": {"engine": engine, "device": "cpu"}})
        runs = [share(config) for _ in range(chosen.repeats)]
        took, added = runs[-1][0], statistics.median(percent for _, percent in runs)
        print(
            f"{engine}, {rounds} rounds of digits: {took:.2f} s, of which clients add {added:.1f} %"
        )


if __name__ == "__main__":
    main()
