"""How dense the code is, room by room: `python .ci/density.py`.

`tests/test_density.py` compares it with `.ci/density.json`, whose numbers may only fall;
`python .ci/density.py --store` lowers them to what is measured and adds rooms that are new.

A room is a folder of the package, or a folder in one, such as `engines.batched`; the files beside
the folders are one room, too. A line of code is one that is neither blank nor a comment, a
docstring or an import. Counted are

- `ternaries` per 1,000 lines of code: conditional expressions, `and`/`or` that choose a value, and
  lambdas in dicts, which are conditional statements in disguise;
- `comprehensions` per 1,000 lines of code, generators among them;
- `parallel` assignments, `a, b = x, y`, per 1,000 lines of code;
- `nested` conditional expressions: one that is directly an arm or the condition of another;
- `names`: locals named after their grammar, `NAMES`, instead of after what they hold;
- `long`: lines of more than 100 columns.
"""

from __future__ import annotations

import ast
import json
import math
import sys
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path

ROOT = Path(__file__).parents[1]
STORED = Path(__file__).with_suffix(".json")
# The folders of packages, and those of which only long lines are counted.
SOURCES = ("src", "reproductions/src")
BESIDE = ("tests", "benchmarks", ".ci")
# What the whole is to reach: half of what there was in November 2026, when this began.
GOALS = {"ternaries": 24.4, "comprehensions": 29.8, "nested": 0}
COLUMNS = 100
NAMES = (
    *("alike", "asked", "each", "found", "given", "here", "known", "left", "made", "mine"),
    *("said", "settled", "shown", "told", "wanted", "whole"),
)
# What begins like this answers yes or no.
QUESTIONS = ("is", "has", "any", "all", "bool", "callable", "startswith", "endswith", "exists")

Function = ast.FunctionDef | ast.AsyncFunctionDef
Comprehension = ast.ListComp | ast.SetComp | ast.DictComp | ast.GeneratorExp


@dataclass
class Count:
    """What is counted in a file, or in all files of a room."""

    lines: int = 0
    conditionals: int = 0
    disguised: int = 0
    nested: int = 0
    comprehensions: int = 0
    parallel: int = 0
    names: int = 0
    long: int = 0

    def __iadd__(self, other: Count) -> Count:
        for field in fields(self):
            total = getattr(self, field.name) + getattr(other, field.name)
            setattr(self, field.name, total)
        return self

    def measured(self) -> dict[str, float]:
        """The numbers that are stored, by their names."""
        ternaries = self.conditionals + self.disguised
        return {
            "ternaries": self.per_thousand(ternaries),
            "comprehensions": self.per_thousand(self.comprehensions),
            "parallel": self.per_thousand(self.parallel),
            "nested": self.nested,
            "names": self.names,
            "long": self.long,
        }

    def per_thousand(self, number: int) -> float:
        return 1000 * number / max(self.lines, 1)


# --- one file -------------------------------------------------------------------------------------


def count(text: str) -> Count:
    """What is counted in the source of one file."""
    tree = ast.parse(text)
    counts = Count(lines=code_lines(text, tree), long=long_lines(text))
    conditions = in_conditions(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.IfExp):
            counts.conditionals += 1
            inner = (node.test, node.body, node.orelse)
            counts.nested += any(isinstance(part, ast.IfExp) for part in inner)
        elif isinstance(node, ast.BoolOp):
            counts.disguised += node not in conditions and not answers(node.values[-1])
        elif isinstance(node, ast.Dict):
            counts.disguised += sum(isinstance(value, ast.Lambda) for value in node.values)
        elif isinstance(node, Comprehension):
            counts.comprehensions += 1
        elif isinstance(node, ast.Assign):
            counts.parallel += is_parallel(node)
        elif isinstance(node, ast.Name):
            counts.names += isinstance(node.ctx, ast.Store) and node.id in NAMES
        elif isinstance(node, ast.arg):
            counts.names += node.arg in NAMES
    return counts


def code_lines(text: str, tree: ast.Module) -> int:
    """The number of lines without docstrings, imports, comments and blank ones."""
    skipped: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            skipped.update(line_numbers(node))
        elif isinstance(node, ast.Module | ast.ClassDef | Function) and ast.get_docstring(node):
            skipped.update(line_numbers(node.body[0]))
    lines = (line.strip() for i, line in enumerate(text.splitlines(), 1) if i not in skipped)
    return sum(line != "" and not line.startswith("#") for line in lines)


def line_numbers(node: ast.stmt) -> range:
    return range(node.lineno, (node.end_lineno or node.lineno) + 1)


def long_lines(text: str) -> int:
    return sum(len(line) > COLUMNS for line in text.splitlines())


