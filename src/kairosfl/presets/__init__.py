"""Presets: configurations as TOML; the first line of each is a description.

Ours are in this folder; other packages add folders by entry points of the group `kairosfl.presets`,
functions that return a path.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from kairosfl.errors import UserError, nearest
from kairosfl.plugins import Registry, in_reproductions


def folder() -> Path:
    """Where our own presets are."""
    return Path(__file__).parent


FOLDERS: Registry[Callable[[], Path]] = Registry("kairosfl.presets", {"kairosfl": folder})
OF_PAPERS = in_reproductions("the presets of papers come")


def names() -> list[str]:
    """The names of all presets."""
    return sorted(_files())


def read(name: str) -> dict[str, Any]:
    """The tables of a preset, ready for `runs.config.resolve`."""
    from kairosfl.runs import config  # late: completion asks for names alone

    return config.read(path(name))


def path(name: str) -> Path:
    """The file of a preset."""
    files = _files()
    if name in files:
        return files[name]
    sentences = [f"There is no preset {name!r}", nearest(name, files)]
    if not has_papers():
        sentences.append(OF_PAPERS)
    raise UserError("; ".join(sentences))


def guess(file: Path) -> str:
    """The presets whose names are close to that of a file that does not exist, as a hint; empty if
    none is.
    """
    close = difflib.get_close_matches(file.stem.lower(), names(), n=3, cutoff=0.5)
    if close:
        return f"did you mean the preset {' or '.join(map(repr, close))}?"
    if len(file.parts) == 1 and not file.suffix and not has_papers():
        return OF_PAPERS
    return ""


def descriptions() -> list[tuple[str, str]]:
    """Name and first comment line of every preset, for a listing."""
    rows = []
    for name, file in sorted(_files().items()):
        first_line = file.read_text(encoding="utf-8").partition("\n")[0]
        rows.append((name, first_line.lstrip("# ")))
    return rows


def _files() -> dict[str, Path]:
    """The file of every preset by its name; of two with one name, that of the first folder."""
    files: dict[str, Path] = {}
    for where in FOLDERS.values():
        for file in where().glob("*.toml"):
            files.setdefault(file.stem, file)
    return files


def has_papers() -> bool:
    """Whether the presets of papers are installed."""
    return "papers" in FOLDERS
