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


class Passes(NamedTuple):
    """How often clients run the model over one sample, `[m]` int64 each; one way is one pass.

    A step of training on b samples is b passes forward and b backward. SAM takes both twice, and a
    measurement on all n samples takes n forward.
    """

    forward: np.ndarray
    backward: np.ndarray

    @property
    def total(self) -> int:
        """Of all clients, both ways."""
        return int(self.forward.sum() + self.backward.sum())


@dataclass(frozen=True, kw_only=True)
class Work:
    """What a brief asks of clients; whole numbers, `[m]` each.

    Args:
        n: Samples of each.
        epoch: One epoch of each.
        steps: In all epochs, if no rule stops the client.
        slopes: Gradients in every step: one, two with SAM, and those of a second model that trains
            along.
        aside: Gradients, in samples, outside of these steps: of an own part that trains first, or
            of a second model that trains before or after.
        scores: Measurements on all samples: of a loss, an accuracy, or a candidate.
        references: Fixed models whose features are compared with the trained one's.
        fisher: How the Fisher information is measured: "", "exact" or "sampled".
    """

    n: np.ndarray
    epoch: Epoch
    steps: np.ndarray
    slopes: np.ndarray
    aside: np.ndarray
    scores: np.ndarray
    references: np.ndarray
    fisher: str = ""

    def samples(self, steps: np.ndarray) -> np.ndarray:
        """Samples in so many steps, each counted every time."""
        epochs, over = np.divmod(steps, self.epoch.steps)
        counted: np.ndarray = epochs * self.epoch.used + over * self.epoch.size
        return counted

    def passes(self, steps: np.ndarray, *, classes: int = 0, anew: bool = False) -> Passes:
        """The passes of clients that did so many steps.

        Args:
            steps: Steps done, `[m]`; fewer than planned where a rule stopped the client.
            classes: Scores of the model for a sample; the exact Fisher information takes a gradient
                of each.
            anew: Whether the fixed models see every batch, as they must where samples or dropout
                masks differ from step to step; otherwise they see every sample once.
        """
        trained = self.samples(steps)
        compared = trained if anew else self.n
        labels = {"": 0, "exact": classes, "sampled": 1}[self.fisher]
        probabilities = self.n if self.fisher else 0
        slopes = trained * self.slopes + self.aside + labels * self.n
        measured = self.scores * self.n + self.references * compared + probabilities
        return Passes(forward=slopes + measured, backward=slopes)
