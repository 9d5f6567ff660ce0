"""The files of a run folder, checked for use in a report.

Damaged parts are left out and named in one sentence.
"""

from __future__ import annotations

import contextlib
import json
import math
import tomllib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from kairosfl.errors import UserError
from kairosfl.runs.files import read_lines
from kairosfl.runs.keys import flatten
from kairosfl.runs.score import Score
from kairosfl.tasks.columns import AMOUNT, ANY, RANGES, SHARE

Array = NDArray[np.float64]
Say = Callable[[str], None]
Checks = Mapping[str, Callable[[Any], bool]]

_MOST = 2**31  # clients or rounds
_NAMED = 5  # damaged lines or rounds of a file; the others are counted
# Types that become a number without a check; a whole one may be too large.
_PLAIN = {float, bool, type(None)}


def silent(_: str) -> None:
    """Says nothing."""


def toml(path: Path, say: Say) -> tuple[str, dict[str, Any]]:
    """The text of a TOML file, and its values by dotted key; both empty if there is no such file."""
    text = _text(path, say) or ""
    try:
        values = flatten(tomllib.loads(text))
        _writable(values)
        return text, values
    except (ValueError, RecursionError) as error:
        say(f"{path} is not valid TOML ({_reason(error)}) and is left out.")
        return "", {}


def table(path: Path, say: Say, checks: Checks) -> dict[str, Any]:
    """The object in a JSON file, without invalid values; empty if there is no such file."""
    text = _text(path, say)
    if text is None:
        return {}
    try:
        value = json.loads(text)
        _writable(value)
    except (ValueError, RecursionError) as error:
        say(f"{path} is not valid JSON ({_reason(error)}) and is left out.")
        return {}
    if not isinstance(value, dict):
        say(f"{path} does not hold a JSON object and is left out.")
        return {}
    return kept(value, checks, path, say)


def _writable(value: Any) -> None:
    """Raise a ValueError for what can be parsed but not shown.

    That is half a character, or a number with thousands of digits.
    """
    json.dumps(value, ensure_ascii=False, default=str).encode()


def kept(values: Mapping[str, Any], checks: Checks, path: Path, say: Say) -> dict[str, Any]:
    """The values of a file, without those that are neither null nor valid."""
    valid = dict(values)
    for key, is_valid in checks.items():
        if values.get(key) is None or is_valid(values[key]):
            continue
        text = repr(values[key])
        if len(text) > 40:
            text = f"{text[:37]}..."
        say(f"{path}: {key} = {text} is not a valid value and is left out.")
        del valid[key]
    return valid


def metrics(
    rows: Sequence[Mapping[str, Any]], scores: Sequence[Score], path: Path, say: Say
) -> dict[str, Array]:
    """The lines of metrics.jsonl as columns, one value per round.

    Of `scores`, the first is the main metric. The column `not_finite` says in which rounds the
    model was evaluated without a finite result.
    """
    main = scores[0]
    ranges = {score.name: _range(score) for score in scores} | RANGES
    ranges[f"client_{main.name}_mean"] = ranges[f"client_{main.name}_worst"] = _range(main)

    columns = {} if rows else {"round": np.zeros(0)}
    wrong: dict[str, list[int]] = {}
    for name in dict.fromkeys(name for row in rows for name in row):
        columns[name], in_rounds = _column(rows, name, *ranges.get(name, ANY))
        if in_rounds and name in ranges:
            wrong[name] = in_rounds
    _name_fields(path, wrong, say)

    damaged = wrong.get(main.name, ())
    lost = [row["round"] not in damaged and _is_lost(row, main) for row in rows]
    columns["not_finite"] = np.array(lost, dtype=np.float64)
    return columns


def _column(
    rows: Sequence[Mapping[str, Any]], name: str, low: float, high: float
) -> tuple[Array, list[int]]:
    """One value per row, NaN if there is none, and the rounds in which it is wrong."""
    values = [row.get(name) for row in rows]
    # All at once, and one by one only where something is wrong.
    if set(map(type, values)) <= _PLAIN | {int}:
        with contextlib.suppress(OverflowError):
            array = np.array(values, dtype=np.float64)
            array[~np.isfinite(array)] = np.nan
            if not ((array < low) | (array > high)).any():
                return array, []

    column = np.full(len(rows), np.nan)
    wrong = []
    for i, (row, value) in enumerate(zip(rows, values, strict=True)):
        real = number(value, low, high)
        if real is None:
            wrong.append(row["round"])
        else:
            column[i] = real
    return column, wrong


def _is_lost(row: Mapping[str, Any], main: Score) -> bool:
    """Whether the model was evaluated and its loss was not finite."""
    is_evaluated = row.get("evaluated", row.get(main.name) is not None)
    return is_evaluated is True and row.get("loss", 0.0) is None


def _range(score: Score) -> tuple[float, float]:
    return SHARE if score.percent else ANY


def clients(path: Path, score: Score, say: Say) -> list[dict[str, Any]]:
    """What happened to each client, one object per round, without damaged fields."""
    wrong: dict[str, list[int]] = {}
    checks = _CLIENT_FIELDS | {score.quantiles: partial(_quantiles, within=_range(score))}
    rows = []
    for row in by_round(path, say):
        if not _is_list(row.get("ids"), is_whole):
            wrong.setdefault("ids", []).append(row["round"])
            continue
        valid = dict(row)
        for name, is_valid in checks.items():
            if row.get(name) is not None and not is_valid(row, name):
                wrong.setdefault(name, []).append(row["round"])
                del valid[name]
        rows.append(valid)
    _name_fields(path, wrong, say)
    return rows


