"""The table of client rows: one row per client that a rule ever wrote about, in blocks that are never copied."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

BLOCK_BYTES = 1 << 26


class Table:
    """Rows of named tensors by client id. A row takes memory from the first time it is written.

    Rows live in slots, numbered in the order in which clients were first seen; slots live in blocks of about 64 MB,
    so a table grows without moving what it holds.
    """

    def __init__(self, default: dict[str, Tensor]) -> None:
        self.default = default
        self.slot: dict[int, int] = {}
        self.blocks: list[dict[str, Tensor]] = []
        self.written: set[int] = set()  # clients written since `written` was last cleared, for checkpoints
        size = sum(value.numel() * value.element_size() for value in default.values())
        self.block_rows = max(1, BLOCK_BYTES // max(1, size))
        if size < 1024:
            self.block_rows = 4096  # small rows: no 64 MB block for a handful of numbers

    def __len__(self) -> int:
        return len(self.slot)

    @property
    def ids(self) -> list[int]:
        """Client ids in slot order."""
        return list(self.slot)

    def rows(self, ids: Tensor) -> dict[str, Tensor]:
        """The rows of these clients stacked, the default for those never written."""
        slots = [self.slot.get(client, -1) for client in ids.tolist()]
        stacked = {}
        for name, default in self.default.items():
            out = default.expand(len(slots), *default.shape).clone()
            for row, slot in enumerate(slots):
                if slot >= 0:
                    out[row] = self.blocks[slot // self.block_rows][name][slot % self.block_rows]
            stacked[name] = out
        return stacked

    def reserve(self, ids: Tensor) -> None:
        """Give these clients the next slots, in this order, where they have none."""
        for client in ids.tolist():
            slot = self.slot.setdefault(client, len(self.slot))
            if slot // self.block_rows == len(self.blocks):
                self.blocks.append({name: self._empty(value) for name, value in self.default.items()})

    def write(self, ids: Tensor, rows: dict[str, Tensor]) -> None:
        """Store rows in place."""
        self.reserve(ids)
        for row, client in enumerate(ids.tolist()):
            slot = self.slot[client]
            block = self.blocks[slot // self.block_rows]
            for name, value in rows.items():
                block[name][slot % self.block_rows] = value[row]
        self.written.update(ids.tolist())

    def column(self, name: str) -> Iterator[Tensor]:
        """All stored rows of one name in slot order, a block at a time, without a copy."""
        left = len(self)
        for block in self.blocks:
            rows = min(left, self.block_rows)
            yield block[name][:rows]
            left -= rows

    def _empty(self, value: Tensor) -> Tensor:
        return torch.empty(self.block_rows, *value.shape, dtype=value.dtype, device=value.device)