def is_parallel(node: ast.Assign) -> bool:
    """Whether it assigns several things in one statement, each an expression of its own."""
    return isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple)


def in_conditions(tree: ast.Module) -> set[ast.AST]:
    """The expressions of which only the truth matters, `and` and `or` inside others included."""
    conditions: set[ast.AST] = set()
    for node in ast.walk(tree):
        for root in conditions_of(node):
            conditions.update(truths(root))
    return conditions


def conditions_of(node: ast.AST) -> Iterator[ast.expr]:
    """The conditions that a statement or an expression holds."""
    if isinstance(node, ast.If | ast.While | ast.IfExp | ast.Assert):
        yield node.test
    elif isinstance(node, ast.match_case) and node.guard is not None:
        yield node.guard
    elif isinstance(node, ast.comprehension):
        yield from node.ifs
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield node.operand
    elif isinstance(node, ast.AnnAssign) and node.value is not None:
        if ast.unparse(node.annotation) == "bool":
            yield node.value
    elif isinstance(node, Function):
        yield from returned_truths(node)
    elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("any", "all", "bool"):
        for argument in node.args:
            yield argument.elt if isinstance(argument, ast.GeneratorExp) else argument


def returned_truths(function: Function) -> Iterator[ast.expr]:
    """What a function with `-> bool` returns."""
    if function.returns is None or ast.unparse(function.returns) != "bool":
        return
    for node in ast.walk(function):
        if isinstance(node, ast.Return) and node.value is not None:
            yield node.value


def truths(node: ast.expr) -> Iterator[ast.expr]:
    """A condition and the `and`, `or` and `not` that it is made of."""
    yield node
    if isinstance(node, ast.BoolOp):
        for part in node.values:
            yield from truths(part)


def answers(node: ast.expr) -> bool:
    """Whether an expression is evidently true or false, so that `and` before it asks."""
    if isinstance(node, ast.Compare):
        return True
    if isinstance(node, ast.UnaryOp):
        return isinstance(node.op, ast.Not)
    if isinstance(node, ast.BoolOp):
        return answers(node.values[-1])
    if isinstance(node, ast.Call):
        name = ast.unparse(node.func).rpartition(".")[2]
        return name.lstrip("_").startswith(QUESTIONS)
    return isinstance(node, ast.Constant) and isinstance(node.value, bool)


# --- all rooms ------------------------------------------------------------------------------------


def rooms() -> dict[str, Count]:
    """What is counted in each room of the sources."""
    counts: dict[str, Count] = {}
    for source in SOURCES:
        for path in sorted((ROOT / source).rglob("*.py")):
            folders = path.relative_to(ROOT / source).parent.parts
            room = ".".join(folders[:3])
            counts.setdefault(room, Count())
            counts[room] += count(path.read_text(encoding="utf-8"))
    return counts


def beside() -> dict[str, int]:
    """The number of long lines in each folder beside the sources."""
    numbers = {}
    for folder in BESIDE:
        paths = sorted((ROOT / folder).rglob("*.py"))
        numbers[folder] = sum(long_lines(path.read_text(encoding="utf-8")) for path in paths)
    return numbers


def all_measured() -> dict[str, dict[str, float]]:
    """The numbers of all rooms and of the folders beside them."""
    counts = rooms()
    measured = {room: counts[room].measured() for room in sorted(counts)}
    for folder, number in beside().items():
        measured[folder] = {"long": number}
    return measured


def whole_measured() -> dict[str, float]:
    """The numbers of all rooms together."""
    total = Count()
    for room in rooms().values():
        total += room
    return total.measured()


def stored() -> dict[str, dict[str, int]]:
    limits: dict[str, dict[str, int]] = json.loads(STORED.read_text(encoding="utf-8"))
    return limits


def store() -> None:
    """Lower the stored numbers to the measured ones; a new room gets those that it has."""
    before = stored()
    limits: dict[str, dict[str, int]] = {}
    for room, numbers in all_measured().items():
        limits[room] = {name: math.ceil(number) for name, number in numbers.items()}
        for name, limit in before.get(room, {}).items():
            limits[room][name] = min(limits[room][name], limit)
    STORED.write_text(json.dumps(limits, indent=2) + "\n", encoding="utf-8")


def show() -> None:
    """Print the table."""
    table = all_measured() | {"all rooms": whole_measured(), "to reach": GOALS}
    names = table["all rooms"]
    print(f"{'room':26}", *(f"{name:>14}" for name in names))
    for room, numbers in table.items():
        cells = [f"{numbers[name]:14.1f}" if name in numbers else " " * 14 for name in names]
        print(f"{room:26}", *cells)


if __name__ == "__main__":
    if sys.argv[1:] == ["--store"]:
        store()
    show()
