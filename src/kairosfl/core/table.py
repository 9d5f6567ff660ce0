"""The table of client rows: one row per client that a rule ever wrote about, in blocks that are
never copied.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

BLOCK_BYTES = 1 << 26
SMALL_ROWS = 4096  # rows in a block of small rows: no 64 MB for a handful of numbers


Allocate = Callable[
    [tuple[int, ...], Tensor], Tensor
]  # memory of this shape for rows like this one


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
        self.default, self.allocate = default, allocate
        self.slot: dict[int, int] = {}
        self.blocks: list[dict[str, Tensor]] = []
        self.block_rows = 0  # known from the first write on
        self.written: set[int] = (
            set()
        )  # clients written since `written` was last cleared, for checkpoints
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
        slots = [self.slot.get(client, -1) for client in ids.tolist()] if self.default else []
        stacked = {}
        for name, default in self.default.items():
            shape = self.blocks[0][name].shape[1:] if self.blocks else default.shape
            out = default.new_empty(len(slots), *shape)
            for row, slot in enumerate(slots):
                out[row] = (
                    default
                    if slot < 0
                    else self.blocks[slot // self.block_rows][name][slot % self.block_rows]
                )
            stacked[name] = out
        return stacked

    def reserve(self, ids: Tensor) -> None:
        """Give these clients the next slots, in this order, where they have none."""
        for client in ids.tolist():
            self.slot.setdefault(client, len(self.slot))

    def write(self, ids: Tensor, rows: dict[str, Tensor]) -> None:
        """Store rows in place. For a client without a row, names that are left out take the
        default.
        """
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
        left = len(self)
        for block in self.blocks:
            rows = min(left, self.block_rows)
            yield block[name][:rows]
            left -= rows

    def _grow(self, rows: dict[str, Tensor]) -> None:
        """Blocks for every slot given out, shaped like these rows if they are the first ones."""
        like = self.blocks[0] if self.blocks else rows
        shapes = {
            name: like[name].shape[1:] if name in like else value.shape
            for name, value in self.default.items()
        }
        if not self.blocks:
            size = sum(
                shapes[name].numel() * value.element_size() for name, value in self.default.items()
            )
            self.block_rows = max(1, BLOCK_BYTES // size) if size >= 1024 else SMALL_ROWS
        while len(self.blocks) * self.block_rows < len(self.slot):
            self.blocks.append(
                {
                    n: self.allocate((self.block_rows, *shapes[n]), value)
                    for n, value in self.default.items()
                }
            )
