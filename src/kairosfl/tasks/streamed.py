"""Samples that are read when a batch needs them: data larger than memory, and transforms that are
drawn anew.
"""

from __future__ import annotations

import hashlib
import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch

from kairosfl.errors import UserError
from kairosfl.tasks.tree import join, leaves, rows, tree_map

Fetch = Callable[[Sequence[int], Sequence[int] | None], tuple[Any, Any]]
PROBED = 64  # samples whose targets say what kind of task it is


@dataclass(frozen=True, eq=False)
class Streamed:
    """Inputs and targets that stay where they are until a batch needs them.

    Args:
        fetch: From the numbers of samples, and a seed for each if their transforms are drawn anew,
            to inputs and targets in memory.
        count: The number of samples.
        known: The targets of all samples if they need not be read, which partitions by class need.
        device: Where batches are put.
    """

    fetch: Fetch
    count: int
    known: torch.Tensor | None = None
    device: torch.device | str = "cpu"

    def __len__(self) -> int:
        return self.count

    def read(
        self, chosen: torch.Tensor | slice, keys: torch.Tensor | None = None
    ) -> tuple[Any, Any]:
        """Inputs and targets of these samples; `keys` seed their transforms."""
        numbers = range(self.count)[chosen] if isinstance(chosen, slice) else chosen.tolist()
        inputs, targets = self.fetch(numbers, None if keys is None else keys.flatten().tolist())
        return self._there(inputs), self._there(targets)

    def _there(self, tree: Any) -> Any:
        return tree_map(lambda leaf: leaf.to(self.device), tree)

    def batches(self, size: int) -> Iterator[tuple[Any, Any]]:
        """All samples in their order, `size` at a time."""
        for begin in range(0, self.count, size):
            yield self.read(slice(begin, begin + size))

    def take(self, chosen: torch.Tensor) -> Streamed:
        """Only these samples."""
        numbers, fetch = chosen.tolist(), self.fetch
        known = None if self.known is None else self.known[chosen]
        return Streamed(
            lambda some, seeds: fetch([numbers[i] for i in some], seeds),
            len(numbers),
            known,
            self.device,
        )

    def to(self, device: torch.device) -> Streamed:
        """The samples with their batches on a device."""
        return replace(self, device=device)

    @cached_property
    def inputs(self) -> Any:
        """The inputs of the first sample, which show the shapes of all."""
        return self.read(slice(0, 1))[0]

    @cached_property
    def targets(self) -> Any:
        """All targets if they are known; otherwise those of the first samples."""
        return self.known if self.known is not None else self.read(slice(0, PROBED))[1]

    def with_targets(self) -> Streamed:
        """With the targets of all samples, for which everything is read once if they are not known."""
        if self.known is not None:
            return self
        parts = [targets for _, targets in self.batches(256)]
        if not all(isinstance(part, torch.Tensor) for part in parts):
            raise UserError(
                "samples with several targets each have no class to divide them by; give the clients."
            )
        return replace(self, known=torch.cat(parts).cpu())

    def digest(self) -> str:
        """Of the number of samples and of the first and last one: reading all would take too long."""
        found = hashlib.md5(str(self.count).encode(), usedforsecurity=False)
        for chosen in (slice(0, 1), slice(self.count - 1, self.count)):
            for leaf in (
                leaf
                for tree in self.read(chosen, torch.zeros(1, dtype=torch.int64))
                for leaf in leaves(tree)
            ):
                found.update(leaf.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        return found.hexdigest()


def reading(data: Any) -> str:
    """What reading costs where samples are read for each batch, as the end of a sentence; empty
    where they are not.
    """
    if not isinstance(data, Streamed):
        return ""
    count, began = min(32, len(data)), time.perf_counter()
    data.read(slice(0, count))
    return f"; samples are read batch by batch, {1e3 * (time.perf_counter() - began) / count:.2g} ms each"


def of_items(items: Any, collate: Callable[[list[Any]], tuple[Any, Any]]) -> Streamed:
    """A map-style data set, whose `items[i]` is a pair of input and target; transforms inside it
    are drawn anew.

    Args:
        items: The data set. Its attribute `targets`, which those of torchvision have, is used if
        there is one.
        collate: From a list of its pairs to inputs and targets.
    """

    def fetch(numbers: Sequence[int], seeds: Sequence[int] | None) -> tuple[Any, Any]:
        drawn = []
        for place, number in enumerate(numbers):
            with seeded(0 if seeds is None else seeds[place]):
                drawn.append(items[number])
        return collate(drawn)

    known = getattr(items, "targets", None)
    whole = known is not None and len(known) == len(items) and np.asarray(known).dtype.kind in "iu"
    return Streamed(fetch, len(items), torch.as_tensor(np.asarray(known)).long() if whole else None)


def of_arrays(x: np.ndarray, targets: Any) -> Streamed:
    """An array on disk, such as a `numpy.memmap`, and its targets in memory."""
    if len(x) != rows(targets):
        raise UserError(
            f"the memory map has {len(x)} inputs and {rows(targets)} targets; give as many."
        )

    def fetch(numbers: Sequence[int], _: Sequence[int] | None) -> tuple[Any, Any]:
        chosen = np.fromiter(numbers, dtype=np.int64, count=len(numbers))
        inputs = torch.from_numpy(np.ascontiguousarray(x[chosen]))
        wanted = torch.from_numpy(chosen)
        return inputs.float() if inputs.is_floating_point() else inputs, tree_map(
            lambda leaf: leaf[wanted], targets
        )

    return Streamed(fetch, len(x), targets if isinstance(targets, torch.Tensor) else None)


def chained(parts: Sequence[Any]) -> Streamed:
    """Several sets of samples, one after another, of which some are read when they are needed."""
    ends = np.cumsum([len(part) for part in parts])

    def fetch(numbers: Sequence[int], seeds: Sequence[int] | None) -> tuple[Any, Any]:
        found = []
        for place, number in enumerate(numbers):
            which = int(np.searchsorted(ends, number, side="right"))
            row = torch.tensor([number - int(ends[which]) + len(parts[which])])
            found.append(
                parts[which].read(row, None if seeds is None else torch.tensor([seeds[place]]))
            )
        inputs, targets = zip(*found, strict=True)
        return join(torch.cat, list(inputs)), join(torch.cat, list(targets))

    whole = [getattr(part, "known", part.targets) for part in parts]
    known = torch.cat(whole) if all(isinstance(each, torch.Tensor) for each in whole) else None
    return Streamed(fetch, int(ends[-1]), known)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Torch, numpy and Python draw from this seed, and go on afterwards as if nothing had been
    drawn.
    """
    before = torch.get_rng_state(), np.random.get_state(), random.getstate()
    torch.default_generator.manual_seed(seed % 2**63)
    np.random.seed(seed % 2**32)
    random.seed(seed)
    try:
        yield
    finally:
        torch.set_rng_state(before[0])
        np.random.set_state(before[1])
        random.setstate(before[2])
