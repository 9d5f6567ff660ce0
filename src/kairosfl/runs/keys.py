"""Nested tables and dotted keys: `{"train": {"lr": 0.1}}` is `{"train.lr": 0.1}`, and back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kairosfl.errors import UserError


def flatten(nested: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested tables as one, with dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in nested.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def updated(tables: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of the tables with these dotted keys set; a section that does not exist is added."""
    changed: dict[str, Any] = _copied(tables)
    for name, value in changes.items():
        *sections, key = name.split(".")
        target = changed
        for depth, section in enumerate(sections, 1):
            target = target.setdefault(section, {})
            if not isinstance(target, dict):
                home = ".".join(sections[:depth])
                raise UserError(
                    f"Cannot set {name}: {home} = {target!r} is not a section; write [{home}] and "
                    "its keys."
                )
        target[key] = _copied(value)
    return changed


def _copied(value: Any) -> Any:
    """A value; of tables, a copy that can be changed."""
    if not isinstance(value, Mapping):
        return value
    return {key: _copied(entry) for key, entry in value.items()}
