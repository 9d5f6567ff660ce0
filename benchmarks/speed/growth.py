"""Cost as work grows: seconds a round for cohorts of 1 to 1,000 clients and models of 0.1 to 100 M
parameters.

    python benchmarks/speed/growth.py --device cpu

Every client trains one batch of 32 samples of 64 features; the model is an MLP with two equal
hidden layers. On a CPU seconds are those of one core that the process really had, on a GPU those of
the clock. What would take longer than --limit or need more memory than is free is left out, and
said so.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from pathlib import Path

import torch

from kairosfl import Loop, Recipe, Run, Task, drive, models, parse, rounds
from kairosfl.core.run import Setup
from kairosfl.data import load
from kairosfl.detectors import FGN
from kairosfl.engines.batched import Batched
from kairosfl.tasks.partitions import iid

COHORTS = (1, 10, 100, 1000)
MILLIONS = (0.1, 1.0, 10.0, 100.0)
SAMPLES, FEATURES, CLASSES = 32, 64, 10


def task_of(millions: float) -> Task:
    """An MLP with so many million parameters: FEATURES·h + h·h + CLASSES·h and the biases."""
    linear = FEATURES + CLASSES + 2
    hidden = round(((linear**2 + 4e6 * millions) ** 0.5 - linear) / 2)
    data = load(
        "synthetic", samples=SAMPLES * max(COHORTS), test_samples=CLASSES, features=FEATURES, seed=0
    )
    model = models.build("mlp", shape=data.shape, classes=CLASSES, seed=0, hidden=(hidden, hidden))
    return Task(model, data, iid(data.train.targets.numpy(), max(COHORTS), 0))


def free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return int(lines["MemAvailable"].split()[0]) * 1024


def seconds(engine: Loop | Batched, cohort: int, repeats: int) -> float:
    """Median of a few rounds after a first one."""
    clock = time.perf_counter if engine.device.type == "cuda" else time.process_time
    recipe = Recipe(rounds=repeats + 1, cohort=cohort, batch_size=SAMPLES, lr=0.01)
    setup = Setup(
        parse("fedavg"), recipe, len(engine.task.clients), engine.task.layout, detectors=(FGN(),)
    )
    took = []
    began = clock()
    for run in drive(rounds(Run.start(engine.start(), setup, seed=0), setup), engine):
        float(run.x[0])  # waits for the device
        took.append(clock() - began)
        began = clock()
    return statistics.median(took[1:])


def measure(
    name: str, millions: float, device: torch.device, limit: float, repeats: int
) -> dict[int, float | str]:
    """Seconds a round by cohort, or why there are none."""
    task = task_of(millions)
    size = 4 * sum(parameter.numel() for parameter in task.model.parameters())
    engine = Loop(task, device) if name == "loop" else Batched(task, device)
    found: dict[int, float | str] = {}
    for cohort in COHORTS:
        last = [(c, s) for c, s in found.items() if isinstance(s, float)][-1:]
        expected = max((cohort / c * s * (repeats + 1) for c, s in last), default=0.0)
        needed = (
            2 * cohort + 8
        ) * size  # updates and their working copies, and a few models beside
        if needed > free_bytes(device):
            found[cohort] = f"needs {needed / 2**30:,.0f} GiB"
        elif expected > limit:
            found[cohort] = f"about {expected:,.0f} s"
        else:
            found[cohort] = seconds(engine, cohort, repeats)
        print(
            f"{name}, {millions:g} M parameters, {cohort} clients: {spell(found[cohort])}",
            flush=True,
        )
    return found


def spell(value: float | str) -> str:
    return f"left out, {value}" if isinstance(value, str) else f"{value:.4f} s"


def draw(found: dict[tuple[str, float], dict[int, float | str]], title: str, out: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    styles = {"batched": "-", "loop": ":"}
    for (name, millions), values in found.items():
        points = [(cohort, value) for cohort, value in values.items() if isinstance(value, float)]
        if points:
            axes.loglog(
                *zip(*points, strict=True),
                styles[name],
                marker="o",
                color=f"C{MILLIONS.index(millions)}",
                label=f"{millions:g} M parameters, {name}",
            )
    axes.set(xlabel="clients in a round", ylabel="seconds a round", title=title)
    axes.grid(True, which="major", alpha=0.3)
    axes.legend(fontsize="small")
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_suffix(".partial.png")
    figure.savefig(partial, dpi=150)
    os.replace(partial, out)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--engines", nargs="+", choices=("batched", "loop"), default=["batched", "loop"]
    )
    parser.add_argument("--millions", nargs="+", type=float, choices=MILLIONS, default=MILLIONS)
    parser.add_argument("--limit", type=float, default=60.0, help="seconds for one size")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=Path("docs/assets/growth.png"))
    options = parser.parse_args()

    torch.set_num_threads(1)
    device = torch.device(options.device)
    found = {
        (name, millions): measure(name, millions, device, options.limit, options.repeats)
        for millions in options.millions
        for name in options.engines
    }
    where = torch.cuda.get_device_name() if device.type == "cuda" else "one CPU core"
    draw(found, f"Seconds a round, {SAMPLES} samples a client, {where}", options.out)
    print(
        "\n| parameters | engine | "
        + " | ".join(f"{cohort:,} clients" for cohort in COHORTS)
        + " |"
    )
    print("|---|---|" + "---|" * len(COHORTS))
    for (name, millions), values in found.items():
        print(
            f"| {millions:g} M | {name} | "
            + " | ".join(spell(values[cohort]) for cohort in COHORTS)
            + " |"
        )


if __name__ == "__main__":
    main()
