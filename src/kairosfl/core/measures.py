"""Measures of one round's updates: how long, how diverse, how coherent.

All take `delta`, `[m, d]`, and read it a constant number of times. `measured` returns numbers on
the host, the others their result on its device.
"""

from __future__ import annotations

from typing import NamedTuple, Self

import numpy as np
import torch
from torch import Tensor


class Measures(NamedTuple):
    """What is measured about one round's updates, on the host."""

    squares: np.ndarray  # [m] float64: ‖delta_i‖²
    elud: float
    coherence: float

    @classmethod
    def of(cls, readings: Tensor) -> Self:
        """From `readings`, on the host, so that the device needs few kernels; waits for it."""
        numbers = readings.cpu()
        squares = numbers[:-2]
        of_mean = numbers[-2:-1]
        of_units = numbers[-1:]
        return cls(
            squares.double().numpy(),
            _elud(squares, of_mean).item(),
            _coherence(squares, of_units).item(),
        )


def measured(delta: Tensor) -> Measures:
    """Squared lengths, diversity and coherence, with one wait for the device.

    NaN without updates.
    """
    return Measures.of(readings(delta))


def readings(delta: Tensor) -> Tensor:
    """What `Measures.of` needs, without waiting for the device: `[m + 2]`.

    They are ‖delta_i‖², ‖mean delta_i‖² and ‖Σ u_i‖².
    """
    if not len(delta):
        return delta.new_full((2,), torch.nan)
    squares = squared_norms(delta)
    return torch.cat([squares, _square(delta.mean(0)), _square(_units(squares) @ delta)])


def squared_norms(delta: Tensor) -> Tensor:
    """‖delta_i‖², `[m]`, without a second `[m, d]`.

    On a GPU by one kernel, elsewhere row by row, where dot is more exact.
    """
    if delta.is_cuda:
        norms: Tensor = torch.linalg.vector_norm(delta, dim=1)
        return norms.square()
    return torch.stack([row.dot(row) for row in delta.unbind()])


def elud(delta: Tensor, squares: Tensor) -> Tensor:
    """Empirical local update diversity, sqrt(mean ‖g_i‖²) / ‖mean g_i‖.

    Zeng et al., AISTATS 2025, Section 5.
    """
    return _elud(squares, _square(delta.mean(0)))[0]


def coherence(delta: Tensor, squares: Tensor) -> Tensor:
    """Mean cosine over all pairs of clients: (‖Σ u_i‖² − m) / (m (m − 1)) with unit vectors u_i.

    It is NaN for one client. An update of length zero has the cosine 0 with every other.
    """
    return _coherence(squares, _square(_units(squares) @ delta))[0]


def _square(vector: Tensor) -> Tensor:
    """Its squared length, `[1]`."""
    return (vector @ vector)[None]


def _units(squares: Tensor) -> Tensor:
    """What updates of these squared lengths are multiplied by to have length 1, or 0."""
    return torch.where(squares > 0, squares.rsqrt(), 0.0)


def _elud(squares: Tensor, of_mean: Tensor) -> Tensor:
    return (squares.double().mean() / of_mean.double()).sqrt()


def _coherence(squares: Tensor, of_units: Tensor) -> Tensor:
    m = len(squares)
    pairs = m * (m - 1) if m > 1 else torch.nan
    return (of_units.double() - (squares > 0).sum()) / pairs


def cosine_matrix(delta: Tensor) -> Tensor:
    """Cosines between every two updates, `[m, m]` (client coherence, Li et al. 2023)."""
    products = delta @ delta.T  # divided afterwards: unit vectors would be a second [m, d]
    lengths = products.diagonal().sqrt()
    scale = torch.where(lengths > 0, 1 / lengths, 0.0)
    return scale[:, None] * products * scale
