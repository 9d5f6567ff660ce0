"""A node that does not make a round wait: Flower's SuperNode, with a resident worker and shorter pauses.

Flower's `flower-supernode` starts `flower-superexec`, which starts a Python process, with torch, for every message; and
it asks for messages only every three seconds. This is the same program with two differences: the resident worker takes
the place of `flower-superexec`, and pauses start short and grow to Flower's. It opens no port that Flower does not.
"""

from __future__ import annotations

import contextlib
import os
import select
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from kairosfl.errors import UserError

SWITCH = "KAIROSFL_RESIDENT"  # 0: plain flower-supernode
WAKE = "KAIROSFL_WAKE"  # the worker's end of a pipe on which its node says that there is a message
FIRST, GROWTH = 0.15, 1.3  # seconds of the first pause, and how much longer each one is than the last
EARLY = 0.8  # of what the last wait took, before the first look
RESTART = (1.0, 60.0)  # seconds after which a worker that died is started again: at first, and at most
STEADY = 60.0  # a worker that lived for this many seconds did not fail to start


class Pauses:
    """Stands in for the module `time` in Flower's loops: a wait costs a fraction of itself, not whole seconds.

    Rounds repeat, so the first pause of a wait is most of what the last wait of its kind took. Those after it start
    short and grow to Flower's. With `wake`, the end of a pipe, a pause ends when something is written to the other.
    """

    def __init__(self, wake: int | None = None) -> None:
        self.wake = wake
        self._asked, self._since, self._pause = 0.0, 0.0, FIRST
        self._took: dict[float, float] = {}  # seconds asked for → what the last wait took

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)

    def restart(self) -> None:
        """Something happened: the wait is over."""
        if self._asked:
            self._took[self._asked] = time.monotonic() - self._since
        self._asked = 0.0

    def sleep(self, seconds: float) -> None:
        """Sleep less than `seconds` at first; another number of seconds is another wait."""
        if seconds != self._asked:
            self.restart()
            self._asked, self._since, self._pause = seconds, time.monotonic(), FIRST
            expected = EARLY * self._took.get(seconds, 0.0)
            if expected > FIRST:
                return self._rest(min(expected, seconds))
        self._rest(min(self._pause, seconds))
        self._pause = min(self._pause * GROWTH, seconds)

    def _rest(self, seconds: float) -> None:
        if self.wake is None:
            time.sleep(seconds)
        elif select.select([self.wake], [], [], seconds)[0]:
            os.read(self.wake, 4096)
            self._pause = FIRST


def worker(command: Sequence[str]) -> list[str]:
    """The command of the resident worker, with the arguments of the `flower-superexec` that it replaces."""
    program, *arguments = command
    if program != "flower-superexec":
        return list(command)
    return [sys.executable, "-P", "-m", "kairosfl.engines.flower.resident", *arguments]


def keep(start: Callable[[], int], sleep: Callable[[float], None] = time.sleep, *, lives: int = sys.maxsize) -> None:
    """Run `start`, which returns when the worker has exited, again and again; less often if it fails at once."""
    pause = RESTART[0]
    for _ in range(lives):
        began = time.monotonic()
        code = start()
        pause = RESTART[0] if code == 0 or time.monotonic() - began > STEADY else min(2 * pause, RESTART[1])
        sleep(pause if code else 0.0)


class Wake:
    """A pipe from a node to its worker, which says that there is a message, so that the worker need not look often."""

    def __init__(self) -> None:
        self._theirs, self._mine = os.pipe()
        os.set_blocking(self._mine, False)

    def launch(self, command: Sequence[str]) -> None:
        """In place of `subprocess.Popen` in Flower's SuperNode: start the worker, again and again."""
        # Telemetry would need a thread, which a fork does not have.
        environment = {**os.environ, "FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}
        environment[WAKE] = str(self._theirs)

        def start() -> int:
            return subprocess.call(worker(command), env=environment, pass_fds=(self._theirs,))

        threading.Thread(target=keep, args=(start,), daemon=True).start()

    def after(self, receive: Callable[..., int | None], pauses: Pauses) -> Callable[..., int | None]:
        """Flower's function that looks for a message, which returns a run if there was one: then wake the worker."""

        def look(**given: Any) -> int | None:
            run = receive(**given)
            if run is not None:
                pauses.restart()
                with contextlib.suppress(BlockingIOError):  # it has not even read the last 64 thousand
                    os.write(self._mine, b"!")
            return run

        return look


def main(arguments: Sequence[str]) -> None:
    """Run a node with the arguments of `flower-supernode`."""
    try:
        from flwr.supernode import start_client_internal as loop
        from flwr.supernode.cli import flower_supernode
    except ImportError:
        raise UserError("A node needs Flower; install it with: pip install 'kairosfl[flower]'.") from None
    sys.argv = ["flower-supernode", *arguments]
    if os.environ.get(SWITCH, "1") != "0" and sys.platform == "linux":  # elsewhere a fork of a loaded torch is not safe
        wake, pauses = Wake(), Pauses()
        look = wake.after(loop._pull_and_store_message, pauses)
        vars(loop).update(time=pauses, subprocess=SimpleNamespace(Popen=wake.launch), _pull_and_store_message=look)
    flower_supernode()


if __name__ == "__main__":
    main(sys.argv[1:])
