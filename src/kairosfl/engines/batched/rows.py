"""Models as rows of one matrix `[m, width]`, laid out for the matrix units.

Every tensor starts at a multiple of 128 bytes, or matrix products do not use the tensor cores, and
the weights of convolutions lie as (outputs, height, width, inputs), so that the inputs of one pixel
are neighbours.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any

import torch
from torch import Tensor, nn

from kairosfl.core.layout import Layout
from kairosfl.engines.batched.fast import kernels
from kairosfl.tasks.vector import trained

ALIGN = 32  # numbers: 128 bytes in float32
STRIP = 64  # columns of a matrix that one program steps


@dataclass(frozen=True)
class Place:
    """Where one tensor is: `shape` is its shape in a row, `swapped` whether that is (O, H, W, I)
    for (O, I, H, W).
    """

    shape: tuple[int, ...]
    offset: int  # in a row
    swapped: bool

    @property
    def size(self) -> int:
        return prod(self.shape)


@dataclass(frozen=True)
class RowLayout:
    """Where every tensor of a model is in a row: first those that all clients share, then those
    that stay with each.
    """

    places: tuple[Place, ...]
    width: int
    own: int = 0  # how many of the places, the last ones, are a client's own part

    @classmethod
    def of(cls, layout: Layout) -> RowLayout:
        places, offset = [], 0
        for entry in layout.joined().entries:
            swapped = len(entry.shape) == 4
            outputs_last = (
                (entry.shape[0], *entry.shape[2:], entry.shape[1]) if swapped else entry.shape
            )
            places.append(Place(outputs_last, offset, swapped))
            offset += -(-entry.size // ALIGN) * ALIGN
        return cls(tuple(places), offset, len(layout.own))

    @cached_property
    def shared_part(self) -> RowLayout:
        """The columns of what clients share; they come first."""
        if not self.own:
            return self
        first = len(self.places) - self.own
        return RowLayout(self.places[:first], self.places[first].offset)

    @cached_property
    def own_part(self) -> RowLayout:
        """The columns after `shared_part`, counted from there."""
        begin = self.shared_part.width
        places = self.places[len(self.shared_part.places) :]
        moved = (replace(place, offset=place.offset - begin) for place in places)
        return RowLayout(tuple(moved), self.width - begin)

    def view(self, rows: Tensor, index: int) -> Tensor:
        """The tensor with this number in every row, `[m, *shape]`, in the layout of the rows."""
        place = self.places[index]
        return rows[:, place.offset : place.offset + place.size].view(len(rows), *place.shape)

    def natural(self, rows: Tensor, index: int) -> Tensor:
        """The same with the axes in the model's own order."""
        view = self.view(rows, index)
        return view.permute(0, 1, 4, 2, 3) if self.places[index].swapped else view

    def ranges(self, without: frozenset[int]) -> list[tuple[int, int]]:
        """Columns (begin, end) of all tensors but these, adjacent ones merged."""
        found: list[tuple[int, int]] = []
        ends = [place.offset for place in self.places[1:]] + [self.width]
        for index, (place, end) in enumerate(zip(self.places, ends, strict=True)):
            if index in without:
                continue
            if found and found[-1][1] == place.offset:
                found[-1] = (found[-1][0], end)
            else:
                found.append((place.offset, end))
        return found

    def strips(self) -> list[int]:
        """For every tensor where its columns begin in a list of the strips of all matrices, and the
        end.
        """
        counts = [
            -(-place.shape[1] // STRIP) if len(place.shape) == 2 else 0 for place in self.places
        ]
        return [sum(counts[:index]) for index in range(len(counts) + 1)]

    def pack(self, vectors: Tensor) -> Tensor:
        """Vectors `[m, d]` as new rows; the gaps are zeros."""
        pieces, zero = [], vectors.new_zeros(())
        for place, piece in zip(self.places, self._split(vectors), strict=True):
            if place.swapped:
                outputs, height, width, inputs = place.shape
                piece = (
                    piece.view(-1, outputs, inputs, height, width)
                    .permute(0, 1, 3, 4, 2)
                    .reshape(piece.shape)
                )
            pieces.append(piece)
            gap = -place.size % ALIGN
            if gap:
                pieces.append(zero.expand(len(vectors), gap))
        return torch.cat(pieces, 1)

    def unpack(self, rows: Tensor, out: Tensor) -> None:
        """Rows as vectors, written into `[m, d]`."""
        parts, vectors = self._parts(rows, out)
        torch._foreach_copy_(vectors, parts)

    def fill(self, vectors: Tensor, rows: Tensor) -> None:
        """Write vectors, `[d]` or `[m, d]`, to rows, as by `pack`."""
        module: Any = kernels("passes", rows)
        if module is None or vectors.stride(-1) != 1:
            rows[:] = self.pack(vectors.view(-1, vectors.shape[-1]))
        else:
            module.fill(vectors.expand(len(rows), -1), rows, self._pieces(module, rows.device))

    def subtract(self, rows: Tensor, start: Tensor, out: Tensor) -> None:
        """Rows minus `start`, `[d]` or `[m, d]`, as vectors: in one pass, unless they differ in
        device or type.
        """
        module: Any = kernels("passes", out)
        if rows.device != out.device or rows.dtype != out.dtype:
            self.unpack(rows, out)
            out -= start
        elif module is not None and start.stride(-1) == 1:
            module.subtract(rows, start.expand_as(out), out, self._pieces(module, rows.device))
        else:
            for part, begin, vector in zip(
                *self._parts(rows, start.expand_as(out), out), strict=True
            ):
                torch.sub(part, begin, out=vector)

    def _pieces(self, module: Any, device: torch.device) -> Tensor:
        """The table of the kernels in `passes`."""
        if device not in self._tables:
            self._tables[device] = module.pieces(self.places, device)
        return self._tables[device]

    @cached_property
    def _tables(self) -> dict[torch.device, Tensor]:
        return {}

    def _parts(self, rows: Tensor, *vectors: Tensor) -> list[list[Tensor]]:
        """Every tensor in the rows, and the same in vectors `[m, d]`."""
        found = [
            list(rows.split_with_sizes(self._gapped, 1)[::2]),
            *(list(self._split(each)) for each in vectors),
        ]
        for index, place in enumerate(self.places):
            if place.swapped:
                natural = self.natural(rows, index)
                for parts in found[1:]:
                    parts[index] = parts[index].view(natural.shape)
                found[0][index] = natural
        return found

    def _split(self, vectors: Tensor) -> tuple[Tensor, ...]:
        """The tensors of vectors `[m, d]`, each flat."""
        pieces: tuple[Tensor, ...] = vectors.split_with_sizes(self._gapped[::2], 1)
        return pieces

    @cached_property
    def _gapped(self) -> list[int]:
        """The size of every tensor and of the gap behind it."""
        return [size for place in self.places for size in (place.size, -place.size % ALIGN)]


def ordered(model: nn.Module, layout: Layout) -> dict[str, nn.Parameter]:
    """The trained tensors by name, in the order of the rows: the shared ones, then the own."""
    by_name = trained(model)
    return {entry.name: by_name[entry.name] for entry in layout.joined().entries}
