"""The one error a user is meant to read: what is wrong, the value, and the fix, in one sentence."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """A mistake that the user can fix. The command line prints its message and exits with status 2."""


def first_line(error: BaseException) -> str:
    """What an error of someone else's code says, in one line; its type if it says nothing."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint for a misspelled name: the closest known name, or all of them."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(names)}"
