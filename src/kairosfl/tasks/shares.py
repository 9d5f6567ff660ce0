"""Shares of the samples in fixed point, and the whole samples that are made of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from kairosfl.errors import UserError
from kairosfl.tasks.dataset import Ints

Shares = npt.NDArray[np.int64]  # fixed point: a client's share in units of 1 / SHARE_UNIT

SHARE_UNIT = 10**9
REDRAWS = 50
# If more clients than this are below the minimum, a redraw succeeds with probability about e^-64:
# move samples instead.
HOPELESS = 64


def even_runs(samples: int, runs: int) -> npt.NDArray[np.int32]:
    """0,0,..,1,1,..: `samples` numbers in `runs` runs whose lengths differ by at most one."""
    cuts = np.arange(runs + 1, dtype=np.int64) * samples // runs
    return np.repeat(np.arange(runs, dtype=np.int32), np.diff(cuts))


def dirichlet_shares(
    rng: np.random.Generator,
    clients: int,
    alpha: float,
    allowed: npt.NDArray[np.bool_] | None = None,
) -> Shares:
    """One draw of a symmetric Dirichlet, rounded to fixed point.

    Computed in logarithms, because a gamma variate underflows for small alpha: Gamma(a) = Gamma(a +
    1) * U^(1/a).
    """
    logs = np.log(rng.standard_gamma(alpha + 1, clients))
    logs += np.log1p(-rng.random(clients)) / alpha
    if allowed is not None:
        logs[~allowed] = -np.inf
    weights = np.exp(logs - logs.max())
    shares: Shares = np.rint(weights * (SHARE_UNIT / weights.sum())).astype(np.int64)
    return shares


def cut(samples: int, shares: Shares, *, nearest: bool = False) -> Ints:
    """Numbers of samples in proportion to the shares, by cutting at their cumulative sum.

    Cuts are rounded down, so that the last client gets what all others lost, or to the nearest.
    """
    ends = np.cumsum(shares)
    half = ends[-1] // 2 if nearest else 0
    # Rounding may push the cumulative sum past the unit; samples * sum fits into 63 bits for up to
    # 9e9 samples.
    counts: Ints = np.diff((ends * samples + half) // ends[-1], prepend=0)
    return counts


def redraw(draw: Callable[[], Ints], minimum: int) -> Ints:
    """Draw counts [classes, clients] until every client has its minimum.

    It is given up where a redraw cannot plausibly succeed.
    """
    counts = draw()
    for _ in range(REDRAWS):
        if not 0 < np.count_nonzero(counts.sum(axis=0) < minimum) <= HOPELESS:
            break
        counts = draw()
    return counts


def fill(rng: np.random.Generator, owner: Ints, clients: int, minimum: int) -> Ints:
    """Give every client its minimum, sample by sample from the client that is largest then."""
    sizes = np.bincount(owner, minlength=clients)
    missing = np.maximum(minimum - sizes, 0)
    if not missing.any():
        return owner
    gives = from_largest(sizes, int(missing.sum()))
    shuffled = rng.permutation(len(owner))
    by_client = shuffled[np.argsort(owner[shuffled], kind="stable")]
    rank = np.arange(len(owner)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    moved = by_client[rank < np.repeat(gives, sizes)]
    owner = owner.copy()
    owner[rng.permutation(moved)] = np.repeat(np.arange(clients, dtype=owner.dtype), missing)
    return owner


def from_largest(sizes: Ints, total: int) -> Ints:
    """How many samples each client gives when `total` are taken one by one from the largest.

    Of several that are as large, the one with the lowest id gives first.
    """
    # By bisection, the highest cap on client sizes that frees at least `total` samples.
    low = 0
    high = int(sizes.max())
    while low < high:
        cap = (low + high + 1) // 2
        freed = np.maximum(sizes - cap, 0).sum()
        if freed >= total:
            low = cap
        else:
            high = cap - 1

    # The last of those that give keep what the cap freed beyond the total.
    gives = np.maximum(sizes - low, 0)
    surplus = int(gives.sum()) - total
    givers = np.flatnonzero(gives)
    gives[givers[len(givers) - surplus :]] -= 1
    return gives


def checked(class_counts: Sequence[Sequence[int]], clients: int, present: Ints) -> Ints:
    """A table `[clients, classes]` that fits the number of clients and the samples present."""
    if len(class_counts) != clients:
        raise UserError(
            f"data.class_counts has {len(class_counts)} rows, but data.clients is {clients}; "
            "give one row for each client."
        )
    for client, row in enumerate(class_counts):
        if len(row) != len(present) or min(row) < 0 or not any(row):
            raise UserError(
                f"data.class_counts has {list(row)} for client {client}; give {len(present)} "
                "numbers, one for each class, 0 or more and not all 0."
            )
    table: Ints = np.array(class_counts, dtype=np.int64)
    for label in np.flatnonzero(table.sum(axis=0) > present):
        raise UserError(
            f"data.class_counts asks for {table[:, label].sum()} samples of class {label}, "
            f"but there are only {present[label]}; lower its numbers."
        )
    return table
