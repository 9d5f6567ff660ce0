"""Writes the run folders that are stored beside this file, with the Kairos of a checkout that is on
PYTHONPATH.

    PYTHONPATH=CHECKOUT/src:tests/old python tests/old/make_old.py tests/old/NAME

The runs have six rounds. Some end there, others are interrupted, as by Ctrl-C, after four of them
were saved.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

os.environ.update(OMP_NUM_THREADS="1", KAIROSFL_CACHE="off")

import old_task

import kairosfl
from kairosfl.cli import app
from kairosfl.engines.loop import Loop
from kairosfl.runs.config import SECTIONS

SETTING = """
seed = 2
[data]
name = "synthetic"
samples = 80
test_samples = 30
features = 4
classes = 3
separation = 2.0
clients = 8
[model]
name = "logistic"
[train]
rounds = 6
cohort = 3
epochs = 2
batch_size = 8
lr = 0.1
[run]
engine = "loop"
device = "cpu"
threads = 1
checkpoint_every = 2
"""
ALGORITHM = "algorithm = 'scaffold + fedcl + pa3fed(always=true)'\n"
FEDAWARE = "algorithm = 'fedavgm + fedaware'\n"
PLUGIN = "algorithm = 'cautious_rules.Cautious(share=0.25) + fedprox(mu=0.1)'\n"
SWEEP = """
[sweep]
algorithm = ["fedavg", "fedyogi"]
seed = [0, 1]
"""
TUNE = """
[tune]
"train.lr" = { low = 0.01, high = 1.0, log = true }
"""
INTERRUPTED = 4  # how many rounds are saved
HERE = re.compile(
    r"/[^\"' ]*/(?=(old_task\.py|stored/))"
)  # paths of the machine on which this runs


class Interrupted:
    """Engine `loop` interrupted as by Ctrl-C when a round begins; the rounds of all runs of the
    process count.
    """

    def __init__(self, after: int | None) -> None:
        self.left, self.train = after, Loop.train

    def __enter__(self) -> None:
        def train(engine: Loop, briefs: Any) -> Any:
            if self.left == 0:
                raise KeyboardInterrupt
            self.left = None if self.left is None else self.left - 1
            return self.train(engine, briefs)

        Loop.train = train  # type: ignore[method-assign]

    def __exit__(self, *_: object) -> None:
        Loop.train = self.train  # type: ignore[method-assign]


def command(*words: str, after: int | None = None) -> None:
    """What the command line does, interrupted after so many rounds."""
    sys.argv = ["kairosfl", *words]
    print(*sys.argv)
    with Interrupted(after):
        status = app([*words, "--quiet"], standalone_mode=False)
    assert status in (None, 0) if after is None else status == 130, status


def simulated(out: Path, after: int | None) -> None:
    """A run of the library."""

    def ends(history: kairosfl.History) -> bool | None:
        return False if len(history.metrics) == after else None

    train, test = old_task.samples(0, 60), old_task.samples(1, 30)
    kairosfl.simulate(
        old_task.model(),
        (train.inputs, train.targets),
        (test.inputs, test.targets),
        algorithm="fedavg",
        clients=5,
        cohort=3,
        rounds=6,
        batch_size=8,
        engine="loop",
        device="cpu",
        checkpoint_every=2,
        progress=False,
        on_round=ends,
        out=out,
    )


def make(folder: Path) -> None:
    """All runs."""
    texts = {"run": ALGORITHM + SETTING, "fedaware": FEDAWARE + SETTING, "sweep": SETTING + SWEEP}
    allow = (
        "allow = ['cautious_rules']\n" if hasattr(SECTIONS["run"], "allow") else ""
    )  # not needed in 0.2.0
    texts |= {"tune": SETTING + TUNE, "plugin": PLUGIN + SETTING + allow}
    for name, text in texts.items():
        Path(f"{name}.toml").write_text(text)
    shutil.copy(old_task.__file__, "old_task.py")
    command("run", "run.toml", "--out", "stored/finished")
    command("run", "run.toml", "--out", "stored/interrupted", after=INTERRUPTED)
    command("run", "fedaware.toml", "--out", "stored/fedaware", after=INTERRUPTED)
    command("run", "plugin.toml", "--out", "stored/plugin", after=INTERRUPTED)
    settings = [
        f"--set={key}"
        for key in ("train.rounds=6", "train.cohort=2", "run.engine=loop", "run.device=cpu")
    ]
    if "task" in SECTIONS:  # not in 0.2.0
        command(
            "run", "--task", "old_task.py", *settings, "--out", "stored/task", after=INTERRUPTED
        )
    command("sweep", "sweep.toml", "--out", "stored/sweep", after=12 + INTERRUPTED)
    if find_spec("kairosfl.tune"):  # not in 0.2.0
        command("tune", "tune.toml", "--trials", "6", "--out", "stored/tune", after=15)
    if hasattr(kairosfl, "simulate"):  # not in 0.2.0
        simulated(Path("stored/simulated"), None)
        simulated(Path("stored/stopped"), INTERRUPTED)
    shutil.copytree("stored", folder)
    for path in folder.rglob("*"):
        if path.suffix == ".html" or path.name == ".lock":
            path.unlink()
        elif path.is_file() and path.suffix != ".safetensors":
            path.write_text(HERE.sub("/old/", path.read_text()))


if __name__ == "__main__":
    destination = Path(sys.argv[1]).absolute()
    with tempfile.TemporaryDirectory() as empty:
        os.chdir(empty)
        make(destination)
