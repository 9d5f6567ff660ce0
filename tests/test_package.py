"""The package as it is installed and imported: what is reachable, what stays unloaded, and one
version everywhere.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import runpy
import subprocess
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import typer.main
from typer.testing import CliRunner

import kairosfl
from kairosfl import models
from kairosfl.cli import app
from kairosfl.data import own
from kairosfl.detectors import DETECTORS
from kairosfl.rules import RULES
from kairosfl.tasks import heterogeneity, partitions

ROOT = Path(__file__).parents[1]
LAZY = ["kairosfl", "kairosfl.engines", "kairosfl.tasks"]
HEAVY = {"torch", "numpy", "matplotlib", "ray", "flwr", "sklearn"}


@pytest.mark.parametrize("package", LAZY)
def test_every_public_name_resolves(package: str) -> None:
    module = importlib.import_module(package)
    assert module.__all__ == sorted(set(module.__all__))
    for name in module.__all__:
        assert getattr(module, name) is not None
        assert name in dir(module)
    with pytest.raises(AttributeError, match=f"module '{package}' has no attribute 'nonsense'"):
        _ = module.nonsense


@pytest.mark.parametrize("package", LAZY)
def test_what_type_checkers_see_is_what_is_loaded(package: str) -> None:
    """The names are written three times: for type checkers, for Python, and for `from package
    import *`.
    """
    source = Path(importlib.import_module(package).__file__ or "").read_text(encoding="utf-8")
    (block,) = (node for node in ast.parse(source).body if isinstance(node, ast.If))
    seen = {
        alias.name: f"{node.module}.{alias.name}" if node.module == package else node.module
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    (homes,) = (
        ast.literal_eval(node) for node in ast.walk(block.orelse[0]) if isinstance(node, ast.Dict)
    )
    assert seen == homes
    assert set(importlib.import_module(package).__all__) - {"__version__"} <= set(homes)


def test_subpackages_are_reachable_from_the_package() -> None:
    names = [
        "rules.FedProx",
        "engines.Loop",
        "detectors.FGN",
        "tasks.Task",
        "models.build",
        "testing.check_rule",
    ]
    said = python(
        "import kairosfl\n" + "".join(f"print(kairosfl.{name}.__name__)\n" for name in names)
    )
    assert said.split() == [name.rpartition(".")[2] for name in names]


OLD_NAMES = """
import pickle, sys, warnings
import kairosfl
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    from kairosfl.tasks.data.own import from_torch
    import kairosfl.tasks.data.cifar
    import kairosfl.tasks.models.small, kairosfl.tasks.models
    kairosfl.tasks.data.load
