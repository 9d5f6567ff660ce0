"""The parties of NIID-Bench and of Flower's re-run: how many samples of each class each party has.

Both seed their generators before they draw the parties, NIID-Bench with 0, 1 and 2 (numpy's and
Python's old generators), Flower with 42 by default (numpy's `default_rng`), so that their parties
can be drawn again.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from kairosfl.tasks.dataset import Ints

CLASSES = PARTIES = 10
EACH = 5000  # training images of a class of CIFAR-10
Table = list[list[int]]


def flower(skew: str) -> Table:
    """The parties of Flower's re-run: "dir0.5", "labels2" or "labels3"."""
    rng = np.random.default_rng(42)
    if skew == "dir0.5":
        return _dirichlet(rng)
    return _labels(lambda: int(rng.choice(CLASSES, 1)[0]), int(skew[-1]))


def niid_bench(skew: str, seed: int = 0) -> Table:
    """The parties of NIID-Bench's run with a seed: "dir0.5", "labels2" or "labels3"."""
    if skew == "dir0.5":
        return _dirichlet(np.random.RandomState(seed))
    drawn = random.Random(seed)
    return _labels(lambda: drawn.randint(0, CLASSES - 1), int(skew[-1]))


def _dirichlet(
    rng: np.random.Generator | np.random.RandomState, alpha: float = 0.5, minimum: int = 10
) -> Table:
    """Classes one after another; a party that has its fair share gets nothing of the next ones."""
    table = np.zeros((PARTIES, CLASSES), dtype=np.int64)
    while table.sum(1).min() < minimum:
        table[:] = 0
        for label in range(CLASSES):
            rng.shuffle(
                np.arange(EACH)
            )  # the samples of the class: which ones does not matter here
            shares = rng.dirichlet(np.full(PARTIES, alpha)) * (
                table.sum(1) < EACH * CLASSES / PARTIES
            )
            ends = (np.cumsum(shares / shares.sum()) * EACH).astype(int)[:-1]
            table[:, label] = np.diff(ends, prepend=0, append=EACH)
    return _listed(table)


def _labels(draw: Callable[[], int], labels: int) -> Table:
    """Party i has class i and others that are drawn until it has enough; a class is divided
    equally.
    """
    has = np.eye(PARTIES, CLASSES, dtype=bool)
    for own in has:
        while own.sum() < labels:
            own[draw()] = True
    table = np.zeros((PARTIES, CLASSES), dtype=np.int64)
    for label, owners in enumerate(has.T):
        table[owners, label] = [len(part) for part in np.array_split(np.arange(EACH), owners.sum())]
    return _listed(table)


def _listed(table: Ints) -> Table:
    return [[int(count) for count in row] for row in table]
