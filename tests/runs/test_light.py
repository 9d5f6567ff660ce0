"""Mistakes that can be seen without torch are answered without importing it, which takes seconds."""

from __future__ import annotations

import inspect
import itertools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from kairosfl import names
from kairosfl.data import DATASETS
from kairosfl.detectors import DETECTORS
from kairosfl.models import MODELS, options
from kairosfl.rules import RULES
from kairosfl.runs.config import SECTIONS
from kairosfl.tasks.partitions import PARTITIONS

# Calls the command line with every line of words that it is given, and prints status, messages, and
# what was imported.
RUNNER = """
import contextlib, io, json, sys
from typer.main import get_command
from kairosfl.cli import app
command = get_command(app)
for words in json.loads(sys.argv[1]):
    status, error, printed = None, io.StringIO(), io.StringIO()
    with contextlib.redirect_stderr(error), contextlib.redirect_stdout(printed):
        try:
            command.main(args=words, prog_name="kairosfl")
        except SystemExit as stopped:
            status = stopped.code
    heavy = sorted({"torch", "sklearn", "matplotlib", "ray", "flwr", "optuna"} & set(sys.modules))
    print(json.dumps([status, error.getvalue(), printed.getvalue(), heavy]))
    if heavy:
        break
"""


def answers(calls: list[list[str]], folder: Path) -> list[tuple[int, str, str, list[str]]]:
    """Exit status, standard error, standard output and heavy modules after each of these calls, in
    one interpreter.
    """
    command = [sys.executable, "-c", RUNNER, json.dumps(calls)]
    printed = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=True).stdout
    return [tuple(json.loads(line)) for line in printed.splitlines()]


