"""Odd names, and task files that change what is not theirs: it works, or is one sentence."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

from kairosfl.cli import app
from kairosfl.errors import UserError
from kairosfl.runs import experiment
from kairosfl.runs.config import resolve
from kairosfl.runs.prepare import build_task
from kairosfl.runs.sensible import unused
from kairosfl.tune.budget import Budget

SMALL = ["data.clients=5", "train.cohort=2", "train.rounds=2", "run.engine=loop", "run.device=cpu"]
CHANGES = [word for change in SMALL for word in ("--set", change)]
HEAD = """import sys
import torch
from torch import nn
x = torch.randn(60, 3)
y = (x[:, 0] > 0).long()
"""
GOOD = "def task():\n    return nn.Linear(3, 2), (x, y), (x, y)\n"
SHORT = """class Short(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, x):
        return self.linear(x)[:5]

def task():
    return Short(), (x, y), (x, y)
"""


def call(*words: str) -> Result:
    return CliRunner().invoke(app, list(words))


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such names")
def test_a_folder_whose_name_is_not_utf8_holds_a_run_like_any_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    name = os.fsdecode(b"caf\xe9")
    assert call("run", "-q", *CHANGES, "--set", "algorithm=scaffold", "--out", name).exit_code == 0
    config = Path(name, "config.toml")
    config.write_text(config.read_text().replace("rounds = 2", "rounds = 3"))
    for words in (
        ["resume", "-q", name],
        ["report", name, "-o", "a.html"],
        ["export", name, "--out", "a.safetensors"],
    ):
        done = call(*words)
        assert done.exit_code == 0, done.output
    assert "caf" in Path("a.html").read_text(encoding="utf-8")
    assert (
        call("run", "-q", *CHANGES, "--from", name, "--out", "next").exit_code == 2
    )  # config.toml is UTF-8


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            "class Own(BaseException): pass\ndef task():\n    raise Own('mine')",
            r"line 8: Own: mine, while calling task",
        ),
        ("def task():\n    raise GeneratorExit", r"line 7: GeneratorExit, while calling task"),
        (
            "def task():\n    return torch.empty(10**15)",
            r"line 7: RuntimeError: .*can't allocate memory",
        ),
        ("def task():\n    raise MemoryError", r"The memory of this machine is too small:"),
        (SHORT, r"ValueError: Expected input batch_size \(5\) to match .*, while training"),
    ],
)
def test_what_a_task_file_raises_is_one_sentence(text: str, sentence: str, tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(HEAD + text)
    with pytest.raises(UserError, match=sentence):
        experiment.start(resolve({"task": {"file": str(file)}}, SMALL), tmp_path / "run")


def test_a_task_file_that_switches_gradients_off_trains(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(f"{HEAD}torch.set_grad_enabled(False)\n{GOOD}")
    summary = experiment.start(resolve({"task": {"file": str(file)}}, SMALL), tmp_path / "run")
    assert summary["rounds"] == 2
    assert torch.is_grad_enabled()


def test_a_task_file_that_closes_the_output_is_told_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "mine.py"
    file.write_text(HEAD + GOOD.replace("    return", "    sys.stdout.close()\n    return"))
    with (tmp_path / "output").open("w") as output:
        monkeypatch.setattr(sys, "stdout", output)
        with pytest.raises(
            UserError, match=r"mine\.py closes sys\.stdout, on which the results are printed"
        ):
            build_task(resolve({"task": {"file": str(file)}}))


def test_a_model_larger_than_the_memory_is_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"too small \(.* GB were asked for at once\): choose a smaller model"
    ):
        experiment.start(resolve({}, [*SMALL, "model.hidden=[10000000000000]"]), tmp_path / "run")


def test_endless_rounds_and_searches_are_said_or_refused_before_they_begin() -> None:
    (said,) = unused([resolve({}, ["train.epochs=1000000000"])])
    assert said.startswith("A round has 10,000,000,000 passes over a client's data")
    assert unused([resolve({}, ["train.epochs=1000"])]) == []
    with pytest.raises(
        UserError, match="--trials 99999999999999999999 is too many to end; give at most 100,000"
    ):
        Budget.of(trials=99999999999999999999)
