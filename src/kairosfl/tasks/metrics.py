"""What a classifier's outputs mean: class scores, and which samples are right."""

from __future__ import annotations

import torch
from torch import Tensor


def class_scores(outputs: Tensor) -> Tensor:
    """A score for every class `[n, classes, ...]`; a single logit, `[n]` or `[n, 1]`, is class 1's against zero."""
    if outputs.ndim == 1:
        outputs = outputs[:, None]
    return torch.cat([torch.zeros_like(outputs), outputs], 1) if outputs.shape[1] == 1 else outputs


def correct(outputs: Tensor, targets: Tensor) -> Tensor:
    """Which samples are right: the class with the highest score is the target, a single logit has its sign."""
    return class_scores(outputs).argmax(1) == targets
