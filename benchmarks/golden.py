"""Golden numbers: is the final model of every rule and of thirty compositions the same, to the bit, at two commits?

    python benchmarks/golden.py OLD_CHECKOUT NEW_CHECKOUT

Each checkout trains all algorithms with its own command line (engine loop, CPU, digits), in a process of its own, and
the checksums of the final `x` are compared. Combinations that the new one refuses are listed, not compared.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

RULES = [
    *("fedavg", "fedprox", "fednova", "vrlsgd", "fedmut", "scaffold", "feddyn", "fedcm", "moon", "fedavgm"),
    *("fedadagrad", "fedadam", "fedyogi", "fedams", "fedcl", "alt", "pa3fed", "fedaware"),
]
COMPOSITIONS = [
    "scaffold + fedcl",
    "scaffold + fedcl + pa3fed",
    "fedprox(mu=0.01) + fedcl + alt + pa3fed + fedaware",
    "fedavgm(beta=0.5) + fedaware",
    "fedavgm + fedcl",
    "fedadam + pa3fed",
    "fedyogi(lr=0.02) + fedcl",
    "fedams + fedaware",
    "fedadagrad + alt",
    "feddyn + fedcl",
    "feddyn + alt + pa3fed",
    "fedcm + fedcl",
    "fedcm + fedaware",
    "fedmut + fedcl",
    "fedmut + fedaware",
    "fedmut + scaffold",
    "moon + fedcl + pa3fed",
    "moon + alt",
    "moon + fedaware",
    "vrlsgd + pa3fed",
    "vrlsgd + fedavgm",
    "fednova + fedprox",
    "fednova(momentum=0.9) + fedcl",
    "fednova + alt",
    "scaffold(weights='samples', lr=0.5) + fedavgm(nesterov=true)",
    "alt(reference='previous', statistic='min', per='batch') + fedcl",
    "fedaware(explore=true, clusters=4)",
    "fedaware(layers=2, normalise=false) + fedprox",
    "pa3fed(always=true, at='before', score='loss') + fedcl.released()",
    "fedcl.random() + scaffold + fedaware",
]
SETTING = """
seed = 3
[data]
name = "digits"
clients = 30
alpha = 0.3
[model]
name = "mlp"
[train]
rounds = 8
cohort = 6
epochs = 2
batch_size = 16
lr = 0.05
momentum = 0.5
weight_decay = 0.001
clip = 2.0
schedule = "exponential"
gamma = 0.97
[run]
engine = "loop"
device = "cpu"
threads = 1
eval_every = 8
"""


def checksums(checkout: Path, processes: int) -> dict[str, str]:
    """The checksum of the final model of every algorithm, or why there is none."""
    algorithms = [*RULES, *COMPOSITIONS]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(processes) as pool:
        config = Path(folder) / "golden.toml"
        config.write_text(SETTING)
        environment = os.environ | {"PYTHONPATH": str(checkout / "src"), "OMP_NUM_THREADS": "1"}

        def checksum(algorithm: str) -> str:
            out = Path(folder) / hashlib.sha256(algorithm.encode()).hexdigest()[:16]
            command = [sys.executable, "-m", "kairosfl", "run", str(config), "--out", str(out), "--quiet"]
            command += ["--set", f"algorithm={json.dumps(algorithm)}"]
            done = subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True)
            if done.returncode:
                return "refused: " + " ".join((done.stdout + done.stderr).split())[:200]
            return hashlib.sha256(_x(max(out.glob("checkpoint/state-*.safetensors")))).hexdigest()[:16]

        return dict(zip(algorithms, pool.map(checksum, algorithms), strict=True))


def _x(path: Path) -> bytes:
    from safetensors.numpy import load_file

    return load_file(path)["x"].tobytes()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("old", type=Path)
    parser.add_argument("new", type=Path)
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    chosen = parser.parse_args()
    old, new = (checksums(checkout.resolve(), chosen.processes) for checkout in (chosen.old, chosen.new))
    differ = [name for name in old if new[name] != old[name] and not new[name].startswith("refused")]
    refused = {name: text for name, text in new.items() if text.startswith("refused")}
    same = len(old) - len(differ) - len(refused)
    for name, text in refused.items():
        print(f"{name}: {text}")
    for name in differ:
        print(f"{name}: {old[name]} before, {new[name]} after")
    print(f"{same} of {len(old)} the same to the bit, {len(refused)} refused, {len(differ)} differ")
    sys.exit(bool(differ))


if __name__ == "__main__":
    main()
