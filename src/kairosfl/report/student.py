"""Student's t: the paired test, its interval, and Holm's correction."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

CONFIDENCE = 0.95
SIGNS = 8  # seeds, from which on it says something that all differ in the same direction


def paired_t(differences: Sequence[float]) -> float:
    """The two-sided p-value of "the mean difference is zero"; NaN if they say nothing about chance.

    That is with fewer than two differences, and where a few of them agree to the last digit, which
    happens with few test samples. Of many that agree it is the p of a sign test.
    """
    n = len(differences)
    if n < 2 or alike(differences):
        return math.nan
    if not any(differences):
        return 1.0
    if agree(differences):
        return 2.0 ** (1 - n)
    standard_error = statistics.stdev(differences) / math.sqrt(n)
    return student_tail(statistics.fmean(differences) / standard_error, n - 1)


def agree(differences: Sequence[float]) -> bool:
    """Whether several differences are the same, up to rounding, and not zero."""
    if len(differences) < 2:
        return False
    largest = max(map(abs, differences))
    return largest > 0 and max(differences) - min(differences) < 1e-9 * largest


def alike(differences: Sequence[float]) -> bool:
    """Whether too few differences are the same to tell them from chance."""
    return len(differences) < SIGNS and agree(differences)


def interval(mean: float, deviation: float, count: int) -> tuple[float, float]:
    """The confidence interval of the mean of `count` differences; NaN with fewer than two."""
    if count < 2:
        return math.nan, math.nan
    half = student_quantile(1 - CONFIDENCE, count - 1) * deviation / math.sqrt(count)
    return mean - half, mean + half


def student_tail(t: float, freedom: int) -> float:
    """P(|T| > |t|) for whole degrees of freedom, in closed form.

    Abramowitz and Stegun, 26.7.3 and 26.7.4.
    """
    angle = math.atan(abs(t) / math.sqrt(freedom))
    sine = math.sin(angle)
    cosine = math.cos(angle)
    is_odd = freedom % 2 == 1
    term = cosine if is_odd else 1.0
    total = term if freedom > 1 else 0.0
    for k in range(3 if is_odd else 2, freedom, 2):
        term *= cosine * cosine * (k - 1) / k
        total += term
    if is_odd:
        return max(0.0, 1.0 - (angle + sine * total) * 2 / math.pi)
    return max(0.0, 1.0 - sine * total)


def student_quantile(tail: float, freedom: int) -> float:
    """The t with P(|T| > t) = tail, by bisection."""
    low, high = 0.0, 1.0
    while student_tail(high, freedom) > tail:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        if student_tail(middle, freedom) > tail:
            low = middle
        else:
            high = middle
    return high


def holm(values: Sequence[float]) -> list[float]:
    """p-values corrected for as many tests as there are values; NaN stays and does not count."""
    tested = [i for i, p in enumerate(values) if math.isfinite(p)]
    adjusted = [math.nan] * len(values)
    highest = 0.0
    for rank, i in enumerate(sorted(tested, key=lambda i: values[i])):
        highest = max(highest, min(1.0, (len(tested) - rank) * values[i]))
        adjusted[i] = highest
    return adjusted
