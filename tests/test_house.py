"""The floors of the house: every import, also in functions and for types, points to its own floor
or below.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from kairosfl.rules import RULES

SOURCE = Path(__file__).parents[1] / "src" / "kairosfl"
FLOORS = (
    "version errors wording lazy moved plugins",
    "core",
    "tasks data models names fleets",
    "detectors client",
    "rules",
    "engines",
    "bench",
    "runs",
    "presets report tune deploy",
    "simulation testing watched summed listing progress",
    "cli",
    "__main__",
)
FLOOR = {name: height for height, names in enumerate(FLOORS) for name in names.split()}
FOR_KERNELS = ("kairosfl.engines.batched.abi", "kairosfl.engines.batched.kernels")
# Numbers and records that Python and Triton share, until they stand in one file.
KERNELS_BORROW = {
    "batch.py -> kairosfl.engines.batched.state",
    "batch.py -> kairosfl.engines.batched.step",
    "conv.py -> kairosfl.engines.batched.conv",
    "depthwise.py -> kairosfl.engines.batched.conv",
    "dropout.py -> kairosfl.engines.batched.dropout",
    "linear.py -> kairosfl.engines.batched.fast",
    "linear.py -> kairosfl.engines.batched.rows",
    "linear.py -> kairosfl.engines.choices",
    "passes.py -> kairosfl.engines.batched.rows",
    "pool.py -> kairosfl.engines.batched.dropout",
    "update.py -> kairosfl.engines.batched.state",
}


def imported(tree: ast.Module) -> Iterator[str]:
    """The modules of Kairos that a file imports anywhere, by statement or by
    `import_module("...")`.
    """
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == "kairosfl":
            yield from (f"kairosfl.{alias.name}" for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.module or ""
        elif isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("import_module"):
            yield from (
                arg.value
                for arg in node.args
                if isinstance(arg, ast.Constant) and isinstance(arg.value, str)
            )


def offenders() -> set[str]:
    climbing = set()
    for path in sorted(SOURCE.rglob("*.py")):
        place = path.relative_to(SOURCE)
        room = place.with_suffix("").parts[0]
        if room == "__init__":  # the package's face shows everything
            continue
        for module in imported(ast.parse(path.read_text(encoding="utf-8"))):
            if not module.startswith("kairosfl"):
                continue
            other = module.split(".")[1] if "." in module else "__init__"
            if other != room and FLOOR.get(other, len(FLOORS)) > FLOOR[room]:
                climbing.add(f"{place.as_posix()} -> {module}")
    return climbing


def test_every_room_has_a_floor() -> None:
    rooms = {
        path.stem
        for path in SOURCE.iterdir()
        if path.suffix == ".py" or (path / "__init__.py").exists()
    }
    assert rooms - {"__init__"} == set(FLOOR)


def test_imports_point_to_their_own_floor_or_below() -> None:
    assert offenders() == set()


@pytest.mark.parametrize("room", ["rules", "detectors", "engines"])
def test_the_core_names_nothing_above_it(room: str) -> None:
    """No import of the core, in whatever form, leaves it; errors and the version lie below."""
    for path in (SOURCE / "core").glob("*.py"):
        for module in imported(ast.parse(path.read_text(encoding="utf-8"))):
            assert not module.startswith(f"kairosfl.{room}"), path


def files() -> Iterator[tuple[str, ast.Module]]:
    for path in sorted(SOURCE.rglob("*.py")):
        yield path.relative_to(SOURCE).as_posix(), ast.parse(path.read_text(encoding="utf-8"))


def test_no_private_name_is_imported_by_another_file() -> None:
    borrowed = []
    for place, tree in files():
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("kairosfl"):
                names = [alias.name for alias in node.names if not alias.name.endswith("__")]
                borrowed += [f"{place}: {name}" for name in names if name.startswith("_")]
    assert borrowed == []


def test_kernels_import_only_the_shared_numbers_and_each_other() -> None:
    """What they took from files that load them would be a circle that no scan sees."""
    taken = set()
    for place, tree in files():
        if place.startswith("engines/batched/kernels/"):
            taken |= {
                f"{Path(place).name} -> {module}"
                for module in imported(tree)
                if module.startswith("kairosfl") and not module.startswith(FOR_KERNELS)
            }
    assert taken == KERNELS_BORROW


# What is below the rules, and does not know them. Docstrings may cite a paper.
BELOW_RULES = ("core", "data", "models", "tasks", "client", "detectors", "engines")
# Names of rules that are words of other things as well.
WORDS = {"average", "budget", "uniform", "privacy", "median", "limits", "attack"}
WORDS |= {"deadline", "stale", "buffered"}


def strings_and_names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """The strings but for docstrings, and the identifiers."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, documented) and node.body and isinstance(node.body[0], ast.Expr)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            if id(node) not in docstrings:
                yield node.lineno, node.value
        elif isinstance(node, ast.Name):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute):
            yield node.lineno, node.attr
        elif isinstance(node, ast.alias):
            yield 0, node.name


def test_no_code_below_the_rules_names_one() -> None:
    classes = [rule.__name__ for rule in RULES.own.values()]
    distinct = [name for name in RULES.own if name not in WORDS]
    named = re.compile(rf"\b({'|'.join(classes)})\b|\b(?i:{'|'.join(distinct)})\b")
    offending = [
        f"{place}:{line}: {text}"
        for place, tree in files()
        if place.partition("/")[0] in BELOW_RULES
        for line, text in strings_and_names(tree)
        if named.search(text)
    ]
    assert offending == []
