"""A data set: training and test samples as tensors on the CPU, and what is needed to use them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kairosfl.core.streams import stream
from kairosfl.errors import UserError

Ints = npt.NDArray[np.integer[Any]]


@dataclass(frozen=True, eq=False)
class Samples:
    """Inputs and their classes.

    Args:
        inputs: uint8 images `[n, C, H, W]`, tokens `[n, L]` or float features `[n, ...]`.
        targets: The class of each input, int64 `[n]`.
    """

    inputs: torch.Tensor
    targets: torch.Tensor

    def __post_init__(self) -> None:
        if self.targets.dtype != torch.int64 or self.targets.dim() != 1:
            shape, dtype = tuple(self.targets.shape), self.targets.dtype
            raise UserError(f"targets must be int64 of shape [n], not {dtype} of shape {list(shape)}.")
        if len(self.inputs) != len(self.targets):
            raise UserError(f"{len(self.inputs)} inputs have {len(self.targets)} targets; give one target each.")

    def __len__(self) -> int:
        return len(self.targets)


@dataclass(frozen=True, eq=False)
class DataSet:
    """What a federation trains and tests on.

    Args:
        name: What reports call it.
        train: The training samples, which are divided among the clients.
        test: The samples on which the global model is evaluated.
        classes: The number of classes; targets are 0 to `classes - 1`.
        mean: One number per channel. With `std`, uint8 images become (x/255 - mean)/std on the device; without
            them inputs are used as they are.
        std: One number per channel, as many as in `mean`.
        vocabulary: The number of token ids, 0 for other inputs.
        labels: The class names.
        keys: The natural client (0 to K - 1) of each training sample where the data has one, a writer or a speaker.
        test_keys: The same for each test sample, -1 for samples of no client.
        key_names: The names of the natural clients.
        hashes: The md5 sums of the files that were read.
        notes: Further numbers to print, such as how many roles a play has.
    """

    name: str
    train: Samples
    test: Samples
    classes: int
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    vocabulary: int = 0
    labels: tuple[str, ...] = ()
    keys: Ints | None = None
    test_keys: Ints | None = None
    key_names: tuple[str, ...] = ()
    hashes: Mapping[str, str] = field(default_factory=dict)
    notes: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for split, samples in (("training", self.train), ("test", self.test)):
            _check_targets(self.name, split, samples.targets, self.classes)
        if not len(self.train):
            raise UserError(f"data set {self.name!r} has no training samples.")
        for name, keys, samples in (
            ("keys", self.keys, self.train),
            ("test_keys", self.test_keys, self.test),
        ):
            if keys is not None and keys.shape != (len(samples),):
                raise UserError(
                    f"{name} of data set {self.name!r} has shape {list(keys.shape)}; "
                    f"give one key for each of the {len(samples)} samples."
                )
        if len(self.mean) != len(self.std):
            counts = f"{len(self.mean)} means and {len(self.std)} deviations"
            raise UserError(f"data set {self.name!r} has {counts}; give one of each per channel.")

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one input."""
        return tuple(self.train.inputs.shape[1:])


def held_out(dataset: DataSet, part: float) -> DataSet:
    """The data set with a fraction of its training samples, the same for every run, instead of its test samples.

    Args:
        dataset: The data set, whose own test samples are left out.
        part: The fraction of the training samples to test on, above 0 and below 1.
    """
    order = stream(0, "validation").permutation(len(dataset.train))
    count = round(part * len(order))
    if not 0 < count < len(order):
        raise UserError(
            f"data.validation = {part} leaves {len(order) - count} of {len(order)} samples for training; "
            "use a fraction above 0 and below 1."
        )
    scored, kept = np.sort(order[:count]), np.sort(order[count:])

    def samples(rows: Ints) -> Samples:
        chosen = torch.from_numpy(rows)
        return Samples(dataset.train.inputs[chosen], dataset.train.targets[chosen])

    keys = dataset.keys
    return replace(
        dataset,
        train=samples(kept),
        test=samples(scored),
        keys=None if keys is None else keys[kept],
        test_keys=None if keys is None else keys[scored],
    )


def _check_targets(name: str, split: str, targets: torch.Tensor, classes: int) -> None:
    if not len(targets):
        return
    low, high = (int(v) for v in torch.aminmax(targets))
    if low < 0 or high >= classes:
        wrong = low if low < 0 else high
        where = int((targets == wrong).nonzero()[0])
        raise UserError(
            f"{split} sample {where} of data set {name!r} has label {wrong}; "
            f"labels must be 0 to {classes - 1} for {classes} classes."
        )
