"""Where the tensors of a model lie in the vectors that stand for it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor

from kairosfl.errors import UserError


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
class Pair:
    """Two trained tensors of which the product is added to a frozen one, as LoRA does.

    Args:
        a: The factor that inputs meet first, `[rank, inputs]`.
        b: The other one, `[outputs, rank]`.
        base: The frozen tensor, `[outputs, inputs]`.
        scale: Of the product: the weights are base + scale · b a.
    """

    a: Entry
    b: Entry
    base: Entry
    scale: float = 1.0

    @property
    def rank(self) -> int:
        """How many components the pair has."""
        return self.a.shape[0]

    def product(self, vector: Tensor) -> Tensor:
        """scale · b a of a model `[d]`, or of every client's in `[m, d]`."""
        return self.scale * (self.b.view(vector) @ self.a.view(vector))


@dataclass(frozen=True)
class Layout:
    """The tensors of a model, in the order of the vectors that hold them.

    Args:
        entries: What is trained and shared: the vector x, of length d.
        own: What is trained and never leaves its client: of length e, one vector per client.
        base: What is frozen and shared by all clients: of length b. It moves only where a rule
            rebases.
        pairs: Which shared tensors are the factors of low-rank pairs.
    """

    entries: tuple[Entry, ...]
    own: tuple[Entry, ...] = ()
    base: tuple[Entry, ...] = ()
    pairs: tuple[Pair, ...] = ()

    @classmethod
    def of(
        cls,
        tensors: Mapping[str, Tensor],
        own: Mapping[str, Tensor] | None = None,
        base: Mapping[str, Tensor] | None = None,
        pairs: Iterable[tuple[str, str, str, float]] = (),
    ) -> Layout:
        """The layout of these tensors, each part in its own order.

        Args:
            tensors: What is trained and shared, by name.
            own: What is trained and never leaves its client.
            base: What is frozen.
            pairs: Low-rank pairs, as the names of their tensors and their scale.
        """
        layout = cls(_entries(tensors))
        if own is not None:
            layout = replace(layout, own=_entries(own))
        if base is not None:
            layout = replace(layout, base=_entries(base))
        low_rank = [layout._pair(*names) for names in pairs]
        return replace(layout, pairs=tuple(low_rank))

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

    def _pair(self, a: str, b: str, base: str, scale: float) -> Pair:
        shared = {entry.name: entry for entry in self.entries}
        frozen = {entry.name: entry for entry in self.base}
        _check_name(a, shared, "shared")
        _check_name(b, shared, "shared")
        _check_name(base, frozen, "frozen")
        pair = Pair(shared[a], shared[b], frozen[base], scale)
        outputs = pair.b.shape[0]
        factors_fit = pair.b.shape == (outputs, pair.rank)
        if not factors_fit or pair.base.shape != (outputs, *pair.a.shape[1:]):
            shapes = [list(entry.shape) for entry in (pair.a, pair.b, pair.base)]
            raise UserError(
                f"pairs: {a}, {b} and {base} have the shapes {shapes}; they must be "
                "[rank, inputs], [outputs, rank] and [outputs, inputs]."
            )
        return pair

    def within(self, rank: int) -> Tensor:
        """Which numbers of x a client with this many components of every pair has, `[d]`."""
        has = torch.ones(self.size, dtype=torch.bool)
        for pair in self.pairs:
            pair.a.view(has)[rank:] = False
            pair.b.view(has)[:, rank:] = False
        return has

    def size_at(self, rank: int) -> int:
        """How many they are."""
        lost = 0
        for pair in self.pairs:
            over = max(pair.rank - rank, 0)
            lost += over * (pair.a.shape[1] + pair.b.shape[0])
        return self.size - lost

    def joined(self) -> Layout:
        """The layout of a vector of length d + e: what is shared, then a client's own part."""
        shifted = (Entry(entry.name, entry.shape, self.size + entry.offset) for entry in self.own)
        return Layout((*self.entries, *shifted))

    @property
    def names(self) -> tuple[str, ...]:
        """Of all trained tensors, as a brief numbers them: the shared ones, then a client's own."""
        return tuple(entry.name for entry in (*self.entries, *self.own))

    @property
    def own_numbers(self) -> frozenset[int]:
        """The numbers of a client's own tensors, as a brief has them."""
        return frozenset(range(len(self.entries), len(self.names)))

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


def _check_name(name: str, tensors: Mapping[str, Entry], kind: str) -> None:
    """Refuse a pair of a tensor that there is not."""
    if name not in tensors:
        listed = "none"
        if tensors:
            listed = ", ".join(tensors)
        raise UserError(
            f"pairs: {name!r} is the name of no {kind} tensor of the model; there are {listed}."
        )


def _entries(tensors: Mapping[str, Tensor]) -> tuple[Entry, ...]:
    """The tensors one after another."""
    entries = []
    offset = 0
    for name, tensor in tensors.items():
        entries.append(Entry(name, tuple(tensor.shape), offset))
        offset += tensor.numel()
    return tuple(entries)


def _length(entries: Iterable[Entry]) -> int:
    return sum(entry.size for entry in entries)


def _digested(entries: Iterable[Entry]) -> str:
    return "".join(f"{entry.name} {list(entry.shape)}\n" for entry in entries)
