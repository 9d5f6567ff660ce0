"""Packages whose names are loaded on first use (PEP 562): `kairosfl --help` imports no torch."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from typing import Any


def attach(
    package: str, homes: Mapping[str, str]
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """`__getattr__` and `__dir__` of a package.

    Args:
        package: Its name.
        homes: The module of each name; of a submodule, itself.
    """

    def getattr_(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        module = importlib.import_module(homes[name])
        if homes[name] == f"{package}.{name}":
            return module
        return getattr(module, name)

    def dir_() -> list[str]:
        return sorted({*vars(importlib.import_module(package)), *homes})

    return getattr_, dir_
