"""The table of client rows, one per client that a rule ever wrote about."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from math import prod

import torch
from torch import Tensor

BLOCK_BYTES = 1 << 26
SMALL_ROWS = 4096  # rows in a block of small rows: no 64 MB for a handful of numbers


# Memory of this shape for rows like this one.
Allocate = Callable[[tuple[int, ...], Tensor], Tensor]


def alike(shape: tuple[int, ...], row: Tensor) -> Tensor:
    """Uninitialised memory where the row is."""
    return row.new_empty(shape)


class Table:
    """Rows of named tensors by client id. A row takes memory from the first time it is written.

    Rows live in slots, numbered in the order in which clients were first seen; slots live in blocks
    of about 64 MB, so a table grows without moving what it holds; `allocate` decides where a block
    lies. A default may be a single number where a row is a vector, when the rule does not know yet
    how long the vector will be.
    """

    def __init__(self, default: dict[str, Tensor], allocate: Allocate = alike) -> None:
        self.default = default
        self.allocate = allocate
        self.slot: dict[int, int] = {}
        self.blocks: list[dict[str, Tensor]] = []
        self.block_rows = 0  # known from the first write on
        # Clients written since `written` was last cleared, for checkpoints.
        self.written: set[int] = set()
        self.writes = 0  # number of writes

    def __len__(self) -> int:
        return len(self.slot)

    @property
    def ids(self) -> list[int]:
        """Client ids in slot order."""
        return list(self.slot)

    def slots(self, ids: Tensor) -> Tensor:
        """The slots of clients that have one."""
        return torch.tensor([self.slot[client] for client in ids.tolist()], dtype=torch.int64)

    def rows(self, ids: Tensor) -> dict[str, Tensor]:
        """The rows of these clients stacked, the default for those never written."""
        if not self.default:
            return {}
        slots = [self.slot.get(client, -1) for client in ids.tolist()]  # -1: never written
        stacked = {}
        for name, default in self.default.items():
            shape = self.blocks[0][name].shape[1:] if self.blocks else default.shape
            out = default.new_empty(len(slots), *shape)
            for row, slot in enumerate(slots):
                if slot < 0:
                    out[row] = default
                else:
                    block = self.blocks[slot // self.block_rows]
                    out[row] = block[name][slot % self.block_rows]
            stacked[name] = out
        return stacked

    def reserve(self, ids: Tensor) -> None:
        """Give these clients the next slots, in this order, where they have none."""
        for client in ids.tolist():
            self.slot.setdefault(client, len(self.slot))

    def write(self, ids: Tensor, rows: dict[str, Tensor]) -> None:
        """Store rows in place; a client's first row takes the default of names left out."""
        new = set(ids.tolist()) - self.slot.keys()
        self.reserve(ids)
        self._grow(rows)
        for row, client in enumerate(ids.tolist()):
            slot = self.slot[client]
            block = self.blocks[slot // self.block_rows]
            for name, default in self.default.items():
                if name in rows:
                    block[name][slot % self.block_rows] = rows[name][row]
                elif client in new:
                    block[name][slot % self.block_rows] = default
        self.written.update(ids.tolist())
        self.writes += 1

    def column(self, name: str) -> Iterator[Tensor]:
        """All stored rows of one name in slot order, a block at a time, without a copy."""
        remaining = len(self)
        for block in self.blocks:
            rows = min(remaining, self.block_rows)
            yield block[name][:rows]
            remaining -= rows

    def _grow(self, rows: dict[str, Tensor]) -> None:
        """Blocks for every slot given out, shaped like these rows if they are the first ones."""
        like = self.blocks[0] if self.blocks else rows
        shapes: dict[str, tuple[int, ...]] = {}
        row_bytes = 0
        for name, default in self.default.items():
            shapes[name] = like[name].shape[1:] if name in like else default.shape
            row_bytes += prod(shapes[name]) * default.element_size()
        if not self.blocks:
            self.block_rows = SMALL_ROWS
            if row_bytes >= 1024:
                self.block_rows = max(1, BLOCK_BYTES // row_bytes)
        while len(self.blocks) * self.block_rows < len(self.slot):
            block = {}
            for name, default in self.default.items():
                block[name] = self.allocate((self.block_rows, *shapes[name]), default)
            self.blocks.append(block)
