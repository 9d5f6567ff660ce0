"""The resident workers with real processes: killed in a run, they are started again, and they end
with their nodes.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest
from kit import CLIENTS, configure, lines, make_app

from kairosfl.deploy import run_to_end
from kairosfl.deploy.local import LocalFederation

pytestmark = pytest.mark.slow
WORKER = "kairosfl.engines.flower.resident"


def test_workers_that_are_killed_are_started_again_and_end_with_their_nodes(tmp_path: Path) -> None:
    app, out = make_app(tmp_path / "federation"), tmp_path / "out"
    with LocalFederation(tmp_path / "stage", [str(client) for client in range(CLIENTS)]) as stage:
        killed: list[int] = []

        def kill() -> None:
            while not (out / "checkpoint" / "checkpoint-000001.json").exists():
                time.sleep(0.1)
            killed.extend(stage.find(WORKER))
            for process in killed:
                os.kill(process, signal.SIGKILL)

        thread = threading.Thread(target=kill, daemon=True)
        thread.start()
        run = configure(
            tmp_path / "federation",
            "killed.toml",
            rounds=4,
            deadline=100.0,
            quorum=0.0,
            algorithm="fedavg",
        )
        run_to_end(stage, app, run, out)
        thread.join(1.0)
        workers = stage.find(WORKER)
        assert len(killed) >= CLIENTS
        assert len(workers) >= CLIENTS
        assert not set(killed) & set(workers)
    rows = lines(out, "metrics.jsonl")
    assert len(rows) == 4
    assert rows[-1]["reported"] == CLIENTS
    assert stage.find(WORKER) == []
