"""Measures of one round's updates against numpy."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from kairosfl.detectors import coherence, cosine_matrix, elud, measured, squared_norms

DELTA = np.random.default_rng(0).normal(size=(6, 40)) + 0.2


def cosines(delta: np.ndarray) -> np.ndarray:
    m = len(delta)
    found = np.zeros((m, m))
    for i in range(m):
        for j in range(m):
            lengths = np.linalg.norm(delta[i]) * np.linalg.norm(delta[j])
            found[i, j] = delta[i] @ delta[j] / lengths if lengths else 0.0
    return found


def test_squared_norms() -> None:
    np.testing.assert_allclose(
        squared_norms(torch.from_numpy(DELTA)), (DELTA**2).sum(1), rtol=1e-12
    )


def test_squared_norms_in_float32() -> None:
    delta = np.random.default_rng(1).normal(size=(7, 50_003)) * 10.0 ** np.arange(-3, 4)[:, None]
    delta = delta.astype(np.float32)
    exact = (delta.astype(np.float64) ** 2).sum(1)
    np.testing.assert_allclose(squared_norms(torch.from_numpy(delta)), exact, rtol=5e-6)


def test_what_is_measured_at_once_is_what_is_measured_one_by_one() -> None:
    delta = torch.from_numpy(DELTA)
    squares = squared_norms(delta)
    found = measured(delta)
    assert found.squares.tolist() == squares.tolist()
    assert (found.elud, found.coherence) == (
        float(elud(delta, squares)),
        float(coherence(delta, squares)),
    )
    nothing = measured(delta[:0])
    assert len(nothing.squares) == 0
    assert math.isnan(nothing.elud)
    assert math.isnan(nothing.coherence)


def test_elud() -> None:
    delta = torch.from_numpy(DELTA)
    expected = np.sqrt(np.mean(np.linalg.norm(DELTA, axis=1) ** 2)) / np.linalg.norm(DELTA.mean(0))
    assert float(elud(delta, squared_norms(delta))) == pytest.approx(expected, rel=1e-12)


def test_elud_by_hand() -> None:
    # Two orthogonal updates of length 3 and 4: sqrt((9 + 16) / 2) over the length 2.5 of their
    # mean.
    delta = torch.tensor([[3.0, 0.0], [0.0, 4.0]])
    assert float(elud(delta, squared_norms(delta))) == pytest.approx(math.sqrt(12.5) / 2.5)
    same = torch.tensor([[1.0, 2.0]] * 3)
    assert float(elud(same, squared_norms(same))) == pytest.approx(1.0)


def test_elud_of_updates_that_cancel_is_infinite() -> None:
    delta = torch.tensor([[1.0, 0.0], [-1.0, 0.0]])
    assert float(elud(delta, squared_norms(delta))) == math.inf


@pytest.mark.parametrize("zero", [False, True])
def test_coherence_is_the_mean_cosine_of_pairs(zero: bool) -> None:
    given = DELTA.copy()
    if zero:
        given[2] = 0
    off = ~np.eye(6, dtype=bool)
    delta = torch.from_numpy(given)
    assert float(coherence(delta, squared_norms(delta))) == pytest.approx(
        cosines(given)[off].mean(), rel=1e-12
    )


def test_coherence_of_one_client_is_unknown() -> None:
    delta = torch.ones(1, 3)
    assert math.isnan(coherence(delta, squared_norms(delta)))


def test_cosine_matrix() -> None:
    given = DELTA.copy()
    given[4] = 0
    np.testing.assert_allclose(
        cosine_matrix(torch.from_numpy(given)), cosines(given), rtol=0, atol=1e-14
    )
