"""The trained model leaves the run folder: as a module, as safetensors, as ONNX; or one sentence
says why not.
"""

from __future__ import annotations

import builtins
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from typer.testing import CliRunner

import kairosfl
from kairosfl.cli import app
from kairosfl.errors import UserError
from kairosfl.models import MODELS
from kairosfl.runs import experiment
from kairosfl.runs.config import resolve
from kairosfl.tasks.prepare import prepare


class Tied(nn.Module):
    """A tied weight, a frozen layer and a constant buffer."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__()
        self.body = nn.Linear(features, 12).requires_grad_(False)
        self.first, self.second = nn.Linear(12, 12), nn.Linear(12, 12)
        self.second.weight = self.first.weight
        self.register_buffer("scale", torch.full((), 0.5))
        self.head = nn.Linear(12, classes)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.body(inputs.flatten(1)).tanh() * self.scale
        return self.head(self.second(self.first(hidden).tanh()).tanh())


class Tempered(Tied):
    """A trained parameter without axes."""

    def __init__(self, features: int, classes: int) -> None:
        super().__init__(features, classes)
        self.heat = nn.Parameter(torch.tensor(0.5))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return super().forward(inputs) / self.heat


@pytest.fixture(scope="module", autouse=True)
def named():
    MODELS["tied"] = lambda shape, classes: Tied(64, classes)
    MODELS["tempered"] = lambda shape, classes: Tempered(64, classes)
    yield
    del MODELS["tied"], MODELS["tempered"]


def trained(folder: Path, **changes: object) -> Path:
    tables = {
        "data": {"clients": 6},
        "model": {"name": "tied"},
        "train": {"rounds": 4, "cohort": 3},
        "run": {"engine": "loop", "checkpoint_every": 2},
    }
    experiment.start(resolve({**tables, **changes}), folder)
    return folder


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> Path:
    return trained(tmp_path_factory.mktemp("export") / "run")


def accuracy(model: nn.Module) -> float:
    data = kairosfl.tasks.load("digits")
    with torch.no_grad():
        return float(
            (model(prepare(data.test.inputs, data)).argmax(1) == data.test.targets).double().mean()
        )


def call(*words: object):
    return CliRunner().invoke(app, [str(word) for word in words])


def files(folder: Path) -> dict[str, int]:
    return {str(file): file.stat().st_mtime_ns for file in folder.rglob("*")}


@pytest.mark.parametrize("algorithm", ["fedavg", "feddyn + fedmut", "scaffold + fedavgm"])
@pytest.mark.parametrize("model", ["mlp", "tied", "tempered"])
def test_the_loaded_model_scores_what_the_summary_says(tmp_path, algorithm, model):
    folder = trained(tmp_path / "run", algorithm=algorithm, model={"name": model})
    before = files(folder)
    loaded = kairosfl.load(folder)
    assert not loaded.training
    assert accuracy(loaded) == json.loads((folder / "summary.json").read_text())["accuracy"]
    assert files(folder) == before


def test_rules_have_the_last_word(tmp_path, monkeypatch):
    folder = trained(tmp_path / "run", algorithm="fedprox")
    plain = kairosfl.load(folder)
    monkeypatch.setattr(kairosfl.rules.FedProx, "result", lambda self, x, memory, now: x * 2)
    doubled = kairosfl.load(str(folder))
    torch.testing.assert_close(doubled.head.weight, plain.head.weight * 2, rtol=0, atol=0)
    assert torch.equal(doubled.body.weight, plain.body.weight)


def test_a_model_of_ones_own(run):
    given = Tied(64, 10)
    given.body.load_state_dict(kairosfl.load(run).body.state_dict())
    before = given.head.weight.clone()
    assert (
        accuracy(kairosfl.load(run, given))
        == json.loads((run / "summary.json").read_text())["accuracy"]
    )
    assert torch.equal(given.head.weight, before)
    with pytest.raises(
        UserError, match=r"has a model of .* trained parameters, but the given one has 650; give"
    ):
        kairosfl.load(run, nn.Sequential(nn.Flatten(), nn.Linear(64, 10)))


def test_a_parameter_without_axes_leaves_and_is_loaded_again(tmp_path):
    folder, out = (
        trained(tmp_path / "run", model={"name": "tempered"}),
        tmp_path / "model.safetensors",
    )
    assert call("export", folder, "-o", out).exit_code == 0
    state, loaded = load_file(out), Tempered(64, 10)
    assert state["heat"].shape == ()
    assert float(state["heat"]) != 0.5
    loaded.load_state_dict(state)
    assert accuracy(loaded) == json.loads((folder / "summary.json").read_text())["accuracy"]


def test_exported_for_torch(run, tmp_path):
    out = tmp_path / "model.safetensors"
    assert call("export", run, "-o", out).stdout == f"model: {out}\n"
    fresh, loaded = Tied(64, 10), kairosfl.load(run)
    fresh.load_state_dict(load_file(out), strict=True)
    for name, value in loaded.state_dict().items():
        assert torch.equal(fresh.state_dict()[name], value), name
    assert fresh.second.weight is fresh.first.weight
    again = call("export", run, "-o", out)
    assert again.exit_code == 2
    assert (
        again.stderr
        == f"kairosfl: {out} already exists; choose another name, or overwrite it with --force.\n"
    )
    assert call("export", run, "-o", out, "--force").exit_code == 0
    assert "is a directory" in call("export", run, "-o", tmp_path).stderr
    other = call("export", run, "-o", tmp_path / "model.pt").stderr
    assert other.endswith("model.pt must end in '.safetensors', or in .onnx for ONNX.\n")
    assert "must end in '.onnx'." in call("export", run, "-o", out, "--onnx", "--force").stderr


def test_onnx_is_written_or_the_reason_is_one_sentence(run, tmp_path, monkeypatch):
    imported = builtins.__import__

    def without(name, *args, **kwargs):
        if name.partition(".")[0] in ("onnx", "onnxscript"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return imported(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    said = call("export", run, "-o", tmp_path / "model.onnx", "--onnx")
    assert said.exit_code == 2
    assert said.stderr.startswith("kairosfl: --onnx needs onnx")
    assert len(said.stderr.splitlines()) == 1
    assert not list(tmp_path.iterdir())


def test_onnx_computes_what_the_model_does(run, tmp_path):
    """For batches of any size; without warnings and the exporter's own messages."""
    pytest.importorskip("onnxscript")
    onnx, runtime = pytest.importorskip("onnx"), pytest.importorskip("onnxruntime")
    out = tmp_path / "model.onnx"
    said = call("export", run, "-o", out)  # its name says which format
    assert said.output == f"model: {out}\n"
    onnx.checker.check_model(onnx.load(out), full_check=True)
    session, model = runtime.InferenceSession(out), kairosfl.load(run)
    for batch in (1, 7):
        inputs = torch.rand(batch, 1, 8, 8)
        found = session.run(["output"], {"input": inputs.numpy()})[0]
        torch.testing.assert_close(torch.from_numpy(found), model(inputs).detach())


