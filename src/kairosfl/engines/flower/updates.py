"""The updates of a round: in memory or, for large models, in an anonymous memory-mapped file."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import mmap
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from kairosfl.core.fields import Briefs

# Flower keeps each response, megabytes large, in a reference cycle; by default 20 of them would
# pile up
EAGER = 50


class Updates:
    """One row for every client that was asked; filled in any order, read in client order."""

    def __init__(self, briefs: Briefs, folder: Path | None, on_disk: int) -> None:
        """Use a file in `folder`, if given, when the updates take `on_disk` bytes or more."""
        length = briefs.start.shape[-1]
        if briefs.measures_only():
            length = 0
        shape = (len(briefs), length)
        dtype = briefs.start.dtype
        self._device = briefs.start.device
        self._map: mmap.mmap | None = None
        size = shape[0] * shape[1] * briefs.start.element_size()
        if folder is None or size < on_disk:
            self._rows = torch.empty(shape, dtype=dtype)
            return
        with tempfile.TemporaryFile(
            dir=folder
        ) as file:  # unnamed, so that a crash leaves nothing behind
            file.truncate(size)
            self._map = mmap.mmap(file.fileno(), size)
        gc.set_threshold(EAGER)
        self._rows = torch.frombuffer(self._map, dtype=dtype).view(shape)

    def __getitem__(self, row: int) -> Tensor:
        """The storage of one update."""
        return self._rows[row]

    def release(self) -> None:
        """Free memory: mapped pages are read again from the file when they are needed."""
        if self._map is not None:
            self._map.madvise(mmap.MADV_DONTNEED)
            gc.collect()
            with contextlib.suppress(
                AttributeError, OSError
            ):  # glibc holds on to the memory of large messages
                ctypes.CDLL(None).malloc_trim(0)

    def rows(self, filled: Sequence[int]) -> Tensor:
        """These rows, in ascending order, as `[m, d]`.

        They are moved up in place, so that nothing is stored twice.
        """
        for to, row in enumerate(filled):
            if to != row:
                self._rows[to] = self._rows[row]
        return self._rows[: len(filled)].to(self._device)
