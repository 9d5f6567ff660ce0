"""The one error a user is meant to read: what is wrong, the value, and the mend, in one sentence."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """A mistake that the user can mend. The command line prints its text and exits with 2."""


def nearest(name: str, known: Iterable[str]) -> str:
    """A phrase that helps with a misspelt name: the nearest right one, or all of them."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.5)
    return f"did you mean {close[0]!r}?" if close else f"known: {', '.join(names)}"
