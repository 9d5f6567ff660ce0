"""Files that are either complete or absent: written to a temporary name, flushed, then renamed."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from kairosfl.errors import UserError

Needs = Mapping[str, Any]  # name -> what isinstance takes
NOTHING: Needs = {}
_STRICT = json.JSONEncoder(allow_nan=False)


def recorded(folder: Path) -> Path:
    """The configuration of a run folder, which a folder that is no run lacks."""
    file = folder / "config.toml"
    if file.is_file():
        return file
    if (folder / "sweep.json").exists():
        raise UserError(
            f"{folder} is a sweep; continue it with the `kairosfl sweep` that began it."
        )
    if not folder.exists():
        raise UserError(f"{folder} does not exist; give a run folder.")
    raise UserError(f"{folder} is not a run folder: it has no config.toml.")


def check_runs(folders: Sequence[Path]) -> None:
    """Refuse folders that do not exist, and a single one without a run."""
    for folder in folders:
        if not folder.exists():
            raise UserError(
                f"{folder} does not exist; give a run folder or a folder of run folders."
            )
    if len(folders) > 1:
        return
    for folder in folders:
        is_sweep = (folder / "sweep.json").exists()
        if not is_sweep and not any(folder.rglob("metrics.jsonl")):
            raise no_run(folder)


def no_run(folder: Path) -> UserError:
    """What to say of a folder without a run."""
    return UserError(
        f"{folder} contains no run (no metrics.jsonl in it or in a folder below it); give a folder "
        "that `kairosfl run` or `kairosfl sweep` wrote."
    )


def write(path: Path, make: bytes | str | Callable[[Path], None]) -> None:
    """Write a file atomically: text, bytes, or what a function writes to a temporary path.

    A link remains a link. A device or pipe, which cannot be replaced, is written to directly.
    """
    target = path
    if path.is_symlink():
        target = Path(os.path.realpath(path))  # Path.resolve fails where links form a loop
    temporary = target.with_name(f".{target.name}.part")
    try:
        if path.exists() and not path.is_file() and not path.is_dir():
            return _put(make, path)
        target.parent.mkdir(parents=True, exist_ok=True)
        _put(make, temporary)
        with temporary.open("rb+") as handle:
            os.fsync(handle.fileno())
        temporary.replace(target)
    except (FileExistsError, NotADirectoryError):
        raise UserError(
            f"Cannot write {path}: {_first_file(target)} is not a directory; choose another place."
        ) from None
    except (OSError, SafetensorError) as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        reason = getattr(error, "strerror", None)
        if not reason:
            reason = error
        raise UserError(
            f"Cannot write {path}: {reason}; free the disk or choose another place."
        ) from None
    except BaseException:  # Ctrl-C
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def _first_file(path: Path) -> Path:
    """The file that is where a folder should be."""
    for parent in reversed(path.parents):
        exists = parent.exists() or parent.is_symlink()
        if exists and not parent.is_dir():
            return parent
    return path.parent


def _put(make: bytes | str | Callable[[Path], None], path: Path) -> None:
    if callable(make):
        make(path)
    elif isinstance(make, str):
        # Names of files may hold bytes that are not UTF-8, for which Python has surrogates.
        path.write_bytes(make.encode(errors="backslashreplace"))
    else:
        path.write_bytes(make)


def plain(value: Any) -> Any:
    """A value as JSON can hold it: NaN and infinity become null."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {str(key): plain(entry) for key, entry in value.items()}
    if isinstance(value, list | tuple):
        return list(map(plain, value))
    return value


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file atomically."""
    write(path, json.dumps(plain(value), indent=1) + "\n")


def append_json(path: Path, value: dict[str, Any]) -> None:
    """Append a line to a JSON Lines file; it is on disk when this returns."""
    try:
        with path.open("ab") as handle:
            handle.write(f"{_line(value)}\n".encode())
    except OSError as error:
        reason = error.strerror if error.strerror else error
        raise UserError(f"Cannot write {path}: {reason}; free the disk, then resume.") from None


def _line(value: dict[str, Any]) -> str:
    """As JSON.

    Lists are first taken as they are: to look for numbers that JSON does not have takes longer than
    to write them.
    """
    row = dict(value)
    for key, entry in value.items():
        if isinstance(entry, float):
            row[key] = plain(entry)
    try:
        return _STRICT.encode(row)
    except ValueError:
        return json.dumps(plain(row))


def read_lines(
    path: Path, damaged: Callable[[int], None] | None = None, needs: Needs = NOTHING
) -> Iterator[dict[str, Any]]:
    """The lines of a JSON Lines file that are objects with the number of a round.

    Any other line, and one that lacks one of `needs` (a name and the type of its value), is
    skipped; `damaged` is called with its number, counted from 1.
    """
    for number, _, row in _lines(path, needs):
        if row is not None:
            yield row
        elif damaged is not None:
            damaged(number)


def cut_lines(
    path: Path, rounds: int, damaged: Callable[[int], None], needs: Needs = NOTHING
) -> None:
    """Drop the lines of rounds after `rounds`, and damaged ones.

    `damaged` is called for those that cost a round.
    """
    kept: list[bytes] = []
    # Damaged if a round that is kept follows them; otherwise left by a killed process.
    doubtful: list[int] = []
    last = 0
    for number, line, row in _lines(path, needs):
        if row is None or row["round"] > rounds:
            doubtful.append(number)
            continue
        for doubtful_number in doubtful:
            damaged(doubtful_number)
        kept.append(line)
        doubtful.clear()
        last = row["round"]
    for doubtful_number in doubtful[: rounds - last]:
        damaged(doubtful_number)
    if path.exists():
        write(path, b"".join(line.rstrip(b"\n") + b"\n" for line in kept))


def _lines(path: Path, needs: Needs) -> Iterator[tuple[int, bytes, dict[str, Any] | None]]:
    """Number, text and content of each line that is not blank; None for damaged content."""
    try:
        with path.open("rb") as handle:
            for number, line in enumerate(handle, 1):
                if line.strip():
                    yield number, line, _row(line, needs)
    except FileNotFoundError:
        return
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}.") from None


def _row(line: bytes, needs: Needs) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(row, dict) or type(row.get("round")) is not int:
        return None
    for name, kind in needs.items():
        if name not in row or not isinstance(row[name], kind):
            return None
    return row


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty if the file is missing or damaged."""
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(content, dict):
        return {}
    return content
