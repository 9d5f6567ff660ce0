"""Presets: each paper's task as a TOML configuration; its first line is a description."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from kairosfl.errors import UserError, nearest
from kairosfl.runs import config

FOLDER = Path(__file__).parent


def names() -> list[str]:
    """The names of all presets."""
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def read(name: str) -> dict[str, Any]:
    """The tables of a preset, ready for `runs.config.resolve`."""
    return config.read(_path(name))


def descriptions() -> list[tuple[str, str]]:
    """Name and first comment line of every preset, for a listing."""
    return [(name, _path(name).read_text(encoding="utf-8").partition("\n")[0].lstrip("# ")) for name in names()]


def _path(name: str) -> Path:
    if name not in names():
        raise UserError(f"There is no preset {name!r}; {nearest(name, names())}")
    return FOLDER / f"{name}.toml"
