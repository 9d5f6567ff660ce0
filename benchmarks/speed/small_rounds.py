"""What a small round costs besides arithmetic: 50 clients, 5 steps of batch 10, a tiny model.

    python benchmarks/speed/small_rounds.py [--device cuda] [--baseline OTHER_CHECKOUT] [--profile]

Prints milliseconds a round as a whole, without the steps, between the rounds and by part, and with
--baseline those of another checkout in the same run, the two taking turns, and whether both end
with the same model, to the bit. Between the rounds is from where the host waits for a cohort to the
next one's first step, without evaluation and metrics: a GPU is idle meanwhile. It is 0 if that step
was launched before. On a CPU it is time that the process really had, and most of it are the steps,
which a GPU replays as graphs; on a GPU it is the clock's, and a part that waits for the device
contains the device's time. --profile lists where the host's time goes.
"""

from __future__ import annotations

import argparse
import cProfile
import hashlib
import itertools
import json
import os
import pstats
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

Clock = Callable[[], float]
CLIENTS, COHORT, SAMPLES, BATCH = 500, 50, 50, 10
CONFIG = f"""
[data]
name = "synthetic"
clients = {CLIENTS}
partition = "iid"
samples = {CLIENTS * SAMPLES}
test_samples = 100
features = 16
[model]
name = "mlp"
hidden = [8]
[train]
rounds = ROUNDS
cohort = {COHORT}
batch_size = {BATCH}
lr = 0.05
[run]
engine = "batched"
device = "DEVICE"
checkpoint_every = 1000000
eval_every = 10
"""
PARTS = {  # what to time: module, class or None, function
    "select, brief": [("core.round", None, "select"), ("core.round", None, "brief")],
    "submit": [("engines.batched.engine", "Batched", "submit")],
    "steps": [("engines.batched.graphs", "Steps", "__call__")],
    "collect, without the steps": [("engines.batched.engine", "Batched", "collect")],
    "reports": [("engines.batched.jobs", "Ticket", "reports")],
    "receive to step": [("core.round", None, "conclude")],
    "evaluation": [("engines.batched.engine", "Batched", "evaluate")],
    "metrics rows": [("runs.metrics", None, "row"), ("runs.metrics", None, "clients_row")],
    "writing lines": [("runs.folder", None, "append_json")],
}


BETWEEN = "between the rounds"
RECORDING = ("evaluation", "metrics rows", "writing lines")


def measure(rounds: int, device: str, profile: bool) -> dict[str, Any]:
    """Milliseconds of one round, the median, and of each part, the mean; and a checksum of the
    final model.
    """
    from kairosfl.runs import experiment
    from kairosfl.runs.checkpoint import model
    from kairosfl.runs.config import load

    clock = (
        time.perf_counter if device == "cuda" else time.process_time
    )  # other processes may share the cores
    spent: dict[str, float] = defaultdict(float)
    for part, functions in PARTS.items():
        for module, owner, name in functions:
            _time(part, f"kairosfl.{module}", owner, name, spent, clock)
    _time_between(spent, clock)
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "small.toml"
        config.write_text(CONFIG.replace("ROUNDS", str(rounds)).replace("DEVICE", device))
        ends: list[float] = []
        profiler = cProfile.Profile()

        def notify(row: dict[str, Any]) -> None:
            ends.append(clock())
            if row["round"] == rounds // 4:  # the first rounds choose and capture
                spent.clear()
                if profile:
                    profiler.enable()

        experiment.start(load(config), Path(folder) / "run", notify=notify)
        profiler.disable()
        x = model(Path(folder) / "run")[0]
    if profile:
        pstats.Stats(profiler).sort_stats("cumtime").print_stats("kairosfl", 40)
    last = ends[rounds // 4 :]
    took = [after - before for before, after in itertools.pairwise(last)]
    counted = len(took)
    parts = {part: 1e3 * spent[part] / counted for part in (*PARTS, BETWEEN)}
    between = max(0.0, parts.pop(BETWEEN) - sum(parts[part] for part in RECORDING))
    parts["collect, without the steps"] = max(
        0.0, parts["collect, without the steps"] - parts["steps"]
    )
    whole, mean = 1e3 * statistics.median(took), 1e3 * sum(took) / counted
    digest = hashlib.sha256(x.numpy().tobytes()).hexdigest()[:16]
    rest = mean - parts["steps"]
    return {
        "round": whole,
        "mean": mean,
        "rest": rest,
        "between": between,
        "parts": parts,
        "model": digest,
    }


def _time(
    part: str, module: str, owner: str | None, name: str, spent: dict[str, float], clock: Clock
) -> None:
    """Replace a function by one that adds up its time."""
    from importlib import import_module

    holder: Any = import_module(module)
    holder = getattr(holder, owner) if owner else holder
    whole = getattr(holder, name)

    def timed(*given: Any, **named: Any) -> Any:
        began = clock()
        try:
            return whole(*given, **named)
        finally:
            spent[part] += clock() - began

    setattr(holder, name, timed)


def _time_between(spent: dict[str, float], clock: Clock) -> None:
    """Add up the time from where the host waits for a cohort to where it launches the next one's
    steps.
    """
    from kairosfl.engines.batched.graphs import Steps
    from kairosfl.engines.batched.jobs import Ticket

    reports, steps, began = Ticket.reports, Steps.__call__, [0.0]

    def awaited(ticket: Any) -> Any:
        began[0] = clock()
        return reports(ticket)

    def launched(taken: Any, *given: Any) -> None:
        if began[0]:
            spent[BETWEEN] += clock() - began[0]
        began[0] = 0.0
        steps(taken, *given)

    Ticket.reports, Steps.__call__ = awaited, launched  # type: ignore[method-assign]


def in_checkout(checkout: Path, options: argparse.Namespace) -> dict[str, Any]:
    """The same in a process of its own, with the sources of a checkout."""
    environment = os.environ | {
        "PYTHONPATH": str(checkout.resolve() / "src"),
        "OMP_NUM_THREADS": "1",
    }
    command = [
        sys.executable,
        __file__,
        "--json",
        "--device",
        options.device,
        "--rounds",
        str(options.rounds),
    ]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument(
        "--repeats", type=int, default=3, help="turns of each checkout with --baseline"
    )
    parser.add_argument("--baseline", type=Path, help="another checkout to compare with")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    if options.baseline is None:
        found = measure(options.rounds, options.device, options.profile)
        if options.json:
            print(json.dumps(found))
            return
        print(
            f"{found['round']:.2f} ms a round (mean {found['mean']:.2f}, {found['rest']:.2f} without the steps, ",
            end="",
        )
        print(f"{found['between']:.2f} between the rounds)")
        for part, value in found["parts"].items():
            print(f"  {value:7.3f}  {part}")
        return
    here = Path(__file__).parents[2]
    turns = [
        (in_checkout(options.baseline, options), in_checkout(here, options))
        for _ in range(options.repeats)
    ]
    before, after = (
        min((turn[side] for turn in turns), key=lambda each: each["rest"]) for side in (0, 1)
    )
    for what, name in (("a round", "round"), ("without the steps", "rest"), (BETWEEN, "between")):
        print(f"{before[name]:.2f} ms {what} before, {after[name]:.2f} after: ", end="")
        print(f"{100 * (1 - after[name] / before[name]):.0f} % less")
    print("the same model to the bit" if before["model"] == after["model"] else "ANOTHER MODEL")
    for part in PARTS:
        print(f"  {before['parts'][part]:7.3f} → {after['parts'][part]:7.3f}  {part}")


if __name__ == "__main__":
    main()
