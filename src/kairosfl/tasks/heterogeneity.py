"""How much clients differ: label entropy, earth mover's distance, inequality of sizes."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from kairosfl.tasks.dataset import DataSet, Ints
from kairosfl.tasks.population import Population

Floats = npt.NDArray[np.float64]

BLOCK = 2**24  # counts in memory at a time


def label_counts(
    targets: Ints, population: Population, classes: int, first: int = 0, last: int = -1
) -> Ints:
    """Samples of every class `[clients, classes]`.

    Args:
        targets: The class of each sample.
        population: Whose samples are whose.
        classes: The number of classes.
        first: The first client to count.
        last: The client to stop before; -1 counts to the end.
    """
    if last < 0:
        last = len(population)
    offsets = population.offsets[first : last + 1]
    clients = len(offsets) - 1
    labels = targets[population.order[offsets[0] : offsets[-1]]]
    owner = np.repeat(np.arange(clients), np.diff(offsets))
    counts = np.bincount(owner * classes + labels, minlength=clients * classes)
    return counts.reshape(clients, classes)


def label_entropy(counts: Ints) -> Floats:
    """Entropy of each client's labels in bits.

    It is 0 for one class and log2(classes) when all are as frequent.

    Args:
        counts: Samples of every class, `[clients, classes]`.
    """
    shares = _shares(counts)
    logs = np.log2(shares, out=np.zeros_like(shares), where=shares > 0)
    entropy: Floats = np.abs((shares * logs).sum(axis=1))
    return entropy


def earth_movers_distance(counts: Ints, whole: Ints) -> Floats:
    """Distance of each client's labels from those of all (earth mover's, Zhao et al. 2018).

    The sum over classes of |p_i(c) - p(c)|, which is 0 for equal distributions and 2 for disjoint
    ones.

    Args:
        counts: Samples of every class, `[clients, classes]`.
        whole: Samples of every class in all the data, `[classes]`.
    """
    distance: Floats = np.abs(_shares(counts) - _shares(whole[None])).sum(axis=1)
    return distance


def size_gini(sizes: Ints) -> float:
    """Gini coefficient of the clients' sizes: 0 when all are equal, nearly 1 when one has all.

    Args:
        sizes: Number of samples of each client.
    """
    ranked = np.sort(sizes).astype(np.float64)
    count = len(ranked)
    total = ranked.sum()
    if total == 0:
        return 0.0
    return float((2 * np.arange(1, count + 1) - count - 1) @ ranked / (count * total))


def describe(dataset: DataSet, population: Population) -> dict[str, Any]:
    """Sizes and measures of heterogeneity, as plain numbers and text.

    Args:
        dataset: The data.
        population: Whose training samples are whose.
    """
    sizes = population.sizes
    return {
        "name": dataset.name,
        "samples": len(dataset.train),
        "test_samples": len(dataset.test),
        "classes": dataset.classes,
        "shape": list(dataset.shape),
        **dataset.notes,
        "clients": len(population),
        "smallest_client": int(sizes.min()),
        "median_client": float(np.median(sizes)),
        "largest_client": int(sizes.max()),
        "size_gini": size_gini(sizes),
        **_of_labels(dataset, population),
        "partition_hash": population.hash(),
    }


def _of_labels(dataset: DataSet, population: Population) -> dict[str, float]:
    """How much the clients' labels differ; nothing where a sample does not have one class."""
    targets = dataset.labels_of_train
    if targets is None:
        return {}
    classes = dataset.classes
    total = np.bincount(targets[population.order], minlength=classes)
    entropy = np.empty(len(population))
    distance = np.empty(len(population))
    classes_held = np.empty(len(population))

    # Block by block, since the counts of all clients may not fit into memory.
    step = max(1, BLOCK // classes)
    for first in range(0, len(population), step):
        last = min(first + step, len(population))
        counts = label_counts(targets, population, classes, first, last)
        entropy[first:last] = label_entropy(counts)
        distance[first:last] = earth_movers_distance(counts, total)
        classes_held[first:last] = np.count_nonzero(counts, axis=1)
    return {
        "classes_per_client": float(classes_held.mean()),
        "label_entropy": float(entropy.mean()),
        "label_entropy_of_all": float(label_entropy(total[None])[0]),
        "earth_movers_distance": float(distance.mean()),
    }


def _shares(counts: Ints) -> Floats:
    """Rows divided by their sums; an all-zero row stays zero."""
    shares: Floats = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    return shares