def number(value: Any, low: float = -math.inf, high: float = math.inf) -> float | None:
    """A JSON value as a number, NaN if nothing was measured; None if it is no number in range."""
    if value is None:
        return math.nan
    if not isinstance(value, int | float):
        return None
    try:
        real = float(value)
    except OverflowError:
        return None
    if not math.isfinite(real):
        return math.nan
    return real if low <= real <= high else None


def is_whole(value: Any, most: int = _MOST) -> bool:
    """Whether it is a count: a whole number of 0 or more."""
    return type(value) is int and 0 <= value < most


def is_seed(value: Any) -> bool:
    """Whether it can be a seed."""
    return is_whole(value, 2**63)


def is_text(value: Any) -> bool:
    """Whether it is text."""
    return isinstance(value, str)


def is_texts(value: Any) -> bool:
    """Whether it is a list of texts."""
    return _is_list(value, is_text)


def is_counts(value: Any) -> bool:
    """Whether it is a non-empty table of counts."""
    if not _is_list(value, _are_amounts):
        return False
    widths = set(map(len, value))
    return len(widths) == 1 and widths != {0}


def _are_amounts(value: Any) -> bool:
    return _is_list(value, _is_amount)


def _is_amount(value: Any) -> bool:
    return value is not None and number(value, *AMOUNT) is not None


def _is_number(value: Any) -> bool:
    return number(value) is not None


def _is_list(value: Any, good: Callable[[Any], bool]) -> bool:
    return isinstance(value, list) and all(map(good, value))


def _are_numbers(value: Any) -> bool:
    if not isinstance(value, list):
        return False
    return set(map(type, value)) <= _PLAIN or all(map(_is_number, value))


def _per_client(row: Mapping[str, Any], name: str) -> bool:
    return _are_numbers(row[name]) and len(row[name]) == len(row["ids"])


def _by_client(row: Mapping[str, Any], name: str) -> bool:
    value = row[name]
    if not isinstance(value, dict):
        return False
    are_clients = all(key.isdecimal() and len(key) < 10 for key in value)
    return are_clients and all(map(_is_number, value.values()))


def _square(row: Mapping[str, Any], name: str) -> bool:
    table = row[name]
    if not isinstance(table, list) or len(table) != len(row["ids"]):
        return False
    return all(_are_numbers(numbers) and len(numbers) == len(table) for numbers in table)


def _quantiles(row: Mapping[str, Any], name: str, within: tuple[float, float]) -> bool:
    values = row[name]
    if not isinstance(values, list) or len(values) < 2:
        return False
    return all(number(value, *within) is not None for value in values)


def _confusion(row: Mapping[str, Any], name: str) -> bool:
    return is_counts(row[name]) and len(row[name]) == len(row[name][0])


_CLIENT_FIELDS: dict[str, Callable[[Mapping[str, Any], str], bool]] = {
    **dict.fromkeys(("weights", "epochs", "similarity", "score"), _per_client),
    "lambda": _by_client,
    "class_accuracy": partial(_quantiles, within=SHARE),
    "confusion": _confusion,
    "cosines": _square,
}


# --- lines ----------------------------------------------------------------------------------------


def by_round(path: Path, say: Say) -> list[dict[str, Any]]:
    """The lines of a file by round, in order; of two for one round, the later one."""
    damaged: list[int] = []
    try:
        lines = list(read_lines(path, damaged.append))
    except UserError as error:
        say(str(error))
        return []
    if damaged and _unended(path, damaged[-1]):
        damaged.pop()
    if damaged:
        say(f"{path}: {_listed('line', damaged)} {_are(damaged)} damaged and left out.")

    rows: dict[int, dict[str, Any]] = {}
    impossible: list[int] = []
    for row in lines:
        if 0 < row["round"] < _MOST:
            rows[row["round"]] = row
        else:
            impossible.append(row["round"])
    if impossible:
        rounds = _listed("round", impossible)
        say(f"{path}: {rounds} cannot exist and {_are(impossible)} left out.")
    return [rows[number] for number in sorted(rows)]


def _are(numbers: Sequence[int]) -> str:
    return "is" if len(numbers) == 1 else "are"


def _unended(path: Path, number: int) -> bool:
    """Whether a line is still being written: the last of an unfinished run, without a newline."""
    lines = path.read_bytes().split(b"\n")
    is_last = len(lines) == number and lines[-1] != b""
    return is_last and not (path.parent / "summary.json").exists()


def _name_fields(path: Path, wrong: Mapping[str, Sequence[int]], say: Say) -> None:
    for name, rounds in wrong.items():
        say(f"{path}: {name} in {_listed('round', rounds)} is damaged and left out.")


def _listed(word: str, numbers: Sequence[int]) -> str:
    """`line 3`, `lines 3 and 5`, `lines 1, 2, 3, 4, 5 and 12 more`."""
    if len(numbers) == 1:
        return f"{word} {numbers[0]}"
    words = list(map(str, numbers[:_NAMED]))
    if len(numbers) > _NAMED:
        words.append(f"{len(numbers) - _NAMED} more")
    return f"{word}s {', '.join(words[:-1])} and {words[-1]}"


def _text(path: Path, say: Say) -> str | None:
    """None if there is no such file or it cannot be read."""
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return None
    except OSError as error:
        say(f"{path} cannot be read ({error.strerror}) and is left out.")
    except UnicodeDecodeError:
        say(f"{path} is not UTF-8 text and is left out.")
    return None


def _reason(error: Exception) -> str:
    return "nested too deeply" if isinstance(error, RecursionError) else str(error).rstrip(".")
