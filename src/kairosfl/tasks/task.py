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

from kairosfl.core.layout import Entry, Layout
from kairosfl.errors import UserError, first_line
from kairosfl.tasks.copied import check_targets
from kairosfl.tasks.crops import Crops, augment
from kairosfl.tasks.dataset import DataSet
from kairosfl.tasks.forward import call
from kairosfl.tasks.kinds import CLASSED, KINDS, Kind, Loss
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
        kind = self._kind
        if self.loss is None:
            if kind is None:
                raise UserError(
                    f"data set {self.dataset.name!r} is of no known kind; give its task a loss."
                )
            object.__setattr__(self, "loss", kind.loss)
        usual = kind is not None and (self.loss is kind.loss or self.metrics is None)
        if self.dataset.kind == "language" and usual:
            check_targets(self.dataset)
        if self.augment:
            self._check_images()
        if self.augment is True:
            object.__setattr__(self, "augment", Crops())

    def _check_images(self) -> None:
        """Refuse crops of what is not one image a sample."""
        alone = isinstance(self.dataset.train.inputs, Tensor)
        if not alone or len(self.dataset.shape) != 3:
            raise UserError(
                "data.augment = true needs images [channels, height, width] alone as input; "
                "set it to false."
            )

    @property
    def _kind(self) -> Kind | None:
        """The usual loss and metrics of this kind of data; None where it is none of ours."""
        if self.dataset.kind is None:
            return None
        return KINDS.get(self.dataset.kind)

    @cached_property
    def measures(self) -> dict[str, Metric]:
        """The metrics by name, the main one first; without any, the loss is the main one."""
        if self.metrics is not None:
            return named(self.metrics)
        kind = self._kind
        if kind is None or not self._judges(kind):
            return {}
        return named(kind.metrics)

    def _judges(self, kind: Kind) -> bool:
        """Whether the usual metrics can judge the outputs, which a loss of one's own may shape."""
        if self.loss is kind.loss:
            return True
        try:
            _, outputs, targets = self._tried
            for metric in kind.metrics.values():
                if len(metric.measure(outputs, targets)) != len(outputs):
                    return False
        except Exception:  # the outputs are of another form
            return False
        return True

    @cached_property
    def confusable(self) -> int:
        """The number of classes of which a run records who is taken for whom.

        It is 0 unless outputs are scores of classes, and these are few.
        """
        usual = [KINDS[name].metrics["accuracy"] for name in CLASSED]
        few = self.dataset.classes <= MOST_CLASSES
        if few and self.measures.get("accuracy") in usual:
            return self.dataset.classes
        return 0

    @property
    def main(self) -> tuple[str, Metric | None]:
        """The name of the main metric, and the metric; None: the loss."""
        return next(iter(self.measures.items()), ("loss", None))

    @cached_property
    def accuracy(self) -> Measure:
        """Which samples of a batch are correct, for clients that are to measure their accuracy."""
        metric = self.measures.get("accuracy")
        if metric is None or metric.finish is not mean:
            names = "none"
            if self.measures:
                names = ", ".join(self.measures)
            raise UserError(
                "A rule that has clients measure their accuracy needs a task with the metric "
                f"accuracy, and this one has {names}; have them measure their loss, as by score = "
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
        return self._joined(self.layout.own)

    @cached_property
    def base_hash(self) -> str | None:
        """A digest of the frozen parameters and buffers; None if the model has none."""
        return base_hash(self.model)

    @cached_property
    def tests(self) -> Population | None:
        """Each client's own test samples, if any client has some."""
        own = own_tests(self.dataset, self.clients)
        if own is None or not own.sizes.any():
            return None
        return own

    @property
    def varies(self) -> bool:
        """Whether a training sample may look different every time it is read."""
        return bool(self.augment) or isinstance(self.dataset.train, Streamed)

    def augmented(self, inputs: Any, keys: Tensor) -> Any:
        """Stored training inputs, cropped and flipped by these keys before they are normalised."""
        crops = self.augment
        if isinstance(crops, Crops):
            return augment(inputs, keys, crops, mean=self.dataset.mean)
        return inputs

    @property
    def client_accuracy_on(self) -> Literal["test", "train"]:
        """Where a client's accuracy is measured: its own test samples, or what it trains on."""
        return "train" if self.tests is None else "test"

    @property
    def measured_clients(self) -> Population:
        """Whose samples each client is measured on, of the set that `client_accuracy_on` names."""
        return self.clients if self.tests is None else self.tests

    def start(self) -> Tensor:
        """What the clients share of the current model, as a new vector."""
        if not self.own:
            return flatten(self.model)
        return self._joined(self.layout.entries)

    def _joined(self, entries: Sequence[Entry]) -> Tensor:
        """These trained tensors of the current model, one after another."""
        tensors = trained(self.model)
        return torch.cat([tensors[entry.name].detach().reshape(-1) for entry in entries])

    def trial(self) -> tuple[Any, Any]:
        """The first training samples as the model sees them, and their targets."""
        count = min(TRIAL, len(self.dataset.train))
        inputs, targets = self.dataset.train.read(torch.arange(count))
        dtype = next(iter(trained(self.model).values())).dtype
        return self.prepared(inputs, dtype), targets

    @cached_property
    def _tried(self) -> tuple[Any, Tensor, Any]:
        """The inputs of the trial, what a copy of the model makes of them, and the targets."""
        inputs, targets = self.trial()
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            return inputs, call(copy.deepcopy(self.model), inputs), targets

    @cached_property
    def scored_classes(self) -> int:
        """For how many classes the model has a score.

        A deployed server has only the shapes of the model and takes the classes of the data.
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
        """Try the model, the loss and the metrics on a few samples, and refuse what does not fit.

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
        self._check_outputs(model, inputs, outputs, targets)
        measures: dict[str, Measure] = {"loss": self.loss}
        for name, metric in self.measures.items():
            measures[f"metrics[{name!r}]"] = metric.measure
        for name, measure in measures.items():
            _check_numbers(name, measure, outputs, targets)
        if not self._has_gradient(outputs, targets):
            raise UserError(
                "loss has no gradient: what it returns is cut off from the model's outputs, as by "
                "detach(), argmax() or no_grad(); compute it from them."
            )

    def _has_gradient(self, outputs: Tree, targets: Any) -> bool:
        """Whether the loss depends on the outputs."""

        def attached(leaf: Tensor) -> Tensor:
            # A clone, since a loss may change it in place.
            return leaf.detach().requires_grad_(leaf.is_floating_point()).clone()

        with torch.enable_grad():
            return self.loss(tree_map(attached, outputs), targets).requires_grad

    def check_features(self, who: str) -> None:
        """Refuse a model whose features, its last layer's input, are not one row per sample.

        Args:
            who: What would compare them.
        """
        model = copy.deepcopy(self.model).eval()
        features: list[Tensor] = []

        def keep(_: nn.Module, arguments: tuple[Any, ...]) -> None:
            features.append(arguments[0])

        last_linear(model).register_forward_pre_hook(keep)
        inputs, targets = self.trial()
        with torch.no_grad():
            call(model, inputs)
        if features and len(features[-1]) == rows(targets):
            return
        problem = "is not used"
        if features:
            problem = f"is given {list(features[-1].shape)} for {rows(targets)} samples"
        raise UserError(
            f"{who} compares features, the input of the last nn.Linear, but that of "
            f"{type(self.model).__name__} {problem}; leave {who} out, or use a model that ends "
            "with an nn.Linear."
        )

    def _check_outputs(self, model: str, inputs: Tree, outputs: Tensor, targets: Any) -> None:
        """Refuse outputs of a wrong shape that the usual loss of this kind would not notice."""
        kind = self.dataset.kind
        if not kind or self.loss is not KINDS[kind].loss:
            return
        model_turns = (
            f"{model} turns inputs of shape {shapes(inputs)} "
            f"into outputs of shape {list(outputs.shape)}"
        )
        if kind == "regression" and outputs.numel() != targets.numel():
            raise UserError(
                f"{model_turns}, but the targets have shape {list(targets.shape)}: give it one "
                "output for each number; if the targets are classes, give them as whole numbers."
            )
        if kind == "classification":
            _check_scores(model_turns, outputs, self.dataset.classes)


def _check_scores(model_turns: str, outputs: Tensor, classes: int) -> None:
    """Refuse too few outputs for the classes, and warn of too many.

    Args:
        model_turns: The beginning of the sentence: what the model turns into which outputs.
        outputs: The model's, `[n]` or `[n, 1]` for a single logit of two classes, else
            `[n, classes]`.
        classes: How many classes the data has.
    """
    single_logit = outputs.shape in ((len(outputs),), (len(outputs), 1))
    if classes <= 2 and single_logit:
        return
    if outputs.ndim != 2 or outputs.shape[1] < classes:
        numbers = ""
        if outputs.numel() == len(outputs):
            numbers = ", or pass kind='regression' if the targets are numbers"
        raise UserError(
            f"{model_turns}, but the data has {classes} classes: give its last layer as many "
            f"outputs, shape [{len(outputs)}, {classes}]{numbers}."
        )
    if outputs.shape[1] > max(classes, 2):
        warnings.warn(
            f"{model_turns}, but the data has {classes} classes: the other outputs only cost time "
            f"and bytes; give its last layer {classes}.",
            stacklevel=3,
        )


def _check_numbers(name: str, measure: Measure, outputs: Any, targets: Any) -> None:
    """Refuse a loss or a metric that fails, or that does not return numbers for each sample."""
    samples = f"outputs of shape {shapes(outputs)} and targets of shape {shapes(targets)}"
    count = rows(targets)
    try:
        numbers = measure(outputs, targets)
    except Exception as error:
        raise UserError(f"{name} fails on {samples}: {first_line(error)}") from error

    returned: Any = type(numbers).__name__
    fits = False
    if isinstance(numbers, Tensor):
        returned = list(numbers.shape)
        fits = numbers.ndim > 0 and len(numbers) == count
        if name == "loss":
            fits = numbers.shape == (count,)
    if not fits:
        raise UserError(
            f"{name} returned {returned} for {samples}; return one number per sample, shape "
            f"[{count}], such as by reduction='none' and a mean over the other dimensions."
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
