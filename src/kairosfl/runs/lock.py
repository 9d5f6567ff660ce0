"""One process in a folder at a time."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from kairosfl.errors import UserError

try:
    import fcntl
except ImportError:  # not available on Windows
    fcntl = None  # type: ignore[assignment]


@contextmanager
def lock(folder: Path, patience: float = 0.0) -> Iterator[None]:
    """Lock a folder, waiting up to this many seconds. The lock ends with the process, however it ends."""
    until = time.monotonic() + patience
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / ".lock").open("ab")
    except OSError as error:
        raise UserError(f"Cannot write into {folder}: {error.strerror}; choose another place.") from None
    with file:
        while _taken(file):
            if time.monotonic() > until:
                raise UserError(f"Another process is using {folder}; wait for it, stop it, or choose another folder.")
            time.sleep(0.2)
        yield


def _taken(file: BinaryIO) -> bool:
    """Whether another process has the lock; if not, we take it. Without lock support, never."""
    if fcntl is None:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # a file system without them
        return False
    return False
