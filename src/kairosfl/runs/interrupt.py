"""Ctrl-C and SIGTERM wait until a round is recorded."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def undisturbed() -> Iterator[list[int]]:
    """Delays the first signal: its number is put into the list. A second one takes effect immediately."""
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

    for number, handler in handlers.items():
        if callable(handler):
            signal.signal(number, hold)
    try:
        yield held
    finally:
        for number, handler in handlers.items():
            if callable(handler):
                signal.signal(number, handler)
