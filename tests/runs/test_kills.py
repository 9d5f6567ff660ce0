"""Runs, sweeps and searches killed at random moments end with the bits of those that nobody killed.

KAIROSFL_SOAK sets the number of kills, 12 by default.
"""

from __future__ import annotations

import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from typer import Exit

from kairosfl.cli.common import friendly
from kairosfl.runs import experiment
from kairosfl.runs.config import resolve
from kairosfl.runs.files import read_lines
from kairosfl.runs.sweep import expand, sweep
from kairosfl.tune.budget import Budget
from kairosfl.tune.search import Search

if sys.platform == "win32":
    pytest.skip("kills processes that it forked", allow_module_level=True)
pytestmark = pytest.mark.slow
KILLS = int(os.environ.get("KAIROSFL_SOAK", "12"))
SIGNALS = (
    [signal.SIGKILL],
    [signal.SIGTERM],
    [signal.SIGINT],
    [signal.SIGINT, signal.SIGINT],
    [signal.SIGTERM, signal.SIGKILL],
)
TABLES: dict[str, Any] = {
    "algorithm": "scaffold + fedavgm",
    "data": {"clients": 12},
    "model": {"hidden": [16]},
    "train": {"rounds": 12, "cohort": 3, "batch_size": 16},
    "run": {"engine": "loop", "device": "cpu", "checkpoint_every": 2, "client_accuracy": False},
}
TIMED = {
    **TABLES,
    "algorithm": "buffered(k=2, concurrency=6) + stale + fedavgm",
    "fleet": {"devices": "lognormal()", "dropout": 0.1},
    "run": {**TABLES["run"], "checkpoint_every": 1},
}
BATCHED = {**TABLES, "run": {**TABLES["run"], "engine": "batched", "deterministic": True}}


class Silent:
    """Where a search says nothing."""

    def say(self, line: str) -> None: ...

    def update(self, part: float, words: str) -> None: ...


def run(folder: Path, tables: dict[str, Any] = TABLES) -> None:
    """Begin a run, or continue it."""
    if (folder / "config.toml").exists():
        experiment.resume(folder)
    else:
        experiment.start(resolve(tables), folder)


def run_batched(folder: Path) -> None:
    run(folder, BATCHED)


def run_on_a_fleet(folder: Path) -> None:
    run(folder, TIMED)


def run_stacked_on_a_fleet(folder: Path) -> None:
    """With a stop rule, so that how long an order takes is known once its client has trained."""
    stopping = "buffered(k=2, concurrency=6) + alt(a=0.99, b=0.001)"
    run(folder, {**TIMED, "algorithm": stopping, "run": {**BATCHED["run"], "checkpoint_every": 1}})


def run_sweep(folder: Path) -> None:
    sweep(expand({**BATCHED, "sweep": {"seed": [0, 1, 2]}}), folder)


def search(folder: Path) -> None:
    Search(
        {**BATCHED, "train": {**TABLES["train"], "rounds": 6}},
        folder,
        Budget.of(trials=6),
        Silent(),
        parallel=3,
    ).run()


def bits(folder: Path) -> dict[str, Any]:
    """The last model, states and rows of every run in a folder, and its records without the clock."""
    found: dict[str, Any] = {}
    for config in folder.rglob("config.toml"):
        home, name = config.parent, str(config.parent.relative_to(folder))
        saved = load_file(max((home / "checkpoint").glob("state-*.safetensors")))
        # Where a row is stored depends on when it was written; its content shows in the next model.
        model = {
            key: value.numpy().tobytes()
            for key, value in saved.items()
            # Nor do orders in flight: their reports hold the seconds that clients took.
            if not key.startswith(("table.", "flight."))
        }
        rows = [
            {key: value for key, value in row.items() if key != "seconds"}
            for file in ("metrics.jsonl", "clients.jsonl")
            for row in read_lines(home / file)
        ]
        found[name] = model, rows
    return found


def stopped(work: Callable[[Path], None], folder: Path, signals: list[int], after: float) -> bool:
    """Let another process work and send it signals; whether it ended before them."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.setpgid(0, 0)
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
            with friendly():
                work(folder)
            status = 0
        except (Exit, KeyboardInterrupt) as end:
            refused = isinstance(end, Exit) and end.exit_code == 2
            status = 2 if refused else 0
        finally:
            os._exit(status)
    time.sleep(after)
    for number in signals:
        if os.waitpid(child, os.WNOHANG) != (0, 0):
            return True
        os.kill(child, number)
        time.sleep(0.02)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, status
    return False


@pytest.mark.parametrize(
    "work", [run, run_batched, run_on_a_fleet, run_stacked_on_a_fleet, run_sweep, search]
)
def test_killed_again_and_again_the_bits_are_the_same(
    work: Callable[[Path], None], tmp_path: Path
) -> None:
    if work is search:
        pytest.importorskip("optuna")
    work(tmp_path / "warm")  # what is imported and compiled is not timed
    began = time.perf_counter()
    work(tmp_path / "reference")
    seconds = time.perf_counter() - began
    reference = bits(tmp_path / "reference")
    chance = random.Random(1)
    killed = attempt = 0
    while killed < KILLS / 4:
        attempt += 1
        folder = tmp_path / f"killed{attempt}"
        for _ in range(chance.randint(1, 4)):
            ended = stopped(
                work, folder, chance.choice(SIGNALS), chance.uniform(0.0, 0.8 * seconds)
            )
            killed += not ended
        work(folder)
        assert bits(folder) == reference, attempt
        assert [*folder.rglob("*.part"), *folder.rglob("*.broken")] == [], attempt
    print(f"{work.__name__}: {killed} kills of {attempt} folders, {seconds:.1f} s each")
