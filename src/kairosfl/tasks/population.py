"""A population: which training samples belong to which client, as two arrays."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from kairosfl.errors import UserError
from kairosfl.tasks.dataset import DataSet, Ints


@dataclass(frozen=True, eq=False)
class Population:
    """Client i owns the samples `order[offsets[i]:offsets[i+1]]`; a million clients cost megabytes.

    `population[i]` are the samples of client i, `len(population)` is the number of clients.

    Args:
        order: Indices of training samples, those of each client together.
        offsets: Where each client's samples begin and the last one's end, `[clients + 1]`.
        keys: The natural client (writer, speaker) that each client is, if there are such.
        tests: Which samples of the test set are whose; a client may have none, and clients may
        share some.
        shared: Whether a training sample may belong to several clients, or to one more than once.
        dealt: The partition that dealt the samples; empty if the clients were given.
    """

    order: Ints
    offsets: Ints
    keys: Ints | None = None
    tests: Population | None = None
    shared: bool = False
    dealt: str = ""

    def __post_init__(self) -> None:
        if self.offsets.ndim != 1 or len(self.offsets) < 2:
            raise UserError("a population needs at least one client.")
        spans_order = self.offsets[0] == 0 and self.offsets[-1] == len(self.order)
        if not spans_order or np.any(np.diff(self.offsets) < 0):
            raise UserError(
                f"offsets must rise from 0 to the number of samples, {len(self.order)}."
            )
        if self.tests is not None and len(self.tests) != len(self):
            raise UserError(
                f"tests has {len(self.tests)} clients; give one list for each of the {len(self)}."
            )

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, client: int) -> Ints:
        if not 0 <= client < len(self):
            raise IndexError(f"client {client} of a population of {len(self)}")
        return self.order[self.offsets[client] : self.offsets[client + 1]]

    def __iter__(self) -> Iterator[Ints]:
        return (self[client] for client in range(len(self)))

    @property
    def sizes(self) -> Ints:
        """Number of samples of each client."""
        return np.diff(self.offsets)

    @cached_property
    def largest(self) -> int:
        """Number of samples of the client that has most."""
        return int(self.sizes.max())

    def hash(self) -> str:
        """A digest of both arrays, and of those of `tests`, the same on every platform."""
        digest = hashlib.sha256()
        for array in (self.offsets, self.order):
            digest.update(np.ascontiguousarray(array, dtype="<i8").data)
        if self.tests is not None:
            digest.update(self.tests.hash().encode())
        return digest.hexdigest()

    @classmethod
    def from_owner(
        cls, owner: Ints, clients: int, keys: Ints | None = None, tests: Population | None = None
    ) -> Population:
        """From the client of every sample; a client's samples keep their order.

        Args:
            owner: The client of each training sample, negative for samples that no client has.
            clients: The number of clients.
            keys: The natural client that each client is.
            tests: Which samples of the test set are whose.
        """
        if len(owner) and int(owner.max()) >= clients:
            sample = int(owner.argmax())
            raise UserError(
                f"sample {sample} belongs to client {owner[sample]}, but there are only "
                f"{clients} clients."
            )
        owned = owner >= 0
        sizes = np.bincount(owner[owned], minlength=clients)
        order = np.argsort(owner, kind="stable")[len(owner) - int(owned.sum()) :]
        offsets = np.zeros(clients + 1, dtype=np.int64)
        np.cumsum(sizes, out=offsets[1:])
        index_type = np.int32 if len(owner) < 2**31 else np.int64
        return cls(order.astype(index_type), offsets, keys, tests)

    @classmethod
    def from_lists(
        cls, clients: Sequence[Ints], *, tests: Sequence[Ints] | None = None
    ) -> Population:
        """From one array of sample indices per client.

        Args:
            clients: For each client, the indices of its samples in the training set.
            tests: For each client, the indices of its own samples in the test set, if it has some.
        """
        lists = [_indices(indices, number) for number, indices in enumerate(clients)]
        offsets = np.zeros(len(lists) + 1, dtype=np.int64)
        np.cumsum([len(indices) for indices in lists], out=offsets[1:])
        order = np.concatenate([*lists, np.empty(0, np.int64)])
        if tests is None:
            return cls(order, offsets)
        return cls(order, offsets, tests=Population.from_lists(tests))

    def check(self, samples: int) -> None:
        """Refuse a client without data, and a sample that does not exist or is owned twice.

        Where the population is `shared`, samples may be owned twice.

        Args:
            samples: The number of training samples.

        Raises:
            UserError: Names the client or the sample.
        """
        empty = np.flatnonzero(self.sizes == 0)
        if len(empty):
            more = ""
            if len(empty) > 1:
                more = f" (and {len(empty) - 1} more)"
            raise UserError(
                f"client {empty[0]}{more} has no data; give it samples or leave it out."
            )
        self.check_range(samples)
        owners = np.bincount(self.order, minlength=samples)
        if owners.max() > 1 and not self.shared:
            sample = int(owners.argmax())
            raise UserError(f"sample {sample} belongs to {owners[sample]} clients; give it to one.")

    def check_range(self, samples: int, what: str = "samples") -> None:
        """Refuse a sample that does not exist."""
        wrong = self.order[(self.order < 0) | (self.order >= samples)]
        if len(wrong):
            raise UserError(
                f"the population names sample {wrong[0]}; the data has {what} 0 to {samples - 1}."
            )


def _indices(indices: Any, number: int) -> Ints:
    """One client's samples as an array; 0.5 or a mask of True and False is not an index."""
    try:
        numbers = np.asarray(indices)
    except (TypeError, ValueError):
        raise UserError(
            f"clients[{number}] is not a list of sample indices; give whole numbers, [n]."
        ) from None
    if numbers.ndim != 1 or (len(numbers) and numbers.dtype.kind not in "iu"):
        raise UserError(
            f"clients[{number}] has {numbers.dtype} values of shape {list(numbers.shape)}; "
            "give the indices of the client's samples, whole numbers of shape [n]."
        )
    return numbers.astype(np.int64)


def own_tests(dataset: DataSet, population: Population) -> Population | None:
    """Each client's own test samples, of which some may have none.

    None if neither the population nor the keys of the data assign them.
    """
    if population.tests is not None:
        return population.tests
    keys = population.keys
    if keys is None:
        keys = _keys(dataset, population)
    if dataset.test_keys is None or keys is None:
        return None
    highest = max(int(dataset.test_keys.max(initial=-1)), int(keys.max()))
    client_of = np.full(highest + 1, -1, dtype=np.int64)
    client_of[keys] = np.arange(len(population))
    owner = np.where(dataset.test_keys >= 0, client_of[dataset.test_keys], -1)
    return Population.from_owner(owner, len(population))


def _keys(dataset: DataSet, population: Population) -> Ints | None:
    """The natural key of each client; None unless each has one, and one of its own."""
    if dataset.keys is None or not population.sizes.all():
        return None
    keys = dataset.keys[population.order]
    first = keys[population.offsets[:-1]]
    if not np.array_equal(keys, np.repeat(first, population.sizes)):
        return None  # a client has samples of several keys
    if len(np.unique(first)) < len(first) or first.min() < 0:
        return None
    return first