def loaded_by(code: str) -> set[str]:
    """The modules that a new interpreter has after this code."""
    command = [sys.executable, "-c", f"{code}; import sys; print(*sys.modules)"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return set(printed.split())


HEAVY = {"numpy", "rich", "safetensors", "scipy", "sklearn", "torch"}


def test_importing_kairosfl_loads_nothing_but_its_names() -> None:
    modules = loaded_by("import kairosfl")
    assert not HEAVY & modules
    own = {name for name in modules if name.startswith("kairosfl")}
    assert own == {"kairosfl", "kairosfl.lazy", "kairosfl.moved", "kairosfl.version"}


def test_building_the_commands_loads_none_of_what_they_use() -> None:
    modules = loaded_by("import kairosfl.cli")
    assert not HEAVY & modules
    for room in ("data", "engines", "models", "report", "rules", "runs", "tasks"):
        assert not any(name.startswith(f"kairosfl.{room}") for name in modules), room


def misspelled(word: str) -> str:
    return word[:-2] + word[-1] + word[-2] + "x"


def generated() -> dict[str, str]:
    """Wrong keys and names as --set takes them, with words of the answer."""
    cases = {}
    for section, fields in SECTIONS.items():
        cases[f"{misspelled(section)}.x=1"] = f"Unknown key {misspelled(section)!r}"
        for key in inspect.signature(fields).parameters:
            if key != "options" and section != "task":
                cases[f"{section}.{misspelled(key)}=1"] = f"Unknown key {section}.{misspelled(key)}"
    for name in names.RULES:
        cases[f"algorithm={misspelled(name)}"] = f"There is no rule {misspelled(name)!r}"
        cases[f"algorithm=fedprox(mu=1) + {misspelled(name)}(x=1)"] = (
            f"There is no rule {misspelled(name)!r}"
        )
        cases[f'algorithm=["{name}", {{rule="{misspelled(name)}"}}]'] = (
            f"There is no rule {misspelled(name)!r}"
        )
    for name in names.DETECTORS:
        cases[f"run.detector={misspelled(name)}"] = f"There is no detector {misspelled(name)!r}"
    for key, known in (
        ("data.name", names.DATA),
        ("data.partition", names.PARTITIONS),
        ("model.name", names.MODELS),
    ):
        for name in known:
            cases[f"{key}={misspelled(name)}"] = f"{key} = {misspelled(name)!r} does not exist"
    return cases | {
        "data.pth=1": "Unknown key data.pth; did you mean",
        "algorithm=fedprox(": "cannot be read",
        "algorithm=fedprox + ": "has nothing next to it",
        "run.engine=fast": "run.engine = 'fast' does not exist",
        "train.rounds=0": "train.rounds = 0 must be 1 or more",
        "train.cohort=50": "more than the 40 clients",
        "train.lr='x'": "train.lr = 'x' must be a number",
        "rounds=3": "Unknown key 'rounds'; did you mean train.rounds?",
    }


def test_wrong_keys_and_names(tmp_path: Path) -> None:
    cases = generated()
    results = answers([["run", "--set", change] for change in cases], tmp_path)
    assert len(results) == len(cases)
    for change, (status, error, _, heavy) in zip(cases, results, strict=True):
        assert (status, heavy) == (2, []), change
        assert cases[change] in error
        assert error.startswith("kairosfl: ")


OTHERS = [
    (["run", "none.toml"], "none.toml does not exist"),
    (["run", "typo.toml"], "Unknown key 'trian'; did you mean 'train'?"),
    (["run", "broken.toml"], "broken.toml is not valid TOML"),
    (
        ["run", "picture.png"],
        "picture.png is not a text file; give the path of a TOML configuration.",
    ),
    (["run", "kairso"], "did you mean the preset"),
    (["run", "--preset", "kairso"], "There is no preset 'kairso'"),
    (["resume", "none"], "none does not exist; give a run folder."),
    (["resume", "."], ". is not a run folder: it has no config.toml."),
    (["resume", "edited"], "Unknown key 'trian'; did you mean 'train'?"),
    (["export", "none"], "none does not exist; give a run folder."),
    (["compare", "none"], "none does not exist; give a run folder or a folder of run folders."),
    (["compare", "edited"], "edited contains no run"),
    (["report", "none"], "none does not exist"),
    (["figure", "none"], "none does not exist"),
    (["watch", "none"], "none does not exist"),
    (["sweep", "typo.toml", "--seeds", "2"], "Unknown key 'trian'"),
    (["sweep", "second.toml"], "There is no rule 'fedprx'; did you mean 'fedprox'?"),
    (["sweep", "keys.toml"], "Unknown key train.rond; did you mean 'rounds'?"),
    (["tune", "typo.toml"], "Unknown key 'trian'"),
    (["periods", "typo.toml"], "Unknown key 'trian'"),
    (["bench", "typo.toml"], "Unknown key 'trian'"),
    (["deploy", "rehearse", "typo.toml"], "Unknown key 'trian'"),
    (["data", "show", "digist"], "data.name = 'digist' does not exist; did you mean 'digits'?"),
    (["reproduce", "fedcl/tabel1"], "There is no item 'fedcl/tabel1'"),
    (["list", "rulse"], "There is no list of 'rulse'; did you mean 'rules'?"),
    (["run", "--otu", "x"], "There is no option --otu; did you mean '--out'?"),
    (["rnu"], "Did you mean 'run'?"),
    (["resume"], "Missing argument"),
]


def test_what_is_not_there_and_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "edited").mkdir()
    for name in ("typo.toml", "edited/config.toml"):
        (tmp_path / name).write_text("[trian]\nrounds = 3\n")
    (tmp_path / "broken.toml").write_text("a = [")
    (tmp_path / "picture.png").write_bytes(b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR")
    (tmp_path / "second.toml").write_text('[sweep]\nalgorithm = ["fedavg", "fedprx"]\n')
    (tmp_path / "keys.toml").write_text("[sweep]\ntrain.rond = [1, 2]\n")
    results = answers([words for words, _ in OTHERS], tmp_path)
    assert len(results) == len(OTHERS)
    for (words, sentence), (status, error, _, heavy) in zip(OTHERS, results, strict=True):
        assert (status, heavy) == (2, []), words
        assert sentence in error


def test_listing_how_many_there_are(tmp_path: Path) -> None:
    ((status, _, printed, heavy),) = answers([["list", "--json"]], tmp_path)
    assert (status, heavy) == (0, [])
    assert json.loads(printed)["models"] == len(MODELS)
    assert json.loads(printed)["rules"] == len(RULES) + 1


def test_names_and_options_are_those_there_are() -> None:
    assert list(RULES.own) == names.RULES
    assert list(DETECTORS) == names.DETECTORS
    assert list(PARTITIONS) == names.PARTITIONS
    loaders = {
        name: list(inspect.signature(loader).parameters) for name, loader in DATASETS.own.items()
    }
    assert {name: words.split() for name, words in names.DATA.items()} == loaders
    assert {name: words.split() for name, words in names.MODELS.items()} == {
        name: [*options(name)] for name in MODELS.own
    }


# Presses Ctrl-C when a module is imported.
INTERRUPTED = """
import signal, sys

class Press:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            sys.meta_path.remove(self)
            signal.raise_signal(signal.SIGINT)

sys.meta_path.insert(0, Press())
from kairosfl.__main__ import main
sys.argv = ["kairosfl", *{words!r}]
{before}
main()
"""
BUILDING = """
import signal, typer.main
typer.main.get_command = lambda *_: exec("import signal; signal.raise_signal(signal.SIGINT)")
"""
MOMENTS = [
    *itertools.product(["typer", "kairosfl.cli", "kairosfl.cli.view"], [["list"]], [""]),
    ("rich", ["run", "digits.toml"], ""),  # for the progress, with every Typer
    *itertools.product(["kairosfl.runs.config", "torch"], [["run"]], [""]),
    ("kairosfl.report", ["compare", "run"], ""),
    ("", ["list"], BUILDING),
]


@pytest.mark.parametrize(("module", "words", "before"), MOMENTS)
def test_ctrl_c_while_python_imports(
    tmp_path: Path, module: str, words: list[str], before: str
) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "metrics.jsonl").touch()
    (tmp_path / "digits.toml").write_text('[data]\nname = "digits"\nclients = 10\n')
    code = INTERRUPTED.format(module=module, words=words, before=before)
    (tmp_path / "pressed.py").write_text(code)
    command = [sys.executable, "-m", "pressed"]
    ended = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, env=os.environ, check=False
    )
    assert ended.returncode == 128 + signal.SIGINT
    assert len(ended.stderr.split("\n")) <= 3, ended.stderr
    assert ended.stderr.startswith("\nStopped.")
