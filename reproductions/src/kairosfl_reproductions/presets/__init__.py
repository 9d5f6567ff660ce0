"""The papers' tasks as TOML configurations, which `kairosfl.presets` finds by entry point."""

from __future__ import annotations

from pathlib import Path


def folder() -> Path:
    """Where they are."""
    return Path(__file__).parent
