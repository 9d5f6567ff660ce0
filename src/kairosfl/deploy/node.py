"""A node that does not make a round wait: Flower's SuperNode, with a resident worker and shorter
pauses.

Flower's `flower-supernode` starts `flower-superexec`, which starts a Python process, with torch,
for every message; and it asks for messages only every three seconds. This is the same program with
two differences: the resident worker takes the place of `flower-superexec`, and pauses start short
and grow to Flower's. It opens no port that Flower does not.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

from kairosfl.engines.flower.pauses import AGAIN, WAKE, Clock, Guess
from kairosfl.errors import UserError

SWITCH = "KAIROSFL_RESIDENT"  # 0: plain flower-supernode
FIRST, GROWTH = (
    0.1,
    1.3,
)  # seconds between the first looks for a message, and how much longer each pause is
MOST = 3.0  # seconds, Flower's own pause
RESTART = (
    1.0,
    60.0,
)  # seconds after which a worker that died is started again: at first, and at most
STEADY = 60.0  # a worker that lived for this many seconds did not fail to start


class Pauses(Clock):
    """A node's pauses: for a message until one is likely, and for the reply of its client until it
    is there.
    """

    def __init__(self) -> None:
        self._messages, self._reply = Guess(FIRST, GROWTH), threading.Event()
        self._at_work = False

    def sleep(self, seconds: float) -> None:
        """At most `seconds`."""
        if self._at_work:
            self._reply.wait(seconds)
            self._reply.clear()
        else:
            time.sleep(self._messages.again(seconds))

    def before(self) -> None:
        """The node is about to ask for a message: not yet, if it has just answered one."""
        if self._at_work:
            time.sleep(self._messages.begin(MOST))
        self._at_work = False

    def found(self) -> None:
        """There was a message."""
        self._messages.found()
        self._at_work = True

    def after(self, put: Callable[..., None]) -> Callable[..., None]:
        """Flower's method that stores a part of a reply: then the pause is over."""

        def store(*given: Any, **named: Any) -> None:
            put(*given, **named)
            self._reply.set()

        return store


def worker(command: Sequence[str]) -> list[str]:
    """The command of the resident worker, with the arguments of the `flower-superexec` that it
    replaces.
    """
    program, *arguments = command
    if program != "flower-superexec":
        return list(command)
    return [sys.executable, "-P", "-m", "kairosfl.engines.flower.resident", *arguments]


def keep(
    start: Callable[[], int],
    sleep: Callable[[float], None] = time.sleep,
    *,
    lives: int = sys.maxsize,
) -> None:
    """Run `start`, which returns when the worker has exited, again and again; less often if it
    fails at once.
    """
    pause = RESTART[0]
    for _ in range(lives):
        began = time.monotonic()
        code = start()
        pause = (
            RESTART[0]
            if code == 0 or time.monotonic() - began > STEADY
            else min(2 * pause, RESTART[1])
        )
        sleep(pause if code else 0.0)


class Wake:
    """A pipe from a node to its worker, which says that there is a message, so that the worker need
    not look often.
    """

    def __init__(self) -> None:
        self._theirs, self._mine = os.pipe()
        os.set_blocking(self._mine, False)

    def launch(self, command: Sequence[str]) -> None:
        """In place of `subprocess.Popen` in Flower's SuperNode: start the worker, again and again."""
        # Telemetry would need a thread, which a fork does not have.
        environment = {
            **os.environ,
            "FLWR_TELEMETRY_ENABLED": "0",
            "FLWR_DISABLE_UPDATE_CHECK": "1",
        }
        environment[WAKE] = str(self._theirs)

        def start() -> int:
            return subprocess.call(worker(command), env=environment, pass_fds=(self._theirs,))

        threading.Thread(target=keep, args=(start,), daemon=True).start()

    def after(
        self, receive: Callable[..., int | None], pauses: Pauses
    ) -> Callable[..., int | None]:
        """Flower's function that looks for a message, which returns a run if there was one: then
        wake the worker.
        """

        def look(**given: Any) -> int | None:
            pauses.before()
            run = receive(**given)
            if run is not None:
                pauses.found()
                with contextlib.suppress(
                    BlockingIOError
                ):  # it has not even read the last 64 thousand
                    os.write(self._mine, b"!")
            return run

        return look


def main(arguments: Sequence[str]) -> None:
    """Run a node with the arguments of `flower-supernode`."""
    try:
        from flwr.supercore.inflatable.inflatable_utils import pull_objects
        from flwr.supercore.object_store.in_memory_object_store import InMemoryObjectStore
        from flwr.supernode import start_client_internal as loop
        from flwr.supernode.cli import flower_supernode

        from kairosfl.engines.flower.trouble import insist, persist
    except ImportError:
        raise UserError(
            "A node needs Flower; install it with: pip install 'kairosfl[flower]'."
        ) from None
    sys.argv = ["flower-supernode", *arguments]
    insist()
    persist()
    if (
        os.environ.get(SWITCH, "1") != "0" and sys.platform == "linux"
    ):  # elsewhere a fork of a loaded torch is not safe
        wake, pauses = Wake(), Pauses()
        vars(loop).update(
            time=pauses,
            subprocess=SimpleNamespace(Popen=wake.launch),
            pull_objects=partial(pull_objects, initial_backoff=AGAIN),
            _pull_and_store_message=wake.after(loop._pull_and_store_message, pauses),
        )
        store: Any = InMemoryObjectStore
        store.put = pauses.after(store.put)
    flower_supernode()


if __name__ == "__main__":
    main(sys.argv[1:])
