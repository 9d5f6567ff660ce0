"""Files that others wrote: only regular ones, no more than fits into memory, texts in UTF-8."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kairosfl.errors import UserError

UTF16 = (b"\xff\xfe", b"\xfe\xff")
LARGEST_CLASS = 2**53  # above it, floating-point numbers skip integers
GROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
MORE_MEMORY = "leave it out, or use a machine with more memory"
ODD_FILES = (
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
    (stat.S_ISDIR, "a directory"),
)


def memory() -> int:
    """Bytes that this process may take: the least of the machine's, its group's and its own."""
    limits = []
    if hasattr(os, "sysconf"):
        limits.append(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
        limits.append(_address_space())
    for name in GROUP_LIMITS:
        limits.append(_group_limit(Path(name)))
    return min([limit for limit in limits if limit > 0], default=sys.maxsize)


def _address_space() -> int:
    import resource  # not on Windows

    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit == resource.RLIM_INFINITY:
        return 0
    return limit


def _group_limit(file: Path) -> int:
    try:
        return int(file.read_text(encoding="ascii"))
    except (OSError, ValueError):  # no such group, or "max"
        return 0


class Room:
    """The memory for a data set's files: half of all, since samples are copied into tensors."""

    def __init__(self) -> None:
        self.left = memory() // 2

    def check(self, size: int, subject: object, fix: str = MORE_MEMORY) -> None:
        """Refuse what takes more than is left.

        Raises:
            UserError: Says how much `subject` would take, how much is left, and the fix.
        """
        if size > self.left:
            raise UserError(
                f"{subject} would take {gigabytes(size)} of memory, and {gigabytes(self.left)} are "
                f"left for data; {fix}."
            )

    def take(self, size: int, subject: object, fix: str = MORE_MEMORY) -> None:
        """The same, and what is taken is no longer left."""
        self.check(size, subject, fix)
        self.left -= size


def gigabytes(size: int) -> str:
    """A size in memory, as a sentence says it."""
    if size >= 1e8:
        return f"{size / 1e9:,.1f} GB"
    return f"{size / 1e6:,.1f} MB"


@contextmanager
def enough_memory(subject: object) -> Iterator[None]:
    """Turn a lack of memory that no estimate foresaw into a sentence."""
    try:
        yield
    except MemoryError:
        raise UserError(
            f"{subject} takes more memory than there is; use less data, or a larger machine."
        ) from None


def read_regular(file: Path, room: Room | None = None) -> bytes:
    """The bytes of a file.

    Raises:
        UserError: If it is a pipe or a device, which may never end, if it is larger than memory
            allows, or unreadable.
    """
    try:
        status = file.stat()
        for is_odd, words in ODD_FILES:
            if is_odd(status.st_mode):
                raise UserError(
                    f"{file} is {words}, not a regular file; replace it with one, or remove it."
                )
        (room or Room()).check(status.st_size, file)
        return file.read_bytes()
    except OSError as error:
        reason = error.strerror or "it is gone"
        raise UserError(
            f"{file} cannot be read ({reason}); make it readable, or remove it."
        ) from None


def readable(name: str) -> str:
    """The name of a file; bytes that are not UTF-8, which no record could hold, become `\\xe9`."""
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def as_text(file: Path, content: bytes) -> str:
    """The text in a file, without a byte order mark.

    Raises:
        UserError: If it is not UTF-8. With other letters in place of what is not, different names
            would become the same.
    """
    wrong = not_utf8(content)
    if wrong:
        raise UserError(f"{file} is {wrong}; save it as UTF-8.")
    return content.decode("utf-8-sig")


def not_utf8(content: bytes) -> str:
    """What bytes are instead of a text in UTF-8, and where; empty if they are one."""
    if content.startswith(UTF16):
        return "in UTF-16"
    zero = content.find(b"\0")
    if zero >= 0:
        return f"not a text (byte 0x00 in line {_line(content, zero)})"
    try:
        content.decode()
    except UnicodeDecodeError as error:
        return (
            f"not UTF-8 (byte 0x{content[error.start]:02x} in line {_line(content, error.start)})"
        )
    return ""


def _line(content: bytes, position: int) -> int:
    """The line of a byte, as an editor counts; old files end lines with carriage returns alone."""
    ending = b"\n" if b"\n" in content else b"\r"
    return 1 + content.count(ending, 0, position)
