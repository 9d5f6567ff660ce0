"""A Ray cluster whose head node is killed in mid-round: one sentence, and the run continues on a
new cluster.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch

from kairosfl.runs import experiment
from kairosfl.runs.checkpoint import model
from kairosfl.runs.config import dump, resolve
from kairosfl.runs.folder import Folder

pytest.importorskip("ray")
if sys.platform != "linux":
    pytest.skip("finds the processes of a cluster in /proc", allow_module_level=True)
pytestmark = pytest.mark.slow
ENVIRONMENT = {
    **os.environ,
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    "OMP_NUM_THREADS": "1",
}
ROUNDS = 6
TABLES = {
    "algorithm": "scaffold",
    "data": {"clients": 8},
    "train": {"rounds": ROUNDS, "cohort": 6, "epochs": 30},
    "run": {"engine": "ray", "actors": 2, "threads": 1, "device": "cpu", "checkpoint_every": 1},
}


class Head:
    """A cluster of one node, with all its files in one folder."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        command = [
            str(Path(sys.executable).with_name("ray")),
            "start",
            "--head",
            "--port=0",
            "--num-cpus=2",
        ]
        command += [
            "--include-dashboard=false",
            f"--temp-dir={folder}",
            f"--object-store-memory={100 << 20}",
        ]
        subprocess.run(command, env=ENVIRONMENT, check=True, capture_output=True, timeout=120)
        self.address = (Path(folder) / "ray_current_cluster").read_text().strip()

    def kill(self) -> None:
        """Kill every process of the cluster at once, actors included."""
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if self.folder.encode() in (entry / "cmdline").read_bytes():
                    os.kill(int(entry.name), signal.SIGKILL)


@contextlib.contextmanager
def head() -> Iterator[Head]:
    with TemporaryDirectory(
        prefix="kairosfl-ray-", dir="/tmp", ignore_cleanup_errors=True
    ) as folder:  # short paths
        made = Head(folder)
        try:
            yield made
        finally:
            made.kill()


def started(*words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "kairosfl", *words, "--quiet"]
    return subprocess.Popen(
        command, env=ENVIRONMENT, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
    )


def test_a_head_node_that_is_killed_costs_its_round_and_the_run_continues_on_another(
    tmp_path: Path,
) -> None:
    run, config = tmp_path / "run", tmp_path / "config.toml"
    config.write_text(dump(TABLES))
    with head() as first:
        process = started("run", str(config), "--out", str(run), "--ray-address", first.address)
        until = time.monotonic() + 240
        while not (run / "checkpoint" / "checkpoint-000002.json").exists():
            assert process.poll() is None, process.stderr.read() if process.stderr else ""
            assert time.monotonic() < until
            time.sleep(0.05)
        first.kill()
        _, said = process.communicate(timeout=120)
    sentences = [line for line in said.splitlines() if line.startswith("kairosfl:")]
    assert process.returncode == 2, said
    assert sentences == [
        sentence
        for sentence in sentences
        if f"The Ray cluster at {first.address} is lost: " in sentence
    ]
    assert len(sentences) == 1
    assert "Traceback" not in said
    assert 2 <= (Folder(run).rounds_done() or 0) < ROUNDS
    with head() as second:
        text = (run / "config.toml").read_text()
        (run / "config.toml").write_text(text.replace(first.address, second.address))
        process = started("resume", str(run))
        _, said = process.communicate(timeout=240)
    assert process.returncode == 0, said
    experiment.start(resolve(TABLES, ["run.engine=loop"]), tmp_path / "loop")
    assert torch.equal(model(run)[0], model(tmp_path / "loop")[0])
