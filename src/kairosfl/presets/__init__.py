"""Presets: each paper's task as a TOML configuration; its first line is a description."""

from __future__ import annotations

import difflib
from pathlib import Path
from typing import Any

from kairosfl.errors import UserError, nearest

FOLDER = Path(__file__).parent


def names() -> list[str]:
    """The names of all presets."""
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def read(name: str) -> dict[str, Any]:
    """The tables of a preset, ready for `runs.config.resolve`."""
    from kairosfl.runs import config  # late: completion asks for names alone

    return config.read(path(name))


def path(name: str) -> Path:
    """The file of a preset."""
    if name not in names():
        raise UserError(f"There is no preset {name!r}; {nearest(name, names())}")
    return FOLDER / f"{name}.toml"


def guess(file: Path) -> str:
    """The presets whose names are close to that of a file that does not exist, as a hint; empty if
    none is.
    """
    close = difflib.get_close_matches(file.stem.lower(), names(), n=3, cutoff=0.5)
    return f"did you mean the preset {' or '.join(map(repr, close))}?" if close else ""


def descriptions() -> list[tuple[str, str]]:
    """Name and first comment line of every preset, for a listing."""
    return [
        (name, path(name).read_text(encoding="utf-8").partition("\n")[0].lstrip("# "))
        for name in names()
    ]