def test_a_broken_checkpoint_is_named_and_left_alone(run, tmp_path):
    folder = shutil.copytree(run, tmp_path / "run")
    (folder / "checkpoint" / "state-000004.safetensors").write_bytes(b"nonsense")
    before = files(folder)
    with pytest.warns(
        UserWarning,
        match=r"checkpoint-000004\.json is broken \(state-000004\.safetensors is damaged\)",
    ):
        kairosfl.load(folder)
    assert files(folder) == before
    (folder / "checkpoint" / "state-000002.safetensors").unlink()
    with pytest.raises(UserError, match="no intact checkpoint"):
        kairosfl.load(folder)


def test_folders_that_cannot_be_loaded(run, tmp_path):
    with pytest.raises(UserError, match=r"is not a run folder: it has no config\.toml"):
        kairosfl.load(tmp_path)
    with pytest.raises(UserError, match=r"nowhere does not exist; give a run folder\."):
        kairosfl.load(tmp_path / "nowhere")
    folder = shutil.copytree(run, tmp_path / "run")
    MODELS["tied"], usual = (
        (lambda shape, classes: nn.Sequential(nn.Flatten(), nn.Linear(64, classes))),
        MODELS["tied"],
    )
    try:
        with pytest.raises(
            UserError, match=r"\(parameters 298 then, 650 now\); restore its data and model"
        ):
            kairosfl.load(folder)
    finally:
        MODELS["tied"] = usual
    about = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(
        json.dumps(about | {"engine": "flower", "population_hash": "another"})
    )
    with pytest.raises(
        UserError, match=r"\(population_hash 'another' then, .* kairosfl\.load\(folder, model\)"
    ):
        kairosfl.load(folder)
    (folder / "run.json").write_text(json.dumps(about | {"version": "0.1.3"}))
    with pytest.raises(UserError, match=r"begun with kairosfl 0\.1\.3"):
        kairosfl.load(folder)
    shutil.rmtree(folder / "checkpoint")
    (folder / "run.json").write_text(json.dumps(about))
    with pytest.raises(UserError, match="has no checkpoint"):
        kairosfl.load(folder)
    (tmp_path / "sweep.json").write_text("{}")
    with pytest.raises(UserError, match="is a sweep; name one of the run folders in it"):
        kairosfl.load(tmp_path)
