"""Tasks of tokens whose targets are their inputs, which a model would learn to copy.

Such a model looks better than one that predicts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from kairosfl.errors import UserError
from kairosfl.tasks.dataset import DataSet
from kairosfl.tasks.kinds import IGNORED
from kairosfl.tasks.streamed import PROBED
from kairosfl.tasks.tree import leaves

PLACES = 8  # a masked language model may leave some of the tokens that it is to predict as they are


def check_targets(dataset: DataSet) -> None:
    """Refuse targets that equal the inputs, the habit of libraries whose models shift them.

    Raises:
        UserError: Says how to shift them, and what to do if copies are meant.
    """
    for split, samples in (("training", dataset.train), ("test", dataset.test)):
        if len(samples) and _copied(*samples.read(slice(0, PROBED))):
            raise UserError(
                f"the {split} targets of data set {dataset.name!r} equal the inputs; a causal "
                "model predicts the next token: give ids[:, :-1] and ids[:, 1:], or a loss and "
                "metrics of your own if copies are meant."
            )


def _copied(inputs: Any, targets: Any) -> bool:
    """Whether every target that counts is the token at its own place."""
    if not isinstance(targets, Tensor) or targets.ndim != 2:
        return False
    counted = targets != IGNORED
    repeated = torch.equal(targets[:, 1:], targets[:, :-1])  # also equal to what is shifted
    if int(counted.sum()) < PLACES or repeated:
        return False
    for leaf in leaves(inputs):
        if leaf.shape != targets.shape or leaf.is_floating_point():
            continue
        tokens = leaf[counted].to(targets.dtype)
        if torch.equal(tokens, targets[counted]):
            return True
    return False
