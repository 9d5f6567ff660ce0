"""Data generated from a seed, for benchmarks: one Gaussian cluster per class, of any shape."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import numpy as np
import numpy.typing as npt
import torch

from kairosfl.errors import UserError
from kairosfl.tasks.dataset import DataSet, Samples

BLOCK = 2**24  # numbers drawn at a time, to avoid a float copy of all images


def synthetic(
    *,
    samples: int = 10_000,
    test_samples: int = 2_000,
    features: int = 32,
    classes: int = 10,
    shape: Sequence[int] = (),
    separation: float = 3.0,
    seed: int = 0,
) -> DataSet:
    """Gaussian class clusters whose centres are `separation` standard deviations from the origin.

    Inputs are float vectors of length `features`, or uint8 images if a `shape` [channels, height,
    width] is given.
    """
    for name, value in (("samples", samples), ("features", features), ("classes", classes)):
        if value < 1:
            raise UserError(f"data.{name} is {value}; give at least 1.")
    for name, value in (("test_samples", test_samples), ("seed", seed)):
        if value < 0:
            raise UserError(f"data.{name} is {value}; give 0 or more.")
    if shape and (len(shape) != 3 or min(shape) < 1):
        raise UserError(
            f"data.shape is {list(shape)}; give channels, height and width, such as [3, 32, 32]."
        )
    size = tuple(shape) or (features,)
    rng = np.random.Generator(np.random.Philox(key=seed))
    centres = rng.standard_normal((classes, prod(size)), dtype=np.float32)
    centres *= separation / np.linalg.norm(centres, axis=1, keepdims=True)
    train = _draw(rng, centres, samples, size, bool(shape))
    test = _draw(rng, centres, test_samples, size, bool(shape))
    if not shape:
        return DataSet("synthetic", train, test, classes)
    half = (0.5,) * size[0]
    quarter = (0.25,) * size[0]
    return DataSet("synthetic", train, test, classes, mean=half, std=quarter)


def _draw(
    rng: np.random.Generator,
    centres: npt.NDArray[np.float32],
    count: int,
    size: tuple[int, ...],
    image: bool,
) -> Samples:
    targets = rng.integers(0, len(centres), count)
    inputs = np.empty((count, *size), dtype=np.uint8 if image else np.float32)
    step = max(1, BLOCK // prod(size))
    for start in range(0, count, step):
        classes = targets[start : start + step]
        block = rng.standard_normal((len(classes), prod(size)), dtype=np.float32)
        block += centres[classes]
        if image:  # one standard deviation is a quarter of the range, like the data set's `std`
            block = np.clip(np.rint(127.5 + 63.75 * block), 0, 255)
        inputs[start : start + step] = block.reshape(-1, *size)
    return Samples(torch.from_numpy(inputs), torch.from_numpy(targets))
