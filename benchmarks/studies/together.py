"""Whether a run of a sweep is what it is alone: the same runs together on one engine and one by
one.

    KAIROSFL_DATA=... python benchmarks/studies/together.py

The setting is that of precision.py, for 10 rounds; three algorithms, two seeds.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

from precision import member

from kairosfl.runs.files import read_lines
from kairosfl.runs.sweep import sweep

WAYS: dict[str, dict[str, Any]] = {
    "tf32": {},
    "float32": {"precision": "float32"},
    "deterministic": {"deterministic": True},
}
ALGORITHMS = ("fedavg", "scaffold", "fedprox(mu=0.1)")
COLUMNS = ("accuracy", "loss", "train_loss")


def largest(first: Path, second: Path, column: str) -> float:
    """How far the two runs are apart in a column, over all rounds."""
    rows = zip(
        read_lines(first / "metrics.jsonl"), read_lines(second / "metrics.jsonl"), strict=True
    )
    return max(abs(ours[column] - theirs[column]) for ours, theirs in rows)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", default="cifar10")
    parser.add_argument("--model", default="cnn")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    print("The largest difference of a round\n")
    print("|", " | ".join(("", *COLUMNS)), "|")
    print("|---|---|---|---|")
    for way, run in WAYS.items():
        members = [member(each, each, seed, options, run) for each in ALGORITHMS for seed in (0, 1)]
        with tempfile.TemporaryDirectory() as folder:
            together, alone = Path(folder, "together"), Path(folder, "alone")
            sweep(members, together)
            for each in members:
                sweep([each], alone)
            apart = [
                max(largest(together / each.name, alone / each.name, column) for each in members)
                for column in COLUMNS
            ]
        print("|", way, "|", " | ".join(f"{value:.1g}" for value in apart), "|", flush=True)


if __name__ == "__main__":
    main()
