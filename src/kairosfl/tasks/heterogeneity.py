"""Measures of how much clients differ: label entropy, earth mover's distance, and inequality of
sizes.
"""

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
    offsets = population.offsets[first : (len(population) if last < 0 else last) + 1]
    clients = len(offsets) - 1
    labels = targets[population.order[offsets[0] : offsets[-1]]]
    owner = np.repeat(np.arange(clients), np.diff(offsets))
    return np.bincount(owner * classes + labels, minlength=clients * classes).reshape(
        clients, classes
    )


def label_entropy(counts: Ints) -> Floats:
    """Entropy of each client's labels in bits: 0 for one class, log2(classes) when all are as
    frequent.

    Args:
        counts: Samples of every class, `[clients, classes]`.
    """
    shares = _shares(counts)
    logs = np.log2(shares, out=np.zeros_like(shares), where=shares > 0)
    entropy: Floats = np.abs((shares * logs).sum(axis=1))
    return entropy


def earth_movers_distance(counts: Ints, whole: Ints) -> Floats:
    """Earth mover's distance between each client's label distribution and that of all clients (Zhao
    et al. 2018).

    The sum over classes of |p_i(c) - p(c)|, which is 0 for equal distributions and 2 for disjoint
    ones.

    Args:
        counts: Samples of every class, `[clients, classes]`.
        whole: Samples of every class in all the data, `[classes]`.
    """
    distance: Floats = np.abs(_shares(counts) - _shares(whole[None])).sum(axis=1)
    return distance


def size_gini(sizes: Ints) -> float:
    """Gini coefficient of the clients' sizes: 0 when all are equal, towards 1 when one client has
    all.

    Args:
        sizes: Number of samples of each client.
    """
    ranked = np.sort(sizes).astype(np.float64)
    count, total = len(ranked), ranked.sum()
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
    targets, classes = dataset.labels_of_train, dataset.classes
    if targets is None:
        return {}
    whole = np.bincount(targets[population.order], minlength=classes)
    entropy, distance, held = (np.empty(len(population)) for _ in range(3))
    step = max(1, BLOCK // classes)
    for first in range(0, len(population), step):
        last = min(first + step, len(population))
        counts = label_counts(targets, population, classes, first, last)
        entropy[first:last] = label_entropy(counts)
        distance[first:last] = earth_movers_distance(counts, whole)
        held[first:last] = np.count_nonzero(counts, axis=1)
    return {
        "classes_per_client": float(held.mean()),
        "label_entropy": float(entropy.mean()),
        "label_entropy_of_all": float(label_entropy(whole[None])[0]),
        "earth_movers_distance": float(distance.mean()),
    }


def _shares(counts: Ints) -> Floats:
    """Rows divided by their sums; an all-zero row stays zero."""
    shares: Floats = counts / np.maximum(counts.sum(axis=1, keepdims=True), 1)
    return shares
