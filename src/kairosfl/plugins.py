"""Names that other distributions add by Python entry points, which are loaded when used."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, MutableMapping
from functools import lru_cache
from importlib.metadata import EntryPoint, entry_points
from typing import Generic, TypeVar

from kairosfl.errors import UserError

T = TypeVar("T")


class Registry(MutableMapping[str, T], Generic[T]):
    """Things by name: our own, those added in Python, and those of the entry points of a group.

    Args:
        group: Of the entry points, such as "kairosfl.rules".
        own: What is there without them; these names come first.
    """

    def __init__(self, group: str, own: Mapping[str, T]) -> None:
        self.group = group
        self.own = dict(own)
        self.loaded: dict[EntryPoint, T] = {}

    def __getitem__(self, name: str) -> T:
        if name in self.own:
            return self.own[name]
        point = external(self.group)[name]
        if point not in self.loaded:
            self.loaded[point] = self._load(point)
        return self.loaded[point]

    def _load(self, point: EntryPoint) -> T:
        try:
            thing: T = point.load()
        except Exception as error:  # the code of somebody else: anything may come out of it
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            raise UserError(
                f"{point.name!r} cannot be loaded from {point.value}, an entry point of "
                f"{origin(point)} ({reason}); fix that package or uninstall it."
            ) from error
        if not callable(thing):
            raise UserError(
                f"{point.name!r}, an entry point of {origin(point)}, names {point.value}, which "
                "cannot be called; name a function or a class."
            )
        return thing

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and (name in self.own or name in external(self.group))

    def __setitem__(self, name: str, thing: T) -> None:
        self.own[name] = thing

    def __delitem__(self, name: str) -> None:
        del self.own[name]

    def __iter__(self) -> Iterator[str]:
        yield from dict.fromkeys([*self.own, *external(self.group)])

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def others(self) -> dict[str, EntryPoint]:
        """The entry points that are in use, by name."""
        points = {}
        for name, point in external(self.group).items():
            if name not in self.own:
                points[name] = point
        return points


def external(group: str) -> Mapping[str, EntryPoint]:
    """The entry points of a group by name; of two with one name, the first on the path."""
    return _found(group, tuple((path, _changed(path)) for path in sys.path))


@lru_cache(maxsize=16)  # reading what every distribution says of itself takes 10 ms and more
def _found(group: str, where: tuple[tuple[str, int], ...]) -> Mapping[str, EntryPoint]:
    return {point.name: point for point in reversed(tuple(entry_points(group=group)))}


def _changed(path: str) -> int:
    """When something was last installed there."""
    try:
        return os.stat(path or ".").st_mtime_ns
    except OSError:
        return 0


def in_reproductions(what: str) -> str:
    """A sentence about what the package kairosfl-reproductions brings, where it is missing."""
    return (
        f"{what} with kairosfl-reproductions, which is not installed; "
        "in a clone of Kairos, run: pip install ./reproductions"
    )


def origin(point: EntryPoint) -> str:
    """Name and version of the distribution."""
    if not point.dist:
        return "an unknown distribution"
    return f"{point.dist.name} {point.dist.version}"
