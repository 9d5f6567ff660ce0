"""A data set: training and test samples as tensors on the CPU, and what is needed to use them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kairosfl.core.streams import stream
from kairosfl.errors import UserError, nearest
from kairosfl.tasks.kinds import CLASSED, IGNORED, KINDS, infer
from kairosfl.tasks.streamed import Streamed
from kairosfl.tasks.tree import Tree, leaves, rows, tree_map

Ints = npt.NDArray[np.integer[Any]]
CHECKED = 1024  # samples at a time, so that a check needs little memory
MANY = 1000  # classes that even a few samples, such as those of one client, may be of


@dataclass(frozen=True, eq=False)
class Samples:
    """Inputs and targets of samples that are in memory.

    Args:
        inputs: A tensor whose first dimension counts the samples: uint8 images `[n, C, H, W]`,
            tokens `[n, L]`, float features `[n, ...]`; or a tuple or a dict of such tensors, with
            which the model is called as `model(*inputs)` or `model(**inputs)`.
        targets: What the loss compares the outputs with: classes as int64 `[n]`, numbers, masks,
            tokens; or a tuple or a dict of tensors for a loss of your own.
    """

    inputs: Tree
    targets: Tree

    def __post_init__(self) -> None:
        _check_tree("inputs", self.inputs)
        _check_tree("targets", self.targets)
        inputs = rows(self.inputs)
        targets = rows(self.targets)
        if inputs != targets:
            raise UserError(f"{inputs} inputs have {targets} targets; give one target each.")

    def __len__(self) -> int:
        return rows(self.targets)

    def read(
        self, chosen: torch.Tensor | slice, keys: torch.Tensor | None = None
    ) -> tuple[Any, Any]:
        """Inputs and targets of these samples; `keys` are for `Streamed` ones."""
        inputs = tree_map(lambda leaf: leaf[chosen], self.inputs)
        targets = tree_map(lambda leaf: leaf[chosen], self.targets)
        return inputs, targets

    def batches(self, size: int) -> Iterator[tuple[Any, Any]]:
        """All samples in their order, `size` at a time."""
        for begin in range(0, len(self), size):
            yield self.read(slice(begin, begin + size))

    def take(self, chosen: torch.Tensor) -> Samples:
        """Only these samples."""
        return Samples(*self.read(chosen))

    def to(self, device: torch.device) -> Samples:
        """The samples on a device."""
        return Samples(
            tree_map(lambda leaf: leaf.to(device), self.inputs),
            tree_map(lambda leaf: leaf.to(device), self.targets),
        )


@dataclass(frozen=True, eq=False)
class DataSet:
    """What a federation trains and tests on.

    Args:
        name: What reports call it.
        train: The training samples, which are divided among the clients; `Streamed` ones are read
        batch by batch.
        test: The samples on which the global model is evaluated.
        classes: The number of classes; targets are 0 to `classes - 1`. Of tokens it is the
            vocabulary of the targets, of several labels their number, of numbers 0. By default
            counted.
        mean: One number per channel. With `std`, uint8 images become (x/255 - mean)/std on the
            device; without them inputs are used as they are.
        std: One number per channel, as many as in `mean`.
        vocabulary: The number of token ids, 0 for other inputs.
        labels: The class names.
        keys: The natural client (0 to K - 1) of each training sample where the data has one, a
        writer or a speaker.
        test_keys: The same for each test sample, -1 for samples of no client.
        key_names: The names of the natural clients.
        hashes: The md5 sums of the files that were read.
        notes: Further numbers to print, such as how many roles a play has.
        kind: "classification", "binary", "multilabel", "regression", "segmentation" or "language";
            by default inferred from the targets. "" is a task of another kind, with its own loss.
    """

    name: str
    train: Samples | Streamed
    test: Samples | Streamed
    classes: int = 0
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    vocabulary: int = 0
    labels: tuple[str, ...] = ()
    keys: Ints | None = None
    test_keys: Ints | None = None
    key_names: tuple[str, ...] = ()
    hashes: Mapping[str, str] = field(default_factory=dict)
    notes: Mapping[str, int] = field(default_factory=dict)
    kind: str | None = None

    def __post_init__(self) -> None:
        if not len(self.train):
            raise UserError(f"data set {self.name!r} has no training samples.")
        if self.kind is None:
            object.__setattr__(self, "kind", self._inferred_kind())
        if self.kind and self.kind not in KINDS:
            raise UserError(
                f"kind = {self.kind!r} of data set {self.name!r} is unknown; "
                f"{nearest(self.kind, KINDS)}"
            )
        if not self.classes and self.kind:
            object.__setattr__(self, "classes", _classes(self.kind, (self.train, self.test)))
            self._check_count()
        for split, samples in (("training", self.train), ("test", self.test)):
            _check_targets(self.name, split, samples.targets, self.kind, self.classes)
            if isinstance(samples, Samples):
                _check_finite(self.name, split, "an input", samples.inputs)
        self._check_keys("keys", self.keys, self.train)
        self._check_keys("test_keys", self.test_keys, self.test)
        if len(self.mean) != len(self.std):
            counts = f"{len(self.mean)} means and {len(self.std)} deviations"
            raise UserError(f"data set {self.name!r} has {counts}; give one of each per channel.")

    def _inferred_kind(self) -> str:
        """The kind that the training targets show; empty where they are several tensors."""
        targets = self.train.targets
        if isinstance(targets, torch.Tensor):
            return infer(targets, self.vocabulary)
        return ""

    def _check_keys(self, name: str, keys: Ints | None, samples: Samples | Streamed) -> None:
        """Refuse natural clients that are not one per sample."""
        if keys is not None and keys.shape != (len(samples),):
            raise UserError(
                f"{name} of data set {self.name!r} has shape {list(keys.shape)}; "
                f"give one key for each of the {len(samples)} samples."
            )

    def _check_count(self) -> None:
        """Refuse counted classes that cannot be meant, such as those of labels that identify."""
        count = len(self.train) + len(self.test)
        if self.kind == "classification" and self.classes > max(count, MANY):
            raise UserError(
                f"data set {self.name!r} has label {self.classes - 1}, which makes "
                f"{self.classes:,} classes of {count:,} samples: number the labels from 0, give "
                "them as text, or say how many `classes` there are."
            )

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one input; of several, that of the first."""
        return tuple(leaves(self.train.inputs)[0].shape[1:])

    @property
    def unit(self) -> tuple[str, int]:
        """What speed is measured in, such as "images", and how many of them a sample has."""
        shape = self.shape
        if self.vocabulary and shape:
            return "tokens", shape[0]
        if len(shape) == 3:
            return "images", 1
        return "samples", 1

    @property
    def outputs(self) -> int:
        """How many numbers a model should return for each sample, token or pixel."""
        if self.classes:
            return self.classes
        first_target = leaves(self.train.targets)[0][0]
        return first_target.numel()

    @property
    def labels_of_train(self) -> Ints | None:
        """The class of each training sample, if each has one and it need not be read first."""
        targets = leaves(self.train.targets)[0]
        if self.kind not in CLASSED or len(targets) != len(self.train):
            return None
        return targets.reshape(-1).long().numpy()

    def with_labels(self) -> DataSet:
        """With the class of each training sample, even if all samples have to be read for it."""
        if isinstance(self.train, Samples) or self.kind not in CLASSED:
            return self
        return replace(self, train=self.train.with_targets())


