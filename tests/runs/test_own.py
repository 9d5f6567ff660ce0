"""Own parts as users ask for them: in a configuration, in Python, in task files; or one sentence
says why not.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import kairosfl
from kairosfl.errors import UserError
from kairosfl.runs import experiment
from kairosfl.runs.config import resolve
from kairosfl.runs.prepare import build_task
from kairosfl.tasks import load

HEAD = ["classifier.bias", "classifier.weight"]  # of the library's mlp
SHORT = {"rounds": 3, "cohort": 2, "epochs": 1}


def config(*own: str, **sections: object):
    tables = {
        "data": {"clients": 4},
        "model": {"own": list(own)},
        "train": SHORT,
        "run": {"engine": "loop"},
    }
    return resolve({**tables, **sections})


def folder(tmp_path: Path, *own: str) -> Path:
    experiment.start(config(*own), tmp_path / "run")
    return tmp_path / "run"


def test_a_configuration_names_the_part_and_bytes_count_what_travels(tmp_path: Path) -> None:
    run = folder(tmp_path, "classifier.*")
    about = json.loads((run / "run.json").read_text())
    whole = build_task(config()).layout
    head = sum(entry.size for entry in whole.entries if entry.name in HEAD)
    assert about["own"] == HEAD
    assert about["config"]["model"]["own"] == ["classifier.*"]
    assert about["parameters"] == whole.size - head

    row = json.loads((run / "metrics.jsonl").read_text().splitlines()[0])
    experiment.start(config(), tmp_path / "whole")
    other = json.loads((tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()[0])
    for name in ("bytes_up", "bytes_down"):
        saved = other[name] - row[name]
        few = 16 * SHORT["cohort"]  # which of a client's reports counted last, and alike
        assert 0 <= SHORT["cohort"] * 4 * head - saved <= few


def test_a_run_is_not_resumed_with_another_part(tmp_path: Path) -> None:
    run = folder(tmp_path, "classifier.*")
    file = run / "config.toml"
    file.write_text(
        file.read_text()
        .replace("classifier.*", "classifier.weight")
        .replace("rounds = 3", "rounds = 4")
    )
    with pytest.raises(
        UserError,
        match=r"model\.own = \['classifier\.weight'\] \(it began with \['classifier\.\*'\]",
    ):
        experiment.resume(run)


class Net(nn.Module):
    """A frozen layer, a tied weight, a head and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(64, 8)
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.second.weight = self.first.weight
        self.fixed = nn.Linear(8, 8).requires_grad_(False)
        self.register_buffer("scale", torch.ones(()))
        self.head = nn.Linear(8, 10)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        hidden = self.second(self.first(self.body(inputs.flatten(1)) * self.scale))
        return self.head(self.fixed(hidden))


def simulated(own: object) -> kairosfl.History:
    quick = {"rounds": 2, "cohort": 2, "clients": 4, "progress": False, "engine": "loop"}
    return kairosfl.simulate(Net(), load("digits"), own=own, **quick)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("own", "sentence"),
    [
        (["heads.*"], r"own = 'heads\.\*' is the name of no trained parameter; there are body\.w"),
        (["scale"], r"own = 'scale' names 'scale', a buffer, which is not trained"),
        (["fixed.*"], r"names 'fixed\.weight', which is frozen and therefore the same on every"),
        (["[!f]*", "first.*"], r"own = \['\[!f\]\*', 'first\.\*'\] leaves nothing to share"),
        (["first.weight"], r"'first\.weight', but 'second\.weight' is the same tensor \(tied"),
        (["second.*"], r"'second\.weight', but 'first\.weight' is the same tensor \(tied"),
        ("head.*", r"model\.own = 'head\.\*' must be a list"),
    ],
)
def test_what_cannot_be_own_is_refused(own: object, sentence: str) -> None:
    with pytest.raises(UserError, match=sentence):
        simulated(own)


def test_tied_parameters_may_be_own_together() -> None:
    history = simulated(["first.weight", "second.weight"])
    about = json.loads((history.folder / "run.json").read_text())
    assert about["own"] == ["first.weight"]


FILE = """
from kairosfl.models import build
from kairosfl.tasks import load

def task():
    data = load("digits")
    model = build("mlp", shape=data.shape, classes=10, seed=0)
    return {"model": model, "train": data, **MORE}
"""


@pytest.mark.parametrize(
    ("returned", "asked"),
    [("classifier.*", ""), ("", "classifier.*"), ("classifier.*", "classifier.*")],
)
def test_a_task_file_returns_it_or_the_configuration_says_it(
    tmp_path: Path, returned: str, asked: str
) -> None:
    task = build_task(_with_file(tmp_path, returned, asked))
    assert sorted(task.own_names) == HEAD


def test_a_task_file_and_a_configuration_that_differ_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"contradicts task\(\) in .*own = \['classifier\.weight'\]; leave"
    ):
        build_task(_with_file(tmp_path, "classifier.weight", "classifier.*"))


def _with_file(tmp_path: Path, returned: str, asked: str):
    more = {"own": [returned]} if returned else {}
    file = tmp_path / "mine.py"
    file.write_text(FILE.replace("**MORE", f"**{more}"))
    own = [asked] if asked else []
    return resolve({"task": {"file": str(file)}, "model": {"own": own}})
