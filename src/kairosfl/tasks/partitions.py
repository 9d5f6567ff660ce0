"""Partitions: pure functions from samples to clients, the same on every platform.

Random numbers come from numpy's Philox. Random shares are rounded to fixed point before samples are
split, so that the last bits of a platform's logarithm cannot move a sample from one client to
another.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from kairosfl import errors
from kairosfl.errors import UserError
from kairosfl.tasks.dataset import DataSet, Ints
from kairosfl.tasks.population import Population
from kairosfl.tasks.shares import checked, cut, dirichlet_shares, even_runs, fill, redraw


def iid(targets: Ints, clients: int, seed: int) -> Population:
    """Every client a uniform sample; sizes differ by at most one.

    Args:
        targets: The class of each sample.
        clients: The number of clients.
        seed: Of the random numbers, 0 or more.
    """
    _check(len(targets), clients, minimum=1)
    owner = np.empty(len(targets), dtype=np.int32)
    owner[_generator(seed, 1).permutation(len(targets))] = even_runs(len(targets), clients)
    return Population.from_owner(owner, clients)


def dirichlet(
    targets: Ints,
    clients: int,
    seed: int,
    *,
    alpha: float,
    minimum: int = 1,
    balance: bool = False,
    nearest: bool = False,
) -> Population:
    """Label skew: each class is split among the clients by shares from a Dirichlet(alpha).

    Args:
        targets: The class of each sample.
        clients: The number of clients.
        seed: Of the random numbers, 0 or more.
        alpha: The smaller, the fewer classes a client has; a large alpha is nearly IID.
        minimum: A draw that leaves a client with fewer samples is repeated, at most 50 times; after
            that samples are moved from the largest clients.
        balance: Whether a client that already holds its equal part n/N gets nothing of the classes
            that come after (as in FedLab and in the released code of FedCL).
        nearest: Whether the cuts of a class are rounded to the nearest sample. By default they are
            rounded down, as is common, which gives the last client one sample of nearly every
            class.
    """
    _check(len(targets), clients, minimum)
    _check_alpha(alpha)
    rng = _generator(seed, 2)
    present = np.bincount(targets)
    fair = len(targets) / clients

    def draw() -> Ints:
        counts = np.empty((len(present), clients), dtype=np.int32)
        sizes = np.zeros(clients, dtype=np.int64)
        for label, samples in enumerate(present):
            allowed = sizes < fair if balance else None
            shares = dirichlet_shares(rng, clients, alpha, allowed)
            counts[label] = cut(int(samples), shares, nearest=nearest)
            sizes += counts[label]
        return counts

    counts = redraw(draw, minimum)
    shuffled = rng.permutation(len(targets))
    labels = targets[shuffled]
    if len(present) <= 2**16:
        labels = labels.astype(np.uint16)  # numpy sorts 16-bit keys in linear time
    by_class = shuffled[np.argsort(labels, kind="stable")]
    owner = np.empty(len(targets), dtype=np.int32)
    every_client = np.tile(np.arange(clients, dtype=np.int32), len(present))
    owner[by_class] = np.repeat(every_client, counts.ravel())
    return Population.from_owner(fill(rng, owner, clients, minimum), clients)


def quantity(
    targets: Ints, clients: int, seed: int, *, alpha: float, minimum: int = 1
) -> Population:
    """Quantity skew: sizes in shares drawn from Dirichlet(alpha), samples uniform.

    Args:
        targets: The class of each sample.
        clients: The number of clients.
        seed: Of the random numbers, 0 or more.
        alpha: The smaller, the more the sizes differ.
        minimum: The least number of samples of a client.
    """
    _check(len(targets), clients, minimum)
    _check_alpha(alpha)
    rng = _generator(seed, 3)

    def draw() -> Ints:
        return cut(len(targets), dirichlet_shares(rng, clients, alpha))[None]

    counts = redraw(draw, minimum)[0]
    owner = np.empty(len(targets), dtype=np.int32)
    owner[rng.permutation(len(targets))] = np.repeat(np.arange(clients, dtype=np.int32), counts)
    return Population.from_owner(fill(rng, owner, clients, minimum), clients)


def shards(targets: Ints, clients: int, seed: int, *, shards: int = 2) -> Population:
    """Pathological label skew: samples sorted by class and cut, `shards` pieces to each client.

    Args:
        targets: The class of each sample.
        clients: The number of clients.
        seed: Of the random numbers, 0 or more.
        shards: The number of shards of each client.
    """
    if shards < 1:
        raise UserError(f"data.shards is {shards}; give at least 1 shard per client.")
    _check(len(targets), clients, minimum=shards, field="data.shards")
    rng = _generator(seed, 4)
    shuffled = rng.permutation(len(targets))
    by_class = shuffled[np.argsort(targets[shuffled], kind="stable")]
    client_of = rng.permutation(np.repeat(np.arange(clients, dtype=np.int32), shards))
    owner = np.empty(len(targets), dtype=np.int32)
    owner[by_class] = client_of[even_runs(len(targets), clients * shards)]
    return Population.from_owner(owner, clients)


def labels(targets: Ints, clients: int, seed: int, *, labels_per_client: int = 2) -> Population:
    """Few labels each, as NIID-Bench deals them: client i has class i mod K and random others.

    The samples of a class are divided equally among the clients that have it; sizes therefore
    differ.

    Args:
        targets: The class of each sample.
        clients: The number of clients; with fewer than classes, some classes may have no client.
        seed: Of the random numbers, 0 or more.
        labels_per_client: How many classes each client has.
    """
    classes = int(targets.max()) + 1
    if not 1 <= labels_per_client <= classes:
        raise UserError(
            f"data.labels_per_client is {labels_per_client}; the data has {classes} classes, "
            "give 1 to that."
        )
    _check(len(targets), clients, minimum=1)
    rng = _generator(seed, 7)
    has = np.zeros((clients, classes), dtype=bool)
    for client in range(clients):
        first = client % classes
        others = rng.permutation(np.delete(np.arange(classes), first))[: labels_per_client - 1]
        has[client, first] = True
        has[client, others] = True
    owner = np.full(len(targets), -1, dtype=np.int32)
    for label in range(classes):
        samples = rng.permutation(np.flatnonzero(targets == label))
        owners = np.flatnonzero(has[:, label])
        if len(owners):
            owner[samples] = owners[even_runs(len(samples), len(owners))]
    return Population.from_owner(owner, clients)


def client_dirichlet(targets: Ints, clients: int, seed: int, *, alpha: float) -> Population:
    """Label skew with equal sizes: each client's classes come from a Dirichlet(alpha) of its own.

    As in the released code of FedDyn and in FL-Simulator, where classes are not divided: one that
    is drawn more often than it has samples is used again from its beginning, and of one that is
    drawn less often some have no client.

    Args:
        targets: The class of each sample.
        clients: The number of clients.
        seed: Of the random numbers, 0 or more.
        alpha: The smaller, the fewer classes a client has.
    """
    _check(len(targets), clients, minimum=1)
    _check_alpha(alpha)
    rng = _generator(seed, 8)
    present = np.flatnonzero(np.bincount(targets))
    per_client = len(targets) // clients
    draws = []
    for _ in range(clients):
        ends = np.cumsum(dirichlet_shares(rng, len(present), alpha))
        draws.append(np.searchsorted(ends, rng.integers(0, ends[-1], per_client), side="right"))
    drawn = np.concatenate(draws)
    order = np.empty(clients * per_client, dtype=np.int64)
    for position, label in enumerate(present):
        samples = rng.permutation(np.flatnonzero(targets == label))
        places = rng.permutation(np.flatnonzero(drawn == position))
        order[places] = samples[np.arange(len(places)) % len(samples)]
    offsets = np.arange(clients + 1, dtype=np.int64) * per_client
    return Population(order, offsets, shared=True)


def disjoint_dirichlet(targets: Ints, clients: int, seed: int, *, alpha: float) -> Population:
    """As `client_dirichlet`, but no sample has two clients.

    As in Hsu, Qi and Brown 2019, TensorFlow Federated and pfl-research. One client after another
    draws its n/N samples. Those of a class that is exhausted are drawn from its other classes and,
    if they are exhausted too, from whatever is left.

    Args:
        targets: The class of each sample.
        clients: The number of clients; samples that are left when all have n/N, rounded down, have
            none.
        seed: Of the random numbers, 0 or more.
        alpha: The smaller, the fewer classes a client has.
    """
    _check(len(targets), clients, minimum=1)
    _check_alpha(alpha)
    rng = _generator(seed, 9)
    remaining = np.bincount(targets)
    classes = len(remaining)
    table = np.zeros((clients, classes), dtype=np.int64)
    for counts in table:
        shares = dirichlet_shares(rng, classes, alpha)
        while missing := len(targets) // clients - counts.sum():
            ends = np.cumsum(np.where(remaining > 0, shares, 0))
            if not ends[-1]:
                ends = np.cumsum(remaining)
            drawn = np.searchsorted(ends, rng.integers(0, ends[-1], missing), side="right")
            taken = np.minimum(np.bincount(drawn, minlength=classes), remaining)
            counts += taken
            remaining = remaining - taken
    return _dealt(rng, targets, table)


def counts(
    targets: Ints, clients: int, seed: int, *, class_counts: Sequence[Sequence[int]]
) -> Population:
    """As many random samples of each class as a table says, such as that of another program.

    Args:
        targets: The class of each sample.
        clients: The number of clients.
        seed: Of the random numbers, 0 or more.
        class_counts: For each client, how many samples of each class it has; samples that are left
            have no client.
    """
    _check(len(targets), clients, minimum=1)
    table = checked(class_counts, clients, np.bincount(targets))
    return _dealt(_generator(seed, 10), targets, table)


def mixed(
    targets: Ints,
    clients: int,
    seed: int,
    *,
    alpha: float,
    minimum: int = 1,
    balance: bool = False,
    nearest: bool = False,
) -> Population:
    """Two kinds of clients: the first half IID, the others label-skewed by Dirichlet(alpha).

    Args:
        targets: The class of each sample.
        clients: The number of clients.
        seed: Of the random numbers, 0 or more.
        alpha: Of the second half, as in `dirichlet`.
        minimum: Of the second half, as in `dirichlet`.
        balance: Of the second half, as in `dirichlet`.
        nearest: Of the second half, as in `dirichlet`.
    """
    _check(len(targets), clients, minimum)
    iid_clients = clients // 2
    skewed = partial(
        dirichlet, seed=seed, alpha=alpha, minimum=minimum, balance=balance, nearest=nearest
    )
    if not iid_clients:
        return skewed(targets, clients)
    shuffled = _generator(seed, 6).permutation(len(targets))
    iid_samples, rest = np.split(shuffled, [len(targets) * iid_clients // clients])
    iid_half = iid(targets[iid_samples], iid_clients, seed)
    skewed_half = skewed(targets[rest], clients - iid_clients)

    # The clients of a half are numbered from 0; those of the second come after the first.
    owner = np.empty(len(targets), dtype=np.int32)
    owner[iid_samples[iid_half.order]] = _owners(iid_half)
    owner[rest[skewed_half.order]] = iid_clients + _owners(skewed_half)
    return Population.from_owner(owner, clients)


def _owners(population: Population) -> Ints:
    """The client of each sample, in the order in which the population has them."""
    return np.repeat(np.arange(len(population)), population.sizes)


def natural(keys: Ints, clients: int | None, seed: int, *, minimum: int = 1) -> Population:
    """One client per key, a writer or a speaker, with at least `minimum` samples.

    Args:
        keys: The natural client of each sample.
        clients: How many of the natural clients, chosen at random, or None for all.
        seed: Of the random numbers, 0 or more.
        minimum: Natural clients with fewer samples are left out.
    """
    if minimum < 1:
        raise UserError(f"data.minimum is {minimum}; a client needs at least 1 sample.")
    sizes = np.bincount(keys)
    enough = np.flatnonzero(sizes >= minimum)
    if not len(enough):
        raise UserError(
            f"data.minimum is {minimum}, but no natural client has that many samples; lower it."
        )
    if clients is None:
        clients = len(enough)
        total = np.count_nonzero(sizes)
        if clients < total:
            warnings.warn(
                f"{total - clients} of {total} natural clients have fewer than data.minimum = "
                f"{minimum} samples and are left out; lower data.minimum to keep them.",
                stacklevel=2,
            )
    if not 1 <= clients <= len(enough):
        raise UserError(
            f"data.clients is {clients}, but the data has {len(enough)} natural clients with at "
            f"least {minimum} samples; give 1 to {len(enough)}."
        )
    kept = np.sort(_generator(seed, 5).permutation(enough)[:clients])
    client_of = np.full(int(keys.max()) + 1, -1, dtype=np.int32)
    client_of[kept] = np.arange(clients, dtype=np.int32)
    return Population.from_owner(client_of[keys], clients, kept)


PARTITIONS: dict[str, Callable[..., Population]] = {
    "iid": iid,
    "dirichlet": dirichlet,
    "quantity": quantity,
    "shards": shards,
    "labels": labels,
    "client_dirichlet": client_dirichlet,
    "disjoint_dirichlet": disjoint_dirichlet,
    "counts": counts,
    "mixed": mixed,
    "natural": natural,
}

OPTIONS = {  # what each uses
    "iid": (),
    "dirichlet": ("alpha", "minimum", "balance", "nearest"),
    "quantity": ("alpha", "minimum"),
    "shards": ("shards",),
    "labels": ("labels_per_client",),
    "client_dirichlet": ("alpha",),
    "disjoint_dirichlet": ("alpha",),
    "counts": ("class_counts",),
    "mixed": ("alpha", "minimum", "balance", "nearest"),
    "natural": ("minimum",),
}
# Of all of them, each once.
SETTINGS = tuple(dict.fromkeys(option for options in OPTIONS.values() for option in options))
BY_NUMBER = ("iid", "quantity")  # these do not look at the classes


def partition(
    dataset: DataSet,
    *,
    name: str,
    clients: int | None,
    seed: int,
    alpha: float = 0.5,
    minimum: int = 1,
    shards: int = 2,
    labels_per_client: int = 2,
    class_counts: Sequence[Sequence[int]] = (),
    balance: bool = False,
    nearest: bool = False,
) -> Population:
    """The partition called `name` of a data set; options that it does not use are ignored.

    Args:
        dataset: Its training samples are divided among the clients.
        name: One of `PARTITIONS`, such as "iid", "dirichlet", "quantity", "shards", "labels" or
            "natural".
        clients: The number of clients; with "natural", None for all.
        seed: Of the random numbers, 0 or more: the same seed gives the same partition on every
            platform.
        alpha: Of the Dirichlet ones, "mixed" and "quantity"; the smaller, the more the clients
            differ.
        minimum: The least number of samples of a client.
        shards: Of "shards": how many each client gets.
        labels_per_client: Of "labels": how many classes each client has.
        class_counts: Of "counts": for each client, how many samples of each class it has.
        balance: Of "dirichlet" and "mixed": whether clients get about as many samples each.
        nearest: Of "dirichlet" and "mixed": whether cuts are rounded to the nearest sample, not
            down.

    Returns:
        The training samples of each client.
    """
    if name not in PARTITIONS:
        raise UserError(
            f"data.partition is {name!r}, which does not exist; {errors.nearest(name, PARTITIONS)}"
        )
    if name == "natural":
        if dataset.keys is None:
            raise UserError(
                f"data.partition is 'natural', but data set {dataset.name!r} has no natural "
                "clients; use 'dirichlet'."
            )
        return replace(natural(dataset.keys, clients, seed, minimum=minimum), dealt=name)
    if clients is None:
        raise UserError(
            f"data.clients is missing: partition {name!r} needs the number of clients; "
            "give at least 1."
        )
    settings: dict[str, Any] = {
        "alpha": alpha,
        "minimum": minimum,
        "balance": balance,
        "nearest": nearest,
        "shards": shards,
        "labels_per_client": labels_per_client,
        "class_counts": class_counts,
    }
    options = {option: settings[option] for option in OPTIONS[name]}
    targets = _classes_to_deal(dataset, name)
    return replace(PARTITIONS[name](targets, clients, seed, **options), dealt=name)


def _classes_to_deal(dataset: DataSet, name: str) -> Ints:
    """The class of each training sample; 0 for all where the partition does not look at it."""
    if name not in BY_NUMBER:
        dataset = dataset.with_labels()
    labels = dataset.labels_of_train
    if labels is not None:
        return labels
    if name in BY_NUMBER:
        return np.zeros(len(dataset.train), dtype=np.int64)
    kind = "a task of its own"
    if dataset.kind:
        kind = dataset.kind
    raise UserError(
        f"data.partition is {name!r}, which deals samples by their class, but data set "
        f"{dataset.name!r} is for {kind}; use {' or '.join(map(repr, BY_NUMBER))}, "
        "or give the clients."
    )


def _dealt(rng: np.random.Generator, targets: Ints, table: Ints) -> Population:
    """Random samples of each class, as many as the table `[clients, classes]` says."""
    owner = np.full(len(targets), -1, dtype=np.int32)
    for label, column in enumerate(table.T):
        samples = rng.permutation(np.flatnonzero(targets == label))
        owner[samples[: column.sum()]] = np.repeat(np.arange(len(table), dtype=np.int32), column)
    return Population.from_owner(owner, len(table))


def _generator(seed: int, purpose: int) -> np.random.Generator:
    if not 0 <= seed < 2**63:
        raise UserError(f"seed is {seed}; give a number from 0 to 2^63 - 1.")
    return np.random.Generator(np.random.Philox(key=np.array([seed, purpose], dtype=np.uint64)))


def _check(samples: int, clients: int, minimum: int, field: str = "data.minimum") -> None:
    if clients < 1:
        raise UserError(f"data.clients is {clients}; give at least 1.")
    if minimum < 1:
        raise UserError(f"{field} is {minimum}; a client needs at least 1 sample.")
    if minimum * clients > samples:
        least = f"at least {minimum} sample{'s' * (minimum > 1)}"
        raise UserError(
            f"data.clients is {clients} with {least} each, but there are only {samples} samples; "
            f"lower data.clients or {field}."
        )


def _check_alpha(alpha: float) -> None:
    if not 1e-9 <= alpha < float("inf"):
        raise UserError(f"data.alpha is {alpha}; give a positive number, such as 0.5.")
