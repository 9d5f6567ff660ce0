"""Rules, data sets and models of other distributions, found by their entry points."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

import kairosfl
from kairosfl import data, models, presets
from kairosfl.cli import app, complete, others
from kairosfl.errors import UserError
from kairosfl.rules import RULES, parse
from kairosfl.runs.config import resolve

CODE = '''
from dataclasses import dataclass
from pathlib import Path
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

def presets():
    return Path(__file__).with_name("presets")

def greet(name: str):
    """Say hello."""
    print(f"hello {name}")
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

[kairosfl.presets]
fake = kairosfl_fake:presets

[kairosfl.commands]
greet = kairosfl_fake:greet
list = kairosfl_fake:greet
crash = kairosfl_crash:command
"""
MISSING = (
    "'gone' cannot be loaded from kairosfl_not_there:Rule, an entry point of fake-plugin 1.2 "
    "(ModuleNotFoundError: "
)

PRESET = """# Few dots.
[data]
name = "dots"
clients = 4
[train]
rounds = 1
cohort = 2
"""


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
    (site / "presets").mkdir()
    (site / "presets" / "small-dots.toml").write_text(PRESET)
    (site / "presets" / "kairos.toml").write_text("# Ours comes first.\n")
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


def test_a_preset_of_a_package_runs_and_ours_of_the_same_name_comes_first():
    assert dict(presets.descriptions())["small-dots"] == "Few dots."
    assert "small-dots" in complete.preset("small")
    assert presets.path("kairos").parent == presets.folder()
    said = call("run", "small-dots", "--quiet", "--set", "model.name=logistic")
    assert said.exit_code == 0, said.output


def test_a_command_of_a_package_is_listed_and_called():
    assert re.search(r"^  greet +Say hello\.$", call("--help").stdout, re.MULTILINE)
    assert call("greet", "Ada").stdout == "hello Ada\n"
    assert "NAME" in call("greet", "-h").stdout
    assert call("list", "presets").stdout.startswith("alt-")  # our own command


def test_a_command_that_cannot_be_loaded_says_so_when_it_is_called():
    assert call("--help").exit_code == 0
    said = call("crash", "--option", "word")
    assert said.exit_code == 2
    assert said.stderr.startswith("kairosfl: 'crash' cannot be loaded from kairosfl_crash:command")
    assert "ZeroDivisionError" in said.stderr


ELSEWHERE = (
    "with kairosfl-reproductions, which is not installed; "
    "in a clone of Kairos, run: pip install ./reproductions"
)


def test_without_the_package_of_papers_one_sentence_says_where_they_are(monkeypatch, tmp_path):
    monkeypatch.setattr(others, "COMMANDS", {})
    monkeypatch.setattr(others, "CURVES", {})
    monkeypatch.setattr(presets, "FOLDERS", {"kairosfl": presets.folder})
    assert all(name.startswith("kairos") for name in presets.names())

    assert "reproduce" not in call("--help").stdout
    said = call("reproduce", "fedcl/table2", "--seeds", "1")
    sentence = f"kairosfl: kairosfl reproduce comes {ELSEWHERE}\n"
    assert (said.exit_code, said.stderr) == (2, sentence)

    said = call("run", "fedcl-cifar10-alexnet")
    sentence = f"fedcl-cifar10-alexnet does not exist; the presets of papers come {ELSEWHERE}"
    assert (said.exit_code, said.stderr) == (2, f"kairosfl: {sentence}\n")
    assert ELSEWHERE not in call("run", "nothing.toml").stderr
    with pytest.raises(UserError, match=f"'niid'; known: .*; the presets of papers .*{ELSEWHERE}"):
        presets.path("niid")

    said = call("figure", "results.json", "-o", str(tmp_path / "figure.svg"))
    sentence = f"kairosfl: results.json: what reads files of results comes {ELSEWHERE}\n"
    assert (said.exit_code, said.stderr) == (2, sentence)


@pytest.mark.parametrize("there", [True, False])
def test_the_old_name_of_the_papers_leads_to_the_package_or_says_where_it_is(there):
    hidden = "" if there else "sys.modules['kairosfl_reproductions'] = None; "
    code = f"import sys; {hidden}import kairosfl.papers.item as old; print(old.__name__)"
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    if there:
        assert said.stdout == "kairosfl_reproductions.item\n"
    else:
        *_, sentence = said.stderr.splitlines()
        assert sentence == (
            "ModuleNotFoundError: kairosfl.papers is now kairosfl_reproductions, "
            f"which comes {ELSEWHERE}"
        )
