"""Runs on a model with a frozen part: its hash in run.json, resuming, sweeps, bytes."""

from __future__ import annotations

import json

import pytest
from torch import nn

from kairosfl.errors import UserError
from kairosfl.models import MODELS
from kairosfl.runs import experiment
from kairosfl.runs.config import RunConfig, resolve
from kairosfl.runs.files import read_lines
from kairosfl.runs.prepare import build_task
from kairosfl.runs.sweep import expand, sweep


@pytest.fixture(autouse=True)
def head(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model by name whose body, random by the seed, is frozen."""

    def head_only(shape: tuple[int, ...], classes: int, *, scale: float = 1.0) -> nn.Module:
        body = nn.Linear(64, 8).requires_grad_(False)
        body.weight.mul_(scale)
        return nn.Sequential(nn.Flatten(), body, nn.Tanh(), nn.Linear(8, classes))

    monkeypatch.setitem(MODELS, "head_only", head_only)


def config(**changes: object) -> RunConfig:
    tables = {
        "data": {"clients": 6},
        "model": {"name": "head_only"},
        "train": {"rounds": 3, "cohort": 3},
        "run": {"engine": "loop", "client_accuracy": True},
    }
    return resolve({**tables, **changes})  # type: ignore[dict-item]


def test_a_run_writes_down_its_base_and_sends_what_is_trained(tmp_path):
    experiment.start(config(), tmp_path / "run")
    note = json.loads((tmp_path / "run" / "run.json").read_text())
    task = build_task(config())
    assert note["base_hash"] == task.base_hash is not None
    assert note["parameters"] == 8 * 10 + 10
    assert note["client_accuracy_on"] == "train"
    row = next(iter(read_lines(tmp_path / "run" / "metrics.jsonl")))
    assert 3 * 4 * 90 <= row["bytes_up"] < 3 * 4 * 90 + 500
    experiment.start(config(model={"name": "mlp"}, run={"engine": "loop"}), tmp_path / "whole")
    note = json.loads((tmp_path / "whole" / "run.json").read_text())
    assert (note["base_hash"], note["client_accuracy_on"]) == (None, None)


def test_a_run_does_not_resume_on_another_base(tmp_path):
    folder = tmp_path / "run"
    experiment.start(config(), folder)
    text = (folder / "config.toml").read_text()
    more = text.replace("rounds = 3", "rounds = 4")
    (folder / "config.toml").write_text(more)
    assert experiment.resume(folder)["rounds"] == 4
    (folder / "config.toml").write_text(more.replace("rounds = 4", "rounds = 5"))
    MODELS["head_only"].__kwdefaults__["scale"] = 1.5
    with pytest.raises(
        UserError,
        match=r"cannot be resumed: its base hash was '[0-9a-f]{64}' and is '[0-9a-f]{64}' now; "
        "restore the data and the model",
    ):
        experiment.resume(folder)
    assert json.loads((folder / "run.json").read_text())["base_hash"] is not None


def test_runs_of_a_sweep_with_other_bases_have_engines_of_their_own(tmp_path):
    tables = {
        "data": {"clients": 6},
        "model": {"name": "head_only"},
        "train": {"rounds": 3, "cohort": 3},
        "run": {"engine": "batched", "deterministic": True},
    }
    summaries = sweep(expand({**tables, "sweep": {"seed": [0, 1]}}), tmp_path / "sweep")
    assert len(summaries) == 2
    for seed, name in enumerate(summaries):
        alone = experiment.start(resolve({**tables, "seed": seed}), tmp_path / f"alone{seed}")
        assert summaries[name]["loss"] == alone["loss"]
