"""When to look for something that comes again and again, such as the next round.

A look cannot wait for it.
"""

from __future__ import annotations

import os
import select
import time
from collections import deque
from typing import Any

# seconds until Flower looks again for a part of a message that is still being sent, at first
AGAIN = 0.1
# of the time until the first look, after it turned out that what was looked for was already there
SOONER = 0.8
WAKE = "KAIROSFL_WAKE"  # the worker's end of a pipe on which its node says that there is a message
WAITS = 4  # the last ones, of which the shortest counts


class Guess:
    """Nobody looks before the shortest of the last waits is over; then looks are frequent, and less
    and less so.

    The shortest, since waits depend on one another: a node that is late makes the others wait. A
    wait counts as long as its last look in vain. If there was none, it was shorter than the time
    until the first look, nobody knows by how much, so that the next one is sooner.
    """

    def __init__(self, first: float, growth: float) -> None:
        """`first` is the shortest pause between two looks in seconds, and each is `growth` times
        the last.
        """
        self.first, self.growth = first, growth
        self._waits: deque[float] = deque(maxlen=WAITS)
        self._began = self._vain = self._until = 0.0
        self._pause = first

    def begin(self, most: float) -> float:
        """A wait begins. Seconds until the first look, at most `most`."""
        shortest = min(self._waits) if len(self._waits) > 1 else 0.0
        self._until = min(shortest, most) if shortest > self.first else 0.0
        self._began, self._vain, self._pause = time.monotonic(), 0.0, self.first
        return self._until

    def again(self, most: float) -> float:
        """The look was in vain. Seconds until the next one, at most `most`."""
        self._vain = time.monotonic() - self._began
        pause, self._pause = min(self._pause, most), self._pause * self.growth
        return pause

    def found(self) -> None:
        """The look was not in vain."""
        self._waits.append(self._vain or SOONER * self._until)


class Clock:
    """Stands in for the module `time` in a loop of Flower's, with shorter pauses."""

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)


class Woken(Clock):
    """A worker's pauses, which end when its node writes to the other end of this pipe."""

    def __init__(self, wake: int) -> None:
        self.wake = wake

    def sleep(self, seconds: float) -> None:
        """At most `seconds`."""
        if select.select([self.wake], [], [], seconds)[0]:
            os.read(self.wake, 4096)
