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
    config = folder.config()
    rows = folder.rows()
    last = {}
    if rows:
        last = rows[-1]
    clients = sorted(int(name) for name in read_json(path / "roster.json") if name.isdecimal())
    return {
        "folder": str(path),
        "algorithm": str(config.algorithm),
        "rounds": config.train.rounds,
        "done": last.get("round", 0),
        "state": _state(folder),
        "last": last,
        "metric": folder.main().name,
        "current": read_json(path / FILE),
        "clients": list(map(str, clients)),
        "faults": _faults(path)[-SHOWN:],
    }


def _faults(path: Path) -> list[str]:
    """The lines of the log that report a fault."""
    log = path / "log.txt"
    if not log.is_file():
        return []
    faults = []
    for line in log.read_text(encoding="utf-8", errors="replace").splitlines():
        if not any(words in line for words in ROUTINE):
            faults.append(line)
    return faults


def _state(folder: Folder) -> str:
    if folder.finished():
        return "finished"
    if _held(folder.path):
        return "running"
    return "stopped"


def text(state: Mapping[str, Any], at: float | None = None) -> list[str]:
    """The status in lines for a person.

    Args:
        state: What `status` returned.
        at: The time, in seconds since 1970; by default now.
    """
    if at is None:
        at = time.time()
    rounds = f"{state['done']} of {counted(state['rounds'], 'round')}"
    lines = [f"{state['folder']}: {state['state']}, {rounds} ({state['algorithm']})"]
    if state["state"] == "stopped":
        lines.append(
            "No server is using the folder; `flwr run` starts it again from its last checkpoint."
        )
    if state["last"]:
        lines.append(_last_round(state["last"], state["metric"]))
    if state["current"] and state["state"] == "running":
        lines += _this_round(state["current"], at)
    lines += [f"log: {line}" for line in state["faults"]]
    return lines


def _last_round(row: Mapping[str, Any], metric: str) -> str:
    """The last finished round, from its line of metrics."""
    score = ""
    if isinstance(row.get(metric), int | float):
        score = f"{metric} {row[metric]:.4g}, "
    return (
        f"round {row['round']}: {score}{row.get('reported', '?')} reported, "
        f"{row.get('rejected', 0)} rejected, {row.get('seconds', 0.0):.1f} s"
    )


def _this_round(now: Mapping[str, Any], at: float) -> list[str]:
    """The round in progress, and every client that was asked."""
    clients = now.get("asked", [])
    line = f"round {now.get('round')}: {now.get('phase')} for {_ago(at, now.get('began'))}"
    if now.get("phase") == "training":
        reported = len(now.get("reported", []))
        line += f"; {reported} of {len(clients)} reported, {now.get('needed')} needed"
        line += f", at most {max(0.0, now.get('until', at) - at):.0f} s more"
    return [line, *(f"  client {client}: {_client(str(client), now, at)}" for client in clients)]


def _client(client: str, now: Mapping[str, Any], at: float) -> str:
    """What became of one client's order in this round, and when it last reported."""
    outcome = "no answer so far"
    if int(client) in now.get("reported", []):
        outcome = "reported"
    elif client in now.get("failed", {}):
        outcome = f"rejected: {now['failed'][client]}"
    seen = now.get("seen", {}).get(client)
    if not seen:
        return f"{outcome}; no report yet"
    return f"{outcome}; last report {_ago(at, seen)} ago"


def _ago(at: float, then: Any) -> str:
    if not isinstance(then, int | float):
        return "an unknown time"
    return f"{max(0.0, at - then):.0f} s"


def _held(path: Path) -> bool:
    """Whether a server is using the folder."""
    if not (path / ".lock").exists():
        return False
    try:
        with lock(path):
            return False
    except UserError:
        return True
