"""Kairos beside other frameworks: the same FedAvg, each in an environment of its own, on this
machine's CPU.

    python benchmarks/peers/run.py

builds the environments under --cache, runs everybody in turns, prints a table and writes it to
--out. Whoever cannot be installed or run is listed with the reason, and the others go on. Needs
nothing but Python and pip.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import statistics
import subprocess
import sys
import time
import venv
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
SHARED = ("torch==2.13.0", "numpy==2.4.6")
SLOW = 10  # times the hand-written loop: run once, no repeat changes such a verdict
SAME = (
    0.02  # accuracies this close are the same: the order of the batches differs between frameworks
)


@dataclass(frozen=True)
class Environment:
    """What pip installs; `alone` without its dependencies, because they ask for what is not used
    here.
    """

    needs: tuple[str, ...] = ()
    alone: tuple[str, ...] = ()


ENVIRONMENTS = {
    "kairos": Environment(("safetensors",)),
    "pfl": Environment(("pfl==0.6.0",)),
    # Both want torchvision, whose wheels do not load beside every build of torch.
    "fedlab": Environment(
        ("pandas", "scikit-learn", "munch", "tqdm", "pillow", "pynvml"), ("fedlab==1.3.0",)
    ),
    "flgo": Environment(
        (
            "tqdm",
            "scipy",
            "matplotlib",
            "prettytable",
            "ujson",
            "pynvml",
            "pyyaml",
            "networkx",
            "requests",
            "toolz",
        ),
        ("flgo==0.4.4",),
    ),
    "flower": Environment(("flwr[simulation]==1.41.0",)),
}


@dataclass(frozen=True)
class Row:
    """A line of the table."""

    name: str
    environment: str
    module: str
    arguments: tuple[str, ...] = ()


ROWS = (
    Row("by hand, tight loop", "kairos", "by_hand"),
    Row("by hand, torch.optim.SGD", "kairos", "by_hand", ("--optimiser",)),
    Row("Kairos, batched", "kairos", "kairos", ("--engine", "batched")),
    Row("Kairos, loop", "kairos", "kairos", ("--engine", "loop")),
    Row("pfl 0.6.0", "pfl", "pfl"),
    Row("FedLab 1.3.0", "fedlab", "fedlab"),
    Row("FLGo 0.4.4", "flgo", "flgo"),
    Row("Flower 1.41.0, 2 actors", "flower", "flower"),
)
HAND = ROWS[0].name
TITLES = {
    "tiny": "tiny: MLP 64-32-10, 1,000 clients of 10 samples, 100 a round, 50 rounds",
    "cnn": "cnn: two 5x5 convolutions, 878,538 parameters, 32x32 colour images, 10 of 100 clients, batch 64, 6 rounds; "
    "one label in five is random",
}


class Failed(Exception):
    """Why a framework has no figures."""


def build(name: str, cache: Path) -> Path:
    """The Python of an environment, made if it is not there in this form."""
    wanted = ENVIRONMENTS[name]
    folder = cache / name
    python, ready = folder / "bin" / "python", folder / "ready.json"
    asked = json.dumps([SHARED, wanted.needs, wanted.alone])
    if ready.exists() and ready.read_text() == asked:
        return python
    print(f"building the environment of {name} in {folder} ...", flush=True)
    venv.create(folder, with_pip=True, clear=True)
    install = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    for packages in (
        [*SHARED, *wanted.needs],
        ["--no-deps", *wanted.alone] if wanted.alone else [],
    ):
        if packages:
            done = subprocess.run([*install, *packages], capture_output=True, text=True)
            if done.returncode:
                raise Failed(f"not installed: {last_line(done.stderr)}")
    ready.write_text(asked)
    return python


def last_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1][:200] if lines else "no message"


def run(row: Row, python: Path, workload: str, options: argparse.Namespace) -> dict[str, Any]:
    """One run's figures, in a process of its own."""
    out = options.cache / f"{row.module}-{workload}.json"
    log = out.with_suffix(".log")
    out.unlink(missing_ok=True)
    places = [str(HERE.parent), *([str(options.source)] if row.environment == "kairos" else [])]
    command = [
        str(python),
        "-P",
        "-m",
        f"peers.{row.module}",
        workload,
        str(out),
        "--threads",
        str(options.threads),
    ]
    if options.rounds:
        command += ["--rounds", str(options.rounds)]
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(places),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    with log.open("w") as told:
        process = subprocess.Popen(
            [*command, *row.arguments, "--began", str(time.time())],
            cwd=options.cache,
            env=environment,
            stdout=told,
            stderr=told,
            start_new_session=True,
        )
        try:
            process.wait(options.limit)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            raise Failed(f"not done after {options.limit} s") from None
    if process.returncode or not out.exists():
        raise Failed(f"did not run: {last_line(log.read_text(errors='replace'))}")
    result: dict[str, Any] = json.loads(out.read_text())
    return result


