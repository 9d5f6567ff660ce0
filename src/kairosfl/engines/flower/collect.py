"""The answers of a round, collected in a thread of their own.

The thread that keeps the deadline waits for a complete answer, or for the deadline, and for nothing
else: every request to the SuperLink is made here.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from queue import Empty, SimpleQueue

from flwr.app import Message
from flwr.serverapp import Grid

from kairosfl.engines.flower.mail import KINDS, Mailbox
from kairosfl.engines.flower.pauses import Guess
from kairosfl.engines.flower.roster import NodeRegistry
from kairosfl.engines.flower.wire import Limit

POLL = (0.05, 1.0)  # seconds between two polls for answers: at first, and at most
GROWTH = 1.5  # of the pause after a poll without an answer
STALLED = 10.0  # seconds without a part of an answer after which a node that is offline has lost it
FAREWELL = 1.0  # seconds that the end of a round waits for a request that is under way

Answer = tuple[str, Message | str]  # the message that it answers; text says why there is none


@dataclass(frozen=True)
class Letter:
    """A brief that was sent."""

    client: int
    node: int
    due: float  # when Flower drops it
    limit: Limit  # of its answer


class Collector:
    """Asks for answers, and keeps the roster current, from `start` to `close`.

    Answers are handed over one at a time, and the next one is fetched once the last was dealt with.
    """

    def __init__(
        self,
        grid: Grid,
        registry: NodeRegistry,
        first: Guess,
        letters: Mapping[str, Letter],
    ) -> None:
        """`first` guesses when the first answer of a round is likely."""
        self._registry, self._first = registry, first
        self._letters = dict(letters)
        self._mailbox = Mailbox(grid)
        self._answers: SimpleQueue[Answer | BaseException] = SimpleQueue()
        self._dealt_with, self._stop = threading.Semaphore(0), threading.Event()
        self._lent = False
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        """Begin to ask."""
        self._thread.start()

    def next(self, until: float) -> Answer | None:
        """The next answer; None if there is none at `until`."""
        if self._lent:
            self._dealt_with.release()
        try:
            answer = self._answers.get(timeout=max(0.0, until - time.monotonic()))
        except Empty:
            self._lent = False
            return None
        if isinstance(answer, BaseException):
            raise answer
        self._lent = True
        return answer

    def arriving(self) -> set[str]:
        """The messages whose answer was announced and is not complete."""
        return self._mailbox.arriving

    def close(self) -> None:
        """Ask no more. A request that is under way ends by itself."""
        self._stop.set()
        self._dealt_with.release()
        self._thread.join(FAREWELL)

    def _run(self) -> None:
        try:
            self._collect()
            self._mailbox.drop(self._mailbox.arriving)
        except BaseException as error:
            self._answers.put(error)

    def _collect(self) -> None:
        """Ask when an answer is likely; look for the parts of announced ones in between."""
        likely = self._first
        asking = time.monotonic() + likely.begin(POLL[1])
        while self._letters and not self._stop.wait(self._mailbox.rest(asking - time.monotonic())):
            if time.monotonic() >= asking:
                asking = time.monotonic()
                limits = {sent: letter.limit for sent, letter in self._letters.items()}
                if self._mailbox.ask(limits):
                    likely.found()
                    likely = Guess(POLL[0], GROWTH)  # the others are near
                else:
                    asking += likely.again(POLL[1])
            for sent, reply in self._mailbox.arrived():
                if not self._hand_over(sent, reply):
                    return
            self._registry.poll()
            for sent in self._mailbox.stalled(STALLED):
                if not self._registry.online(self._letters[sent].node):
                    self._mailbox.drop([sent])
                    self._hand_over(sent, KINDS[5])

    def _hand_over(self, sent: str, reply: Message | str) -> bool:
        """Whether there is more to do once this answer was dealt with."""
        del self._letters[sent]
        self._answers.put((sent, reply))
        self._dealt_with.acquire()
        return not self._stop.is_set()
