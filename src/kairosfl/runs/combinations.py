"""The combinations of the lists under [sweep], checked before torch is imported."""

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
    section = tables.get("sweep", {})
    if not isinstance(section, Mapping):
        raise UserError(
            f"sweep = {section!r} must be a section: write [sweep] and its lists below."
        )
    lists = flatten(section)
    for key, values in lists.items():
        if not isinstance(values, list) or not values:
            raise UserError(f"sweep.{key} = {values!r} must be a list of values to try.")
        home = key.partition(".")[0]
        homes = ["algorithm", "seed", *SECTIONS]
        if home not in homes:
            raise UserError(f"Unknown key sweep.{key}; {nearest(home, homes)}")
    count = math.prod(map(len, lists.values()))
    if count > MOST:
        raise UserError(
            f"[sweep] asks for {count:,} runs, and {MOST:,} are the most; leave out values, or "
            "make several sweeps."
        )
    for values in itertools.product(*lists.values()):
        settings = dict(zip(lists, values, strict=True))
        yield settings, updated(rest, settings)


def check(tables: Mapping[str, Any]) -> None:
    """Refuse the mistakes that can be seen without torch."""
    for _, combination in combinations(tables):
        checked(combination)
