"""Kinds of tasks: what the targets are, and the loss and the metrics that go with them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from kairosfl.tasks.metrics import Metric, class_scores, correct

Loss = Callable[[Any, Any], Tensor]  # of outputs and targets
IGNORED = -100  # the target of a token or pixel that does not count


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Per sample, `[batch]`; a single logit is class 1 against class 0."""
    scores = outputs
    if outputs.ndim == 1 or outputs.shape[1] == 1:
        scores = class_scores(outputs)
    return F.cross_entropy(scores, targets, reduction="none")


def logit_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """`cross_entropy` for targets that may also be 0.0 and 1.0, `[batch]` or `[batch, 1]`."""
    return cross_entropy(outputs, targets.reshape(len(targets)).long())


def squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    """The mean over the outputs of each sample."""
    return _error(outputs, targets).square().mean(1)


def multilabel_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Binary cross-entropy with logits, the mean over the labels of each sample."""
    classes = targets.to(outputs.dtype)
    losses = F.binary_cross_entropy_with_logits(outputs, classes, reduction="none")
    return losses.flatten(1).mean(1)


def place_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy of every token or pixel, the mean over those of each sample that count."""
    losses, counts = _places(outputs, targets)
    return losses.sum(1) / counts.sum(1).clamp(min=1)