def measure(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """For every workload and row the runs, taken in turns, or the reason why there are none."""
    found: dict[str, dict[str, Any]] = {
        w: {row.name: [] for row in ROWS} for w in options.workloads
    }
    pythons: dict[str, Path | str] = {}
    for name in dict.fromkeys(row.environment for row in options.rows):
        try:
            pythons[name] = build(name, options.cache)
        except (Failed, OSError, subprocess.SubprocessError) as reason:
            pythons[name] = str(reason)
    for turn in range(options.repeats):
        for workload in options.workloads:
            runs = found[workload]
            for row in options.rows:
                python = pythons[row.environment]
                if isinstance(python, str):
                    runs[row.name] = python
                if isinstance(runs[row.name], str) or (turn and slow(runs, row.name)):
                    continue
                print(f"turn {turn + 1} of {options.repeats}, {workload}: {row.name}", flush=True)
                try:
                    runs[row.name].append(run(row, Path(python), workload, options))
                except Failed as reason:
                    runs[row.name] = str(reason)
    return found


def slow(runs: dict[str, Any], name: str) -> bool:
    key = "cpu_seconds_per_round"
    hand, mine = runs[HAND], runs[name]
    return bool(hand and mine) and mine[0][key] > SLOW * hand[0][key]


def summary(runs: dict[str, Any]) -> list[dict[str, Any]]:
    """One entry a row: medians over the turns, and the median of the ratios to the hand-written
    loop of the turn.
    """
    entries = []
    hand = runs[HAND] if isinstance(runs[HAND], list) else []
    for name, mine in runs.items():
        if not mine:
            continue
        if isinstance(mine, str):
            entries.append({"name": name, "failed": mine})
            continue
        entry = {"name": name, "turns": len(mine)}
        for key in mine[0]:
            if key != "checksum":
                entry[key] = statistics.median(each[key] for each in mine)
        if hand:
            pairs = list(zip(mine, hand, strict=False))
            for kind in ("cpu", "wall"):
                key = f"{kind}_seconds_per_round"
                entry[f"{kind}_ratio"] = statistics.median(
                    ours[key] / theirs[key] for ours, theirs in pairs
                )
            if mine[0]["checksum"] != hand[0]["checksum"]:
                entry["failed"] = "trained on other data"
            elif abs(entry["accuracy"] - hand[0]["accuracy"]) > SAME:
                entry["failed"] = f"reached another accuracy, {entry['accuracy']:.3f}"
        entries.append(entry)
    return entries


def table(title: str, entries: list[dict[str, Any]]) -> str:
    lines = [
        title,
        "",
        "| | CPU s a round | against the loop by hand | wall s a round | accuracy | memory MiB | first round after s |",
        "|---|---|---|---|---|---|---|",
    ]
    for entry in entries:
        if "failed" in entry:
            lines.append(f"| {entry['name']} | – | {entry['failed']} | | | | |")
            continue
        ratio = f"{entry['cpu_ratio']:.2f}" if "cpu_ratio" in entry else "–"
        lines.append(
            f"| {entry['name']} | {entry['cpu_seconds_per_round']:.4f} | {ratio} "
            f"| {entry['wall_seconds_per_round']:.4f} | {entry['accuracy']:.4f} | {entry['peak_mebibytes']:,.0f} "
            f"| {entry['start_up_seconds']:.1f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache" / "kairosfl" / "peers")
    parser.add_argument("--out", type=Path, default=Path("build/peers.json"))
    parser.add_argument(
        "--source", type=Path, default=HERE.parents[1] / "src", help="of the Kairos to measure"
    )
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--rounds", type=int, help="fewer or more than the workload has")
    parser.add_argument("--threads", type=int, default=1, help="of every process")
    parser.add_argument("--limit", type=int, default=1200, help="seconds for one run")
    parser.add_argument("--workloads", nargs="+", choices=list(TITLES), default=list(TITLES))
    parser.add_argument(
        "--only", nargs="+", choices=list(ENVIRONMENTS), help="beside Kairos and the loop by hand"
    )
    options = parser.parse_args()
    options.cache, options.source = options.cache.expanduser().resolve(), options.source.resolve()
    options.out = options.out.resolve()
    options.cache.mkdir(parents=True, exist_ok=True)
    options.rows = [
        row for row in ROWS if not options.only or row.environment in {"kairos", *options.only}
    ]

    found = measure(options)
    entries = {workload: summary(runs) for workload, runs in found.items()}
    machine = {
        "system": platform.platform(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "packages": SHARED,
        "threads": options.threads,
        "repeats": options.repeats,
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    partial = options.out.with_suffix(".partial")
    partial.write_text(
        json.dumps({"machine": machine, "workloads": entries, "runs": found}, indent=1)
    )
    os.replace(partial, options.out)
    print(
        f"\n{machine['cores']} cores, {machine['machine']}, {options.threads} thread(s) a process; "
        f"written to {options.out}"
    )
    for workload, rows in entries.items():
        print("\n" + table(TITLES[workload], rows))
    sys.exit(
        any(
            "failed" in entry
            for rows in entries.values()
            for entry in rows
            if entry["name"].startswith("Kairos")
        )
    )


if __name__ == "__main__":
    main()
