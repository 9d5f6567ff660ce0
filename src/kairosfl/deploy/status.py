"""What a deployed run is doing, from the files that its server writes."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kairosfl.engines.flower.board import FILE
from kairosfl.errors import UserError
from kairosfl.runs.files import read_json
from kairosfl.runs.folder import Folder
from kairosfl.runs.lock import lock
from kairosfl.wording import counted

ROUTINE = ("is served by", "resumed after round")  # lines of the log that report no fault
SHOWN = 5  # lines of the log


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
