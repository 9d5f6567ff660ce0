"""Whether a Ray cluster is alive. Ray ends a process whose cluster is lost without a word, some seconds later."""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping
from typing import Any

from kairosfl.errors import UserError

LOOK = 2.0  # seconds between two looks: the raylet logs each of them
GONE = (ConnectionRefusedError, FileNotFoundError)  # a raylet that is merely busy does not cause these
SILENT = 10.0  # seconds that a head node may not answer: it may be restarting


class Cluster:
    """The two processes of Ray without which this one cannot go on: the raylet here, and the head node's server."""

    def __init__(self, about: Mapping[str, Any]) -> None:
        self._raylet, self._head = str(about["raylet_socket_name"]), str(about["gcs_address"])
        self._heard, self._next = time.monotonic(), 0.0

    def check(self, *, now: bool = True) -> None:
        """Refuse to go on without them; unless `now`, at most every two seconds."""
        if not now and time.monotonic() < self._next:
            return
        self._next = time.monotonic() + LOOK
        if hasattr(socket, "AF_UNIX") and isinstance(_fault(socket.AF_UNIX, self._raylet), GONE):
            raise _dead(self._head, "its process on this machine, the raylet, does not answer")
        host, _, port = self._head.rpartition(":")
        if _fault(socket.AF_INET6 if ":" in host else socket.AF_INET, (host.strip("[]"), int(port))) is None:
            self._heard = time.monotonic()
        elif time.monotonic() > self._heard + SILENT:
            raise _dead(self._head, f"its head node has not answered for {SILENT:g} s")


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
        f"The Ray cluster at {address} is lost: {why}; start it again, or set run.ray_address in the run's config.toml "
        "to another, and `kairosfl resume` continues from the last checkpoint."
    )
