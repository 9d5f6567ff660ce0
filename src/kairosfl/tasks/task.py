"""A task: a model, a data set, and the samples of each client."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch.nn.functional as F
from torch import Tensor, nn

from kairosfl.errors import UserError
from kairosfl.tasks.dataset import DataSet
from kairosfl.tasks.population import Population, own_tests
from kairosfl.tasks.prepare import prepare
from kairosfl.tasks.vector import Layout, base_hash, check_base, flatten, trained

Loss = Callable[[Tensor, Tensor], Tensor]
TRIAL = 4  # samples


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

    Of the model, the parameters with `requires_grad` are trained and sent. The others and the buffers are the base,
    which every client has and no training step changes.
    """

    model: nn.Module
    dataset: DataSet
    clients: Population
    loss: Loss = cross_entropy
    augment: bool = False

    def __post_init__(self) -> None:
        self.clients.check(len(self.dataset.train))
        if self.clients.tests is not None:
            self.clients.tests.check_range(len(self.dataset.test), "test samples")

    @cached_property
    def layout(self) -> Layout:
        """Where each trained tensor of the model is in the vector."""
        layout = Layout.of(self.model)
        check_base(self.model, *self.trial(), self.loss)
        return layout

    @cached_property
    def base_hash(self) -> str | None:
        """A digest of the frozen parameters and buffers; None if the model has none."""
        return base_hash(self.model)

    @cached_property
    def tests(self) -> Population | None:
        """Each client's own test samples, if any client has some."""
        own = own_tests(self.dataset, self.clients)
        return own if own is not None and own.sizes.any() else None

    @property
    def client_accuracy_on(self) -> Literal["test", "train"]:
        """On which samples the accuracy of each client is measured: its own test samples, or else what it trains on."""
        return "train" if self.tests is None else "test"

    def start(self) -> Tensor:
        """The current model as a new vector."""
        return flatten(self.model)

    def trial(self) -> tuple[Tensor, Tensor]:
        """The first training samples as the model sees them, and their targets, to try the model on."""
        samples = self.dataset.train
        inputs = prepare(samples.inputs[:TRIAL], self.dataset)
        dtype = next(iter(trained(self.model).values())).dtype
        return inputs.to(dtype) if inputs.is_floating_point() else inputs, samples.targets[:TRIAL]


def last_linear(model: nn.Module) -> nn.Linear:
    """The layer whose input is the model's features: its last `nn.Linear`."""
    layers = [module for module in model.modules() if isinstance(module, nn.Linear)]
    if not layers:
        raise UserError(
            f"The model {type(model).__name__} has no nn.Linear, whose input would be the features that ALT and MOON "
            "compare; make it the last layer."
        )
    return layers[-1]
