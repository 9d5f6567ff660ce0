"""Samples that are read when a batch needs them.

Such is data larger than memory, or with transforms that are drawn anew.
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
        seeds = None
        if keys is not None:
            seeds = keys.flatten().tolist()
        inputs, targets = self.fetch(numbers, seeds)
        return self._there(inputs), self._there(targets)

    def _there(self, tree: Any) -> Any:
        return tree_map(lambda leaf: leaf.to(self.device), tree)

    def batches(self, size: int) -> Iterator[tuple[Any, Any]]:
        """All samples in their order, `size` at a time."""
        for begin in range(0, self.count, size):
            yield self.read(slice(begin, begin + size))

    def take(self, chosen: torch.Tensor) -> Streamed:
        """Only these samples."""
        numbers = chosen.tolist()
        fetch = self.fetch

        def fetch_chosen(places: Sequence[int], seeds: Sequence[int] | None) -> tuple[Any, Any]:
            return fetch([numbers[place] for place in places], seeds)

        targets = None
        if self.known is not None:
            targets = self.known[chosen]
        return Streamed(fetch_chosen, len(numbers), targets, self.device)

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
        if self.known is not None:
            return self.known
        _, targets = self.read(slice(0, PROBED))
        return targets

    def with_targets(self) -> Streamed:
        """With the targets of all samples; if they are not known, everything is read once."""
        if self.known is not None:
            return self
        parts = []
        for _, targets in self.batches(256):
            if not isinstance(targets, torch.Tensor):
                raise UserError(
                    "samples with several targets each have no class to divide them by; "
                    "give the clients."
                )
            parts.append(targets)
        return replace(self, known=torch.cat(parts).cpu())

    def digest(self) -> str:
        """Of the number of samples and the first and last one: reading all would take too long."""
        md5 = hashlib.md5(str(self.count).encode(), usedforsecurity=False)
        key = torch.zeros(1, dtype=torch.int64)
        for chosen in (slice(0, 1), slice(self.count - 1, self.count)):
            inputs, targets = self.read(chosen, key)
            for leaf in (*leaves(inputs), *leaves(targets)):
                md5.update(leaf.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
        return md5.hexdigest()


def reading(data: Any) -> str:
    """What reading costs, as the end of a sentence; empty where samples are in memory."""
    if not isinstance(data, Streamed):
        return ""
    count = min(32, len(data))
    began = time.perf_counter()
    data.read(slice(0, count))
    milliseconds = 1e3 * (time.perf_counter() - began) / count
    return f"; samples are read batch by batch, {milliseconds:.2g} ms each"


def of_items(items: Any, collate: Callable[[list[Any]], tuple[Any, Any]]) -> Streamed:
    """A map-style data set, whose transforms are drawn anew; `items[i]` is an input and a target.

    Args:
        items: The data set. Its attribute `targets`, which those of torchvision have, is used if
            there is one.
        collate: From a list of its pairs to inputs and targets.
    """

    def fetch(numbers: Sequence[int], seeds: Sequence[int] | None) -> tuple[Any, Any]:
        pairs = []
        for place, number in enumerate(numbers):
            with seeded(0 if seeds is None else seeds[place]):
                pairs.append(items[number])
        return collate(pairs)

    return Streamed(fetch, len(items), _classes_of(items))


def _classes_of(items: Any) -> torch.Tensor | None:
    """The classes of all samples, where a data set says them."""
    targets = getattr(items, "targets", None)
    if targets is None or len(targets) != len(items):
        return None
    classes = np.asarray(targets)
    if classes.dtype.kind not in "iu":
        return None
    return torch.as_tensor(classes).long()


def of_arrays(x: np.ndarray, targets: Any) -> Streamed:
    """An array on disk, such as a `numpy.memmap`, and its targets in memory."""
    if len(x) != rows(targets):
        raise UserError(
            f"the memory map has {len(x)} inputs and {rows(targets)} targets; give as many."
        )

    def fetch(numbers: Sequence[int], _: Sequence[int] | None) -> tuple[Any, Any]:
        chosen = np.fromiter(numbers, dtype=np.int64, count=len(numbers))
        inputs = torch.from_numpy(np.ascontiguousarray(x[chosen]))
        if inputs.is_floating_point():
            inputs = inputs.float()
        places = torch.from_numpy(chosen)
        return inputs, tree_map(lambda leaf: leaf[places], targets)

    return Streamed(fetch, len(x), targets if isinstance(targets, torch.Tensor) else None)


def chained(parts: Sequence[Any]) -> Streamed:
    """Several sets of samples, one after another, of which some are read when they are needed."""
    ends = np.cumsum([len(part) for part in parts])

    def fetch(numbers: Sequence[int], seeds: Sequence[int] | None) -> tuple[Any, Any]:
        samples = []
        for place, number in enumerate(numbers):
            which = int(np.searchsorted(ends, number, side="right"))
            part = parts[which]
            row = torch.tensor([number - int(ends[which]) + len(part)])
            key = None
            if seeds is not None:
                key = torch.tensor([seeds[place]])
            samples.append(part.read(row, key))
        inputs, targets = zip(*samples, strict=True)
        return join(torch.cat, list(inputs)), join(torch.cat, list(targets))

    return Streamed(fetch, int(ends[-1]), _targets_of(parts))


def _targets_of(parts: Sequence[Any]) -> torch.Tensor | None:
    """The targets of all parts, one after another; None where some are not known."""
    targets = []
    for part in parts:
        known_targets = getattr(part, "known", part.targets)
        if not isinstance(known_targets, torch.Tensor):
            return None
        targets.append(known_targets)
    return torch.cat(targets)


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Torch, numpy and Python draw from this seed, and go on afterwards as if they had not."""
    torch_state = torch.get_rng_state()
    numpy_state = np.random.get_state()
    python_state = random.getstate()
    torch.default_generator.manual_seed(seed % 2**63)
    np.random.seed(seed % 2**32)
    random.seed(seed)
    try:
        yield
    finally:
        torch.set_rng_state(torch_state)
        np.random.set_state(numpy_state)
        random.setstate(python_state)
