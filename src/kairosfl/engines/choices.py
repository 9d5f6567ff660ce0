"""What an engine chose by measuring, stored so that a resumed run takes the same path."""

from __future__ import annotations

from collections.abc import Callable, Mapping


class Choices:
    """Choices by name, each made once by measuring.

    `made` are in force. `known` were made by an earlier process of the run, in rounds that are trained again:
    each takes effect at the moment at which it would be measured, so that everything before it runs as it did.
    """

    def __init__(self) -> None:
        self.made: dict[str, str] = {}
        self.known: dict[str, str] = {}

    def choose(self, name: str, measure: Callable[[], str]) -> str:
        """The choice of this name, by `measure` if it is not known yet."""
        if name not in self.made:
            self.made[name] = self.known[name] if name in self.known else measure()
        return self.made[name]

    def restore(self, written: Mapping[str, tuple[str, int]], rounds: int) -> None:
        """Choices with the rounds in which they were made, for a run that resumes after `rounds` rounds."""
        for name, (choice, round) in written.items():
            (self.made if round <= rounds else self.known).setdefault(name, choice)
