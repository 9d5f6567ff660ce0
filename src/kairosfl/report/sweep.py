"""The parameters of a sweep: in which settings and options of rules the groups differ."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from itertools import combinations, permutations
from typing import Any

from kairosfl.report.read import Group, differing

NONE = "–"  # the group does not have this parameter
# groups, above which they are coloured and split by parameters to begin with, and values of these
MANY = 8


def parameters(groups: Sequence[Group]) -> dict[str, list[str]]:
    """Each parameter with its value in every group; only those of which there are several values."""
    runs = [group.runs[0] for group in groups]
    options = [rule_options(run.algorithm) for run in runs]
    found = {"algorithm": [family for family, _ in options]}
    for name in dict.fromkeys(name for _, own in options for name in own):
        found[name] = [own.get(name, NONE) for _, own in options]
    for key in differing(runs):
        found[_short(key, found)] = [_text(run.settings.get(key)) for run in runs]
    return {name: values for name, values in found.items() if len(set(values)) > 1}


def crossed(varied: Mapping[str, Sequence[str]]) -> tuple[str, str] | None:
    """The two parameters of which the most combinations were run, numbers first; None if no two
    were crossed.
    """
    best: tuple[tuple[bool, int], str, str] | None = None
    for up, across in combinations(varied, 2):
        run = len(set(zip(varied[up], varied[across], strict=True)))
        sizes = [len(set(varied[name])) for name in (up, across)]
        if run >= 4 and run > max(sizes) and 2 * run >= sizes[0] * sizes[1]:
            rank = all(_is_numeric(varied[name]) for name in (up, across)), run
            best = max(best or (rank, across, up), (rank, across, up), key=lambda each: each[0])
    return best[1:] if best else None


def told_apart(varied: Mapping[str, Sequence[str]]) -> tuple[str, str]:
    """What many groups are coloured and split by to begin with: the two parameters that tell the
    most of them apart.
    """
    few = [name for name, values in varied.items() if len(values) > MANY >= len(set(values))]
    pairs = permutations(few, 2)
    first = few[0] if few else ""
    return max(
        pairs,
        key=lambda pair: len(set(zip(*map(varied.get, pair), strict=True))),
        default=(first, ""),
    )


def rule_options(algorithm: str) -> tuple[str, dict[str, str]]:
    """`fedprox(mu=0.1) + alt` as `fedprox + alt` and {"fedprox.mu": "0.1"}; as it is if it cannot
    be parsed.
    """
    try:
        rules = _rules(ast.parse(algorithm, mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return algorithm, {}
    options = {f"{name}.{key.arg}": _value(key.value) for name, keys in rules for key in keys}
    return " + ".join(name for name, _ in rules), options


def _rules(tree: ast.expr) -> list[tuple[str, list[ast.keyword]]]:
    if isinstance(tree, ast.BinOp) and isinstance(tree.op, ast.Add):
        return _rules(tree.left) + _rules(tree.right)
    if isinstance(tree, ast.Call) and not tree.args:
        return [(ast.unparse(tree.func), tree.keywords)]
    if isinstance(tree, ast.Name | ast.Attribute):
        return [(ast.unparse(tree), [])]
    raise ValueError("not a sum of rules")


def _value(tree: ast.expr) -> str:
    return ast.unparse(tree).strip("'\"")


def _is_numeric(values: Sequence[str]) -> bool:
    """Whether there are several values that are all numbers, where there is one."""
    known = set(values) - {NONE}
    try:
        return len(set(map(float, known))) > 1
    except ValueError:
        return False


def _short(key: str, taken: dict[str, Any]) -> str:
    """The last part of a key, as in the labels of groups; the whole key if that is taken."""
    last = key.rpartition(".")[2]
    return key if last in taken else last


def _text(value: Any) -> str:
    return NONE if value is None else str(value)
