"""The arrays of an .npz file, each unpacked when it is needed."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kairosfl.data.intake import Room
from kairosfl.errors import UserError, first_line

Array = npt.NDArray[Any]
ZIP = b"PK"
NPY = b"\x93NUMPY"


class Archive:
    """An .npz file: the names of its arrays, and each of them."""

    def __init__(self, file: Path, content: bytes, room: Room) -> None:
        self.file = file
        self.room = room
        if content.startswith(NPY):
            raise UserError(f"{file} is a single array; write inputs and targets with numpy.savez.")
        if not content.startswith(ZIP):
            raise UserError(
                f"{file} is damaged: it is not an .npz archive; write it again with numpy.savez."
            )
        try:
            self.archive: Any = np.load(io.BytesIO(content), allow_pickle=False)
            entries = self.archive.zip.infolist()
        except Exception as error:  # of a damaged file, anything may come out
            raise self._damaged(error) from None
        self.sizes: dict[str, int] = {
            entry.filename.removesuffix(".npy"): entry.file_size for entry in entries
        }

    def __contains__(self, name: str) -> bool:
        return name in self.sizes

    def __getitem__(self, name: str) -> Array:
        # A few bytes may declare gigabytes.
        self.room.take(self.sizes[name], f"the array {name} in {self.file}")
        try:
            with np.errstate(all="ignore"):  # numpy multiplies the sides of any shape
                array = self.archive[name]
        except MemoryError:
            raise UserError(
                f"{self.file} declares more values in {name} than memory has; write it again."
            ) from None
        except Exception as error:
            raise self._damaged(error) from None
        if not isinstance(array, np.ndarray):
            raise UserError(
                f"{self.file} has {name}, which is not an array; write it again with numpy.savez."
            )
        return array.astype(array.dtype.newbyteorder("="), copy=False)

    def _damaged(self, error: Exception) -> UserError:
        return UserError(
            f"{self.file} is damaged: it cannot be read as .npz ({first_line(error)}); "
            "write it again."
        )
