"""What is measured on the test set: named metrics that add up over batches."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from kairosfl.errors import UserError
from kairosfl.tasks.columns import TAKEN

Measure = Callable[[Tensor, Tensor], Tensor]
Finish = Callable[[list[float], int], float]


def mean(sums: list[float], samples: int) -> float:
    """The mean over the samples."""
    return sums[0] / samples


@dataclass(frozen=True)
class Metric:
    """A number that says how good a model is.

    Args:
        measure: From the outputs and targets of a batch to numbers for each sample, `[batch]` or
            `[batch, k]`, which are summed over all samples.
        better: Which values are better, "higher" or "lower".
        finish: From the `k` sums and the number of samples to the metric; by default the mean.
        percent: Whether it is a fraction that is shown in per cent.
    """

    measure: Measure
    better: Literal["higher", "lower"] = "higher"
    finish: Finish = mean
    percent: bool = False

    def __post_init__(self) -> None:
        if self.better not in ("higher", "lower"):
            raise UserError(f"better = {self.better!r} of a metric must be 'higher' or 'lower'.")


def named(metrics: Mapping[str, Metric | Measure]) -> dict[str, Metric]:
    """Metrics by name, the main one first; a function is a mean that is better when higher."""
    by_name: dict[str, Metric] = {}
    for name, metric in metrics.items():
        if not _is_free(name):
            raise UserError(
                f"metrics cannot have the name {name!r}: use a word that no other column has."
            )
        if isinstance(metric, Metric):
            by_name[name] = metric
        elif callable(metric):
            by_name[name] = Metric(metric)
        else:
            raise UserError(
                f"metrics[{name!r}] is a {type(metric).__name__}; give a function or a Metric."
            )
    return by_name


def _is_free(name: Any) -> bool:
    """Whether a metric may have this name."""
    if not isinstance(name, str) or not name.isidentifier():
        return False
    return name not in TAKEN and not name.startswith("client_")


def facts(metrics: Mapping[str, Metric]) -> list[dict[str, Any]]:
    """What `run.json` says about them, the main one first."""
    return [
        {"name": name, "better": metric.better, "percent": metric.percent}
        for name, metric in metrics.items()
    ]


def class_scores(outputs: Tensor) -> Tensor:
    """A score for every class, `[n, classes, ...]`.

    A single logit, `[n]` or `[n, 1, ...]`, is that of class 1 against zero.
    """
    if outputs.ndim == 1:
        outputs = outputs[:, None]
    if outputs.shape[1] == 1:
        return torch.cat([torch.zeros_like(outputs), outputs], 1)
    return outputs


def confusion(outputs: Tensor, targets: Tensor, classes: int) -> Tensor:
    """How many samples of each class are taken for which, `[classes, classes + 1]`.

    The last column is for any other class.
    """
    labels = torch.arange(classes, device=outputs.device)
    actual = (targets.reshape(-1, 1) == labels).double()
    predicted = (class_scores(outputs).argmax(1)[:, None] == labels).double()
    return actual.mT @ torch.cat([predicted, 1 - predicted.sum(1, keepdim=True)], 1)


def correct(outputs: Tensor, targets: Tensor) -> Tensor:
    """Which samples are correct: the highest score is the target's.

    A single logit is compared with zero.
    """
    return class_scores(outputs).argmax(1) == targets
