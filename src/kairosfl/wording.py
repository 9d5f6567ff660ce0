"""Numbers as a sentence says them."""

from __future__ import annotations


def counted(number: int, word: str) -> str:
    """`1 run`, `2 runs`, `2 classes`."""
    ending = "" if number == 1 else "es" if word.endswith("s") else "s"
    return f"{number:,} {word}{ending}"


def measured(value: float) -> str:
    """A loss or metric with four decimals; in scientific notation once it has exploded, or is too small for them."""
    return f"{value:.4f}" if value == 0 or 1e-4 <= abs(value) < 1e5 else f"{value:.2e}"


def pace(speed: float) -> str:
    """Rounds in a second, or the seconds of a round that takes longer."""
    return f"{speed:.1f} rounds/s" if speed >= 1 else f"{1 / max(speed, 1e-9):.1f} s/round"
