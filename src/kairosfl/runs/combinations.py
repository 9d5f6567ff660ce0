"""The combinations of the lists under [sweep], without importing torch: mistakes in any are named
before it is.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from typing import Any

from kairosfl.errors import UserError, nearest
from kairosfl.runs.config import SECTIONS, checked
from kairosfl.runs.keys import flatten, updated

MOST = 10_000  # runs


def combinations(tables: Mapping[str, Any]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """What each combination sets, and its tables; in the order in which the lists are written."""
    rest = {key: value for key, value in tables.items() if key != "sweep"}
    asked = tables.get("sweep", {})
    if not isinstance(asked, Mapping):
        raise UserError(f"sweep = {asked!r} must be a section: write [sweep] and its lists below.")
    lists = flatten(asked)
    for key, values in lists.items():
        if not isinstance(values, list) or not values:
            raise UserError(f"sweep.{key} = {values!r} must be a list of values to try.")
        section = key.partition(".")[0]
        if section not in {"algorithm", "seed", *SECTIONS}:
            raise UserError(
                f"Unknown key sweep.{key}; {nearest(section, ['algorithm', 'seed', *SECTIONS])}"
            )
    count = math.prod(map(len, lists.values()))
    if count > MOST:
        raise UserError(
            f"[sweep] asks for {count:,} runs, and {MOST:,} are the most; leave out values, or make several sweeps."
        )
    for values in itertools.product(*lists.values()):
        settings = dict(zip(lists, values, strict=True))
        yield settings, updated(rest, settings)


def check(tables: Mapping[str, Any]) -> None:
    """Refuse the mistakes that can be seen without torch."""
    for _, combination in combinations(tables):
        checked(combination)
