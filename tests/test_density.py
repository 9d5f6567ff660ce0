"""The density of the code falls: no room gets denser than `.ci/density.json` allows."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]
# How far the stored number may be above the measured one, so that people who work in one room at
# the same time seldom have to change the same line.
SLACK = 5


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("density", ROOT / ".ci" / "density.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["density"] = module  # its dataclass looks itself up
    spec.loader.exec_module(module)
    return module


density = load()


@pytest.fixture(scope="module")
def measured() -> dict[str, dict[str, float]]:
    return density.all_measured()


def test_no_room_gets_denser(measured: dict[str, dict[str, float]]) -> None:
    limits = density.stored()
    denser = []
    for room, numbers in measured.items():
        for name, number in numbers.items():
            limit = limits.get(room, {}).get(name, density.GOALS.get(name, 0))
            if number > limit:
                denser.append(f"{room} has {number:.1f} {name}, at most {limit} are allowed")
    assert not denser, (
        f"{'; '.join(denser)}: write it plainer; for a room that is new or was moved, "
        "run `python .ci/density.py --store`."
    )


def test_what_has_become_plainer_stays_so(measured: dict[str, dict[str, float]]) -> None:
    limits = density.stored()
    loose = []
    for room, numbers in measured.items():
        for name, number in numbers.items():
            limit = limits.get(room, {}).get(name, 0)
            if limit > number + SLACK:
                loose.append(f"{room} has {number:.1f} {name} and {limit} are stored")
    assert not loose, (
        f"Well done: {'; '.join(loose)}. Lower the stored numbers: `python .ci/density.py --store`."
    )


SOURCE = '''"""A docstring."""

import os
from sys import (
    argv,
)

# A comment.
one, two = 1, 2  # trailing


def rank(given, other: bool) -> bool:
    """Another
    docstring.
    """
    found = "a" if given else "b" if other else "c"
    names = [name for name in argv if name and other]
    if given and other:
        found = given or "default"
    choose = {"x": lambda: 1, "y": abs}
    asks = given and found == "a"
    return given or other
'''


def test_the_count_of_a_small_file() -> None:
    """Counted by hand. Conditions, and what is evidently true or false, are no values."""
    counts = density.count(SOURCE)

    assert counts.lines == 9
    assert counts.conditionals == 2
    assert counts.nested == 1
    assert counts.disguised == 2  # `given or "default"` and the lambda
    assert counts.comprehensions == 1
    assert counts.parallel == 1
    assert counts.names == 3  # the parameter, and two assignments of `found`
    assert counts.long == 0
    assert counts.measured()["ternaries"] == pytest.approx(4000 / 9)


def test_a_long_line_is_one_of_more_than_100_columns() -> None:
    assert density.count(f"x = '{'a' * 94}'\n").long == 0
    assert density.count(f"x = '{'a' * 95}'\n").long == 1
