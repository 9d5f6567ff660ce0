"""What a deployed run is doing: the server writes it to `status.json`, and `kairosfl deploy status`
reads it.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from kairosfl.errors import UserError
from kairosfl.runs.files import read_json
from kairosfl.runs.folder import Folder
from kairosfl.runs.lock import lock
from kairosfl.wording import counted

FILE = "status.json"
OFTEN = 1.0  # seconds between two writes within a round
ROUTINE = ("is served by", "resumed after round")  # lines of the log that report no fault
SHOWN = 5  # lines of the log, and clients without any event


class Board:
    """The round in progress, written to the run folder; a disk that is full does not stop the
    round.
    """

    def __init__(self, folder: Path | None) -> None:
        self._path, self._next = folder / FILE if folder else None, 0.0
        before = read_json(self._path) if self._path else {}
        self.seen: dict[str, float] = before["seen"] if isinstance(before.get("seen"), dict) else {}
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


def status(path: Path) -> dict[str, Any]:
    """What the run in a folder is doing, from its files; the run need not be alive."""
    folder = Folder(path)
    config, rows, now = folder.config(), folder.rows(), read_json(path / FILE)
    lines = (
        (path / "log.txt").read_text(encoding="utf-8", errors="replace").splitlines()
        if _log(path)
        else []
    )
    faults = [line for line in lines if not any(each in line for each in ROUTINE)]
    known = [int(client) for client in read_json(path / "roster.json") if client.isdecimal()]
    return {
        "folder": str(path),
        "algorithm": str(config.algorithm),
        "rounds": config.train.rounds,
        "done": rows[-1]["round"] if rows else 0,
        "state": "finished" if folder.finished() else "running" if _held(path) else "stopped",
        "last": rows[-1] if rows else {},
        "metric": folder.main().name,
        "current": now,
        "clients": [str(client) for client in sorted(known)],
        "faults": faults[-SHOWN:],
    }


def text(found: Mapping[str, Any], at: float | None = None) -> list[str]:
    """The status in lines for a person."""
    at, now, last = time.time() if at is None else at, found["current"], found["last"]
    rounds = f"{found['done']} of {counted(found['rounds'], 'round')}"
    lines = [f"{found['folder']}: {found['state']}, {rounds} ({found['algorithm']})"]
    if found["state"] == "stopped":
        lines.append(
            "No server is using the folder; `flwr run` starts it again from its last checkpoint."
        )
    if last:
        score = last.get(found["metric"])
        measured = f"{found['metric']} {score:.4g}, " if isinstance(score, int | float) else ""
        lines.append(
            f"round {last['round']}: {measured}{last.get('reported', '?')} reported, "
            f"{last.get('rejected', 0)} rejected, {last.get('seconds', 0.0):.1f} s"
        )
    if now and found["state"] == "running":
        reported, asked = now.get("reported", []), now.get("asked", [])
        line = f"round {now.get('round')}: {now.get('phase')} for {_ago(at, now.get('began'))}"
        if now.get("phase") == "training":
            line += f"; {len(reported)} of {len(asked)} reported, {now.get('needed')} needed"
            line += f", at most {max(0.0, now.get('until', at) - at):.0f} s more"
        lines.append(line)
        lines += [f"  client {client}: {_client(str(client), now, at)}" for client in asked]
    lines += [f"log: {line}" for line in found["faults"]]
    return lines


def _client(client: str, now: Mapping[str, Any], at: float) -> str:
    seen = now.get("seen", {}).get(client)
    last = f"; last report {_ago(at, seen)} ago" if seen else "; no report yet"
    if int(client) in now.get("reported", []):
        return "reported" + last
    failed = now.get("failed", {}).get(client)
    return (f"rejected: {failed}" if failed else "no answer so far") + last


def _ago(at: float, then: Any) -> str:
    return f"{max(0.0, at - then):.0f} s" if isinstance(then, int | float) else "an unknown time"


def _log(path: Path) -> bool:
    return (path / "log.txt").is_file()


def _held(path: Path) -> bool:
    """Whether a server is using the folder."""
    if not (path / ".lock").exists():
        return False
    try:
        with lock(path):
            return False
    except UserError:
        return True
