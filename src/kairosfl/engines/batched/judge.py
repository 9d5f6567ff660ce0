"""Evaluation as one captured graph: the test set stays on the device, two numbers come back."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from kairosfl.engines.evaluate import Scores
from kairosfl.engines.precision import Precision
from kairosfl.tasks.dataset import Samples
from kairosfl.tasks.prepare import prepare
from kairosfl.tasks.task import Task

BATCH = 2000


class Judge:
    """Accuracy and loss of one vector after another on a GPU."""

    def __init__(
        self, task: Task, test: Samples, predict: Callable[[Tensor, Tensor], Tensor], precision: Precision
    ) -> None:
        self.task, self.test, self.predict, self.precision = task, test, predict, precision
        # Convolutions are quicker in this order; PyTorch's GroupNorm loses digits in it.
        self._last = not any(isinstance(module, nn.GroupNorm) for module in task.model.modules())
        self._graph: torch.cuda.CUDAGraph | None = None

    @torch.no_grad()
    def __call__(self, x: Tensor) -> Scores:
        if self._graph is None:
            self._capture(x)
        assert self._graph is not None
        self._x.copy_(x)
        self._graph.replay()
        right, loss = self._totals.tolist()
        return Scores(right / len(self.test), loss / len(self.test))

    def _capture(self, x: Tensor) -> None:
        self._x = torch.empty_like(x, device=self.test.targets.device).copy_(x)
        self._totals = torch.zeros(2, dtype=torch.float64, device=self._x.device)
        graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream(self._x.device)
        side.wait_stream(torch.cuda.current_stream())
        with self.precision(), torch.cuda.stream(side):
            self._run()
            with torch.cuda.graph(graph, stream=side):
                self._run()
        torch.cuda.current_stream().wait_stream(side)
        self._graph = graph

    def _run(self) -> None:
        self._totals.zero_()
        for inputs, targets in zip(self.test.inputs.split(BATCH), self.test.targets.split(BATCH), strict=True):
            prepared = prepare(inputs, self.task.dataset)
            if prepared.ndim == 4 and self._last:
                prepared = prepared.contiguous(memory_format=torch.channels_last)
            prepared = prepared.to(self._x.dtype) if prepared.is_floating_point() else prepared
            with self.precision.autocast(self._x.device):
                outputs = self.predict(self._x, prepared).to(self._x.dtype)
            self._totals[0] += (outputs.argmax(1) == targets).sum()
            self._totals[1] += self.task.loss(outputs, targets).double().sum()
