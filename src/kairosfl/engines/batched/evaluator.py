"""Evaluation as one captured graph: the test set stays on the device, and a few sums are copied
back.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from kairosfl.engines.batched.fast import timed
from kairosfl.engines.batched.step import Work
from kairosfl.engines.choices import Choices
from kairosfl.engines.evaluate import Scores, measured, scored
from kairosfl.engines.precision import Precision
from kairosfl.tasks.dataset import Samples
from kairosfl.tasks.task import Task
from kairosfl.tasks.tree import cast, leaves, tree_map

BATCH = 2000
Predict = Callable[[Tensor, Any], Tensor]


class GraphEvaluator:
    """Scores of one vector after another on a GPU; if there is an `other` way, by the faster one."""

    def __init__(
        self, task: Task, test: Samples, way: Predict, precision: Precision, choices: Choices
    ) -> None:
        self.task, self.test, self.way, self.precision, self.choices = (
            task,
            test,
            way,
            precision,
            choices,
        )
        self.other: Predict | None = None
        self._graph: torch.cuda.CUDAGraph | None = None

    @torch.no_grad()
    def __call__(self, x: Tensor) -> Scores:
        if self._graph is None:
            self._x = torch.empty_like(x, device=leaves(self.test.targets)[0].device).copy_(x)
            self._totals: list[Tensor] = []
            self._graph = self._quicker()
        self._x.copy_(x)
        self._graph.replay()
        flat = torch.cat(self._totals).tolist()  # one wait for the device
        ends = np.cumsum([len(each) for each in self._totals]).tolist()
        sums = [flat[end - len(each) : end] for each, end in zip(self._totals, ends, strict=True)]
        return scored(self.task, sums, len(self.test))

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
                times = {
                    name: min(timed(graph.replay) for _ in range(3))
                    for name, graph in graphs.items()
                }
            return min(times, key=times.__getitem__)

        what = f"{self.task.model!r} {self.task.layout} {self.task.dataset.shape}"
        setting = (
            f"{len(self.test)} samples, model {hashlib.sha256(what.encode()).hexdigest()[:16]}"
        )
        chosen = self.choices.choose("evaluation", measure, ways, setting)
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
        for total in self._totals:
            total.zero_()
        for inputs, targets in self.test.batches(BATCH):
            outputs = predict(self._x, self.task.prepared(inputs, self._x.dtype)).to(self._x.dtype)
            sums = [part.sum(0) for part in measured(self.task, outputs, targets)]
            if not self._totals:  # in the run before the capture
                self._totals = [torch.zeros_like(part) for part in sums]
            torch._foreach_add_(self._totals, sums)


def _channels_last(leaf: Tensor) -> Tensor:
    return leaf.contiguous(memory_format=torch.channels_last) if leaf.ndim == 4 else leaf


def plain(task: Task, predict: Predict, precision: Precision) -> Predict:
    """The model as it is."""
    # Convolutions are faster in this order, but PyTorch's GroupNorm is less accurate in it.
    last = not any(isinstance(module, nn.GroupNorm) for module in task.model.modules())

    def outputs(x: Tensor, inputs: Any) -> Tensor:
        if last:
            inputs = tree_map(_channels_last, inputs)
        with precision.autocast(x.device):
            return predict(x, inputs)

    return outputs


def single(work: Work) -> Predict:
    """The stacked model with one client."""
    rehearsed = False

    def outputs(x: Tensor, inputs: Any) -> Tensor:
        nonlocal rehearsed
        frame = work.stack.frame
        rows = frame.layout.pack(x[None])
        if not rehearsed:
            work.rehearse_one(rows, len(leaves(inputs)[0]))
            rehearsed = True
        try:
            frame.open(rows)
            return work.stack(cast(inputs, work.compute))
        finally:
            frame.close()

    return outputs
