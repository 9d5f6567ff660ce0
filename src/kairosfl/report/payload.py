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
    # Otherwise the baseline that is chosen on the page sets the target.
    sets_goal = not given and len(by_problem(rows)) == 1

    of_groups = []
    of_runs = []
    for number, (group, row) in enumerate(zip(groups, rows, strict=True)):
        of_groups.append(_group(number, group, row, sets_goal))
        of_runs += [_run(number, run) for run in group.shown]
    lines = []
    heats = []
    for picture in pictures:
        if isinstance(picture, Lines):
            lines.append(_lines(picture))
        else:
            heats.append(_heat(picture))
    return {
        "groups": of_groups,
        "lines": lines,
        "heats": heats,
        "runs": of_runs,
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
    candidates = list(dict.fromkeys([*first, *compared]))
    cells: dict[str, dict[int, tuple[str, str]]] = {}
    for baseline in sorted(candidates[:BASELINES]):
        members = problems[rows[baseline].problem]
        by_label = versus(against(groups, baseline, members))
        column = {i: by_label.get(groups[i].label, UNCOMPARED) for i in members}
        column[baseline] = ("baseline", "")
        cells[str(baseline)] = column
    return cells


def _group(number: int, group: Group, row: Row, sets_goal: bool) -> dict[str, Any]:
    final = goal = None
    if row.compared:
        final = _rounded(row.last_tenth.mean)
    if row.compared and sets_goal:
        goal = _rounded(group.score.rounded(row.last_tenth.mean))
    periods = [[left, right, round(share, 3)] for left, right, share in followed_periods(group)]
    return {
        "label": group.label,
        "letter": letter(number),
        "problem": group.problem,
        "seeds": [run.seed for run in group.runs],
        "final": final,
        "goal": goal,
        "reached": reached(f"{group.label}, the baseline,", row.when),
        "critical": periods,
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
    deviation = seeds = None
    if len(series.seeds) > 1:
        deviation = short(numbers(series.deviation))
        seeds = [short(numbers(seed, DIGITS - 1)) for seed in series.seeds]
    return {
        "group": series.group,
        "name": series.name,
        "dashed": series.dashed,
        "x": short(numbers(series.x)),
        "mean": short(numbers(series.mean)),
        "count": short(list(map(int, series.count))),
        "deviation": deviation,
        "seeds": seeds,
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
    span = high - low if high != low else 1.0
    share = (grid - low) / span
    steps = np.where(np.isfinite(grid), 1 + np.round(65534 * np.nan_to_num(share)), 0)
    return base64.b64encode(steps.astype("<u2").tobytes()).decode()


def _run(number: int, run: RunData) -> dict[str, Any]:
    """What the page needs to find when a run reached a target."""
    evaluated, scores = scored(run)
    finite = np.isfinite(scores)
    rounds = run.column("round")[evaluated[finite]]
    megabytes = run.total("bytes_down", "bytes_up")[evaluated[finite]] / 1e6
    return {
        "group": number,
        "seed": run.seed,
        "round": short(numbers(rounds)),
        "score": numbers(scores[finite], 7),
        "mb": numbers(megabytes, 7),
    }


def numbers(values: Array, digits: int = DIGITS) -> Numbers:
    """Values as short JSON: a few digits, whole numbers without a point, null for none."""
    return [_rounded(value, digits) for value in values.tolist()]


def _rounded(value: float, digits: int = DIGITS) -> float | int | None:
    if not math.isfinite(value):
        return None
    rounded = float(f"{value:.{digits}g}")
    if rounded.is_integer() and abs(rounded) < 1e15:
        return int(rounded)
    return rounded


def short(values: Numbers) -> Numbers | dict[str, float | int]:
    """A long list that is constant or rises in whole steps, by first value, step and length."""
    existing = [value for value in values if value is not None]
    if len(values) < LONG or len(existing) < len(values):
        return values
    first = existing[0]
    step = existing[1] - first
    is_exact = step == 0 or (type(first) is int and type(step) is int)
    if is_exact and existing == [first + i * step for i in range(len(existing))]:
        return {"first": first, "step": step, "length": len(values)}
    return values
