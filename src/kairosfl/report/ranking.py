"""Which rows of a table of results are the best in a column."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from kairosfl.report.tables import Row, Spread, by_problem

_METRIC: dict[str, Callable[[Row], Spread]] = {
    "final 10 %": lambda row: row.last_tenth,
    "final": lambda row: row.final,
    "best": lambda row: row.best,
    "worst clients": lambda row: row.worst_clients,
}
_COST: dict[str, Callable[[Row], Spread]] = {
    "rounds to target": lambda row: row.rounds_to_target,
    "MB to target": lambda row: row.bytes_to_target,
}


def best_rows(rows: Sequence[Row], column: str) -> set[int]:
    """The best of those on the same data that can be compared, if there are several, in a column
    that can be ranked.

    What it cost to reach the target is ranked only if every seed got there.
    """
    score = rows[0].score
    if column in _METRIC:
        known = {i: score.sign * _METRIC[column](row).mean for i, row in enumerate(rows)}
    elif column in _COST:
        spreads = {i: _COST[column](row) for i, row in enumerate(rows)}
        known = {i: -each.mean for i, each in spreads.items() if each.count == each.asked}
    else:
        return set()
    best: set[int] = set()
    for mine in by_problem(rows).values():
        ranked = {
            i: known[i] for i in mine if rows[i].compared and math.isfinite(known.get(i, math.nan))
        }
        if len(ranked) > 1:
            best |= {i for i, value in ranked.items() if value == max(ranked.values())}
    return best
