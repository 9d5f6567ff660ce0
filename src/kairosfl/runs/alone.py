"""One process in a folder at a time."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kairosfl.errors import UserError


@contextmanager
def alone(folder: Path, patience: float = 0.0) -> Iterator[None]:
    """Hold a folder, after waiting so many seconds for who has it. The hold ends with the process, however it ends."""
    try:
        import fcntl
    except ImportError:  # Windows has none
        yield
        return
    until = time.monotonic() + patience
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / ".lock").open("ab")
    except OSError as error:
        raise UserError(
            f"Cannot write into {folder}: {error.strerror}; free the disk or choose another place."
        ) from None
    with file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                if time.monotonic() > until:
                    raise UserError(
                        f"Another process is at work in {folder}; wait for it, end it, or name another folder."
                    ) from None
                time.sleep(0.2)
                continue
            except OSError:  # a file system without locks
                pass
            break
        yield
