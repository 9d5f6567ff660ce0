"""The files of a run folder, checked for use in a report: damaged parts are left out and named in
one sentence.
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

Array = NDArray[np.float64]
Say = Callable[[str], None]
Wanted = Mapping[str, Callable[[Any], bool]]

_MOST = 2**31  # clients or rounds
_NAMED = 5  # damaged lines or rounds of a file; the others are counted
_ANY, _SHARE, _AMOUNT = (-math.inf, math.inf), (0.0, 1.0), (0.0, 1e18)
_PLAIN = {
    float,
    bool,
    type(None),
}  # types that become a number without a check; a whole one may be too large
_METRICS = {
    "critical": _SHARE,
    **dict.fromkeys(("cohort", "reported", "rejected", "epochs", "epochs_total"), _AMOUNT),
    **dict.fromkeys(("bytes_down", "bytes_up", "lr", "seconds"), _AMOUNT),
    **dict.fromkeys(("loss", "train_loss", "fgn", "fedfim", "elud", "coherence"), _ANY),
}


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


def table(path: Path, say: Say, wanted: Wanted) -> dict[str, Any]:
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
    return kept(value, wanted, path, say)


def _writable(value: Any) -> None:
    """Raise a ValueError for what can be parsed but not shown: half a character, a number with
    thousands of digits.
    """
    json.dumps(value, ensure_ascii=False, default=str).encode()


def kept(values: Mapping[str, Any], wanted: Wanted, path: Path, say: Say) -> dict[str, Any]:
    """The values of a file, without those that are neither null nor valid."""
    wrong = [
        key for key, good in wanted.items() if values.get(key) is not None and not good(values[key])
    ]
    for key in wrong:
        text = repr(values[key])
        shown = text if len(text) <= 40 else f"{text[:37]}..."
        say(f"{path}: {key} = {shown} is not a valid value and is left out.")
    return {key: value for key, value in values.items() if key not in wrong}


def metrics(
    rows: Sequence[Mapping[str, Any]], scores: Sequence[Score], path: Path, say: Say
) -> dict[str, Array]:
    """The lines of metrics.jsonl as columns, one value per round; of `scores`, the first is the
    main metric.
    """
    wrong: dict[str, list[int]] = {}
    main = scores[0]
    ranges = {score.name: _range(score) for score in scores}
    ranges |= _METRICS | {
        f"client_{main.name}_{which}": _range(main) for which in ("mean", "worst")
    }

    def value(row: Mapping[str, Any], name: str) -> float:
        found = number(row.get(name), *ranges.get(name, _ANY))
        if found is None and name in ranges:
            wrong.setdefault(name, []).append(row["round"])
        return math.nan if found is None else found

    def column(name: str) -> Array:
        values = [row.get(name) for row in rows]
        low, high = ranges.get(name, _ANY)
        if set(map(type, values)) <= _PLAIN | {
            int
        }:  # all at once; one by one only where something is wrong
            with contextlib.suppress(OverflowError):
                array = np.array(values, dtype=np.float64)
                array[~np.isfinite(array)] = np.nan
                if not ((array < low) | (array > high)).any():
                    return array
        return np.array([value(row, name) for row in rows], dtype=np.float64)

    names = dict.fromkeys(name for row in rows for name in row)
    columns = {name: column(name) for name in names}
    _name_fields(path, wrong, say)
    intact = [row if row["round"] not in wrong.get(main.name, ()) else {} for row in rows]
    evaluated = [row.get("evaluated", row.get(main.name) is not None) is True for row in intact]
    lost = [
        scored and row.get("loss", 0.0) is None for scored, row in zip(evaluated, rows, strict=True)
    ]  # not finite
    return (columns or {"round": np.zeros(0)}) | {"not_finite": np.array(lost, dtype=np.float64)}


def _range(score: Score) -> tuple[float, float]:
    return _SHARE if score.percent else _ANY


def clients(path: Path, score: Score, say: Say) -> list[dict[str, Any]]:
    """What happened to each client, one object per round, without damaged fields."""
    wrong: dict[str, list[int]] = {}
    fields = _CLIENT_FIELDS | {score.quantiles: partial(_quantiles, within=_range(score))}
    rows = []
    for row in by_round(path, say):
        if _is_list(row.get("ids"), is_whole):
            damaged = [
                name
                for name, good in fields.items()
                if row.get(name) is not None and not good(row, name)
            ]
            rows.append({name: value for name, value in row.items() if name not in damaged})
        else:
            damaged = ["ids"]
        for name in damaged:
            wrong.setdefault(name, []).append(row["round"])
    _name_fields(path, wrong, say)
    return rows


def number(value: Any, low: float = -math.inf, high: float = math.inf) -> float | None:
    """A JSON value as a number, NaN if nothing was measured; None if it is not a number or out of
    range.
    """
    if value is None:
        return math.nan
    if not isinstance(value, int | float):
        return None
    try:
        real = float(value)
    except OverflowError:
        return None
    return math.nan if not math.isfinite(real) else real if low <= real <= high else None


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
    widths = (
        {len(row) for row in value}
        if _is_list(value, lambda row: _is_list(row, _is_amount))
        else set()
    )
    return len(widths) == 1 and widths != {0}


def _is_amount(value: Any) -> bool:
    return value is not None and number(value, *_AMOUNT) is not None


def _is_number(value: Any) -> bool:
    return number(value) is not None


def _is_list(value: Any, good: Callable[[Any], bool]) -> bool:
    return isinstance(value, list) and all(map(good, value))


def _are_numbers(value: Any) -> bool:
    plain = isinstance(value, list) and set(map(type, value)) <= _PLAIN
    return plain or _is_list(value, _is_number)


def _per_client(row: Mapping[str, Any], name: str) -> bool:
    return _are_numbers(row[name]) and len(row[name]) == len(row["ids"])


def _by_client(row: Mapping[str, Any], name: str) -> bool:
    value = row[name]
    named = isinstance(value, dict) and all(key.isdecimal() and len(key) < 10 for key in value)
    return named and all(map(_is_number, value.values()))


def _square(row: Mapping[str, Any], name: str) -> bool:
    value = row[name]
    return _is_list(value, lambda each: _per_client({"ids": value, name: each}, name)) and len(
        value
    ) == len(row["ids"])


def _quantiles(row: Mapping[str, Any], name: str, within: tuple[float, float]) -> bool:
    return (
        _is_list(row[name], lambda value: number(value, *within) is not None) and len(row[name]) > 1
    )


_CLIENT_FIELDS: dict[str, Callable[[Mapping[str, Any], str], bool]] = {
    **dict.fromkeys(("weights", "epochs", "similarity", "score"), _per_client),
    "lambda": _by_client,
    "class_accuracy": lambda row, name: _quantiles(row, name, _SHARE),
    "confusion": lambda row, name: is_counts(row[name]) and len(row[name]) == len(row[name][0]),
    "cosines": _square,
}


def by_round(path: Path, say: Say) -> list[dict[str, Any]]:
    """The lines of a file in the order of their rounds; of two for the same round, the later one."""
    damaged: list[int] = []
    try:
        lines = list(read_lines(path, damaged.append))
    except UserError as error:
        say(str(error))
        return []
    if damaged and _unended(path, damaged[-1]):
        damaged.pop()
    if damaged:
        say(
            f"{path}: {_listed('line', damaged)} {'is' if len(damaged) == 1 else 'are'} damaged and left out."
        )
    wrong = [row["round"] for row in lines if not 0 < row["round"] < _MOST]
    if wrong:
        say(
            f"{path}: {_listed('round', wrong)} cannot exist and {'is' if len(wrong) == 1 else 'are'} left out."
        )
    rows = {row["round"]: row for row in lines if row["round"] not in wrong}
    return [rows[number] for number in sorted(rows)]


def _unended(path: Path, number: int) -> bool:
    """Whether a line is still being written: the last one of an unfinished run, without a newline."""
    lines = path.read_bytes().split(b"\n")
    return len(lines) == number and lines[-1] != b"" and not (path.parent / "summary.json").exists()


def _name_fields(path: Path, wrong: Mapping[str, Sequence[int]], say: Say) -> None:
    for name, rounds in wrong.items():
        say(f"{path}: {name} in {_listed('round', rounds)} is damaged and left out.")


def _listed(word: str, numbers: Sequence[int]) -> str:
    """`line 3`, `lines 3 and 5`, `lines 1, 2, 3, 4, 5 and 12 more`."""
    shown = [
        *map(str, numbers[:_NAMED]),
        *([f"{len(numbers) - _NAMED} more"] if len(numbers) > _NAMED else []),
    ]
    words = f"{', '.join(shown[:-1])} and {shown[-1]}" if len(shown) > 1 else shown[0]
    return f"{word if len(numbers) == 1 else f'{word}s'} {words}"


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
