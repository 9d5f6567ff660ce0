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
from kairosfl.tasks.tree import tree_map

CPU_BATCH, GPU_BATCH = 256, 1024  # on a CPU, small enough that the allocator reuses the memory


@dataclass(frozen=True)
class Scores:
    """Mean loss and metrics on the test set, by name."""

    loss: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    confusion: tuple[tuple[int, ...], ...] = field(
        default=(), compare=False, repr=False
    )  # see `confusion` of metrics

    @property
    def main(self) -> float:
        """The main metric: the first one, or the loss if there is none."""
        return next(iter(self.metrics.values()), self.loss)

    def __getattr__(self, name: str) -> float:
        """A metric, such as `scores.accuracy`."""
        metrics = self.__dict__.get("metrics", {})
        if name not in metrics:
            raise AttributeError(
                f"the metrics are {', '.join(metrics) or 'none'}, and {name!r} is not one of them"
            )
        return float(metrics[name])


def measured(task: Task, outputs: Tensor, targets: Any) -> list[Tensor]:
    """What adds up over samples, each `[batch, columns]` in float64: the loss, then what every
    metric measures.

    The last, where samples have one class each, adds up over batches: `[1, columns]`, who is taken
    for whom.
    """
    parts = [
        task.loss(outputs, targets),
        *(metric.measure(outputs, targets) for metric in task.measures.values()),
    ]
    found = [part.double().reshape(len(part), -1) for part in parts]
    classes = task.confusable
    return [*found, confusion(outputs, targets, classes).reshape(1, -1)] if classes else found


def scored(task: Task, sums: list[list[float]], samples: int) -> Scores:
    """The scores from the sums over all samples of what was measured."""
    loss, *rest = sums
    finished = zip(task.measures.items(), rest[: len(task.measures)], strict=True)
    metrics = {name: metric.finish(each, samples) for (name, metric), each in finished}
    counts = (
        np.array(rest[-1], dtype=np.int64).reshape(task.confusable, -1).tolist()
        if task.confusable
        else []
    )
    return Scores(loss[0] / samples, metrics, tuple(map(tuple, counts)))


Sums = list[list[float]]  # of what `measured` returns, over the samples of one client


def of_clients(task: Task, sums: Sequence[Sums]) -> tuple[Scores, np.ndarray]:
    """The scores over all samples of all clients, each measured with its own client's model, and
    the main metric of every client, NaN for one without samples.

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
        self.task, self.device, self.predict, self.choices = task, device, predict, Choices()
        self.test = test or task.dataset.test.to(device)

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
        inputs, targets = (
            tree_map(lambda leaf: leaf.to(self.device), tree) for tree in (inputs, targets)
        )
        outputs = self.predict(x, ordered(self.task.prepared(inputs, x.dtype)))
        return measured(self.task, outputs, targets)

    @torch.no_grad()
    def measure_clients(self, ids: Tensor, models: Tensor) -> list[Sums]:
        """What was measured on these clients' own samples, each client with its own model: the sums
        that `of_clients` reads, none for a client without samples.

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
        sums = [
            torch.cat(parts).sum(0).tolist()
            for parts in zip(*self._measured(x, self.test), strict=True)
        ]
        return scored(self.task, sums, len(self.test))

    def evaluate_clients(self, x: Tensor) -> np.ndarray:
        """The main metric of every client `[N]`, on the samples that `Task.client_accuracy_on`
        names: its own test samples (NaN for a client without any) or, if no client has any, those
        it trains on."""
        own = self.task.tests
        samples, clients = (
            (self.test, own) if own is not None else (self.task.dataset.train, self.task.clients)
        )
        metric = self.task.main[1]
        which, finish = (0, mean) if metric is None else (1, metric.finish)
        found = (
            torch.cat([parts[which] for parts in self._measured(x, samples)])
            .cpu()
            .numpy()[clients.order]
        )
        sums = np.concatenate([np.zeros((1, found.shape[1])), np.cumsum(found, axis=0)])[
            clients.offsets
        ]
        owned = zip(np.diff(sums, axis=0).tolist(), clients.sizes.tolist(), strict=True)
        return np.array([finish(total, count) if count else np.nan for total, count in owned])
