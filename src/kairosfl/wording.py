"""Numbers, names and excerpts as a sentence says them."""

from __future__ import annotations

from collections.abc import Collection
from itertools import islice


def counted(number: int, word: str) -> str:
    """`1 run`, `2 runs`, `2 classes`."""
    if number == 1:
        return f"{number:,} {word}"
    plural = "es" if word.endswith("s") else "s"
    return f"{number:,} {word}{plural}"


def measured(value: float) -> str:
    """A loss or metric with four decimals, or in scientific notation where these do not suit."""
    if value == 0 or 1e-4 <= abs(value) < 1e5:
        return f"{value:.4f}"
    return f"{value:.2e}"


def pace(speed: float) -> str:
    """Rounds in a second, or the seconds of a round that takes longer."""
    if speed >= 1:
        return f"{speed:.1f} rounds/s"
    return f"{1 / max(speed, 1e-9):.1f} s/round"


LONGEST = 60  # letters of a name or a cell that a sentence repeats


def clipped(text: str) -> str:
    """A text without its end if it is long, as a cell in someone's file may be."""
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
