"""Metrics reach TensorBoard and MLflow; without their libraries one sentence says what to install."""

from __future__ import annotations

import sys
import types

import pytest

from kairosfl import UserError
from kairosfl.runs import experiment
from kairosfl.runs.config import resolve

SMALL = {
    "data": {"clients": 8},
    "train": {"rounds": 4, "cohort": 2},
    "run": {"engine": "loop", "checkpoint_every": 2, "eval_every": 2},
}


def config(*names):
    return resolve(SMALL | {"run": SMALL["run"] | {"track": list(names)}})


@pytest.fixture
def mlflow(monkeypatch):
    """A stand-in with the functions of the library that are used."""
    calls = []
    fake = types.ModuleType("mlflow")
    fake.start_run = lambda run_id, run_name: (
        calls.append(("start", run_id)) or types.SimpleNamespace(info=types.SimpleNamespace(run_id=run_id or "abc"))
    )
    fake.log_params = lambda settings: calls.append(("params", settings["train.rounds"]))
    fake.log_metrics = lambda values, step: calls.append(("metrics", step, "accuracy" in values, "fgn" in values))
    fake.end_run = lambda: calls.append(("end",))
    monkeypatch.setitem(sys.modules, "mlflow", fake)
    return calls


def test_mlflow_gets_parameters_and_every_round(mlflow, tmp_path):
    experiment.start(config("mlflow"), tmp_path / "run")
    rounds = [("metrics", t, t % 2 == 0, True) for t in (1, 2, 3, 4)]
    assert mlflow == [("start", None), ("params", 4), *rounds, ("end",)]


def test_a_resumed_run_keeps_its_identity_and_is_ended_when_stopped(mlflow, tmp_path):
    def stop(row):
        if row["round"] == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        experiment.start(config("mlflow"), tmp_path / "run", notify=stop)
    assert mlflow[-1] == ("end",)
    experiment.resume(tmp_path / "run")
    again = mlflow.index(("start", "abc"))
    assert [call[1] for call in mlflow[again:] if call[0] == "metrics"] == [3, 4]


def test_tensorboard_gets_every_round(monkeypatch, tmp_path):
    written = []

    class Writer:
        def __init__(self, folder, purge_step):
            written.append((folder, purge_step))

        def add_scalar(self, name, value, step):
            written.append((name, step))

        def close(self):
            written.append("closed")

    module = types.ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = Writer
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    experiment.start(config("tensorboard"), tmp_path / "run")
    assert written[0] == (str(tmp_path / "run" / "tensorboard"), 1)
    assert [step for name, step in written[1:-1] if name == "accuracy"] == [2, 4]
    assert [step for name, step in written[1:-1] if name == "fgn"] == [1, 2, 3, 4]
    assert written[-1] == "closed"


@pytest.mark.parametrize(("name", "module"), [("mlflow", "mlflow"), ("tensorboard", "torch.utils.tensorboard")])
def test_without_the_library_the_sentence_says_what_to_install(monkeypatch, tmp_path, name, module):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UserError, match=r"needs its library: pip install"):
        experiment.start(config(name), tmp_path / "run")


def test_a_tracker_that_does_not_exist():
    with pytest.raises(UserError, match="'tensorboard'"):
        config("tensorbord")
