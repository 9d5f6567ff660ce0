"""Mass: how far a constant unit gradient would have moved a client's weights.

The mean gradients of the clients follow from it.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from kairosfl.core.fields import Briefs

if TYPE_CHECKING:
    from kairosfl.core.rule import Round


def strides(now: Round) -> Tensor:
    """w − start of each reporter, `[m, d]`: its own steps, even if a rule moved its start."""
    if now.briefs.offset is None:
        return now.reports.delta
    return now.reports.delta - (now.briefs.start - now.version)


def mean_gradients(now: Round) -> Tensor:
    """The mean gradient of each reporter, `[m, d]`, weight decay at its start included."""
    return strides(now) / -now.reports.mass.to(now.reports.delta)[:, None]


def mass(briefs: Briefs, steps: Tensor) -> Tensor:
    """How far a constant unit gradient would have moved each client's weights, `[m]` float64.

    It is NaN under adamw.

    −(w − start) / mass is then the client's mean local gradient, whatever its momentum, pull,
    weight decay and steps. The server computes it from the brief and the steps done; a divisor
    reported by a client could be used for attacks.
    """
    if briefs.optimizer != "sgd":
        return torch.full((len(steps),), torch.nan, dtype=torch.float64)
    pull = briefs.pull + briefs.weight_decay
    settings = (steps.tolist(), briefs.lr.tolist(), briefs.momentum.tolist(), pull.tolist())
    return torch.tensor(list(map(_mass, *settings)), dtype=torch.float64)


@lru_cache(maxsize=1 << 16)
def _mass(steps: int, lr: float, momentum: float, pull: float) -> float:
    """The mass of one client.

    One step maps (u, v, 1) by v ← momentum·v + pull·u + 1 and u ← u − lr·v; the mass is −u after
    all steps.
    """
    velocity = np.array([pull, momentum, 1.0])
    position = np.array([1.0, 0.0, 0.0]) - lr * velocity
    one = np.array([0.0, 0.0, 1.0])
    step = np.stack([position, velocity, one])
    return -float(np.linalg.matrix_power(step, steps)[0, 2])
