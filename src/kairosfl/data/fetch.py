"""Download the missing files of a data set from its official URL, and check them."""

from __future__ import annotations

import tarfile
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kairosfl.data.files import CACHE, File, write
from kairosfl.errors import UserError

if TYPE_CHECKING:
    from rich.progress import Progress


@dataclass(frozen=True)
class Download:
    """A file to download.

    Args:
        url: The official URL.
        md5: Of the file that it serves; empty: unknown.
        path: Where a plain file is stored; of an archive, the directory whose members are
            extracted.
        archive: Whether it is one, to be unpacked.
    """

    url: str
    md5: str
    path: str
    archive: bool = False


def ensure(name: str, folder: Path, files: Sequence[File], downloads: Sequence[Download]) -> None:
    """Download missing files. Without a network, the error says which files to put where."""
    paths = [file.path for file in files]
    missing = _missing(folder, paths)
    for download in downloads:
        if any(path == download.path or path.startswith(download.path + "/") for path in missing):
            _fetch(name, folder, missing, download, last=paths)
    missing = _missing(folder, paths)
    if missing:
        raise UserError(f"data set {name!r} needs {_listed(missing)} in {folder}; copy them there.")


def _missing(folder: Path, paths: Sequence[str]) -> list[str]:
    """Those that are not in the folder."""
    return [path for path in paths if not (folder / path).is_file()]


def _fetch(
    name: str, folder: Path, missing: list[str], download: Download, last: list[str]
) -> None:
    fix = (
        f"copy {_listed(missing)} to {folder}, or set KAIROSFL_DATA to the directory that "
        "contains them"
    )
    try:
        import pooch
        from rich.console import Console
        from rich.progress import Progress
    except ImportError:
        raise UserError(
            f"data set {name!r} is not in {folder}, and downloading needs pooch: "
            f'pip install "kairosfl[cli]", or {fix}.'
        ) from None
    target = Path(download.path)
    if download.archive:
        target = Path(CACHE, "downloads", download.url.rsplit("/", 1)[-1])
    pooch.get_logger().setLevel("ERROR")  # its log lines would repeat what the progress bar shows
    try:
        with Progress(console=Console(stderr=True)) as progress:
            fetched = pooch.retrieve(
                download.url,
                known_hash=f"md5:{download.md5}" if download.md5 else None,
                fname=target.name,
                path=folder / target.parent,
                downloader=pooch.HTTPDownloader(progressbar=_Bar(progress, target.name)),
            )
    except ValueError as error:  # pooch raises this for a wrong checksum
        raise UserError(
            f"the download from {download.url} is corrupt or has changed "
            f"({_first_line(error)}); {fix}."
        ) from None
    except OSError as error:  # requests' exceptions are OSErrors, too
        raise UserError(
            f"data set {name!r} could not be downloaded from {download.url} "
            f"({type(error).__name__}); {fix}."
        ) from None
    if download.archive:
        unpack(Path(fetched), folder, download.path, last)
        Path(fetched).unlink()


def unpack(archive: Path, folder: Path, inside: str, last: Sequence[str]) -> None:
    """Extract an archive's members under `inside/` into the folder.

    Files named in `last` are written after all others: the data set counts as present once they
    exist.
    """
    delayed = {}
    for member, data in _members(archive):
        name = member.removeprefix("./")
        if not name.startswith(inside + "/") or ".." in Path(name).parts:
            continue
        if name in last:
            delayed[name] = data
        else:
            write(folder / name, data)
    for name, data in delayed.items():
        write(folder / name, data)


def _members(archive: Path) -> Iterator[tuple[str, bytes]]:
    if zipfile.is_zipfile(archive):
        with zipfile.ZipFile(archive) as zipped:
            for entry in zipped.infolist():
                if not entry.is_dir():
                    yield entry.filename, zipped.read(entry)
    else:
        with tarfile.open(archive) as tar:
            for member in tar:
                if member.isfile() and (stream := tar.extractfile(member)):
                    yield member.name, stream.read()


class _Bar:
    """The progress-bar interface that pooch expects, drawn by rich."""

    def __init__(self, progress: Progress, title: str) -> None:
        self._progress = progress
        self._task = progress.add_task(title, total=None)

    @property
    def total(self) -> float | None:
        return self._progress.tasks[self._task].total

    @total.setter
    def total(self, total: float) -> None:
        self._progress.update(self._task, total=total)

    def update(self, step: float) -> None:
        self._progress.advance(self._task, step)

    def reset(self) -> None:
        self._progress.update(self._task, completed=0)

    def close(self) -> None:
        self._progress.stop_task(self._task)


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]


def _listed(paths: Sequence[str]) -> str:
    first = ", ".join(paths[:8])
    if len(paths) <= 8:
        return first
    return f"{first} and {len(paths) - 8} more"
