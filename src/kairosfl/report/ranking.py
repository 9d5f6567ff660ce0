"""Which rows of a table of results are the best in a column."""

from __future__ import annotations

import math
from collections.abc import Sequence

from kairosfl.report.tables import Row, Spread, by_problem

# The field of a row that a column shows.
_METRIC = {
    "final 10 %": "last_tenth",
    "final": "final",
    "best": "best",
    "worst clients": "worst_clients",
}
_COST = {"rounds to target": "rounds_to_target", "MB to target": "bytes_to_target"}


def best_rows(rows: Sequence[Row], column: str) -> set[int]:
    """The best rows on the same data in a column; none if it cannot be ranked.

    Only rows that can be compared are ranked, and only if there are several. What it cost to reach
    the target is ranked only if every seed got there.
    """
    ranks = [_rank(row, column) for row in rows]
    best: set[int] = set()
    for members in by_problem(rows).values():
        ranked = [i for i in members if rows[i].compared and math.isfinite(ranks[i])]
        if len(ranked) > 1:
            highest = max(ranks[i] for i in ranked)
            best.update(i for i in ranked if ranks[i] == highest)
    return best


def _rank(row: Row, column: str) -> float:
    """What a row is ranked by, the best highest; NaN if it is not."""
    if column in _METRIC:
        spread: Spread = getattr(row, _METRIC[column])
        return row.score.sign * spread.mean
    if column in _COST:
        cost: Spread = getattr(row, _COST[column])
        return -cost.mean if cost.count == cost.asked else math.nan
    return math.nan
