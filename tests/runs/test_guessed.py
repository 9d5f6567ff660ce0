"""The command line as people guess it: presets by name, `list` alone, completion by tab."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from kairosfl import presets
from kairosfl.cli import app, complete
from kairosfl.core.recipe import OPTIMIZERS, SCHEDULES
from kairosfl.data import DATASETS
from kairosfl.detectors import DETECTORS
from kairosfl.models import MODELS
from kairosfl.rules import RULES
from kairosfl.runs.config import ENGINES, PRECISIONS, SECTIONS
from kairosfl.tasks.partitions import PARTITIONS


def call(*words: object):
    return CliRunner().invoke(app, [str(word) for word in words])


@pytest.fixture(autouse=True)
def elsewhere(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tiny.toml").write_text("[data]\nclients = 6\n[train]\nrounds = 1\ncohort = 2\n")
    monkeypatch.setattr(presets, "FOLDERS", {"papers": lambda: tmp_path / "presets"})
    (tmp_path / "presets").mkdir()
    (tmp_path / "presets" / "quick-digits.toml").write_text(
        "# Digits.\n" + (tmp_path / "tiny.toml").read_text()
    )


def test_a_preset_by_its_name():
    said = call("run", "quick-digits")
    assert said.exit_code == 0, said.output
    assert "running the preset 'quick-digits'" in said.stderr
    assert Path("runs/quick-digits/summary.json").is_file()
    assert "preset" not in call("run", "quick-digits", "--quiet").stderr
    assert call("run", "--preset", "quick-digits", "--quiet").exit_code == 0


def test_a_file_comes_before_a_preset_and_a_folder_does_not():
    Path("quick-digits").mkdir()
    assert "running the preset 'quick-digits'" in call("run", "quick-digits").stderr
    Path("quick-digits").rmdir()
    Path("quick-digits").write_text(Path("tiny.toml").read_text())
    said = call("run", "quick-digits")
    assert said.exit_code == 0
    assert "preset" not in said.stderr


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["quik-digits"], "quik-digits does not exist; did you mean the preset 'quick-digits'?"),
        (
            ["quick-digits.toml"],
            "quick-digits.toml does not exist; did you mean the preset 'quick-digits'?",
        ),
        (["nothing.toml"], "nothing.toml does not exist; give the path of a TOML configuration."),
        (["presets"], "presets is a folder; give a TOML file, such as presets/config.toml."),
        (["--preset", "quik"], "There is no preset 'quik'; did you mean 'quick-digits'?"),
        (
            ["tiny.toml", "--preset", "quick-digits"],
            "Give a file or --preset, not both; override single keys with --set.",
        ),
    ],
)
def test_a_file_that_is_not_there(words, sentence):
    said = call("run", *words)
    assert (said.exit_code, said.stderr) == (2, f"kairosfl: {sentence}\n")


def test_list_alone():
    said = call("list")
    assert said.exit_code == 0
    assert [line.split() for line in said.stdout.splitlines()][:2] == [
        ["rules", str(1 + len(RULES)), "kairosfl", "list", "rules"],
        ["data", str(len(DATASETS)), "kairosfl", "list", "data"],
    ]
    counts = json.loads(call("list", "--json").stdout)
    assert counts["presets"] == 1
    assert list(counts) == ["rules", "data", "models", "partitions", "detectors", "presets"]


def test_what_completes_is_what_there_is():
    keys = {name: [each.name for each in dataclasses.fields(cls)] for name, cls in SECTIONS.items()}
    assert {name: words.split() for name, words in complete.KEYS.items()} == {
        name: [key for key in of if key != "options"] for name, of in keys.items()
    }
    assert {key: set(words.split()) for key, words in complete.VALUES.items()} == {
        "algorithm": {"fedavg", *RULES},
        "data.name": set(DATASETS),
        "data.partition": set(PARTITIONS),
        "model.name": set(MODELS),
        "run.detector": set(DETECTORS),
        "run.engine": set(ENGINES),
        "run.precision": set(PRECISIONS),
        "train.optimizer": set(OPTIMIZERS),
        "train.schedule": set(SCHEDULES),
    }


def completed(*words: str) -> list[str]:
    """What bash is given for the last word, by a fresh interpreter that must not load torch."""
    code = (
        "import sys, atexit\n"
        "atexit.register(lambda: print(*sorted({'torch', 'numpy'} & set(sys.modules))))\n"
        "from kairosfl.cli import app\napp(prog_name='kairosfl')"
    )
    asked = {"COMP_WORDS": " ".join(("kairosfl", *words)), "COMP_CWORD": str(len(words))}
    env = os.environ | {"_KAIROSFL_COMPLETE": "complete_bash"} | asked
    said = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=env, check=False
    )
    *lines, heavy = said.stdout.splitlines()
    assert heavy == "", said.stderr
    return lines


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("run", "tin"), ["tiny.toml"]),
        (
            ("run", "--preset", "kair"),
            ["kairos", "kairos-cifar100", "kairos-fashion_mnist", "kairos-thrifty"],
        ),
        (("run", "kair"), ["kairos", "kairos-cifar100", "kairos-fashion_mnist", "kairos-thrifty"]),
        (("run", "--set", "train.lr"), ["train.lr=", "train.lr_min="]),
        (("run", "--set", "algorithm", "=", "fedad"), ["fedadagrad", "fedadam"]),
        (("sweep", "tiny.toml", "--set", "algorithm", "=", "fedad"), ["fedadagrad", "fedadam"]),
        (("run", "--set", "run.engine", "="), ["auto", "loop", "batched", "ray", "debug"]),
        (("data", "show", "cifar"), ["cifar10", "cifar100"]),
        (("list", "pre"), ["presets"]),
    ],
)
def test_completion_in_bash(words, expected):
    assert completed(*words) == expected


def test_completion_of_a_sum_of_rules():
    assert complete.change("algorithm=fedavgm + scaf") == ["algorithm=fedavgm + scaffold"]
    assert complete.change("algorithm=moon+pa") == ["algorithm=moon+pa3fed"]
    assert complete.change("data.name=shake") == ["data.name=shakespeare"]
    assert complete.change("train.rounds=1") == []


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("run", "--rounds", "3"), "There is no option --rounds; use --set train.rounds=VALUE."),
        (
            ("sweep", "--batch-size=3", "tiny.toml"),
            "There is no option --batch-size; use --set train.batch_size=VALUE.",
        ),
        (
            ("run", "--algorithm", "fedavg"),
            "There is no option --algorithm; use --set algorithm=VALUE.",
        ),
        (("compare", "--lr", "3"), "There is no option --lr; did you mean '--label'?"),
    ],
)
def test_a_key_that_is_given_as_an_option(words, sentence):
    said = call(*words)
    assert said.exit_code == 2
    assert sentence in said.stderr
