"""Ctrl-C and SIGTERM wait until a round is recorded."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

NOTICE = (
    b"\nStopping when this round is evaluated and recorded; "
    b"press Ctrl-C again to stop now, without the rounds since the last checkpoint.\n"
)


@contextmanager
def undisturbed() -> Iterator[list[int]]:
    """Delays the first signal, whose number is put into the list.

    A second one takes effect immediately, as whoever presses Ctrl-C is told.
    """
    held: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield held
        return
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def hold(number: int, frame: FrameType | None) -> None:
        handler = handlers[signal.Signals(number)]
        if held and callable(handler):
            handler(number, frame)
        held.append(number)
        if number == signal.SIGINT and sys.stderr is not None and sys.stderr.isatty():
            # Not `print`, in the middle of which the signal may have come.
            os.write(sys.stderr.fileno(), NOTICE)

    for number, handler in handlers.items():
        if callable(handler):
            signal.signal(number, hold)
    try:
        yield held
    finally:
        for number, handler in handlers.items():
            if callable(handler):
                signal.signal(number, handler)
