"""What the round in progress of a deployed run is doing, as a file for `kairosfl deploy status`."""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

FILE = "status.json"
OFTEN = 1.0  # seconds between two writes within a round


class Board:
    """The round in progress, written to the run folder.

    A disk that is full does not stop the round.
    """

    def __init__(self, folder: Path | None) -> None:
        self._path: Path | None = None
        self._next = 0.0
        self.seen: dict[str, float] = {}
        if folder is not None:
            self._path = folder / FILE
            self.seen = _seen(self._path)
        self._round: dict[str, Any] = {}

    def gather(self, round: int, clients: Iterable[int]) -> None:
        """The server waits for these clients to be online."""
        self._round = {
            "round": round,
            "phase": "waiting for clients to be online",
            "asked": list(clients),
        }
        self._round |= {"began": time.time(), "reported": [], "failed": {}}
        self._write(now=False)

    def begin(self, needed: int, seconds: float, failed: Mapping[int, str]) -> None:
        """The briefs are sent; clients have this many seconds."""
        self._round |= {
            "phase": "training",
            "needed": needed,
            "began": time.time(),
            "until": time.time() + seconds,
        }
        self._round["failed"] = {str(client): reason for client, reason in failed.items()}
        self._write()

    def outcome(self, client: int, reason: str | None) -> None:
        """A client's report was accepted, or not."""
        if reason is None:
            self._round["reported"].append(client)
            self.seen[str(client)] = time.time()
        else:
            self._round["failed"][str(client)] = reason
        self._write(now=False)

    def end(self, online: Iterable[int]) -> None:
        """The round has ended."""
        self._round |= {"phase": "aggregating", "began": time.time(), "online": sorted(online)}
        self._write()

    def _write(self, *, now: bool = True) -> None:
        if self._path is None or (not now and time.monotonic() < self._next):
            return
        self._next = time.monotonic() + OFTEN
        temporary = self._path.with_name(f".{FILE}.part")
        with contextlib.suppress(
            OSError
        ):  # not flushed to disk: it matters only while the server lives
            temporary.write_text(
                json.dumps({**self._round, "seen": self.seen, "written": time.time()})
            )
            os.replace(temporary, self._path)


def _seen(path: Path) -> dict[str, float]:
    """When each client last reported, as an earlier server wrote it; nothing if unreadable."""
    try:
        seen = json.loads(path.read_bytes())["seen"]
    except (OSError, ValueError, RecursionError, KeyError, TypeError):
        return {}
    if not isinstance(seen, dict):
        return {}
    return seen
