"""Metrics reach TensorBoard and MLflow; without their libraries one sentence says what to install."""

from __future__ import annotations

import sys
import types

import pytest

from kairosfl import UserError
from kairosfl.runs import experiment
from kairosfl.runs.config import resolve
from kairosfl.runs.sweep import Member, sweep

SMALL = {
    "data": {"clients": 8},
    "train": {"rounds": 4, "cohort": 2},
    "run": {"engine": "loop", "checkpoint_every": 2, "eval_every": 2},
}


def config(*names):
    return resolve(SMALL | {"run": SMALL["run"] | {"track": list(names)}})


class Client:
    """A stand-in for the library's, with the methods that are used: runs by their id."""

    def __init__(self, calls):
        self.calls = calls

    def create_run(self, experiment, run_name):
        self.calls.append(("start", experiment, run_name))
        return types.SimpleNamespace(info=types.SimpleNamespace(run_id=f"id-{run_name}"))

    def update_run(self, run, status):
        self.calls.append((run, status))

    def log_batch(self, run, metrics=(), params=()):
        if params:
            self.calls.append((run, "params", dict(params)["train.rounds"]))
        for step in {step for _, _, _, step in metrics}:
            names = {name for name, *_ in metrics}
            self.calls.append((run, "metrics", step, "accuracy" in names, "fgn" in names))

    def set_terminated(self, run):
        self.calls.append((run, "end"))


@pytest.fixture
def mlflow(monkeypatch):
    calls = []
    fake = types.ModuleType("mlflow")
    fake.MlflowException = type("MlflowException", (Exception,), {})
    fake.MlflowClient = lambda: Client(calls)
    fake.entities = types.SimpleNamespace(Param=lambda *pair: pair, Metric=lambda *four: four)
    monkeypatch.setitem(sys.modules, "mlflow", fake)
    for name in ("NAME", "ID"):
        monkeypatch.delenv(f"MLFLOW_EXPERIMENT_{name}", raising=False)
    return calls


def test_mlflow_gets_parameters_and_every_round(mlflow, tmp_path):
    experiment.start(config("mlflow"), tmp_path / "run")
    rounds = [("id-run", "metrics", t, t % 2 == 0, True) for t in (1, 2, 3, 4)]
    assert mlflow == [("start", "0", "run"), ("id-run", "params", "4"), *rounds, ("id-run", "end")]


def test_runs_of_a_sweep_are_open_beside_each_other(mlflow, tmp_path):
    together = {"run": SMALL["run"] | {"engine": "batched", "track": ["mlflow"]}}
    sweep(
        [Member(name, {}, resolve(SMALL | together | {"seed": i})) for i, name in enumerate("ab")],
        tmp_path,
    )
    for name in ("id-a", "id-b"):
        assert [call[2] for call in mlflow if call[:2] == (name, "metrics")] == [1, 2, 3, 4]
        assert mlflow.count((name, "end")) == 1


def test_a_resumed_run_keeps_its_identity_and_is_ended_when_stopped(mlflow, tmp_path):
    def stop(row):
        if row["round"] == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        experiment.start(config("mlflow"), tmp_path / "run", notify=stop)
    assert mlflow[-1] == ("id-run", "end")
    experiment.resume(tmp_path / "run")
    again = mlflow.index(("id-run", "RUNNING"))
    assert [call[2] for call in mlflow[again:] if call[1] == "metrics"] == [3, 4]


def test_a_server_that_is_not_there_is_one_sentence(mlflow, tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise sys.modules["mlflow"].MlflowException("No route to it.\nDetails")

    monkeypatch.setattr(Client, "log_batch", refuse)
    with pytest.raises(
        UserError,
        match=r'^run.track = "mlflow": No route to it\. Set MLFLOW_TRACKING_URI .*mlflow\.$',
    ):
        experiment.start(config("mlflow"), tmp_path / "run")


def test_mlflow_itself(tmp_path, monkeypatch):
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "kairos")
    mlflow.set_tracking_uri((tmp_path / "store").as_uri())
    experiment.start(config("mlflow"), tmp_path / "run")
    client = mlflow.MlflowClient()
    (run,) = client.search_runs([client.get_experiment_by_name("kairos").experiment_id])
    assert (run.info.run_name, run.info.status, run.data.params["train.rounds"]) == (
        "run",
        "FINISHED",
        "4",
    )
    assert [each.step for each in client.get_metric_history(run.info.run_id, "fgn")] == [1, 2, 3, 4]


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


@pytest.mark.parametrize(
    ("name", "module"), [("mlflow", "mlflow"), ("tensorboard", "torch.utils.tensorboard")]
)
def test_without_the_library_the_sentence_says_what_to_install(monkeypatch, tmp_path, name, module):
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UserError, match=rf"needs its library: pip install {name}$"):
        experiment.start(config(name), tmp_path / "run")
    assert not (tmp_path / "run").exists()  # installed, the same command runs


def test_a_tracker_that_does_not_exist():
    with pytest.raises(UserError, match="'tensorboard'"):
        config("tensorbord")
