"""The floors of the house: every import, also in functions and for types, points to its own floor
or below.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "kairosfl"
FLOORS = (
    "version errors wording lazy moved plugins",
    "core",
    "tasks data models names",
    "detectors client",
    "rules",
    "engines",
    "bench",
    "runs",
    "presets report tune progress testing watched deploy",
    "simulation listing",
    "papers",
    "cli",
    "__main__",
)
FLOOR = {name: height for height, names in enumerate(FLOORS) for name in names.split()}
# Operations of deployment, which belong above the runs.
TO_BE_MOVED = {
    "engines/flower/client.py -> kairosfl.runs.taskfile",
    "engines/flower/status.py -> kairosfl.runs.files",
    "engines/flower/status.py -> kairosfl.runs.folder",
    "engines/flower/status.py -> kairosfl.runs.lock",
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
    assert offenders() == TO_BE_MOVED


@pytest.mark.parametrize("room", ["rules", "detectors", "engines"])
def test_the_core_names_nothing_above_it(room: str) -> None:
    """No import of the core, in whatever form, leaves it; errors and the version lie below."""
    for path in (SOURCE / "core").glob("*.py"):
        for module in imported(ast.parse(path.read_text(encoding="utf-8"))):
            assert not module.startswith(f"kairosfl.{room}"), path
