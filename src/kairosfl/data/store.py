"""Cache of converted data sets: arrays built once, then memory-mapped on every start."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kairosfl.data.fetch import Download, ensure
from kairosfl.data.files import CACHE, File, check, data_folder
from kairosfl.tasks.dataset import Samples

Arrays = dict[str, npt.NDArray[Any]]

VERSION = "1"  # of the converted format: changing it invalidates the cache


def arrays(
    name: str,
    files: Sequence[File],
    downloads: Sequence[Download],
    convert: Callable[[Path], Arrays],
    options: Mapping[str, object] | None = None,
) -> tuple[Arrays, dict[str, str]]:
    """The converted arrays of a data set, and the md5 of each file they were built from.

    `convert` builds the arrays from the data directory. They are cached under a hash of the files
    and the options, so other files or options never use stale arrays.
    """
    folder = data_folder()
    ensure(name, folder, files, downloads)
    sums = check(folder, files)
    chosen = sorted((options or {}).items())
    identity = [VERSION, *sums.values(), repr(chosen)]
    return cached(folder, name, identity, convert), sums


def split(converted: Arrays, name: str) -> Samples:
    """The samples stored as `name_inputs` and `name_targets` in converted arrays."""
    inputs = torch.from_numpy(converted[f"{name}_inputs"])
    targets = torch.from_numpy(converted[f"{name}_targets"])
    return Samples(inputs, targets)


def cached(
    folder: Path, name: str, identity: Sequence[str], convert: Callable[[Path], Arrays]
) -> Arrays:
    """The result of `convert`, from the cache if it was already built for the same identity."""
    key = hashlib.sha256("\n".join(identity).encode()).hexdigest()[:16]
    place = folder / CACHE / f"{name}-{key}"
    mapped = _mapped(place)
    if mapped is not None:
        return mapped
    converted = convert(folder)
    try:
        _write(place, converted)
    except OSError as error:
        if not place.exists():  # otherwise another process wrote it first
            warnings.warn(
                f"{place} cannot be written ({error.strerror}); "
                f"{name} will be converted again on every start.",
                stacklevel=4,
            )
    return _mapped(place) or converted


def _mapped(place: Path) -> Arrays | None:
    """The arrays in a directory; None if they are missing or truncated, and to be built again."""
    # Copy-on-write: torch needs writable memory, and the file must not change.
    mapped: Arrays = {}
    try:
        for path in place.iterdir():
            if path.suffix == ".npy":
                mapped[path.stem] = np.load(path, mmap_mode="c", allow_pickle=False)
    except (OSError, ValueError):
        return None
    return mapped or None


def _write(place: Path, converted: Arrays) -> None:
    place.parent.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(prefix=f".{place.name}.", dir=place.parent))
    try:
        for name, array in converted.items():
            np.save(part / f"{name}.npy", array, allow_pickle=False)
        shutil.rmtree(place, ignore_errors=True)  # truncated, or it would have been used
        os.replace(part, place)
    finally:
        shutil.rmtree(part, ignore_errors=True)
