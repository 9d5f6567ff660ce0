"""The one error a user is meant to read: what is wrong, the value, and the fix, in one sentence."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from kairosfl.wording import listed

HEAD, TAIL = 400, 300  # characters of a long message that are kept, from its beginning and its end
# Names that a hint repeats: more than there are rules, fewer than a table may have columns.
MOST = 60


class UserError(ValueError):
    """A mistake that the user can fix. The command line prints its message and exits with status 2.

    A message is one sentence, whatever it repeats: of a very long one, the middle is left out.
    """

    def __init__(self, message: str = "") -> None:
        super().__init__(shortened(message))


class StageError(UserError):
    """What went wrong first in a run with engine `debug`, and in which stage of which round.

    What a rule or a model raised is its `__cause__`, with its traceback.

    Args:
        message: The sentence.
        stage: The hook, or "train".
        round: The round, counted from 1.
        part: The rule or detector, or the layer of the model; empty: none of them.
        client: Which one trained; None: none.
    """

    def __init__(
        self, message: str, *, stage: str, round: int, part: str = "", client: int | None = None
    ) -> None:
        super().__init__(message[:1].upper() + message[1:])
        self.stage = stage
        self.round = round
        self.part = part
        self.client = client


def shortened(message: str) -> str:
    """A message without its middle if it is long; the field is at its head, the fix at its end."""
    if len(message) <= HEAD + TAIL:
        return message
    left_out = len(message) - HEAD - TAIL
    return f"{message[:HEAD]} … ({left_out:,} characters) … {message[-TAIL:]}"


def shown(value: object) -> str:
    """A value in a message, as Python writes it."""
    try:
        return repr(value)
    except ValueError:  # Python refuses to write whole numbers of thousands of digits
        return "(a number of more than 4,300 digits)"


def first_line(error: BaseException) -> str:
    """What an error of someone else's code says, in one line; its type if it says nothing."""
    text = str(error).strip()
    if not text:
        return type(error).__name__
    return text.splitlines()[0]


def nearest(name: str, known: Iterable[str]) -> str:
    """A hint for a misspelled name: the closest known name, or all of them."""
    names = sorted(known)
    hint = close(name, names)
    if hint:
        return hint
    return f"known: {listed(names, MOST)}"


def close(name: str, known: Iterable[str]) -> str:
    """A hint for a misspelled name: the closest known name; empty if none is close."""
    matches = difflib.get_close_matches(name, sorted(known), n=1, cutoff=0.5)
    if not matches:
        return ""
    return f"did you mean {matches[0]!r}?"