def _places(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    """The loss `[batch, places]` of every token or pixel, and which count."""
    places = targets.flatten(1)
    losses = F.cross_entropy(
        _by_class(outputs, targets), places, reduction="none", ignore_index=IGNORED
    )
    return losses, (places != IGNORED).to(losses.dtype)


def _by_class(outputs: Tensor, targets: Tensor) -> Tensor:
    """Scores `[batch, classes, places]`.

    They come as `[batch, classes, ...]` or, of tokens, as `[batch, places, classes]`.
    """
    if targets.ndim == 2 and outputs.shape[1] == targets.shape[1]:
        return outputs.transpose(1, 2)
    return class_scores(outputs).flatten(2)


def _error(outputs: Tensor, targets: Tensor) -> Tensor:
    return outputs.reshape(len(outputs), -1) - targets.reshape(len(targets), -1).to(outputs.dtype)


def _r2(outputs: Tensor, targets: Tensor) -> Tensor:
    """Squared errors, targets and squared targets of each sample, one of each per output."""
    numbers = targets.reshape(len(targets), -1).double()
    errors = _error(outputs, targets).double().square()
    return torch.cat([errors, numbers, numbers.square()], 1)


def _explained(sums: list[float], samples: int) -> float:
    """1 - mean squared error / variance, the mean over the outputs whose targets vary."""
    error, first, second = np.array(sums).reshape(3, -1) / samples
    variance = second - first**2
    varies = variance > 0
    if not varies.any():
        return float("nan")
    return float(np.mean(1 - error[varies] / variance[varies]))


def _hits(outputs: Tensor, targets: Tensor) -> Tensor:
    """True positives, false positives and false negatives of each sample."""
    scores = outputs
    if outputs.shape[1:] == (2,) and targets.numel() == len(targets):  # scores of both classes
        scores = outputs[:, 1] - outputs[:, 0]
    predicted = scores.reshape(len(targets), -1) > 0
    actual = targets.reshape(len(targets), -1) > 0
    right = (predicted & actual).sum(1)
    wrong = (predicted & ~actual).sum(1)
    missed = (~predicted & actual).sum(1)
    return torch.stack([right, wrong, missed], 1)


def _f1(sums: list[float], samples: int) -> float:
    right, wrong, missed = sums
    return 2 * right / max(2 * right + wrong + missed, 1)


def _exact(outputs: Tensor, targets: Tensor) -> Tensor:
    return ((outputs > 0) == (targets > 0)).flatten(1).all(1)


def _overlap(outputs: Tensor, targets: Tensor) -> Tensor:
    """Intersection and union of every class in each sample."""
    scores = _by_class(outputs, targets)
    labels = targets.flatten(1)
    counts = (labels != IGNORED)[:, None]
    classes = torch.arange(scores.shape[1], device=scores.device)[:, None]
    predicted = (scores.argmax(1)[:, None] == classes) & counts
    actual = labels[:, None] == classes
    return torch.cat([(predicted & actual).sum(2), (predicted | actual).sum(2)], 1)


def _iou(sums: list[float], samples: int) -> float:
    """The mean over the classes that occur of intersection / union."""
    half = len(sums) // 2
    ratios = []
    for both, either in zip(sums[:half], sums[half:], strict=True):
        if either:
            ratios.append(both / either)
    if not ratios:
        return float("nan")
    return sum(ratios) / len(ratios)


def _right_places(outputs: Tensor, targets: Tensor) -> Tensor:
    """How many tokens or pixels of each sample are right, and how many count."""
    labels = targets.flatten(1)
    counts = labels != IGNORED
    right = (_by_class(outputs, targets).argmax(1) == labels) & counts
    return torch.stack([right.sum(1), counts.sum(1)], 1)


def _ratio(sums: list[float], samples: int) -> float:
    return sums[0] / sums[1] if sums[1] else float("nan")


def _surprise(outputs: Tensor, targets: Tensor) -> Tensor:
    losses, counts = _places(outputs, targets)
    return torch.stack([losses.double().sum(1), counts.double().sum(1)], 1)


def _perplexity(sums: list[float], samples: int) -> float:
    return math.exp(min(_ratio(sums, samples), 700.0))  # a diverged model would overflow


@dataclass(frozen=True)
class Kind:
    """What a task of this kind is trained with and judged by.

    Args:
        loss: From outputs and targets of a batch to one loss per sample.
        metrics: By name, the main one first.
    """

    loss: Loss
    metrics: Mapping[str, Metric]


_ACCURACY = Metric(correct, percent=True)
_BINARY = Metric(
    lambda outputs, targets: correct(outputs, targets.reshape(len(targets)).long()), percent=True
)
_F1 = Metric(_hits, finish=_f1, percent=True)

KINDS: dict[str, Kind] = {
    "classification": Kind(cross_entropy, {"accuracy": _ACCURACY}),
    "binary": Kind(logit_entropy, {"accuracy": _BINARY, "f1": _F1}),
    "multilabel": Kind(
        multilabel_entropy, {"f1": _F1, "exact_match": Metric(_exact, percent=True)}
    ),
    "regression": Kind(
        squared_error,
        {
            "rmse": Metric(
                squared_error, "lower", lambda sums, samples: math.sqrt(sums[0] / samples)
            ),
            "mae": Metric(lambda outputs, targets: _error(outputs, targets).abs().mean(1), "lower"),
            "r2": Metric(_r2, finish=_explained),
        },
    ),
    "segmentation": Kind(
        place_entropy,
        {
            "iou": Metric(_overlap, finish=_iou, percent=True),
            "pixel_accuracy": Metric(_right_places, finish=_ratio, percent=True),
        },
    ),
    "language": Kind(
        place_entropy,
        {
            "perplexity": Metric(_surprise, "lower", _perplexity),
            "token_accuracy": Metric(_right_places, finish=_ratio, percent=True),
        },
    ),
}
# One class per sample: what partitions by label and heterogeneity are about.
CLASSED = ("classification", "binary")


def infer(targets: Tensor, vocabulary: int) -> str:
    """The kind of task, from what the targets of all training samples are."""
    zeros_and_ones = targets.ndim <= 2 and bool(((targets == 0) | (targets == 1)).all())
    single = targets.ndim == 1 or targets.shape[1:] == (1,)
    kind_of_ones = "binary" if single else "multilabel"
    if targets.is_floating_point():
        return kind_of_ones if zeros_and_ones else "regression"
    if targets.ndim == 1:
        return "classification"
    if targets.ndim > 2:
        return "segmentation"
    if vocabulary or not zeros_and_ones:
        return "language"
    return kind_of_ones
