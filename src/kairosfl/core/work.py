"""How much there is to do for a client: from its samples and its brief to batches and steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np


class Epoch(NamedTuple):
    """One epoch of a client; whole numbers, or arrays with one for each client."""

    size: Any  # samples in a full batch
    used: Any  # samples that are trained on
    steps: Any


def epoch_of(n: Any, batch_size: Any, *, drop_last: bool) -> Epoch:
    """The work of one epoch on n samples; a batch larger than that is all of them."""
    size = np.maximum(np.minimum(batch_size, n), 1)
    used = n - n % size if drop_last else n
    return Epoch(size, used, -(-used // size))


@dataclass(frozen=True)
class Work:
    """What a brief asks of clients, `[m]` int64 each.

    Args:
        epoch: One epoch of each.
        steps: In all epochs, if no rule stops the client.
    """

    epoch: Epoch
    steps: np.ndarray

    def samples(self, steps: np.ndarray) -> np.ndarray:
        """Samples in so many steps, each counted every time."""
        epochs, over = np.divmod(steps, self.epoch.steps)
        counted: np.ndarray = epochs * self.epoch.used + over * self.epoch.size
        return counted
