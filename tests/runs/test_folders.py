"""Who writes into a run folder, and what is left in it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from kairosfl import simulate
from kairosfl.cli import app
from kairosfl.errors import UserError
from kairosfl.runs import experiment
from kairosfl.runs.config import resolve
from kairosfl.runs.files import read_lines, write
from kairosfl.runs.lock import Displaced, lock
from kairosfl.runs.sweep import expand, sweep

TABLES: dict[str, Any] = {
    "data": {"name": "synthetic", "clients": 6, "features": 4, "samples": 60},
    "model": {"name": "mlp", "hidden": [4]},
    "train": {"cohort": 2, "rounds": 6},
    "run": {"engine": "loop", "device": "cpu", "checkpoint_every": 2, "client_accuracy": False},
}


class After:
    """Does something after a round."""

    def __init__(self, round: int, action: Any) -> None:
        self.round, self.action = round, action

    def __call__(self, row: dict[str, Any]) -> None:
        if row["round"] == self.round:
            self.action()


def stop() -> None:
    raise KeyboardInterrupt


def kill() -> None:
    os._exit(9)


def contents(folder: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(folder)): path.read_bytes()
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_a_folder_is_locked_before_anything_is_written(tmp_path: Path) -> None:
    with (
        lock(tmp_path / "run"),
        pytest.raises(UserError, match="Another process is using"),
    ):
        experiment.start(resolve(TABLES), tmp_path / "run")
    assert [path.name for path in (tmp_path / "run").iterdir()] == [".lock"]


def test_a_folder_that_is_filled_while_the_data_is_loaded_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, build = tmp_path / "run", experiment.prepare

    def slow(config: Any) -> Any:
        prepared = build(config)
        folder.mkdir()
        (folder / "config.toml").write_text("seed = 7\n")
        return prepared

    monkeypatch.setattr(experiment, "prepare", slow)
    with pytest.raises(UserError, match="is not empty"):
        experiment.start(resolve(TABLES), folder)
    assert (folder / "config.toml").read_text() == "seed = 7\n"


def test_a_new_folder_in_which_nothing_was_written_is_removed(tmp_path: Path) -> None:
    tables = {**TABLES, "model": {**TABLES["model"], "start": str(tmp_path / "none")}}
    with pytest.raises(UserError, match=r"model\.start"):
        experiment.start(resolve(tables), tmp_path / "run")
    assert list(tmp_path.iterdir()) == []


def test_folders_of_runs_without_a_name_are_made_not_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from kairosfl.cli.runs import fresh

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(
        Path, "exists", lambda *_: False
    )  # what two processes see at the same moment
    assert [fresh("default").name for _ in range(3)] == ["default", "default-2", "default-3"]
    Path("runs/default-2").rmdir()
    assert fresh("default").name == "default-2"
    refused = CliRunner().invoke(app, ["run", "--set", "train.lr=-1"])
    assert refused.exit_code == 2
    assert sorted(path.name for path in Path("runs").iterdir()) == [
        "default",
        "default-2",
        "default-3",
    ]


@pytest.mark.slow
def test_runs_that_start_at_once_without_a_folder_all_train(tmp_path: Path) -> None:
    words = [
        sys.executable,
        "-m",
        "kairosfl",
        "run",
        "-q",
        "--set",
        "train.rounds=1",
        "--set",
        "data.clients=5",
    ]
    words += ["--set", "train.cohort=2"]
    runs = [subprocess.Popen([*words, "--set", f"seed={seed}"], cwd=tmp_path) for seed in range(4)]
    assert [run.wait() for run in runs] == [0] * 4
    seeds = [
        json.loads((path / "run.json").read_text())["seed"]
        for path in (tmp_path / "runs").iterdir()
    ]
    assert sorted(seeds) == [0, 1, 2, 3]


@pytest.mark.parametrize("again", [False, True])
def test_a_run_whose_lock_was_removed_writes_nothing_more(tmp_path: Path, again: bool) -> None:
    folder = tmp_path / "run"
    before: dict[str, bytes] = {}

    def steal() -> None:
        (folder / ".lock").unlink()
        if again:
            with lock(folder):
                pass
        before.update(contents(folder))

    with pytest.raises(UserError, match=r"\.lock was removed or replaced while this run trained"):
        experiment.start(resolve(TABLES), folder, notify=After(3, steal))
    assert contents(folder) == before
    assert [row["round"] for row in read_lines(folder / "metrics.jsonl")] == [1, 2, 3]
    experiment.resume(folder)
    experiment.start(resolve(TABLES), tmp_path / "whole")
    assert models(folder) == models(tmp_path / "whole")


def models(folder: Path) -> bytes:
    return sorted((folder / "checkpoint").glob("state-*"))[-1].read_bytes()


@pytest.mark.parametrize("engine", ["loop", "batched"])
def test_a_sweep_whose_lock_was_removed_writes_nothing_more(tmp_path: Path, engine: str) -> None:
    out = tmp_path / "sweep"
    tables = {**TABLES, "run": {**TABLES["run"], "engine": engine}, "sweep": {"seed": [0, 1, 2]}}
    before: dict[str, bytes] = {}

    def steal() -> None:
        (out / ".lock").unlink()
        before.update(contents(out))

    with pytest.raises(Displaced):
        sweep(expand(tables), out, watch=lambda name, _: After(3 if name == "seed0" else 99, steal))
    assert contents(out) == before
    assert len(sweep(expand(tables), out)) == 3


def test_a_run_of_a_sweep_is_not_resumed_beside_it(tmp_path: Path) -> None:
    tables = {**TABLES, "sweep": {"seed": [0, 1]}}
    with pytest.raises(KeyboardInterrupt):
        sweep(expand(tables), tmp_path, watch=lambda *_: After(3, stop))
    with (
        lock(tmp_path),
        pytest.raises(UserError, match=r"belongs to .* which another process is using"),
    ):
        experiment.resume(tmp_path / "seed0")

    def start_the_sweep() -> None:
        with pytest.raises(UserError, match="Another process is using"):
            sweep(expand(tables), tmp_path)

    experiment.resume(tmp_path / "seed0", notify=After(4, start_the_sweep))
    assert len(sweep(expand(tables), tmp_path)) == 2


def test_what_a_killed_process_was_writing_is_removed(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with pytest.raises(KeyboardInterrupt):
        experiment.start(resolve(TABLES), folder, notify=After(3, stop))
    left = [
        ".state-000021.safetensors.part",
        ".rows-000021.safetensors.part",
        ".checkpoint-000021.json.part",
    ]
    left = [f"checkpoint/{name}" for name in left] + [".metrics.jsonl.part", ".run.json.part"]
    for name in left:
        (folder / name).write_bytes(b"half")
    (folder / ".mine.html.part").write_text("of another program")
    experiment.resume(folder)
    assert [path.name for path in folder.rglob("*.part")] == [".mine.html.part"]


def test_a_run_killed_while_its_configuration_was_written_starts_again(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / ".lock").touch()
    (folder / ".config.toml.part").write_text("algori")
    assert experiment.start(resolve(TABLES), folder)["rounds"] == 6
    assert list(folder.rglob("*.part")) == []


def test_checkpoints_tidy_away_what_a_killed_one_left(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    left = folder / "checkpoint" / ".state-000001.safetensors.part"
    seen: list[bool] = []
    listen = After(1, lambda: left.write_bytes(b"half"))

    def notify(row: dict[str, Any]) -> None:
        listen(row)
        seen.append(left.exists())

    experiment.start(resolve(TABLES), folder, notify=notify)
    assert seen == [True, True, False, False, False, False]


def test_a_write_that_is_interrupted_leaves_nothing(tmp_path: Path) -> None:
    def interrupted(path: Path) -> None:
        path.write_bytes(b"half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write(tmp_path / "state", interrupted)
    assert list(tmp_path.iterdir()) == []


def test_what_is_removed_under_a_run_is_said(tmp_path: Path) -> None:
    folder, said = tmp_path / "run", []

    def remove() -> None:
        (folder / "run.json").unlink()
        (folder / "metrics.jsonl").unlink()

    summary = experiment.start(resolve(TABLES), folder, notify=After(2, remove), say=said.append)
    assert f"{folder / 'metrics.jsonl'} was removed: the records of earlier rounds are lost" in said
    assert (
        f"{folder / 'run.json'} was removed or damaged while the run trained, and is written again"
        in said
    )
    assert summary["missing_rounds"] == [1, 2]
    log = (folder / "log.txt").read_text()
    assert all(line in log for line in said if "removed" in line)
    about = json.loads((folder / "run.json").read_text())
    assert about["config"]["train"]["rounds"] == 6
    assert "verdicts" in about


def test_metrics_removed_between_two_sessions_are_said(tmp_path: Path) -> None:
    folder, said = tmp_path / "run", []
    with pytest.raises(KeyboardInterrupt):
        experiment.start(resolve(TABLES), folder, notify=After(4, stop))
    (folder / "metrics.jsonl").unlink()
    experiment.resume(folder, say=said.append)
    assert any("metrics.jsonl was removed" in line for line in said)


def test_simulate_does_not_touch_a_folder_that_another_process_uses(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(60, 3, generator=generator)
    data = x, (x[:, 0] > 0).long()
    more: dict[str, Any] = {"engine": "loop", "device": "cpu", "progress": False, "clients": 5}
    out = tmp_path / "run"
    simulate(torch.nn.Linear(3, 2), data, data, rounds=2, out=out, **more)
    before = contents(out)
    with lock(out), pytest.raises(UserError, match="Another process is using"):
        simulate(torch.nn.Linear(3, 2), data, data, rounds=4, out=out, **more)
    assert contents(out) == before
