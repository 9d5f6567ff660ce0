"""The data of a page: plots as JSON, with shortened numbers and packed heat maps."""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from kairosfl.report.checked import Array
from kairosfl.report.figures import followed_periods
from kairosfl.report.parts import UNCOMPARED, versus
from kairosfl.report.pictures import BAND, CRITICAL, HeatMap, Lines, Picture, Series, letter
from kairosfl.report.read import Group, RunData
from kairosfl.report.tables import Row, against, by_problem, scored
from kairosfl.report.verdict import reached, target_words

DIGITS = 5  # significant ones: more than a screen shows
LONG = 64  # a shorter list is written out
BASELINES = 40  # that can be chosen on the page: every one has a comparison with all others

Numbers = list[float | int | None]


def payload(
    groups: Sequence[Group],
    rows: Sequence[Row],
    pictures: Sequence[Picture],
    target: float,
    *,
    given: bool,
    varied: Mapping[str, Sequence[str]],
) -> dict[str, Any]:
    """All that the scripts of the page read."""
    score = groups[0].score
    baselines = [number for number, row in enumerate(rows) if row.baseline]
    sets_goal = (
        not given and len(by_problem(rows)) == 1
    )  # the baseline that is chosen on the page does
    return {
        "groups": [
            _group(i, group, row, sets_goal)
            for i, (group, row) in enumerate(zip(groups, rows, strict=True))
        ],
        "lines": [_lines(each) for each in pictures if isinstance(each, Lines)],
        "heats": [_heat(each) for each in pictures if isinstance(each, HeatMap)],
        "runs": [_run(number, run) for number, group in enumerate(groups) for run in group.shown],
        "varied": varied,
        "baselines": baselines,
        "versus": _versus(groups, rows, baselines),
        "words": {"band": BAND, "critical": CRITICAL, "target": target_words(rows, target, given)},
        "target": target if math.isfinite(target) else None,
        "metric": {
            "scale": score.scale,
            "sign": score.sign,
            "words": score.words,
            "percent": score.percent,
        },
    }


def _versus(
    groups: Sequence[Group], rows: Sequence[Row], first: Sequence[int]
) -> dict[str, dict[int, tuple[str, str]]]:
    """For each group that can be chosen as the baseline, the cells of all on the same data."""
    problems = by_problem(rows)
    compared = [i for i, row in enumerate(rows) if row.compared and len(problems[row.problem]) > 1]
    number = {group.label: i for i, group in enumerate(groups)}
    found = {}
    for i in list(dict.fromkeys([*first, *compared]))[:BASELINES]:
        mine = problems[rows[i].problem]
        cells = versus(against(groups, i, mine))
        known = {number[label]: cell for label, cell in cells.items()} | {i: ("baseline", "")}
        found[str(i)] = {each: known.get(each, UNCOMPARED) for each in mine}
    return dict(sorted(found.items(), key=lambda each: int(each[0])))


def _group(number: int, group: Group, row: Row, sets_goal: bool) -> dict[str, Any]:
    return {
        "label": group.label,
        "letter": letter(number),
        "problem": group.problem,
        "seeds": [run.seed for run in group.runs],
        "final": _rounded(row.last_tenth.mean) if row.compared else None,
        "goal": _rounded(group.score.rounded(row.last_tenth.mean))
        if row.compared and sets_goal
        else None,
        "reached": reached(f"{group.label}, the baseline,", row.when),
        "critical": [
            [left, right, round(share, 3)] for left, right, share in followed_periods(group)
        ],
    }


def _lines(picture: Lines) -> dict[str, Any]:
    return {
        "key": picture.key,
        "x_label": picture.x_label,
        "percent": picture.percent,
        "steps": picture.steps,
        "series": [_series(series) for series in picture.series],
    }


def _series(series: Series) -> dict[str, Any]:
    several = len(series.seeds) > 1
    return {
        "group": series.group,
        "name": series.name,
        "dashed": series.dashed,
        "x": short(numbers(series.x)),
        "mean": short(numbers(series.mean)),
        "count": short([int(count) for count in series.count]),
        "deviation": short(numbers(series.deviation)) if several else None,
        "seeds": [short(numbers(seed, DIGITS - 1)) for seed in series.seeds] if several else None,
    }


def _heat(picture: HeatMap) -> dict[str, Any]:
    grid = picture.grid
    low, high = picture.span
    return {
        "key": picture.key,
        "x_label": picture.x_label,
        "y_label": picture.y_label,
        "value_label": picture.value_label,
        "x_range": picture.x_range,
        "y_range": picture.y_range,
        "rows": grid.shape[0],
        "columns": grid.shape[1],
        "names": picture.names,
        "power": picture.power,
        "low": low,
        "high": high,
        "data": pack(grid, low, high),
    }


def pack(grid: Array, low: float, high: float) -> str:
    """A grid as 16-bit steps between low and high, row by row, in base64; 0 means no value."""
    share = (grid - low) / ((high - low) or 1.0)
    steps = np.where(np.isfinite(grid), 1 + np.round(65534 * np.nan_to_num(share)), 0)
    return base64.b64encode(steps.astype("<u2").tobytes()).decode()


def _run(number: int, run: RunData) -> dict[str, Any]:
    """What the page needs to find when a run reached a target."""
    index, values = scored(run)
    index, values = index[np.isfinite(values)], values[np.isfinite(values)]
    megabytes = run.total("bytes_down", "bytes_up")[index] / 1e6
    return {
        "group": number,
        "seed": run.seed,
        "round": short(numbers(run.column("round")[index])),
        "score": numbers(values, 7),
        "mb": numbers(megabytes, 7),
    }


def numbers(values: Array, digits: int = DIGITS) -> Numbers:
    """Values as short JSON: a few digits, whole numbers without a point, null for none."""
    return [_rounded(value, digits) for value in values.tolist()]


def _rounded(value: float, digits: int = DIGITS) -> float | int | None:
    if not math.isfinite(value):
        return None
    rounded = float(f"{value:.{digits}g}")
    return int(rounded) if rounded.is_integer() and abs(rounded) < 1e15 else rounded


def short(values: Numbers) -> Numbers | dict[str, float | int]:
    """A long list that is constant or rises in whole steps, as rounds do, as its first value, step
    and length.
    """
    if len(values) < LONG or any(value is None for value in values):
        return values
    first, step = values[0], values[1] - values[0]  # type: ignore[operator]
    whole = step == 0 or (type(first) is int and type(step) is int)
    if whole and all(value == first + i * step for i, value in enumerate(values)):  # type: ignore[operator]
        return {"first": first, "step": step, "length": len(values)}  # type: ignore[dict-item]
    return values
