"""Evaluation of a vector on the test set and on every client's own data."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kairosfl.engines.choices import Choices
from kairosfl.tasks.dataset import Samples
from kairosfl.tasks.metrics import confusion, mean
from kairosfl.tasks.prepare import ordered
from kairosfl.tasks.streamed import Streamed
from kairosfl.tasks.task import Task
from kairosfl.tasks.tree import Tree, tree_map

CPU_BATCH, GPU_BATCH = 256, 1024  # on a CPU, small enough that the allocator reuses the memory


@dataclass(frozen=True)
class Scores:
    """Mean loss and metrics on the test set, by name."""

    loss: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    # Who is taken for whom, as `confusion` of metrics counts.
    confusion: tuple[tuple[int, ...], ...] = field(default=(), compare=False, repr=False)

    @property
    def main(self) -> float:
        """The main metric: the first one, or the loss if there is none."""
        return next(iter(self.metrics.values()), self.loss)

    def __getattr__(self, name: str) -> float:
        """A metric, such as `scores.accuracy`."""
        metrics = self.__dict__.get("metrics", {})
        if name not in metrics:
            listed = ", ".join(metrics)
            if not listed:
                listed = "none"
            raise AttributeError(f"the metrics are {listed}, and {name!r} is not one of them")
        return float(metrics[name])


def measured(task: Task, outputs: Tensor, targets: Any) -> list[Tensor]:
    """What adds up over samples, each `[batch, columns]` in float64: the loss, then the metrics.

    The last, where samples have one class each, adds up over batches: `[1, columns]`, who is taken
    for whom.
    """
    parts = [task.loss(outputs, targets)]
    for metric in task.measures.values():
        parts.append(metric.measure(outputs, targets))
    columns = [part.double().reshape(len(part), -1) for part in parts]
    if task.confusable:
        columns.append(confusion(outputs, targets, task.confusable).reshape(1, -1))
    return columns


def scored(task: Task, sums: list[list[float]], samples: int) -> Scores:
    """The scores from the sums over all samples of what was measured."""
    loss, *rest = sums
    metrics = {}
    totals = zip(task.measures.items(), rest[: len(task.measures)], strict=True)
    for (name, metric), total in totals:
        metrics[name] = metric.finish(total, samples)
    counts: list[list[int]] = []
    if task.confusable:  # they come after the metrics
        counts = np.array(rest[-1], dtype=np.int64).reshape(task.confusable, -1).tolist()
    return Scores(loss[0] / samples, metrics, tuple(map(tuple, counts)))


Sums = list[list[float]]  # of what `measured` returns, over the samples of one client


def of_clients(task: Task, sums: Sequence[Sums]) -> tuple[Scores, np.ndarray]:
    """The scores over the samples of all clients, each client with its own model.

    The second is the main metric of every client, NaN for one without samples.

    Args:
        task: What is learnt.
        sums: Of every client, as `measure_clients` returns them.
    """
    sizes = task.measured_clients.sizes.tolist()
    metric = task.main[1]
    which, finish = (0, mean) if metric is None else (1, metric.finish)
    by_client = np.full(len(sizes), np.nan)
    totals: list[np.ndarray] = []
    for client, parts in enumerate(sums):
        if not sizes[client]:
            continue
        by_client[client] = finish(parts[which], sizes[client])
        arrays = [np.array(part) for part in parts]
        totals = [a + b for a, b in zip(totals, arrays, strict=True)] if totals else arrays
    return scored(task, [total.tolist() for total in totals], sum(sizes)), by_client


class Evaluator:
    """Evaluates on a device that holds the test set."""

    why = ""  # how this engine runs the model, where there is a choice

    def __init__(
        self,
        task: Task,
        device: torch.device,
        predict: Callable[[Tensor, Any], Tensor],
        test: Samples | Streamed | None = None,
    ) -> None:
        self.task = task
        self.device = device
        self.predict = predict
        self.choices = Choices()
        if not test:
            test = task.dataset.test.to(device)
        self.test = test

    @torch.no_grad()
    def _measured(self, x: Tensor, samples: Samples | Streamed) -> Iterator[list[Tensor]]:
        """What was measured in every batch."""
        x = x.to(self.device)
        for inputs, targets in samples.batches(self._batch):
            yield self._measure(x, inputs, targets)

    @property
    def _batch(self) -> int:
        return CPU_BATCH if self.device.type == "cpu" else GPU_BATCH

    def _measure(self, x: Tensor, inputs: Any, targets: Any) -> list[Tensor]:
        """What is measured on one batch; x is on this device."""
        prepared = self.task.prepared(self._here(inputs), x.dtype)
        outputs = self.predict(x, ordered(prepared))
        return measured(self.task, outputs, self._here(targets))

    def _here(self, tree: Tree) -> Any:
        return tree_map(lambda leaf: leaf.to(self.device), tree)

    @torch.no_grad()
    def measure_clients(self, ids: Tensor, models: Tensor) -> list[Sums]:
        """What was measured on these clients' own samples, each client with its own model.

        These are the sums that `of_clients` reads, none for a client without samples.

        Args:
            ids: Clients, `[m]`.
            models: Their whole models, `[m, d + e]`.
        """
        own = self.task.tests
        samples = self.test if own is not None else self.task.dataset.train
        clients = self.task.measured_clients
        sums: list[Sums] = []
        for client, model in zip(ids.tolist(), models.to(self.device), strict=True):
            totals: list[Tensor] = []
            owned = torch.from_numpy(clients[client].astype(np.int64))
            for begin in range(0, len(owned), self._batch):
                rows = owned[begin : begin + self._batch]
                parts = self._measure(model, *samples.read(rows))
                batch = [part.sum(0) for part in parts]
                totals = [a + b for a, b in zip(totals, batch, strict=True)] if totals else batch
            sums.append([total.tolist() for total in totals])
        return sums

    def evaluate(self, x: Tensor) -> Scores:
        """On the whole test set."""
        sums = []
        for parts in zip(*self._measured(x, self.test), strict=True):
            sums.append(torch.cat(parts).sum(0).tolist())
        return scored(self.task, sums, len(self.test))

    def evaluate_clients(self, x: Tensor) -> np.ndarray:
        """The main metric of every client `[N]`, on samples as `Task.client_accuracy_on` says.

        They are its own test samples (NaN for a client without any) or, if no client has any, those
        it trains on.
        """
        samples: Samples | Streamed = self.task.dataset.train
        clients = self.task.clients
        if self.task.tests is not None:
            samples = self.test
            clients = self.task.tests

        # The loss is measured first, the main metric second.
        _, metric = self.task.main
        place, finish = (0, mean) if metric is None else (1, metric.finish)
        batches = [parts[place] for parts in self._measured(x, samples)]
        numbers = torch.cat(batches).cpu().numpy()[clients.order]

        # The sum over a client's samples is the difference of two sums from the first one on.
        zero = np.zeros((1, numbers.shape[1]))
        sums = np.concatenate([zero, np.cumsum(numbers, axis=0)])[clients.offsets]
        totals = np.diff(sums, axis=0).tolist()
        scores = []
        for total, count in zip(totals, clients.sizes.tolist(), strict=True):
            scores.append(finish(total, count) if count else np.nan)
        return np.array(scores)
