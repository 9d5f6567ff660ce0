"""The min-norm solver: exact small cases, the duality gap up to 1,000 vectors, and a general QP
solver beside it.
"""

from __future__ import annotations

import numpy as np
import pytest
from scipy.optimize import minimize, nnls

from kairosfl.rules import minnorm
from kairosfl.rules.minnorm import frank_wolfe, gap, min_norm


def vectors(kind: str, count: int, length: int, seed: int = 0) -> np.ndarray:
    draw = np.random.default_rng(seed)
    found = draw.normal(size=(count, length))
    if kind == "shifted":  # all on one side of the origin: few vectors carry the answer
        found += 0.5
    if kind == "unit":
        found /= np.linalg.norm(found, axis=1, keepdims=True)
    if kind == "lengths":  # squared norms over six orders of magnitude
        found *= np.exp(1.5 * draw.normal(size=(count, 1)))
        found += 0.1
    if kind == "repeated":
        found = found[draw.integers(0, count, count)] + 1
    return found


def test_orthogonal_vectors_count_by_their_inverse_squares() -> None:
    np.testing.assert_allclose(
        min_norm(np.diag([1.0, 4.0, 16.0])), np.array([16, 4, 1]) / 21, rtol=1e-7
    )


def test_two_vectors_by_hand() -> None:
    # (3, 0) and (1, 1): the nearest point to the origin between them is the end (1, 1).
    np.testing.assert_array_equal(min_norm(np.array([[9.0, 3.0], [3.0, 2.0]])), [0, 1])
    # (1, 2) and (1, −1): the point (1, 0), a third of the way from the second.
    np.testing.assert_allclose(
        min_norm(np.array([[5.0, -1.0], [-1.0, 2.0]])), [1 / 3, 2 / 3], rtol=1e-7
    )


def test_one_vector_and_equal_vectors() -> None:
    np.testing.assert_array_equal(min_norm(np.array([[7.0]])), [1])
    np.testing.assert_allclose(min_norm(np.full((5, 5), 3.0)), np.full(5, 0.2), rtol=1e-6)
    np.testing.assert_array_equal(min_norm(np.diag([1.0, 0.0, 0.0, 2.0])), [0, 0.5, 0.5, 0])


@pytest.mark.parametrize("kind", ["raw", "shifted", "unit", "lengths", "repeated"])
@pytest.mark.parametrize(
    ("count", "length"), [(2, 3), (10, 2), (10, 100), (100, 50), (1000, 50), (1000, 2000)]
)
def test_the_duality_gap_is_below_a_millionth(kind: str, count: int, length: int) -> None:
    given = vectors(kind, count, length)
    gram = given @ given.T
    weights = min_norm(gram)
    assert weights.min() >= 0
    assert weights.sum() == pytest.approx(1, abs=1e-12)
    assert gap(gram, weights) <= 1e-6 * gram.diagonal().max()


@pytest.mark.parametrize("kind", ["raw", "shifted", "unit"])
@pytest.mark.parametrize("length", [4, 12, 60])
def test_a_general_qp_solver_finds_the_same_point(kind: str, length: int) -> None:
    given = vectors(kind, 25, length, seed=length)
    gram = given @ given.T
    other = minimize(
        lambda w: w @ gram @ w,
        np.full(25, 1 / 25),
        jac=lambda w: 2 * gram @ w,
        bounds=[(0, 1)] * 25,
        constraints={"type": "eq", "fun": lambda w: w.sum() - 1, "jac": lambda w: np.ones(25)},
        method="SLSQP",
        options={"ftol": 1e-15, "maxiter": 1000},
    )
    mine = min_norm(gram)
    np.testing.assert_allclose(mine @ given, other.x @ given, atol=2e-5)
    assert mine @ gram @ mine <= other.fun + 1e-8 * gram.diagonal().max()


@pytest.mark.parametrize(("count", "length"), [(40, 20), (300, 40), (300, 600)])
def test_non_negative_least_squares_finds_the_same_weights(count: int, length: int) -> None:
    given = vectors("shifted", count, length, seed=1)
    found, _ = nnls(np.vstack([given.T, np.ones(count)]), np.append(np.zeros(length), 1.0))
    np.testing.assert_allclose(min_norm(given @ given.T), found / found.sum(), atol=1e-7)


@pytest.mark.parametrize(("count", "length"), [(100, 50), (200, 400)])
def test_where_it_starts_does_not_change_the_answer(count: int, length: int) -> None:
    given = vectors("unit", count, length)
    gram = given @ given.T
    weights = min_norm(gram)
    draw = np.random.default_rng(2)
    for start in (
        weights,
        np.zeros(count),
        np.eye(count)[0],
        (draw.random(count) < 0.5).astype(float),
    ):
        np.testing.assert_allclose(min_norm(gram, start), weights, atol=1e-6)


@pytest.mark.parametrize("kind", ["raw", "shifted", "unit", "lengths", "repeated"])
def test_the_active_set_alone_finds_the_answer(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    given = vectors(kind, 60, 30)
    gram = given @ given.T
    weights = min_norm(gram)
    monkeypatch.setattr(minnorm, "EXCHANGES", 0)
    alone = min_norm(gram)
    assert gap(gram, alone) <= 1e-6 * gram.diagonal().max()
    np.testing.assert_allclose(alone @ given, weights @ given, atol=1e-5)


def released(gram: np.ndarray) -> np.ndarray:
    """The released procedure once more, pair by pair and with plain numbers."""

    def between(one: float, product: float, two: float) -> tuple[float, float]:
        if product >= one:
            return 0.999, one
        if product >= two:
            return 0.001, two
        part = (two - product) / (one + two - 2 * product)
        return part, two + part * (product - two)

    count = len(gram)
    shortest, weights = np.inf, np.zeros(count)
    for i in range(count):
        for j in range(i + 1, count):
            part, cost = between(gram[i, i], gram[i, j], gram[j, j])
            if cost < shortest:
                shortest, weights = cost, np.zeros(count)
                weights[i], weights[j] = part, 1 - part
    for _ in range(1000):
        t = int(np.argmin(gram @ weights))
        part, _ = between(weights @ gram @ weights, float(gram[t] @ weights), gram[t, t])
        moved = part * weights
        moved[t] += 1 - part
        if np.abs(moved - weights).sum() < 1e-5:
            return weights
        weights = moved
    return weights


@pytest.mark.parametrize("kind", ["raw", "shifted", "unit", "lengths"])
def test_frank_wolfe_is_the_released_one(kind: str) -> None:
    given = vectors(kind, 20, 30)
    gram = given @ given.T
    np.testing.assert_allclose(frank_wolfe(gram), released(gram), rtol=1e-9, atol=1e-15)


def test_frank_wolfe_by_hand() -> None:
    np.testing.assert_array_equal(frank_wolfe(np.array([[2.0]])), [1])
    # Two orthogonal unit vectors: the pair is the answer, and the next step does not move it.
    np.testing.assert_allclose(frank_wolfe(np.eye(2)), [0.5, 0.5])
    # (1, 1) before (2, 0): the shorter end, clipped to 0.999 of it; the first step leads on to
    # 0.999 + 0.001 · 0.999.
    ends = frank_wolfe(np.array([[2.0, 2.0], [2.0, 4.0]]))
    assert ends[0] == pytest.approx(1, abs=1e-4)


def test_frank_wolfe_stops_short_of_the_active_set() -> None:
    given = vectors("unit", 100, 400)
    gram = given @ given.T
    assert gap(gram, min_norm(gram)) < 1e-9 < 1e-6 < gap(gram, frank_wolfe(gram))
