"""The meaning of a classifier's outputs: class scores, and which samples are classified correctly."""

from __future__ import annotations

import torch
from torch import Tensor


def class_scores(outputs: Tensor) -> Tensor:
    """A score for every class `[n, classes, ...]`; a single logit, `[n]` or `[n, 1]`, is class 1 against zero."""
    if outputs.ndim == 1:
        outputs = outputs[:, None]
    return torch.cat([torch.zeros_like(outputs), outputs], 1) if outputs.shape[1] == 1 else outputs


def correct(outputs: Tensor, targets: Tensor) -> Tensor:
    """Which samples are correct: the highest score is the target's; a single logit is compared with zero."""
    return class_scores(outputs).argmax(1) == targets
