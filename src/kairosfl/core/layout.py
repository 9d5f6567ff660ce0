"""Where the tensors of a model lie in the vectors that stand for it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from math import prod

from torch import Tensor


@dataclass(frozen=True)
class Entry:
    """One tensor of the model inside a vector."""

    name: str
    shape: tuple[int, ...]
    offset: int

    @property
    def size(self) -> int:
        return prod(self.shape)

    def view(self, vector: Tensor) -> Tensor:
        """This tensor inside a vector `[d]` or the same tensor of every client inside `[m, d]`."""
        part = vector[..., self.offset : self.offset + self.size]
        return part.view((*vector.shape[:-1], *self.shape))


@dataclass(frozen=True)
class Layout:
    """The tensors of a model, in the order of the vectors that hold them.

    Args:
        entries: What is trained and shared: the vector x, of length d.
        own: What is trained and never leaves its client: of length e, one vector per client.
        base: What is frozen and shared by all clients: of length b. It moves only where a rule
        rebases.
    """

    entries: tuple[Entry, ...]
    own: tuple[Entry, ...] = ()
    base: tuple[Entry, ...] = ()

    @classmethod
    def of(
        cls,
        tensors: Mapping[str, Tensor],
        own: Mapping[str, Tensor] | None = None,
        base: Mapping[str, Tensor] | None = None,
    ) -> Layout:
        """The layout of these tensors by name, each part in its own order."""
        return cls(_entries(tensors), _entries(own or {}), _entries(base or {}))

    @property
    def size(self) -> int:
        """Length d of the vector x."""
        return _length(self.entries)

    @property
    def own_size(self) -> int:
        """Length e of a client's own part."""
        return _length(self.own)

    @property
    def base_size(self) -> int:
        """Length b of the base."""
        return _length(self.base)

    def joined(self) -> Layout:
        """The layout of a vector of length d + e: what is shared, then a client's own part."""
        shifted = (Entry(entry.name, entry.shape, self.size + entry.offset) for entry in self.own)
        return Layout((*self.entries, *shifted))

    @property
    def names(self) -> tuple[str, ...]:
        """Of all trained tensors, in the order in which a brief numbers them: the shared ones, then
        a client's own.
        """
        return tuple(entry.name for entry in (*self.entries, *self.own))

    @property
    def hash(self) -> str:
        """A digest of the names and shapes of what is trained, in their order."""
        listed = _digested(self.entries)
        if self.own:
            listed += "own\n" + _digested(self.own)
        return hashlib.sha256(listed.encode()).hexdigest()

    def views(self, vector: Tensor) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor) of every entry of x, without a copy."""
        for entry in self.entries:
            yield entry.name, entry.view(vector)


def _entries(tensors: Mapping[str, Tensor]) -> tuple[Entry, ...]:
    entries, offset = [], 0
    for name, tensor in tensors.items():
        entries.append(Entry(name, tuple(tensor.shape), offset))
        offset += tensor.numel()
    return tuple(entries)


def _length(entries: Iterable[Entry]) -> int:
    return sum(entry.size for entry in entries)


def _digested(entries: Iterable[Entry]) -> str:
    return "".join(f"{entry.name} {list(entry.shape)}\n" for entry in entries)
