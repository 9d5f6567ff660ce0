"""A task: a model, a data set, and whose samples are whose."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch.nn.functional as F
from torch import Tensor, nn

from kairosfl.errors import UserError
from kairosfl.tasks.dataset import DataSet
from kairosfl.tasks.population import Population
from kairosfl.tasks.vector import Layout, flatten

Loss = Callable[[Tensor, Tensor], Tensor]


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Per sample, `[batch]`."""
    return F.cross_entropy(outputs, targets, reduction="none")


@dataclass(frozen=True, eq=False)
class Task:
    """What a run learns.

    Args:
        model: Any module; its parameters as they are now are the start of the run.
        dataset: Training and test samples.
        clients: The training samples of each client, as from `partition`.
        loss: From outputs and targets of a batch to one loss per sample, `[batch]`.
        augment: Whether images are randomly cropped and flipped while training.
    """

    model: nn.Module
    dataset: DataSet
    clients: Population
    loss: Loss = cross_entropy
    augment: bool = False

    def __post_init__(self) -> None:
        self.clients.check(len(self.dataset.train))

    @cached_property
    def layout(self) -> Layout:
        """Where each tensor of the model lies in the vector."""
        return Layout.of(self.model)

    def start(self) -> Tensor:
        """The model as it is now, as a new vector."""
        return flatten(self.model)


def last_linear(model: nn.Module) -> nn.Linear:
    """The layer whose input is the model's features: its last `nn.Linear`."""
    layers = [module for module in model.modules() if isinstance(module, nn.Linear)]
    if not layers:
        raise UserError(
            f"The model {type(model).__name__} has no nn.Linear, whose input would be the features that ALT and MOON "
            "compare; end the model with one."
        )
    return layers[-1]
