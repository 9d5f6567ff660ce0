"""Evaluation as one captured graph: the test set stays on the device, and two numbers are copied back."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from kairosfl.engines.batched.fast import timed
from kairosfl.engines.batched.step import Work
from kairosfl.engines.choices import Choices
from kairosfl.engines.evaluate import Scores
from kairosfl.engines.precision import Precision
from kairosfl.tasks.dataset import Samples
from kairosfl.tasks.metrics import correct
from kairosfl.tasks.prepare import prepare
from kairosfl.tasks.task import Task

BATCH = 2000
Predict = Callable[[Tensor, Tensor], Tensor]


class GraphEvaluator:
    """Accuracy and loss of one vector after another on a GPU; if there is an `other` way, by the faster one."""

    def __init__(self, task: Task, test: Samples, way: Predict, precision: Precision, choices: Choices) -> None:
        self.task, self.test, self.way, self.precision, self.choices = task, test, way, precision, choices
        self.other: Predict | None = None
        self._graph: torch.cuda.CUDAGraph | None = None

    @torch.no_grad()
    def __call__(self, x: Tensor) -> Scores:
        if self._graph is None:
            self._x = torch.empty_like(x, device=self.test.targets.device).copy_(x)
            self._totals = torch.zeros(2, dtype=torch.float64, device=self._x.device)
            self._graph = self._quicker()
        self._x.copy_(x)
        self._graph.replay()
        right, loss = self._totals.tolist()
        return Scores(right / len(self.test), loss / len(self.test))

    def _quicker(self) -> torch.cuda.CUDAGraph:
        if self.other is None:
            return self._captured(self.way)
        ways = {"plain": self.way, "stacked": self.other}
        graphs: dict[str, torch.cuda.CUDAGraph] = {}

        def measure() -> str:
            graphs["plain"] = self._captured(ways["plain"])
            try:
                graphs["stacked"] = self._captured(ways["stacked"])
            except Exception:  # it would only have been faster
                return "plain"
            with torch.cuda.device(self._x.device):
                times = {name: min(timed(graph.replay) for _ in range(3)) for name, graph in graphs.items()}
            return min(times, key=times.__getitem__)

        chosen = self.choices.choose("evaluation", measure)
        return graphs.get(chosen) or self._captured(ways[chosen])

    def _captured(self, predict: Predict) -> torch.cuda.CUDAGraph:
        graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream(self._x.device)
        now = torch.cuda.current_stream(self._x.device)
        side.wait_stream(now)
        try:
            with self.precision(), torch.cuda.stream(side):
                self._run(predict)
                with torch.cuda.graph(graph, stream=side):
                    self._run(predict)
        finally:
            now.wait_stream(side)
        return graph

    def _run(self, predict: Predict) -> None:
        self._totals.zero_()
        for inputs, targets in zip(self.test.inputs.split(BATCH), self.test.targets.split(BATCH), strict=True):
            prepared = prepare(inputs, self.task.dataset)
            prepared = prepared.to(self._x.dtype) if prepared.is_floating_point() else prepared
            outputs = predict(self._x, prepared).to(self._x.dtype)
            self._totals[0] += correct(outputs, targets).sum()
            self._totals[1] += self.task.loss(outputs, targets).double().sum()


def plain(task: Task, predict: Predict, precision: Precision) -> Predict:
    """The model as it is."""
    # Convolutions are faster in this order, but PyTorch's GroupNorm is less accurate in it.
    last = not any(isinstance(module, nn.GroupNorm) for module in task.model.modules())

    def outputs(x: Tensor, inputs: Tensor) -> Tensor:
        if inputs.ndim == 4 and last:
            inputs = inputs.contiguous(memory_format=torch.channels_last)
        with precision.autocast(x.device):
            return predict(x, inputs)

    return outputs


def single(work: Work) -> Predict:
    """The stacked model with one client."""

    def outputs(x: Tensor, inputs: Tensor) -> Tensor:
        frame = work.stack.frame
        try:
            frame.open(frame.layout.pack(x[None]))
            return work.stack(inputs.to(work.compute) if inputs.is_floating_point() else inputs)
        finally:
            frame.close()

    return outputs
