"""Measures of one round's updates: how long, how diverse, how coherent.

All take `delta`, `[m, d]`, and read it a constant number of times. `measured` returns numbers on the host, the others
their result on its device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor


@dataclass(frozen=True)
class Signals:
    """What is known about the progress of a run. NaN: not measured yet."""

    critical: bool = True
    fgn: float = float("nan")
    fisher: float = float("nan")
    elud: float = float("nan")
    coherence: float = float("nan")


class Measures(NamedTuple):
    """What is measured about one round's updates, on the host."""

    squares: np.ndarray  # [m] float64: ‖delta_i‖²
    elud: float
    coherence: float


def measured(delta: Tensor) -> Measures:
    """Squared lengths, diversity and coherence, with one wait for the device. NaN without updates."""
    if not len(delta):
        return Measures(np.empty(0), float("nan"), float("nan"))
    squares = squared_norms(delta)
    pair = torch.stack([elud(delta, squares), coherence(delta, squares)])
    found = torch.cat([squares.double(), pair]).cpu().numpy()
    return Measures(found[:-2], *found[-2:].tolist())


def squared_norms(delta: Tensor) -> Tensor:
    """‖delta_i‖², `[m]`, without a second `[m, d]`: by one kernel on a GPU, and row by row where dot is more exact."""
    if delta.is_cuda:
        norms: Tensor = torch.linalg.vector_norm(delta, dim=1)
        return norms.square()
    return torch.stack([row.dot(row) for row in delta.unbind()])


def elud(delta: Tensor, squares: Tensor) -> Tensor:
    """Empirical local update diversity, sqrt(mean ‖g_i‖²) / ‖mean g_i‖ (Zeng et al., AISTATS 2025, Section 5)."""
    mean = delta.mean(0)
    return (squares.double().mean() / (mean @ mean)).sqrt()


def coherence(delta: Tensor, squares: Tensor) -> Tensor:
    """Mean cosine over all pairs of clients: (‖Σ u_i‖² − m) / (m (m − 1)) with unit vectors u_i. NaN for one client.

    An update of length zero has the cosine 0 with every other.
    """
    m = len(delta)
    if m < 2:
        return torch.full((), float("nan"), dtype=torch.float64, device=delta.device)
    moved = squares > 0
    total = torch.where(moved, squares.rsqrt(), 0.0) @ delta
    return ((total @ total).double() - moved.sum()) / (m * (m - 1))


def cosine_matrix(delta: Tensor) -> Tensor:
    """Cosines between every two updates, `[m, m]` (client coherence, Li et al. 2023)."""
    products = delta @ delta.T  # divided afterwards: unit vectors would be a second [m, d]
    lengths = products.diagonal().sqrt()
    scale = torch.where(lengths > 0, 1 / lengths, 0.0)
    return scale[:, None] * products * scale
