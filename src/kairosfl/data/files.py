"""The official files of a data set: where they are stored, and whether they are intact."""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import io
import json
import os
import sys
import warnings
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from kairosfl.data.intake import gigabytes, not_utf8, read_regular
from kairosfl.errors import UserError

CACHE = ".kairosfl"  # the library's own directory, next to the data sets
LARGEST = 10**9  # bytes in a .gz file; official ones have 47 million


@dataclass(frozen=True)
class File:
    """One official file: its path under the data directory, and its md5 and size where known.

    The md5 of a .gz file is that of its contents, because the file may have been recompressed.
    """

    path: str
    md5: str = ""
    size: int = 0


def data_folder() -> Path:
    """`KAIROSFL_DATA`, or the platform's cache directory."""
    chosen = os.environ.get("KAIROSFL_DATA")
    if chosen:
        return Path(chosen).expanduser()
    return cache_folder()


def cache_folder() -> Path:
    """Kairos's part of the platform's cache directory."""
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA") or "~/AppData/Local"
    else:
        base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "kairosfl"


def damaged(path: Path, why: str) -> UserError:
    """The error for a file whose contents are invalid."""
    return UserError(
        f"{path} is damaged: {why}; delete it and run again, or replace it with an intact copy."
    )


def content(path: Path) -> bytes:
    """A file's bytes; a .gz file is decompressed, which verifies its checksum."""
    data = read_regular(path)
    if path.suffix != ".gz":
        return data
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(data)) as stream:
            unpacked = stream.read(LARGEST + 1)
    except EOFError:
        raise damaged(path, f"its compressed data is truncated after {len(data)} bytes") from None
    except (OSError, zlib.error) as error:
        raise damaged(path, f"it cannot be decompressed ({error})") from None
    if len(unpacked) > LARGEST:
        raise damaged(path, f"its compressed data has more than {gigabytes(LARGEST)}")
    return unpacked


def read_text(path: Path) -> str:
    """A text file, which must be UTF-8."""
    read = content(path)
    wrong = not_utf8(read)
    if wrong:
        raise damaged(path, f"it is {wrong}")
    return read.decode("utf-8-sig")


def check(folder: Path, files: Sequence[File]) -> dict[str, str]:
    """The md5 of every file.

    A damaged file is an error; an intact file with another md5 is used with a warning.
    """
    stored = _read_sums(folder)
    sums = dict(stored)
    for file in files:
        path = folder / file.path
        stat = path.stat()
        stamp = f"{stat.st_size} {stat.st_mtime_ns}"
        if sums.get(file.path, ("", ""))[0] != stamp:
            sums[file.path] = (stamp, hashlib.md5(content(path), usedforsecurity=False).hexdigest())
        md5 = sums[file.path][1]
        if not file.md5 or md5 == file.md5:
            continue
        if file.size and stat.st_size == file.size:
            raise damaged(
                path,
                f"it has the size of the official file, but its md5 is {md5}, not {file.md5}",
            )
        warnings.warn(
            f"{path} is not the official file (md5 {md5}, not {file.md5}); it is used anyway, "
            "but results are not comparable with those on the official data.",
            stacklevel=4,
        )
    if sums != stored:
        _write_sums(folder, sums)
    return {file.path: sums[file.path][1] for file in files}


def write(path: Path, data: bytes) -> None:
    """Write a file atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    part.write_bytes(data)
    os.replace(part, path)


def _read_sums(folder: Path) -> dict[str, tuple[str, str]]:
    # Checksums are reused while size and modification time are unchanged: hashing 186 MB on every
    # start is slow.
    try:
        loaded = json.loads((folder / CACHE / "sums.json").read_text())
        return {path: (str(stamp), str(md5)) for path, (stamp, md5) in loaded.items()}
    except (OSError, ValueError, AttributeError, TypeError):
        return {}


def _write_sums(folder: Path, sums: dict[str, tuple[str, str]]) -> None:
    # In a read-only data directory checksums are computed again next time.
    with contextlib.suppress(OSError):
        write(folder / CACHE / "sums.json", json.dumps(sums, indent=1).encode())
