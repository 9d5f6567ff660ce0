"""Run folders made up in the stated format, for tests of the report: curves with noise, critical
periods, gaps.
"""

import json
import math
from pathlib import Path

import numpy as np

CONFIG = """algorithm = "{algorithm}"
seed = {seed}

[data]
name = "cifar10"
clients = {clients}
partition = "dirichlet"
alpha = {alpha}
partition_seed = -1

[model]
name = "aware_cnn"

[train]
rounds = {planned}
cohort = 10
epochs = 3
lr = {lr}

[run]
engine = "auto"
detector = "{detector}"
checkpoint_every = 10
"""


def write_run(
    folder: Path,
    *,
    algorithm: str = "fedavg",
    seed: int = 0,
    rounds: int = 40,
    planned: int | None = None,
    clients: int = 30,
    classes: int = 10,
    top: float = 0.6,
    alpha: float = 0.1,
    lr: float = 0.05,
    eval_every: int = 1,
    critical_until: int = 12,
    done: bool = True,
    detector: str = "fgn",
) -> Path:
    """A run folder with everything in it that its algorithm would write."""
    folder.mkdir(parents=True)
    random = np.random.default_rng([seed, len(algorithm), rounds])
    planned = planned or rounds
    (folder / "config.toml").write_text(
        CONFIG.format(
            algorithm=algorithm,
            seed=seed,
            clients=clients,
            alpha=alpha,
            lr=lr,
            planned=planned,
            detector=detector,
        )
    )
    about = {
        "version": "0.1.0",
        "torch": "2.6.0",
        "numpy": "2.0.0",
        "python": "3.12.1",
        "platform": "Linux",
        "device": "cpu",
        "engine": "loop",
        "precision": "float32",
        "git": "2f1ad6c",
        "seed": seed,
        "algorithm": algorithm,
        "parameters": 122570,
        "clients": clients,
        "population_hash": f"{alpha}-{seed}" * 16,
        "data_hashes": {"train": "ab" * 32},
        "started": "2025-05-01T12:00:00",
        "command": f"kairosfl run cifar10.toml --set algorithm='{algorithm}' --set seed={seed}",
    }
    (folder / "run.json").write_text(json.dumps(about))
    counts = np.array(
        [random.multinomial(300, random.dirichlet(np.full(classes, alpha))) for _ in range(clients)]
    )
    partition = {
        "clients": clients,
        "classes": classes,
        "labels": [f"class {c}" for c in range(classes)],
        "sizes": counts.sum(1).tolist(),
        "counts": counts.tolist(),
    }
    (folder / "partition.json").write_text(json.dumps(partition))

    metrics, log = [], []
    accuracy = []
    for number in range(1, rounds + 1):
        critical = number <= critical_until or 30 <= number < 33
        cohort = (20 if critical else 8) if "fedcl" in algorithm else 10
        cohort = min(cohort, clients)
        ids = np.sort(random.choice(clients, cohort, replace=False))
        weights = random.dirichlet(np.full(cohort, 5.0))
        epochs = random.integers(1, 4, cohort) if "alt" in algorithm else np.full(cohort, 3)
        progress = 1 - math.exp(-5 * number / planned)
        noise = 0.006 if "aware" in algorithm else 0.02
        value = 0.1 + (top - 0.1) * progress + noise * random.standard_normal() + 0.004 * (seed % 5)
        seen = number % eval_every == 0 or number == rounds
        accuracy.append(value if seen else None)
        aware = "aware" in algorithm
        metrics.append(
            {
                "round": number,
                "accuracy": accuracy[-1],
                "loss": 2.3 * (1 - progress) + 0.9 + 0.05 * random.standard_normal()
                if seen
                else None,
                "train_loss": 2.3 * (1 - progress) + 0.4,
                "cohort": cohort,
                "reported": cohort,
                "rejected": 0,
                "critical": critical,
                "fgn": 8 * math.exp(-number / 9) + 0.4 + 0.1 * random.random(),
                "fedfim": None,
                "elud": 2.2 + 0.6 * aware + 0.1 * random.standard_normal(),
                "coherence": 0.2 + 0.05 * random.random(),
                "consensus": 1.0,
                "epochs": float(epochs.mean()),
                "epochs_total": int(epochs.sum()),
                "steps": int(epochs.sum()) * 5,
                "passes": int(epochs.sum()) * 300,
                "bytes_down": cohort * 490280,
                "bytes_up": cohort * 490280,
                "lr": lr,
                "seconds": 0.5,
                "client_accuracy_mean": value - 0.03 if seen else None,
                "client_accuracy_worst": value * 0.4 if seen else None,
            }
        )
        lambdas = random.dirichlet(np.full(clients, 0.3)) if aware else None
        log.append(
            {
                "round": number,
                "ids": ids.tolist(),
                "n": counts.sum(1)[ids].tolist(),
                "weights": weights.tolist(),
                "epochs": epochs.tolist(),
                "steps": (epochs * 5).tolist(),
                "loss": random.random(cohort).tolist(),
                "similarity": (0.8 + 0.2 * random.random(cohort)).tolist()
                if "alt" in algorithm
                else None,
                "score": None,
                "lambda": {str(c): float(v) for c, v in enumerate(lambdas)}
                if lambdas is not None
                else None,
                "rejected": [],
            }
            | ({"accuracy_quantiles": (value * np.linspace(0.3, 1.2, 21)).tolist()} if seen else {})
        )
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in metrics))
    (folder / "clients.jsonl").write_text("".join(json.dumps(row) + "\n" for row in log))
    if done:
        (folder / "summary.json").write_text(
            json.dumps({"rounds": rounds, "seconds": 0.5 * rounds})
        )
    return folder


ALGORITHMS = {
    "fedavg": 0.55,
    "fedavgm(beta=0.7)": 0.6,
    "fedavgm(beta=0.7) + fedaware": 0.62,
    "fedprox(mu=0.01) + fedcl + alt": 0.58,
}


def write_sweep(
    folder: Path, *, seeds: int = 3, algorithms: dict[str, float] = ALGORITHMS, **options: object
) -> Path:
    """A folder of runs: every algorithm with every seed, and the sweep.json that lists them."""
    runs = []
    for number, (algorithm, top) in enumerate(algorithms.items()):
        for seed in range(seeds):
            name = f"{number}-{seed}"
            write_run(folder / name, algorithm=algorithm, seed=seed, top=top, **options)
            runs.append(
                {"name": name, "path": name, "settings": {"algorithm": algorithm, "seed": seed}}
            )
    (folder / "sweep.json").write_text(json.dumps({"runs": runs}))
    return folder


def edit(folder: Path, **columns: object) -> None:
    """Overwrite columns of metrics.jsonl: a value for all rounds, or a list of one a round."""
    path = folder / "metrics.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for name, values in columns.items():
        for i, row in enumerate(rows):
            row[name] = values[i] if isinstance(values, list) else values
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
