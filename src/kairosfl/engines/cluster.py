"""Whether a Ray cluster is alive.

Ray ends a process whose cluster is lost without a word, at once or seconds later.
"""

from __future__ import annotations

import atexit
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from kairosfl.errors import UserError

LOOK = 2.0  # seconds between two looks: the raylet logs each of them
GONE = (ConnectionRefusedError, FileNotFoundError)  # a raylet that is merely busy causes others
REACHED = 10.0  # seconds within which a cluster answers when a run begins
SILENT = 10.0  # seconds that a head node may not answer: it may be restarting


class Cluster:
    """The processes of Ray without which this one cannot go on: the raylet here, and the head node.

    Args:
        about: Where they are, as Ray says it.
    """

    def __init__(self, about: Mapping[str, Any]) -> None:
        self._raylet = str(about["raylet_socket_name"])
        self._head = str(about["gcs_address"])
        self._heard = time.monotonic()
        self._next = 0.0

    def check(self, *, now: bool = True) -> None:
        """Refuse to go on without them; unless `now`, at most every two seconds."""
        if not now and time.monotonic() < self._next:
            return
        self._next = time.monotonic() + LOOK
        if hasattr(socket, "AF_UNIX") and isinstance(_fault(socket.AF_UNIX, self._raylet), GONE):
            raise _dead(self._head, "its process on this machine, the raylet, does not answer")
        host, _, port = self._head.rpartition(":")
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        if _fault(family, (host.strip("[]"), int(port))) is None:
            self._heard = time.monotonic()
        elif time.monotonic() > self._heard + SILENT:
            raise _dead(self._head, f"its head node has not answered for {SILENT:g} s")


LAST_WORD = (
    "The run was ended without a word, as Ray does when its own processes are lost; run `kairosfl "
    "resume` with the run folder, or the same sweep again, and training continues from the last "
    "checkpoint."
)
WAITS = "import sys\nif not sys.stdin.read(): sys.stderr.write(sys.argv[1])"


class Witness:
    """A process that says what happened where Ray ends this one from its C++ code.

    It waits for a word through a pipe: a process that ends as it should sends it, in the end by
    `atexit`.
    """

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-ISc", WAITS, f"kairosfl: {LAST_WORD}\n"],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # Ctrl-C is not for it
        )
        self._owner = os.getpid()
        atexit.register(self.dismiss)

    def dismiss(self) -> None:
        """Let it end in silence; a fork of this process has no say in that."""
        atexit.unregister(self.dismiss)
        if self._process.stdin is None or self._process.stdin.closed or os.getpid() != self._owner:
            return
        with suppress(OSError):
            self._process.stdin.write(b"well")
            self._process.stdin.close()
        self._process.wait()


def check_reachable(address: str) -> None:
    """Refuse an address at which nobody answers: Ray itself would try for minutes, in silence."""
    scheme, _, place = address.rpartition("://")
    host, colon, port = place.rpartition(":")
    if not colon or not port.isdecimal():  # "auto", "local", or a form that Ray knows
        return
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=REACHED).close()
    except (OSError, OverflowError, UnicodeError) as error:
        reason = getattr(error, "strerror", None) or error
        hint = "ray://HOST:10001" if scheme else "HOST:6379"
        raise UserError(
            f"run.ray_address = {address!r} cannot be reached: {reason}; start a cluster there "
            f"with `ray start --head`, and give its address, {hint}."
        ) from None


def _fault(family: int, address: Any) -> OSError | None:
    """Why nobody answers there; None if somebody does."""
    try:
        with socket.socket(family) as probe:
            probe.settimeout(LOOK)
            probe.connect(address)
    except OSError as error:
        return error
    return None


def _dead(address: str, why: str) -> UserError:
    return UserError(
        f"The Ray cluster at {address} is lost: {why}; start it again, or set run.ray_address in "
        "the run's config.toml to another, and `kairosfl resume` continues from the last "
        "checkpoint."
    )