print(*(warning.category.__name__ for warning in caught))
print(*(str(warning.message) for warning in caught), sep="\\n")
from kairosfl.data import own
print(own.from_torch is from_torch, kairosfl.tasks.models is kairosfl.models)
print(sys.modules["kairosfl.tasks.models.small"] is kairosfl.models.small)
print(pickle.loads(b"ckairosfl.tasks.models\\nDescription\\n.") is kairosfl.models.Description)
print(kairosfl.models.small.__name__, kairosfl.models.small.__spec__.name)
"""


def test_modules_that_moved_are_found_by_their_old_names_with_one_warning_each() -> None:
    assert python(OLD_NAMES).splitlines() == [
        "DeprecationWarning DeprecationWarning",
        "kairosfl.tasks.data is now kairosfl.data; the old name works until the next minor version.",
        "kairosfl.tasks.models is now kairosfl.models; "
        "the old name works until the next minor version.",
        "True True",
        "True",
        "True",
        "kairosfl.models.small kairosfl.models.small",
    ]


def test_an_old_name_needs_no_import_of_its_own() -> None:
    said = python("import kairosfl; print(kairosfl.tasks.data.load is kairosfl.data.load)")
    assert said == "True\n"
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'kairosfl\.data\.nonsense'"):
        importlib.import_module("kairosfl.tasks.data.nonsense")


@pytest.mark.parametrize("words", [[], ["--help"], ["run", "--help"], ["--version"]])
def test_importing_and_help_load_nothing_heavy(words: list[str]) -> None:
    call = f"from typer.testing import CliRunner; from kairosfl.cli import app; CliRunner().invoke(app, {words})"
    said = python(f"import sys, kairosfl\n{call if words else ''}\nprint(*sys.modules)")
    assert "kairosfl" in said.split()
    assert not HEAVY & set(said.split())


def test_the_reference_names_everything_public() -> None:
    page = (ROOT / "docs" / "reference" / "index.md").read_text(encoding="utf-8")
    assert set(kairosfl.__all__) <= set(re.findall(r"`(\w+)`", page))


DOCUMENTED = [
    kairosfl.Recipe,
    kairosfl.Run.start,
    kairosfl.Setup,
    kairosfl.check_rule,
    kairosfl.detectors.FGN,
    kairosfl.detectors.FedFIM,
    kairosfl.drive,
    kairosfl.parse,
    kairosfl.result,
    kairosfl.rounds,
    kairosfl.Batched,
    kairosfl.DataSet,
    kairosfl.Loop,
    kairosfl.Population,
    kairosfl.Population.from_lists,
    kairosfl.Population.from_owner,
    kairosfl.Samples,
    kairosfl.Task,
    heterogeneity.describe,
    models.build,
    models.describe,
    models.options,
    own.from_hugging_face,
    own.from_partitioner,
    own.from_torch,
    partitions.partition,
    *partitions.PARTITIONS.values(),
    *RULES.own.values(),
    *DETECTORS.values(),
]


@pytest.mark.parametrize("of", DOCUMENTED, ids=lambda of: of.__qualname__)
def test_every_argument_is_documented_in_order(of: Callable[..., object]) -> None:
    _, _, args = (inspect.getdoc(of) or "").partition("\nArgs:\n")
    said = re.findall(r"^    \**(\w+): \S", args.partition("\n\n")[0], re.MULTILINE)
    assert said == list(inspect.signature(of).parameters)


def test_one_version() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert "version" not in project
    assert "version" in project["dynamic"]
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert re.findall(r"^version: (\S+)$", citation, re.MULTILINE) == [kairosfl.__version__]
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    headings = re.findall(r"^## (.*)$", changelog, re.MULTILINE)
    assert headings[0] == "Unreleased"
    assert headings[1].split(" - ")[0] == kairosfl.__version__


def helped() -> Iterator[str]:
    """The words of every command, groups included."""
    groups = [("", typer.main.get_command(app))]
    for path, group in groups:
        yield path
        names = group.list_commands(None) if hasattr(group, "list_commands") else []
        for name in names:
            groups.append((f"{path} {name}".strip(), group.get_command(None, name)))


@pytest.mark.parametrize("words", list(helped()))
def test_help_is_plain_text(words: str) -> None:
    said = CliRunner().invoke(app, [*words.split(), "--help"])
    assert said.exit_code == 0
    assert "\\" not in said.stdout
    assert max(map(len, said.stdout.splitlines())) <= 80


def test_help_describes_arguments() -> None:
    said = CliRunner().invoke(app, ["resume", "--help"]).stdout
    # Typer 0.29 writes "folder <path>" where older ones write FOLDER.
    assert re.search(r"^  (FOLDER|folder <path>) +Run folder\.  \[required\]$", said, re.MULTILINE)


def test_nothing_imports_click_which_the_newest_typer_does_not_bring() -> None:
    for path in (ROOT / "src").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert "click" not in [name.partition(".")[0] for name in names], path


def test_every_command_is_called_with_the_newest_and_the_lowest_packages() -> None:
    smoke = runpy.run_path(str(ROOT / ".ci" / "smoke.py"))
    calls = [words if isinstance(words, str) else " ".join(words) for words, _ in smoke["WORKING"]]
    calls = [re.sub(r"^\?\w+ ", "", call) for call in calls]
    groups = {"", "data", "deploy"}
    for path in set(helped()) - groups:
        assert any(call.startswith(path) for call in calls), path


def test_every_package_has_a_lower_bound_that_can_be_tried() -> None:
    versions = runpy.run_path(str(ROOT / ".ci" / "versions.py"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = ("core", "cli", "files", "ray", "flower", "tune", "privacy")
    packages = list(project["dependencies"])
    for extra in extras[1:]:
        packages += project["optional-dependencies"][extra]
    floors = versions["floors"](extras)
    assert {re.split(r"[<>=]", package)[0] for package in packages} - set(floors) == {"click"}
    assert floors["torch"] == re.search(r"torch>=([\d.]+)", project["dependencies"][0])[1]


def test_maintaining_the_repository_is_not_a_users_command() -> None:
    assert "results" not in helped()
    assert re.search(
        r"^results: .*\n\t.*kairosfl_reproductions\.page",
        (ROOT / "Makefile").read_text(),
        re.MULTILINE,
    )


def python(code: str) -> str:
    """What a fresh interpreter prints."""
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    ).stdout
