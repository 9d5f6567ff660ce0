"""From stored inputs to what a model sees, on the device: normalisation, and random keys.

Every operation acts on each sample alone, so one client's batch [b,...] and stacked ones [m,b,...]
give equal bits.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from kairosfl.errors import UserError
from kairosfl.tasks.dataset import DataSet
from kairosfl.tasks.kinds import CLASSED
from kairosfl.tasks.tree import Tree, tree_map


def prepare(inputs: Tree, dataset: DataSet) -> Any:
    """Tokens as int64, uint8 images as (x/255 - mean)/std (or x/255), floats as they are."""
    if isinstance(inputs, torch.Tensor):
        if dataset.vocabulary:
            return inputs.long()
        return _normalised(inputs, dataset)

    def image_normalised(leaf: torch.Tensor) -> torch.Tensor:
        if leaf.ndim != 4:
            return leaf  # of several inputs, uint8 may also be a mask
        return _normalised(leaf, dataset)

    return tree_map(image_normalised, inputs)


def _normalised(inputs: torch.Tensor, dataset: DataSet) -> torch.Tensor:
    if inputs.dtype != torch.uint8:
        return inputs
    scale, shift = affine(dataset.mean, dataset.std, inputs.device)
    # Two operations, each rounded: a fused one would give different bits on other devices and at
    # the end of a vector.
    return inputs.float().mul_(scale).add_(shift)


@lru_cache(maxsize=16)
def affine(
    mean: tuple[float, ...], std: tuple[float, ...], device: torch.device
) -> tuple[torch.Tensor, torch.Tensor]:
    """What uint8 images are multiplied by and what is then added, `[channels or 1, 1, 1]`."""
    means = torch.zeros(1, dtype=torch.float64)
    stds = torch.ones(1, dtype=torch.float64)
    if mean:
        means = torch.tensor(mean, dtype=torch.float64)
    if std:
        stds = torch.tensor(std, dtype=torch.float64)
    scale = 1 / (255 * stds)
    shift = -means / stds
    return scale.float().view(-1, 1, 1).to(device), shift.float().view(-1, 1, 1).to(device)


def sample_keys(
    samples: torch.Tensor,
    *,
    seed: int,
    round: int | torch.Tensor,
    client: int | torch.Tensor,
    step: int | torch.Tensor,
) -> torch.Tensor:
    """A 64-bit key for every sample number, from whole numbers alone.

    For stacked batches [m,b] of sample numbers, round, client and step may be tensors [m,1].
    """
    keys = torch.full_like(samples, _signed(seed), dtype=torch.int64)
    for number in (round, client, step, samples):
        keys = _mix(keys ^ number)
    return keys


def ordered(inputs: Tree) -> Any:
    """Images channels-last on a CPU, where convolutions and poolings are twice as fast."""

    def channels_last(leaf: torch.Tensor) -> torch.Tensor:
        if leaf.ndim == 4 and leaf.device.type == "cpu":
            return leaf.contiguous(memory_format=torch.channels_last)
        return leaf

    return tree_map(channels_last, inputs)


def mislabelled(
    targets: torch.Tensor, keys: torch.Tensor, noise: float | torch.Tensor, dataset: DataSet
) -> torch.Tensor:
    """The classes, of which a fraction `noise` is replaced by others, chosen by the keys."""
    if dataset.kind not in CLASSED:
        raise UserError(
            f"label_noise needs one class per sample, and data set {dataset.name!r} is "
            f"{dataset.kind!r}."
        )
    # Rounded, so that float32 and float64 choose the same samples.
    limit = noise * 2**16
    limit = limit.round() if isinstance(limit, torch.Tensor) else round(limit)
    wrong = keys & 0xFFFF < limit
    others = 1 + (((keys >> 16) & 0xFFFFFF) * (dataset.classes - 1) >> 24)
    moved = (targets + others.view(targets.shape).to(targets.dtype)) % dataset.classes
    return torch.where(wrong.view(targets.shape), moved, targets)


def _mix(keys: torch.Tensor) -> torch.Tensor:
    """The finaliser of splitmix64: every input bit moves every output bit."""
    keys = keys + _signed(0x9E3779B97F4A7C15)
    keys = (keys ^ _shift(keys, 30)) * _signed(0xBF58476D1CE4E5B9)
    keys = (keys ^ _shift(keys, 27)) * _signed(0x94D049BB133111EB)
    return keys ^ _shift(keys, 31)


def _shift(keys: torch.Tensor, bits: int) -> torch.Tensor:
    # A shift of signed numbers keeps the sign; the mask makes it that of unsigned ones.
    return (keys >> bits) & ((1 << (64 - bits)) - 1)


def _signed(number: int) -> int:
    """The signed 64-bit number with the same bits."""
    return (number + 2**63) % 2**64 - 2**63
