"""What measuring every client after the last round costs a small run: `python benchmarks/client_accuracy.py`."""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
from torch import Tensor

from kairosfl.engines.evaluate import Evaluator
from kairosfl.runs import experiment
from kairosfl.runs.config import resolve

REPEATS = 7
spent: list[float] = []
measure = Evaluator.evaluate_clients


def timed(self: Evaluator, x: Tensor) -> np.ndarray:
    """The measurement itself, with its seconds kept."""
    began = time.perf_counter()
    found = measure(self, x)
    spent.append(time.perf_counter() - began)
    return found


Evaluator.evaluate_clients = timed  # type: ignore[method-assign]
for engine in ("loop", "batched"):
    for rounds in (21, 100):
        config = resolve({"train": {"rounds": rounds}, "run": {"engine": engine, "device": "cpu"}})
        shares = []
        for _ in range(REPEATS):
            spent.clear()
            with tempfile.TemporaryDirectory() as folder:
                began = time.perf_counter()
                experiment.start(config, Path(folder) / "run")
                took = time.perf_counter() - began
            (once,) = spent  # in the last round, and only there
            shares.append(100 * once / (took - once))
        print(
            f"{engine}, {rounds} rounds of digits: {took:.2f} s, of which clients add {statistics.median(shares):.1f} %"
        )
