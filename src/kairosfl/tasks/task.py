"""A task: a model, a data set, and the samples of each client."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch
from torch import Tensor, nn

from kairosfl.core.layout import Layout
from kairosfl.errors import UserError, first_line
from kairosfl.tasks.copied import check_targets
from kairosfl.tasks.crops import Crops, augment
from kairosfl.tasks.dataset import DataSet
from kairosfl.tasks.forward import call
from kairosfl.tasks.kinds import CLASSED, KINDS, Loss
from kairosfl.tasks.metrics import Measure, Metric, class_scores, mean, named
from kairosfl.tasks.owned import own_names
from kairosfl.tasks.population import Population, own_tests
from kairosfl.tasks.prepare import prepare
from kairosfl.tasks.streamed import Streamed
from kairosfl.tasks.tree import Tree, cast, rows, shapes, tree_map
from kairosfl.tasks.vector import base_hash, check_base, check_state, flatten, layout_of, trained

TRIAL = 4  # samples
MOST_CLASSES = 100  # of which a run records the accuracy of each

DROPOUT = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)


@dataclass(frozen=True, eq=False)
class Task:
    """What a run learns.

    Args:
        model: Any module; its parameters as they are now are the start of the run.
        dataset: Training and test samples.
        clients: The training samples of each client, as from `partition`.
        loss: From outputs and targets of a batch to one loss per sample, `[batch]`; by default that
        of the data's kind.
        augment: Whether images are randomly cropped and flipped while training; `Crops` says how.
        metrics: What is measured on the test set, by name, the main one first; by default those of
            the data's kind. A plain function returns a number per sample, whose mean is better when
            higher; for others use `Metric`.
        own: Names of trained parameters that never leave a client, or shell patterns of them such
            as "head.*".
        pairs: Low-rank pairs of the model, as `(a, b, base, scale)`: the names of two trained
            tensors and of the frozen one to which scale · b a is added.

    Of the model, the parameters with `requires_grad` are trained and sent. The others and the
    buffers are the base, which every client has and no training step changes.
    """

    model: nn.Module
    dataset: DataSet
    clients: Population
    loss: Loss = None  # type: ignore[assignment]  # never None after __post_init__
    augment: bool | Crops = False
    metrics: Mapping[str, Metric | Measure] | None = None
    own: Sequence[str] = ()
    pairs: Sequence[tuple[str, str, str, float]] = ()

    def __post_init__(self) -> None:
        if isinstance(self.own, str):
            object.__setattr__(self, "own", (self.own,))
        self.clients.check(len(self.dataset.train))
        if self.clients.tests is not None:
            self.clients.tests.check_range(len(self.dataset.test), "test samples")
        kind = KINDS.get(self.dataset.kind or "")
        if self.loss is None:
            if kind is None:
                raise UserError(
                    f"data set {self.dataset.name!r} is of no known kind; give its task a loss."
                )
            object.__setattr__(self, "loss", kind.loss)
        usual = kind is not None and (self.loss is kind.loss or self.metrics is None)
        if self.dataset.kind == "language" and usual:
            check_targets(self.dataset)
        if self.augment and (
            not isinstance(self.dataset.train.inputs, Tensor) or len(self.dataset.shape) != 3
        ):
            raise UserError(
                "data.augment = true needs images [channels, height, width] alone as input; set it to false."
            )
        if self.augment is True:
            object.__setattr__(self, "augment", Crops())

    @cached_property
    def measures(self) -> dict[str, Metric]:
        """The metrics by name, the main one first; without any, the loss is the main one."""
        own = self.metrics
        if own is None:
            kind = KINDS.get(self.dataset.kind or "")
            own = kind.metrics if kind is not None and self._judges(kind.metrics) else {}
        return named(own)

    def _judges(self, metrics: Mapping[str, Metric]) -> bool:
        """Whether the usual metrics of this kind can judge the model's outputs, which a loss of
        one's own may not.
        """
        if self.loss is KINDS[self.dataset.kind or ""].loss:
            return True
        try:
            _, outputs, targets = self._tried
            return all(
                len(metric.measure(outputs, targets)) == len(outputs) for metric in metrics.values()
            )
        except Exception:  # the outputs are of another form
            return False

    @cached_property
    def confusable(self) -> int:
        """The number of classes, if outputs are scores of classes and these are few enough to be
        recorded; else 0.
        """
        usual = [KINDS[name].metrics["accuracy"] for name in CLASSED]
        few = self.dataset.classes <= MOST_CLASSES
        return self.dataset.classes if few and self.measures.get("accuracy") in usual else 0

    @property
    def main(self) -> tuple[str, Metric | None]:
        """The name of the main metric, and the metric; None: the loss."""
        return next(iter(self.measures.items()), ("loss", None))

    @cached_property
    def accuracy(self) -> Measure:
        """Which samples of a batch are correct, for clients that are to measure their accuracy."""
        metric = self.measures.get("accuracy")
        if metric is None or metric.finish is not mean:
            have = ", ".join(self.measures) or "none"
            raise UserError(
                "A rule that has clients measure their accuracy needs a task with the metric accuracy, "
                f"and this one has {have}; have them measure their loss, as by score = "
                "'log_likelihood'."
            )
        return metric.measure

    @cached_property
    def layout(self) -> Layout:
        """Where each trained tensor of the model is in the vector."""
        layout = layout_of(self.model, self.own_names, self.pairs)
        check_base(self.model, *self.trial(), self.loss)
        return layout

    @cached_property
    def own_names(self) -> frozenset[str]:
        """The names of the trained parameters that never leave a client."""
        return own_names(self.model, self.own)

    def own_start(self) -> Tensor | None:
        """The own part of a client that has not trained yet; None where the model has none."""
        if not self.own:
            return None
        tensors = trained(self.model)
        return torch.cat([tensors[entry.name].detach().reshape(-1) for entry in self.layout.own])

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
    def varies(self) -> bool:
        """Whether a training sample may look different every time it is read."""
        return bool(self.augment) or isinstance(self.dataset.train, Streamed)

    def augmented(self, inputs: Any, keys: Tensor) -> Any:
        """Stored training inputs, cropped and flipped by these keys if so asked for: before they
        are normalised.
        """
        crops = self.augment
        return (
            augment(inputs, keys, crops, mean=self.dataset.mean)
            if isinstance(crops, Crops)
            else inputs
        )

    @property
    def client_accuracy_on(self) -> Literal["test", "train"]:
        """On which samples the accuracy of each client is measured: its own test samples, or else
        what it trains on.
        """
        return "train" if self.tests is None else "test"

    def start(self) -> Tensor:
        """What the clients share of the current model, as a new vector."""
        if not self.own:
            return flatten(self.model)
        tensors = trained(self.model)
        return torch.cat(
            [tensors[entry.name].detach().reshape(-1) for entry in self.layout.entries]
        )

    def trial(self) -> tuple[Any, Any]:
        """The first training samples as the model sees them, and their targets, to try the model
        on.
        """
        inputs, targets = self.dataset.train.read(torch.arange(min(TRIAL, len(self.dataset.train))))
        return self.prepared(inputs, next(iter(trained(self.model).values())).dtype), targets

    @cached_property
    def _tried(self) -> tuple[Any, Tensor, Any]:
        """The inputs of the trial, what a copy of the model makes of them, and the targets."""
        inputs, targets = self.trial()
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            return inputs, call(copy.deepcopy(self.model), inputs), targets

    @cached_property
    def scored_classes(self) -> int:
        """For how many classes the model has a score; a deployed server, which has only its shapes,
        takes those of the data.
        """
        if _is_hollow(self.model):
            return self.dataset.classes
        return class_scores(self._tried[1]).shape[1]

    @cached_property
    def draws(self) -> bool:
        """Whether a forward pass in training draws random numbers, as for dropout."""
        if _is_hollow(self.model):
            return any(isinstance(module, DROPOUT) and module.p for module in self.model.modules())
        model = copy.deepcopy(self.model).train()
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            before = torch.get_rng_state()
            call(model, self.trial()[0])
            return not torch.equal(before, torch.get_rng_state())

    def prepared(self, inputs: Tree, dtype: torch.dtype) -> Any:
        """Stored inputs as the model sees them, floating-point ones of this type."""
        return cast(prepare(inputs, self.dataset), dtype)

    def check(self) -> None:
        """Try the model, the loss and the metrics on a few samples, and refuse what does not fit
        with the shapes.

        Raises:
            UserError: Names what fails or has the wrong shape.
        """
        check_state(self.model)
        model = f"The model {type(self.model).__name__}"
        try:
            inputs, outputs, targets = self._tried
        except UserError:
            raise
        except Exception as error:  # the user's forward: anything may come out of it
            shape = shapes(self.trial()[0])
            raise UserError(
                f"{model} fails on training inputs of shape {shape}: {first_line(error)}"
            ) from error
        count = rows(targets)
        made = f"outputs of shape {shapes(outputs)} and targets of shape {shapes(targets)}"
        self._check_outputs(model, inputs, outputs, targets)
        for name, measure in (
            ("loss", self.loss),
            *((f"metrics[{key!r}]", m.measure) for key, m in self.measures.items()),
        ):
            try:
                numbers = measure(outputs, targets)
            except Exception as error:
                raise UserError(f"{name} fails on {made}: {first_line(error)}") from error
            per_sample = isinstance(numbers, Tensor) and numbers.ndim and len(numbers) == count
            if not per_sample or (name == "loss" and numbers.shape != (count,)):
                found = (
                    list(numbers.shape) if isinstance(numbers, Tensor) else type(numbers).__name__
                )
                raise UserError(
                    f"{name} returned {found} for {made}; return one number per sample, shape [{count}], such as by "
                    "reduction='none' and a mean over the other dimensions."
                )
        if not self._has_gradient(outputs, targets):
            raise UserError(
                "loss has no gradient: what it returns is cut off from the model's outputs, as by detach(), argmax() "
                "or no_grad(); compute it from them."
            )

    def _has_gradient(self, outputs: Tree, targets: Any) -> bool:
        with torch.enable_grad():  # clones, which a loss may change in place
            watched = tree_map(
                lambda leaf: leaf.detach().requires_grad_(leaf.is_floating_point()).clone(), outputs
            )
            return self.loss(watched, targets).requires_grad

    def check_features(self, who: str) -> None:
        """Refuse a model whose features, the input of its last `nn.Linear`, are not one row per
        sample.

        Args:
            who: What would compare them.
        """
        model, heard = copy.deepcopy(self.model).eval(), []
        last_linear(model).register_forward_pre_hook(
            lambda _, arguments: heard.append(arguments[0])
        )
        inputs, targets = self.trial()
        with torch.no_grad():
            call(model, inputs)
        if not heard or len(heard[-1]) != rows(targets):
            found = (
                f"is given {list(heard[-1].shape)} for {rows(targets)} samples"
                if heard
                else "is not used"
            )
            raise UserError(
                f"{who} compares features, the input of the last nn.Linear, but that of {type(self.model).__name__} "
                f"{found}; leave {who} out, or use a model that ends with an nn.Linear."
            )

    def _check_outputs(self, model: str, inputs: Tree, outputs: Tensor, targets: Any) -> None:
        """Refuse outputs of a shape that is wrong in a way that the usual loss of this kind would
        not notice.
        """
        kind, classes = self.dataset.kind, self.dataset.classes
        if not kind or self.loss is not KINDS[kind].loss:
            return
        made = f"{model} turns inputs of shape {shapes(inputs)} into outputs of shape {list(outputs.shape)}"
        if kind == "regression" and outputs.numel() != targets.numel():
            raise UserError(
                f"{made}, but the targets have shape {list(targets.shape)}: give it one output for each number; if the "
                "targets are classes, give them as whole numbers."
            )
        logit = classes <= 2 and outputs.shape in ((len(outputs),), (len(outputs), 1))
        if (
            kind == "classification"
            and not logit
            and (outputs.ndim != 2 or outputs.shape[1] < classes)
        ):
            numbers = ""
            if outputs.numel() == len(outputs):
                numbers = ", or pass kind='regression' if the targets are numbers"
            raise UserError(
                f"{made}, but the data has {classes} classes: give its last layer as many outputs, "
                f"shape [{len(outputs)}, {classes}]{numbers}."
            )
        if kind == "classification" and outputs.ndim == 2 and outputs.shape[1] > max(classes, 2):
            warnings.warn(
                f"{made}, but the data has {classes} classes: the other outputs only cost time and bytes; give its "
                f"last layer {classes}.",
                stacklevel=2,
            )


def last_linear(model: nn.Module) -> nn.Linear:
    """The layer whose input is the model's features: its last `nn.Linear`."""
    layers = [module for module in model.modules() if isinstance(module, nn.Linear)]
    if not layers:
        raise UserError(
            f"The model {type(model).__name__} has no nn.Linear, whose input would be the "
            "features that rules compare; make it the last layer."
        )
    return layers[-1]


def _is_hollow(model: nn.Module) -> bool:
    """Whether a model has only shapes and no weights."""
    return any(parameter.is_meta for parameter in model.parameters())
