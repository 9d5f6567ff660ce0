"""The updates of a round: in memory, or for large models in a file that is mapped and has no name any more."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from kairosfl.briefs import Report


class Updates:
    """Rows like a vector, one per client that was asked; filled in any order, read in client order."""

    def __init__(self, like: Tensor, rows: int, folder: Path | None) -> None:
        """In memory without a folder, else in a file there."""
        self._device = like.device
        if folder is None:
            self._rows = torch.empty(rows, len(like), dtype=like.dtype)
            return
        with tempfile.TemporaryFile(dir=folder) as file:  # without a name: a crash leaves nothing behind
            file.truncate(rows * len(like) * like.element_size())
            kind = torch.empty(0, dtype=like.dtype).numpy().dtype
            self._rows = torch.from_numpy(np.memmap(file, dtype=kind, mode="r+", shape=(rows, len(like))))

    def put(self, row: int, report: Report) -> Report:
        """Keep the report's update; the report that is returned holds it no longer."""
        self._rows[row] = report.delta
        return replace(report, delta=torch.empty(0))

    def rows(self, filled: Sequence[int]) -> Tensor:
        """`[m, d]` of these rows, ascending; the others give up their place, so that nothing is copied to memory."""
        for to, row in enumerate(filled):
            if to != row:
                self._rows[to] = self._rows[row]
        return self._rows[: len(filled)].to(self._device)
