"""Ways in which a node can fail while it answers, drawn at random: a word, and a number after a
colon.
"""

from __future__ import annotations

import numpy as np

SEEN = ("die:0", "drop:0", "dup:0", "huge:300", "many:3000")

# The least and the most of the number. An honest report on a small model has three parts.
DRAWN = {
    "die": (0, 2),  # killed after so many parts
    "drop": (0, 2),  # no more parts after so many
    "hole": (0, 2),  # all parts but this one
    "dup": (0, 0),  # announced twice, and the contents sent as if it had been once
    "slow": (35, 45),  # seconds before every part, of which two are sent at a time
    "huge": (2, 8),  # megabytes in a record of their own
    "fat": (2, 8),  # megabytes among the numbers
    "keys": (10_000, 15_000),  # more numbers, with long names
    "many": (2, 600),  # more records
}
TOO_LARGE = ("huge", "fat", "keys")


def draw(count: int, seed: int, without: tuple[str, ...] = ()) -> list[str]:
    """So many faults."""
    chance = np.random.default_rng(seed)
    kinds = [kind for kind in DRAWN if kind not in without]
    chosen = [kinds[i] for i in chance.integers(len(kinds), size=count)]
    return [
        f"{kind}:{chance.integers(DRAWN[kind][0], DRAWN[kind][1], endpoint=True)}"
        for kind in chosen
    ]


def reasons(fault: str, deadline: float) -> tuple[str, ...]:
    """What the log may say about a fault, the most likely first; a lot to send may not be there in
    time.
    """
    kind, _, number = fault.partition(":")
    late = f"in {deadline:g} s"
    slow = (
        f"its answer did not arrive in full {late}",
        f"no answer {late}",
        "its node went offline",
    )
    if kind == "many":
        return (f"its answer has {3 + int(number)} parts, above the 4 allowed", *slow)
    if kind in TOO_LARGE:
        return ("its answer has more than the 1.0 MB allowed", *slow)
    return slow
