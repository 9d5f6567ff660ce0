"""What clients keep on their devices, with real processes: the bits of the loop engine, also after
every process was started again.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from kit import configure, lines, make_app, reference
from safetensors import safe_open

from kairosfl.deploy import model_of, run_to_end
from kairosfl.deploy.local import LocalFederation
from kairosfl.runs.files import read_json

NODES = ["0-1", "2-3"]  # each serves two clients


@pytest.mark.slow
def test_own_parts_outlive_every_process(tmp_path: Path) -> None:
    folder, out, place = tmp_path / "federation", tmp_path / "out", tmp_path / "kept"
    app = make_app(folder)
    task = app / "federation" / "task.py"
    plain = task.read_text()
    task.write_text(plain.replace("classes=2), clients)", 'classes=2), clients, own=["2.*"])'))
    assert task.read_text() != plain
    environment = {"KAIROSFL_KEPT": str(place)}

    settings = {"algorithm": "fedavgm", "cohort": 3, "quorum": 1.0}
    short = configure(folder, "short.toml", rounds=2, **settings)
    with LocalFederation(tmp_path / "first", NODES, environment=environment) as stage:
        run_to_end(stage, app, short, out)
    mark = read_json(out / "run.json")["mark"]
    files = sorted((place / mark).glob("*.safetensors"))
    before = [file.read_bytes() for file in files]
    assert files

    # The operator asks for two more rounds; keys, nodes, SuperLink and server are new.
    for file in (short, out / "config.toml"):
        file.write_text(file.read_text().replace("rounds = 2", "rounds = 4"))
    (out / "roster.json").unlink()
    with LocalFederation(tmp_path / "second", NODES, environment=environment) as stage:
        run_to_end(stage, app, short, out)
    assert [file.read_bytes() for file in files] != before
    assert read_json(out / "run.json")["mark"] == mark

    loop = reference(folder, short, tmp_path / "loop")
    assert torch.equal(model_of(out), model_of(loop.path))
    assert lines(out, "clients.jsonl") == lines(loop.path, "clients.jsonl")
    assert lines(out, "metrics.jsonl") == lines(loop.path, "metrics.jsonl")
    for file in (place / mark).glob("*.safetensors"):
        with safe_open(file, "pt") as kept:
            assert kept.get_tensor("after.own").shape == (34,)  # 16 x 2 weights and 2 biases