def held_out(dataset: DataSet, part: float) -> DataSet:
    """The data set that tests on a fraction of its training samples, the same for every run.

    Args:
        dataset: The data set, whose own test samples are left out.
        part: The fraction of the training samples to test on, above 0 and below 1.
    """
    order = stream(0, "validation").permutation(len(dataset.train))
    count = round(part * len(order))
    if not 0 < count < len(order):
        if not 0 < part < 1:
            fix = "a fraction above 0 and below 1"
        elif part < 0.5:
            fix = "a larger one"
        else:
            fix = "a smaller one"
        raise UserError(
            f"data.validation = {part} leaves {len(order) - count} of {len(order)} samples for "
            f"training; use {fix}."
        )
    scored = np.sort(order[:count])
    kept = np.sort(order[count:])

    keys = test_keys = None
    if dataset.keys is not None:
        keys = dataset.keys[kept]
        test_keys = dataset.keys[scored]
    return replace(
        dataset,
        train=dataset.train.take(torch.from_numpy(kept)),
        test=dataset.train.take(torch.from_numpy(scored)),
        keys=keys,
        test_keys=test_keys,
    )


def _check_tree(what: str, tree: Any) -> None:
    """Refuse what is not a tensor, or a tuple or dict of tensors that are equally long."""
    is_nested = isinstance(tree, tuple | dict) and bool(leaves(tree))
    if not isinstance(tree, torch.Tensor) and not is_nested:
        raise UserError(
            f"{what} is a {type(tree).__name__}; give a tensor, or a tuple or dict of tensors."
        )
    sizes = [len(leaf) if leaf.ndim else 0 for leaf in leaves(tree)]
    if len(set(sizes)) > 1:
        raise UserError(
            f"the tensors of {what} have {sizes} samples; give the same number in each."
        )


