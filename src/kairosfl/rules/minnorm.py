"""The point of least norm in the convex hull of vectors, from their inner products alone.

    min λᵀGλ    over    λ ≥ 0, Σ λ_i = 1

With unit vectors u_i = v_i / ‖v_i‖, C their cosines and a_i = min‖v‖ / ‖v_i‖ this is a
least-squares problem without an equation: z ≥ 0 minimises zᵀCz + (aᵀz − 1)², and λ ∝ a·z (Wolfe,
"Finding the nearest point in a polytope", 1976). A ridge makes its solution unique. Exchanging
whole blocks of indices finds it in a handful of linear systems almost always (Júdice and Pires,
1994; Kim and Park, 2011); Lawson and Hanson's active set, which descends in every step and
therefore terminates, takes over if that does not converge.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Mask = npt.NDArray[np.bool_]

RIDGE = 1e-8  # of every squared norm; the duality gap that it leaves is of the same size
SLACK = 1e-14  # how far below zero rounding may take a multiplier
EXCHANGES = 20


def gap(gram: Floats, weights: Floats) -> float:
    """Duality gap λᵀGλ − min_i (Gλ)_i.

    Twice that is the most by which λᵀGλ can exceed the least squared norm.
    """
    slopes = gram @ weights
    return float(weights @ slopes - slopes.min())


def min_norm(gram: Floats, start: Floats | None = None) -> Floats:
    """λ of the point of least norm, `[K]` for a Gram matrix `[K, K]`.

    The positive entries of `start` are the first guess at those of λ; they change the time, not the
    answer. Equal vectors get equal weights.
    """
    squares = np.diag(gram)
    if not squares.min() > 0:  # a vector of length zero is the answer
        weights: Floats = (squares <= 0).astype(np.float64)
        weights /= weights.sum()
        return weights
    lengths = np.sqrt(squares)
    a = lengths.min() / lengths
    matrix = gram / lengths / lengths[:, None] + a * a[:, None]
    matrix[np.diag_indices_from(matrix)] += RIDGE

    inside: Mask = np.ones(len(a), bool)
    if start is not None:
        inside = start > 0
    z, solved = _exchange(matrix, a, inside)
    if not solved:
        z = _active_set(matrix, a, z)
    weights = a * z
    weights /= weights.sum()
    return weights


def _solve(matrix: Floats, a: Floats, inside: Mask) -> Floats:
    """The best point with zeros outside of the mask, of which entries may be negative."""
    z = np.zeros(len(a))
    z[inside] = np.linalg.solve(matrix[np.ix_(inside, inside)], a[inside])
    return z


def _exchange(matrix: Floats, a: Floats, inside: Mask) -> tuple[Floats, bool]:
    """The solution and True, or the best z ≥ 0 that the exchanges found and False."""
    best = np.zeros(len(a))
    lowest = 0.0
    for _ in range(EXCHANGES):
        z = _solve(matrix, a, inside)
        wrong = np.where(inside, z < 0, matrix @ z - a < -SLACK)
        if not wrong.any():
            return z, True
        z = z.clip(min=0)
        objective = float(z @ (matrix @ z - 2 * a))
        if objective < lowest:
            best = z
            lowest = objective
        inside = inside ^ wrong
    return best, False


def _active_set(matrix: Floats, a: Floats, z: Floats) -> Floats:
    """Descend from z ≥ 0.

    Go to the best point on the active indices, drop those that it makes negative, add one; repeat.
    """
    inside = z > 0
    lowest = np.inf
    while True:
        aim, inside = _feasible(matrix, a, z, inside)
        slopes = matrix @ aim - a
        objective = float(aim @ (slopes - a))
        if not objective < lowest:  # any further decrease is below rounding error
            return z
        z = aim
        lowest = objective
        if slopes.min() >= -SLACK:
            return z
        inside[np.argmin(slopes)] = True


def _feasible(matrix: Floats, a: Floats, z: Floats, inside: Mask) -> tuple[Floats, Mask]:
    """The best point on the active indices with none of them negative, and those left active.

    On the way from z to the best point the first index to reach zero is dropped, until none does.
    """
    now = z
    aim = _solve(matrix, a, inside)
    falling = inside & (aim <= 0)
    while falling.any():
        steps = np.divide(now, now - aim, out=np.zeros(len(a)), where=now > aim)
        ratios = np.where(falling, steps, np.inf)
        now = (now + ratios.min() * (aim - now)).clip(min=0)
        inside = inside & (now > 0)
        inside[np.argmin(ratios)] = False
        now[~inside] = 0
        aim = _solve(matrix, a, inside)
        falling = inside & (aim <= 0)
    return aim, inside


def frank_wolfe(gram: Floats, iterations: int = 1000, tolerance: float = 1e-5) -> Floats:
    """λ by the released code's Frank-Wolfe: from the best pair, until λ hardly changes.

    It does not test the duality gap, which on a hundred unit vectors ends at 1e-5 to 1e-4.

    Args:
        gram: The inner products, `[K, K]`.
        iterations: The most steps that it takes.
        tolerance: It stops when λ changes by less than this in total.
    """
    count = len(gram)
    if count == 1:
        return np.ones(1)

    # The best point between any two of the vectors.
    squares = np.diag(gram)
    first, second = np.triu_indices(count, 1)
    part, cost = _between(squares[first], gram[first, second], squares[second])
    pair = int(np.argmin(cost))
    weights = np.zeros(count)
    weights[first[pair]] = part[pair]
    weights[second[pair]] = 1 - part[pair]

    # From there towards one vertex at a time.
    for _ in range(iterations):
        slopes = gram @ weights
        vertex = int(np.argmin(slopes))
        part, _ = _between(weights @ slopes, slopes[vertex], squares[vertex])
        moved = part * weights
        moved[vertex] += 1 - part
        if np.abs(moved - weights).sum() < tolerance:
            break
        weights = moved
    return weights


def _between(one: Floats, product: Floats, two: Floats) -> tuple[Floats, Floats]:
    """The share of the first of two vectors in the shortest point between them, and its square."""
    with np.errstate(divide="ignore", invalid="ignore"):
        part = (two - product) / (one + two - 2 * product)
    cost = two + part * (product - two)
    ends = [product >= one, product >= two]
    return np.select(ends, [0.999, 0.001], part), np.select(ends, [one, two], cost)
