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
    values: dict[str, list[str]] = {"algorithm": []}
    options: list[dict[str, str]] = []
    for run in runs:
        family, of_rules = rule_options(run.algorithm)
        values["algorithm"].append(family)
        options.append(of_rules)
    for of_rules in options:
        for name in of_rules:
            values[name] = [of_group.get(name, NONE) for of_group in options]
    for key in differing(runs):
        values[_short(key, values)] = [_text(run.settings.get(key)) for run in runs]
    return {name: texts for name, texts in values.items() if len(set(texts)) > 1}


def crossed(varied: Mapping[str, Sequence[str]]) -> tuple[str, str] | None:
    """The two parameters of which the most combinations were run; None if no two were crossed.

    They are those across and up. Two with numbers come before others.
    """
    best = None
    best_rank = (False, 0)
    for up, across in combinations(varied, 2):
        run = _combinations(varied, up, across)
        rows = len(set(varied[up]))
        columns = len(set(varied[across]))
        if run < 4 or run <= max(rows, columns) or 2 * run < rows * columns:
            continue
        rank = (_is_numeric(varied[up]) and _is_numeric(varied[across]), run)
        if best is None or rank > best_rank:
            best = (across, up)
            best_rank = rank
    return best


def told_apart(varied: Mapping[str, Sequence[str]]) -> tuple[str, str]:
    """What many groups are coloured and split by to begin with.

    These are the two parameters that tell the most of them apart.
    """
    few = [name for name, values in varied.items() if len(values) > MANY >= len(set(values))]
    if len(few) < 2:
        return "".join(few), ""
    return max(permutations(few, 2), key=lambda pair: _combinations(varied, *pair))


def _combinations(varied: Mapping[str, Sequence[str]], one: str, other: str) -> int:
    """How many combinations of their values two parameters have."""
    return len(set(zip(varied[one], varied[other], strict=True)))


def rule_options(algorithm: str) -> tuple[str, dict[str, str]]:
    """`fedprox(mu=0.1) + alt` as `fedprox + alt` and {"fedprox.mu": "0.1"}.

    What cannot be parsed stays as it is, without options.
    """
    try:
        rules = _rules(ast.parse(algorithm, mode="eval").body)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return algorithm, {}
    options = {}
    for name, keywords in rules:
        for keyword in keywords:
            options[f"{name}.{keyword.arg}"] = _value(keyword.value)
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
    try:
        return len(set(map(float, set(values) - {NONE}))) > 1
    except ValueError:
        return False


def _short(key: str, taken: dict[str, Any]) -> str:
    """The last part of a key, as in the labels of groups; the whole key if that is taken."""
    last = key.rpartition(".")[2]
    return key if last in taken else last


def _text(value: Any) -> str:
    return NONE if value is None else str(value)