def _classes(kind: str, parts: Sequence[Samples | Streamed]) -> int:
    """The number of classes, counted: one more than the highest label of all parts."""
    targets = []
    for part in parts:
        labelled = part
        if kind in CLASSED and isinstance(part, Streamed):
            labelled = part.with_targets()
        if len(part):
            targets.append(leaves(labelled.targets)[0])

    if kind == "multilabel":
        return targets[0].shape[1]
    if kind == "regression":
        return 0
    return 1 + max(int(labels.max()) for labels in targets)


def _check_finite(name: str, split: str, what: str, values: Tree) -> None:
    """Refuse a sample with a number that is infinite or none."""
    for leaf in leaves(values):
        if not leaf.is_floating_point():
            continue
        for begin in range(0, len(leaf), CHECKED):
            wrong = ~leaf[begin : begin + CHECKED].isfinite()
            if wrong.any():
                first = begin + int(wrong.reshape(len(wrong), -1).any(1).nonzero()[0])
                raise UserError(
                    f"{split} sample {first} of data set {name!r} has {what} that is not a finite "
                    "number; fill it in, or leave the sample out."
                )


def _check_targets(name: str, split: str, targets: Tree, kind: str | None, classes: int) -> None:
    """Refuse targets that are not of their kind: classes as whole numbers from 0 to the last."""
    _check_finite(name, split, "a target", targets)
    if not isinstance(targets, torch.Tensor):
        return
    if kind not in ("classification", "segmentation", "language"):
        return
    if targets.is_floating_point():
        raise UserError(
            f"the {split} targets of data set {name!r} are {targets.dtype}; "
            f"{kind} needs whole numbers."
        )
    if kind == "classification" and (targets.dtype != torch.int64 or targets.ndim != 1):
        raise UserError(
            "targets must be int64 of shape [n] for classification, "
            f"not {targets.dtype} of shape {list(targets.shape)}."
        )

    counted = targets
    if kind != "classification":
        counted = targets[targets != IGNORED]
    if not counted.numel():
        return
    lowest, highest = torch.aminmax(counted)
    low = int(lowest)
    high = int(highest)
    if low < 0 or high >= classes:
        wrong = low if low < 0 else high
        where = int((targets == wrong).nonzero()[0, 0])
        raise UserError(
            f"{split} sample {where} of data set {name!r} has label {wrong}; "
            f"labels must be 0 to {classes - 1} for {classes} classes."
        )
