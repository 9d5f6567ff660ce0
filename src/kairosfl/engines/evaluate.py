"""Evaluation of a vector on the test set and on every client's own data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kairosfl.engines.choices import Choices
from kairosfl.tasks.dataset import Samples
from kairosfl.tasks.metrics import correct
from kairosfl.tasks.prepare import ordered, prepare
from kairosfl.tasks.task import Task

CPU_BATCH, GPU_BATCH = 256, 1024  # on a CPU, small enough that the allocator reuses the memory


@dataclass(frozen=True)
class Scores:
    """Accuracy and mean loss on the test set."""

    accuracy: float
    loss: float


class Evaluator:
    """Evaluates on a device that holds the test set."""

    why = ""  # how this engine runs the model, where there is a choice

    def __init__(
        self,
        task: Task,
        device: torch.device,
        predict: Callable[[Tensor, Tensor], Tensor],
        test: Samples | None = None,
    ) -> None:
        self.task, self.device, self.predict, self.choices = task, device, predict, Choices()
        own = task.dataset.test
        self.test = test or Samples(own.inputs.to(device), own.targets.to(device))

    @torch.no_grad()
    def _outcomes(self, x: Tensor, samples: Samples) -> tuple[Tensor, Tensor]:
        """For every sample, whether the prediction is correct, and its loss."""
        right, losses = [], []
        x = x.to(self.device)
        batch = CPU_BATCH if self.device.type == "cpu" else GPU_BATCH
        for inputs, targets in zip(samples.inputs.split(batch), samples.targets.split(batch), strict=True):
            targets = targets.to(self.device)
            prepared = ordered(prepare(inputs.to(self.device), self.task.dataset))
            outputs = self.predict(x, prepared.to(x.dtype) if prepared.is_floating_point() else prepared)
            right.append(correct(outputs, targets))
            losses.append(self.task.loss(outputs, targets).double())
        return torch.cat(right), torch.cat(losses)

    def evaluate(self, x: Tensor) -> Scores:
        """On the whole test set."""
        right, losses = self._outcomes(x, self.test)
        return Scores(float(right.double().mean()), float(losses.mean()))

    def evaluate_clients(self, x: Tensor) -> np.ndarray:
        """Every client's accuracy `[N]`, on the samples that `Task.client_accuracy_on` names: its own test samples (NaN
        for a client without any) or, if no client has any, those it trains on."""
        own = self.task.tests
        samples, clients = (self.test, own) if own is not None else (self.task.dataset.train, self.task.clients)
        right = self._outcomes(x, samples)[0].cpu().numpy().astype(np.float64)
        sums = np.concatenate([[0.0], np.cumsum(right[clients.order])])[clients.offsets]
        with np.errstate(invalid="ignore"):
            return np.diff(sums) / clients.sizes
