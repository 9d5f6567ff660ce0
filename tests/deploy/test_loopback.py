"""Four authenticated nodes over TLS give the bits of the loop engine, for one algorithm after
another.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from kit import CLIENTS, configure, lines, make_app, reference

from kairosfl.deploy import model_of, run_to_end
from kairosfl.deploy.local import LocalFederation


@pytest.mark.slow
def test_the_bits_of_the_loop_engine_with_two_algorithms_on_the_same_nodes(tmp_path: Path) -> None:
    folder = tmp_path / "federation"
    app = make_app(folder)
    with LocalFederation(tmp_path / "stage", [str(client) for client in range(CLIENTS)]) as stage:
        nodes = {
            name: process.pid
            for name, process in stage.processes.items()
            if name.startswith("node")
        }
        for i, algorithm in enumerate(["scaffold + fedcl + alt + pa3fed", "fedyogi + fedaware"]):
            run = configure(
                folder, f"run{i}.toml", algorithm=algorithm, rounds=2, cohort=2, quorum=1.0
            )
            run_to_end(stage, app, run, tmp_path / f"out{i}")
            wanted = reference(folder, run, tmp_path / f"loop{i}")
            assert torch.equal(model_of(tmp_path / f"out{i}"), model_of(wanted.path))
            for name in ("metrics.jsonl", "clients.jsonl"):
                assert lines(tmp_path / f"out{i}", name) == lines(wanted.path, name)
        # Nobody was restarted, and the clients' app is still the one that was there before.
        assert nodes == {
            name: process.pid
            for name, process in stage.processes.items()
            if name.startswith("node")
        }
        assert all(stage.processes[name].poll() is None for name in nodes)
