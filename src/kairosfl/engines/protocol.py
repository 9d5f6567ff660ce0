"""What a run needs from an engine: the interface of `loop`, `batched`, `ray` and `flower`."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from torch import Tensor

from kairosfl.core.fields import Briefs, Reports
from kairosfl.engines.choices import Choices
from kairosfl.engines.evaluate import Scores, Sums


class Engine(Protocol):
    """Turns briefs into reports and evaluates a vector: the only part that touches data or devices.

    An engine may have a method `begin(briefs)`, too: it is told what `train` will be asked for
    next, before the last round is evaluated and recorded, and returns without waiting.
    """

    why: str  # how it runs the model, where there is a choice
    choices: Choices  # what it chose by measuring

    def start(self) -> Tensor:
        """The model before training, on the device of the server's vectors."""
        ...

    def train(self, briefs: Briefs) -> Reports:
        """One report per client that could train; why the others could not is in `failed`."""
        ...

    def evaluate(self, x: Tensor) -> Scores:
        """Loss and metrics on the test set."""
        ...

    def evaluate_clients(self, x: Tensor) -> np.ndarray:
        """The main metric of every client."""
        ...

    def measure_clients(self, ids: Tensor, models: Tensor) -> list[Sums]:
        """What was measured on these clients' own samples, each client with its own model."""
        ...
