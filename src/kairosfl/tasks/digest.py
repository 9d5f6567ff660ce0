"""What tells data sets apart: a digest of their samples."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import torch

from kairosfl.tasks.dataset import DataSet, Samples
from kairosfl.tasks.streamed import Streamed
from kairosfl.tasks.tree import leaves, tree_map


def hashed(dataset: DataSet) -> DataSet:
    """With a digest of the samples, so that a run is not resumed with others."""
    own = {"train": digest(dataset.train), "test": digest(dataset.test)}
    return replace(dataset, hashes={**dataset.hashes, **own})


def digest(samples: Samples | Streamed) -> str:
    """Of all inputs and targets; of samples that are read when they are needed, only of some."""
    if isinstance(samples, Streamed):
        return samples.digest()
    form = tree_map(lambda leaf: f"{leaf.dtype} {list(leaf.shape)}", samples.inputs)
    md5 = hashlib.md5(str(form).encode(), usedforsecurity=False)
    for tensor in (*leaves(samples.inputs), *leaves(samples.targets)):
        md5.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return md5.hexdigest()
