"""Why is an unfinished Frank-Wolfe better than the exact minimum-norm point in FedAWARE? λ and
accuracy, by solver.

    python benchmarks/studies/aware_solver.py --seeds 4                                     # digits, on a CPU
    KAIROSFL_DATA=... python benchmarks/studies/aware_solver.py --preset fedaware-cifar10-cnn --seeds 2 --device cuda

Every variant trains the same federation. `clients` is e to the entropy of λ, the number of clients
that count; `distance` is ‖λ − uniform‖; `mean` and `exact` are the cosines of FedAWARE's direction
with the plain mean of the unit vectors and with the exact minimum-norm point, both of the same
round. All are means over rounds, ± over seeds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from kairosfl import presets
from kairosfl.core.round import drive, rounds
from kairosfl.core.run import Run
from kairosfl.detectors import FGN
from kairosfl.rules.minnorm import min_norm
from kairosfl.runs.config import resolve
from kairosfl.runs.prepare import prepare

sys.path.insert(0, str(Path(__file__).parents[1]))
from setting import SOLVERS

# Updates under other clients' names, as in FedAWARE's released server.
SWAPPED = "attack(lie='swapped', share=1.0) + "
BASE = "fedavgm(beta=0.7) + fedaware(project=True{})"
VARIANTS = {
    "FedAvgM": "fedavgm(beta=0.7)",
    "exact": BASE.format(""),
    "Frank-Wolfe": BASE.format(", solver='frank_wolfe'"),
    **{
        f"ridge {ridge:g}": BASE.format(f", ridge={ridge}")
        for ridge in (0.001, 0.01, 0.1, 1.0, 100.0)
    },
}
VARIANTS |= {
    f"{name}, swapped": SWAPPED + VARIANTS[name] for name in ("FedAvgM", "exact", "Frank-Wolfe")
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", help="instead of digits")
    parser.add_argument("--variants", nargs="*", default=list(VARIANTS))
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--rounds", type=int)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, help="also write the numbers as JSON")
    asked = parser.parse_args()
    tables = presets.read(asked.preset) if asked.preset else SOLVERS
    tables = {**tables, "run": {"device": asked.device, "engine": "batched"}}
    if asked.rounds:
        tables["train"] = {**tables["train"], "rounds": asked.rounds}
    found: dict[str, list[dict[str, float]]] = {}
    print(f"{'':20} accuracy, final 10 %   clients   distance   cosine to mean   cosine to exact")
    for name in asked.variants:
        found[name] = [
            follow({**tables, "algorithm": VARIANTS[name], "seed": seed})
            for seed in range(asked.seeds)
        ]
        columns = ("accuracy", "clients", "distance", "mean", "exact")
        print(
            f"{name:20}",
            *(_spread([run[column] for run in found[name]]) for column in columns),
            flush=True,
        )
        if asked.out:
            asked.out.write_text(json.dumps(found, indent=1) + "\n")


def follow(tables: dict[str, Any]) -> dict[str, float]:
    """One run: its accuracy and what its λ was like."""
    config = resolve(tables)
    prepared = prepare(config)
    engine = prepared.engine
    setup = replace(prepared.setup, detectors=(FGN(),))
    start = Run.start(engine.start(), setup, seed=config.seed)
    scores, looks = [], []
    for run in drive(rounds(start, setup), engine):
        if run.round > 0.9 * config.train.rounds:
            scores.append(100 * engine.evaluate(run.x).accuracy)
        for state in run.states:
            if "gram" in state and len(state["lambda"]) > 1:
                looks.append(look(state["gram"].cpu().numpy(), state["lambda"].cpu().numpy()))
    averages = (
        {key: statistics.fmean(each[key] for each in looks) for key in looks[0]} if looks else {}
    )
    nothing = dict.fromkeys(("clients", "distance", "mean", "exact"), float("nan"))
    return {"accuracy": statistics.fmean(scores)} | nothing | averages


def look(gram: np.ndarray, shares: np.ndarray) -> dict[str, float]:
    """What λ is like, from the Gram matrix of the averages."""
    lengths = np.sqrt(np.diag(gram))
    cosines = gram / lengths / lengths[:, None]
    uniform = np.full(len(shares), 1 / len(shares))
    positive = shares[shares > 0]

    def cosine(a: np.ndarray, b: np.ndarray) -> float:
        return float(a @ cosines @ b / np.sqrt((a @ cosines @ a) * (b @ cosines @ b)))

    return {
        "clients": float(np.exp(-(positive * np.log(positive)).sum())),
        "distance": float(np.linalg.norm(shares - uniform)),
        "mean": cosine(shares, uniform),
        "exact": cosine(shares, min_norm(cosines)),
    }


def _spread(numbers: list[float]) -> str:
    if np.isnan(numbers).any():  # FedAvgM has no λ
        return "–".rjust(17)
    deviation = f" ± {statistics.stdev(numbers):.3g}" if len(numbers) > 1 else ""
    return f"{statistics.fmean(numbers):.4g}{deviation}".rjust(17)


if __name__ == "__main__":
    main()
