"""One process in a folder at a time."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from kairosfl.errors import UserError

try:
    import fcntl
except ImportError:  # not available on Windows
    fcntl = None  # type: ignore[assignment]

NAME = ".lock"
STUDIES = ("sweep.json", "tune.json")  # of a folder whose lock is that of all runs in it
ABOVE = 2  # levels between a run and its study, at most


class Displaced(UserError):
    """The lock of a folder was removed while we held it: nothing more may be written there."""


@dataclass(frozen=True)
class Lock:
    """The lock of a folder, held by this process."""

    folder: Path
    file: BinaryIO

    def check(self) -> None:
        """Refuse to write where the lock was removed: another process may have taken a new one."""
        if not self.stands():
            raise Displaced(
                f"{self.folder / NAME} was removed or replaced while this run trained, so another "
                "process may write there: it stops and writes nothing more; leave that file alone, "
                "and continue from the last checkpoint."
            )

    def stands(self) -> bool:
        """Whether the file that is locked still has its name."""
        try:
            return os.path.samestat((self.folder / NAME).stat(), os.fstat(self.file.fileno()))
        except (FileNotFoundError, NotADirectoryError):
            return False
        except OSError:  # a network that hiccups
            return True


@contextmanager
def lock(folder: Path, patience: float = 0.0) -> Iterator[Lock]:
    """Lock a folder, waiting up to this many seconds.

    The lock ends with the process, however that ends.
    """
    until = time.monotonic() + patience
    while True:
        with _open(folder) as file:
            held = Lock(folder, file)
            while _taken(file):
                if time.monotonic() > until:
                    raise UserError(
                        f"Another process is using {folder}; wait for it, stop it, or choose "
                        "another folder."
                    )
                time.sleep(0.2)
            if held.stands():  # whoever had it before may have removed the folder
                yield held
                return


@contextmanager
def within_study(folder: Path) -> Iterator[None]:
    """Keep a sweep or search and one of its runs, continued alone, from running together."""
    with ExitStack() as files:
        for parent in folder.absolute().parents[:ABOVE]:
            is_study = any((parent / name).is_file() for name in STUDIES)
            if not is_study or not (parent / NAME).is_file():
                continue
            with suppress(PermissionError):
                file = files.enter_context((parent / NAME).open("ab"))
                if _taken(file, shared=True):
                    raise UserError(
                        f"{folder} belongs to {parent}, which another process is using; wait for "
                        "it, or stop it."
                    )
        yield


def forget(folder: Path) -> None:
    """Remove a folder in which nothing was written."""
    with suppress(OSError):
        if {path.name for path in folder.iterdir()} <= {NAME}:
            (folder / NAME).unlink(missing_ok=True)
            folder.rmdir()
            if folder.parent == Path("runs"):  # where folders without a name are made
                folder.parent.rmdir()


def _open(folder: Path) -> BinaryIO:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return (folder / NAME).open("ab")
    except OSError as error:
        raise UserError(
            f"Cannot write into {folder}: {error.strerror}; choose another place."
        ) from None


def _taken(file: BinaryIO, *, shared: bool = False) -> bool:
    """Whether another process has the lock; if not, we take it. Without lock support, never."""
    if fcntl is None:
        return False
    try:
        fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:  # a file system without them
        return False
    return False
