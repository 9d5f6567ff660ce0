"""Numbers, names and excerpts as a sentence says them."""

from __future__ import annotations

from collections.abc import Collection
from itertools import islice


def counted(number: int, word: str) -> str:
    """`1 run`, `2 runs`, `2 classes`."""
    ending = "" if number == 1 else "es" if word.endswith("s") else "s"
    return f"{number:,} {word}{ending}"


def measured(value: float) -> str:
    """A loss or metric with four decimals; in scientific notation once it has exploded, or is too
    small for them.
    """
    return f"{value:.4f}" if value == 0 or 1e-4 <= abs(value) < 1e5 else f"{value:.2e}"


def pace(speed: float) -> str:
    """Rounds in a second, or the seconds of a round that takes longer."""
    return f"{speed:.1f} rounds/s" if speed >= 1 else f"{1 / max(speed, 1e-9):.1f} s/round"


LONGEST = 60  # letters of a name or a cell that a sentence repeats


def clipped(text: str) -> str:
    """A text without its end if it is long: a cell or a name in someone's file may have thousands
    of letters.
    """
    if len(text) <= LONGEST:
        return text
    return f"{text[:LONGEST]}… ({len(text):,} characters)"


def excerpt(text: str) -> str:
    """A text in quotes, without its end if it is long."""
    if len(text) <= LONGEST:
        return repr(text)
    return f"{text[:LONGEST]!r}… ({len(text):,} characters)"


def listed(names: Collection[str], most: int = 20) -> str:
    """Names with commas, of many the first ones and how many more there are."""
    first = ", ".join(clipped(name) for name in islice(names, most))
    if len(names) <= most:
        return first
    return f"{first} and {len(names) - most:,} more"
