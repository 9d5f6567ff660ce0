"""Feature noise that differs between clients: NIID-Bench's noise-based feature skew."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from kairosfl.core.streams import stream
from kairosfl.errors import UserError
from kairosfl.tasks.dataset import DataSet, Samples
from kairosfl.tasks.population import Population
from kairosfl.tasks.prepare import prepare
from kairosfl.tasks.streamed import Streamed


def noisy(dataset: DataSet, clients: Population, noise: float, seed: int) -> DataSet:
    """The data set with Gaussian noise, which grows from client to client.

    That of client i of N has standard deviation noise · i / (N - 1). Images are measured from 0 to
    1, before normalisation. Test samples have the noise of one client after another, so that a
    model is evaluated on all levels. The noise of a sample is the same in every epoch.

    Args:
        dataset: Images or other real numbers.
        clients: Whose training samples are whose.
        noise: The standard deviation of the last client's noise.
        seed: Of the random numbers.
    """
    if dataset.vocabulary or clients.shared:
        which = "tokens" if dataset.vocabulary else "samples that several clients share"
        raise UserError(f"data.noise = {noise} cannot be added to {which}; set it to 0.")
    levels = noise * np.arange(len(clients)) / max(1, len(clients) - 1)
    train_levels = np.zeros(len(dataset.train))
    train_levels[clients.order] = np.repeat(levels, clients.sizes)
    test_levels = levels[np.arange(len(dataset.test)) % len(levels)]
    train = _added(dataset.train, dataset, train_levels, "noise train", seed)
    test = _added(dataset.test, dataset, test_levels, "noise test", seed)
    return replace(
        dataset,
        train=Samples(train, dataset.train.targets),
        test=Samples(test, dataset.test.targets),
        mean=(),
        std=(),
    )


def _added(
    samples: Samples | Streamed, dataset: DataSet, levels: np.ndarray, purpose: str, seed: int
) -> Tensor:
    """The inputs with noise, of which each sample has its own level."""
    inputs = samples.inputs
    if not isinstance(inputs, torch.Tensor) or isinstance(samples, Streamed):
        raise UserError(
            "data.noise can only be added to inputs that are one tensor in memory; set it to 0."
        )
    clear: Tensor = prepare(inputs, dataset)
    drawn = stream(seed, purpose).standard_normal(clear.shape, dtype=np.float32)
    drawn *= levels.astype(np.float32).reshape(-1, *[1] * (clear.ndim - 1))
    added = torch.from_numpy(drawn)
    if dataset.std and inputs.dtype == torch.uint8:
        added /= torch.tensor(dataset.std).view(-1, 1, 1)
    return added.add_(clear)
