"""Rules, data sets and models of other distributions, found by their entry points."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

import kairosfl
from kairosfl import data, models
from kairosfl.cli import app, complete
from kairosfl.errors import UserError
from kairosfl.rules import RULES, parse
from kairosfl.runs.config import resolve

CODE = '''
from dataclasses import dataclass
import torch
from torch import nn
from kairosfl import DataSet, Rule, Samples

@dataclass(frozen=True, kw_only=True)
class Mild(Rule):
    """Half of every step."""
    factor: float = 0.5
    def combine(self, direction, memory, now):
        return self.factor * direction

class Bare(Rule):
    pass

def dots(*, samples: int = 60, shift=0.0):
    """Points on a line; the class is the side."""
    x = torch.linspace(-1, 1, samples)[:, None]
    own = Samples(x + shift, (x[:, 0] > 0).long())
    return DataSet("dots", own, own, 2)

def line(shape, classes, *, bias: bool = True):
    """One layer."""
    return nn.Linear(shape[0], classes, bias=bias)

number = 3
'''
POINTS = """
[kairosfl.rules]
mild = kairosfl_fake:Mild
fedprox = kairosfl_fake:Mild
bare = kairosfl_fake:Bare
gone = kairosfl_not_there:Rule

[kairosfl.data]
dots = kairosfl_fake:dots
number = kairosfl_fake:number

[kairosfl.models]
line = kairosfl_fake:line
crash = kairosfl_crash:model
"""
MISSING = (
    "'gone' cannot be loaded from kairosfl_not_there:Rule, an entry point of fake-plugin 1.2 "
    "(ModuleNotFoundError: "
)


@pytest.fixture(autouse=True)
def installed(tmp_path, monkeypatch):
    """A distribution as pip leaves it."""
    site = tmp_path / "site"
    info = site / "fake_plugin-1.2.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: fake-plugin\nVersion: 1.2\n")
    (info / "entry_points.txt").write_text(POINTS)
    (site / "kairosfl_fake.py").write_text(CODE)
    (site / "kairosfl_crash.py").write_text("1 / 0\n")
    monkeypatch.syspath_prepend(site)
    monkeypatch.chdir(tmp_path)


def call(*words: object):
    return CliRunner().invoke(app, [str(word) for word in words])


def test_a_run_uses_all_three():
    changes = {
        "algorithm": "mild(factor=0.25) + fedavgm",
        "data.name": "dots",
        "data.samples": 90,
        "model.name": "line",
    }
    small = {
        "data.clients": 4,
        "train.cohort": 2,
        "train.rounds": 2,
        "run.engine": "loop",
        "model.bias": "false",
    }
    words = [
        word for key, value in (changes | small).items() for word in ("--set", f"{key}={value}")
    ]
    said = call("run", *words, "--out", "run", "--json")
    assert said.exit_code == 0, said.output
    config = Path("run/config.toml").read_text()
    assert 'algorithm = "kairosfl_fake.Mild(factor=0.25) + fedavgm"' in config
    assert call("resume", "run", "--json").exit_code == 0
    assert kairosfl.load("run").bias is None
    assert json.loads(said.stdout)["rounds"] == 2


def test_names_of_ours_come_first_and_the_mapping_is_whole():
    assert parse("fedprox").rules[0].__class__ is kairosfl.rules.FedProx
    assert {"mild", "gone", "fedprox"} <= set(RULES)
    assert len(RULES) == len(set(RULES)) == len(list(RULES))
    assert "nonsense" not in RULES
    with pytest.raises(UserError, match=r"There is no rule 'mildd'; did you mean 'mild'\?"):
        parse("mildd")


@pytest.mark.parametrize(
    ("use", "sentence"),
    [
        (lambda: parse("gone"), MISSING),
        (
            lambda: parse("bare"),
            "bare is not a dataclass; write @dataclass(frozen=True, kw_only=True) above its class.",
        ),
        (lambda: parse("mild(fcator=1)"), "mild has no option 'fcator'; did you mean 'factor'?"),
        (
            lambda: data.load("number"),
            "'number', an entry point of fake-plugin 1.2, names kairosfl_fake:number, which ",
        ),
        (
            lambda: resolve({"model": {"name": "crash"}}),
            "'crash' cannot be loaded from kairosfl_crash:model, an entry ",
        ),
        (
            lambda: models.build("line", shape=(1,), classes=2, seed=0, bias=3),
            "model.bias of line must be true or fal",
        ),
    ],
)
def test_a_broken_one_is_one_sentence(use, sentence):
    with pytest.raises(UserError) as error:
        use()
    assert str(error.value).startswith(sentence)
    assert "\n" not in str(error.value)


def test_an_option_without_annotation():
    assert float(data.load("dots", shift=5.0).train.inputs.min()) == 4.0


def test_they_are_listed_with_their_distribution_and_a_broken_one_does_not_hide_the_others():
    rules = json.loads(call("list", "rules", "--json").stdout)
    assert rules["mild"] == "Half of every step. (from fake-plugin 1.2)"
    assert rules["gone"].startswith(f"broken: {MISSING}")
    assert rules["fedprox"].endswith("[mu=0.01]")
    assert json.loads(call("list", "data", "--json").stdout)["dots"].endswith(
        "the side. (from fake-plugin 1.2)"
    )
    assert (
        json.loads(call("list", "models", "--json").stdout)["line"]
        == "One layer. (from fake-plugin 1.2)"
    )
    assert call("list").exit_code == 0


def test_they_complete_by_tab():
    assert complete.change("algorithm=mil") == ["algorithm=mild"]
    assert complete.dataset("dot") == ["dots"]


def test_what_is_installed_later_is_found(tmp_path):
    assert "late" not in RULES
    info = tmp_path / "site" / "late_plugin-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: late-plugin\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[kairosfl.rules]\nlate = kairosfl_fake:Mild\n")
    assert "late" in RULES
