"""Whether the harm of deficits lasts: differences over seeds, what is beyond chance, and the
verdict in words.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

Lost = Sequence[Sequence[float]]  # by window, by seed

ENOUGH = 4  # seeds with which a null result is one
SIGNS = 8  # seeds of which all lose by chance once in 256 times
# Student's t, two-sided 99 %, by the number of seeds: with five windows, one deficit in forty seems
# harmful by chance.
CERTAIN = {2: 63.66, 3: 9.92, 4: 5.84, 5: 4.60, 6: 4.03, 7: 3.71, 8: 3.50, 9: 3.36, 10: 3.25}
LIKELY = {
    4: 3.18,
    5: 2.78,
    6: 2.57,
    7: 2.45,
    8: 2.36,
    9: 2.31,
    10: 2.26,
}  # 95 %: too large to be called absent


def spread(values: Sequence[float]) -> dict[str, float | None]:
    """Mean and standard error."""
    error = float(np.std(values, ddof=1)) / len(values) ** 0.5 if len(values) > 1 else None
    return {"mean": float(np.mean(values)), "error": error}


def lasting(lost: Lost, idle: Sequence[int] = ()) -> list[int]:
    """The windows, from 1, whose harm is beyond chance; `idle` ones left out nothing."""
    return [window for window in _above(lost, CERTAIN, 3.17, idle) if not _agree(lost[window - 1])]


def verdict(lost: Lost, number: int, idle: Sequence[int] = (), unit: str = "") -> str:
    """What is known about a deficit in windows of `number`; those that had no less of `unit` are
    not judged.
    """
    seeds = len(lost[0])
    none = f"had no fewer {unit} than without a deficit"
    after = (
        f"; {_listed(idle)} {none}, and {'are' if len(idle) > 1 else 'is'} not judged"
        if idle
        else ""
    )
    judged = [values for window, values in enumerate(lost, 1) if window not in idle]
    if not judged:
        return f"undecided; no window counts, since each {none}"
    if not any(map(any, judged)):
        return f"undecided; it changed no score at all: look whether the runs learn{after}"
    if seeds < 2:
        return f"undecided; one seed does not show which differences are chance; use --seeds {ENOUGH} or more{after}"
    doubtful = _above(lost, LIKELY, 2.0 if seeds < ENOUGH else 2.23, idle)
    if found := lasting(lost, idle):
        open_yet = [window for window in doubtful if window not in found]
        rest = f"; {_listed(open_yet)} undecided" if open_yet else ""
        return f"harm done in {_listed(found)} of {number} lasts (99 % interval above zero){rest}{after}"
    if seeds < ENOUGH or doubtful:
        where, more = (
            f" ({_listed(doubtful)})" if doubtful else "",
            ENOUGH if seeds < ENOUGH else 2 * seeds,
        )
        return f"undecided; {seeds} seeds are too few to tell harm{where} from chance; use --seeds {more}{after}"
    return (
        f"no critical period here; no harm before the final 10 % of rounds is beyond chance{after}"
    )


def _above(
    lost: Lost, bounds: Mapping[int, float], otherwise: float, idle: Sequence[int]
) -> list[int]:
    """The windows, from 1, whose mean is more than so many standard errors above zero."""
    found = []
    for window, values in enumerate(lost, 1):
        harm = spread(values)
        beyond = bounds.get(len(values), otherwise) * (harm["error"] or 0.0)
        if window not in idle and len(values) > 1 and (harm["mean"] or 0.0) > beyond:
            found.append(window)
    return found


def _agree(values: Sequence[float]) -> bool:
    """Whether a few seeds all lost the same, which says nothing about chance: it happens with few
    test samples.
    """
    return len(values) < SIGNS and bool(np.ptp(values) < 1e-9 * max(map(abs, values)))


def _listed(windows: Sequence[int]) -> str:
    return f"window{'s' * (len(windows) > 1)} {', '.join(map(str, windows))}"
