"""The roster: which node serves which client, bound to the node's key.

Node ids are Flower's and may change; a client's id is forever. An id belongs to the key that the operator wrote into
`roster.json`, or else to the one that first claimed it: a node with an unknown key is asked whom it serves.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeVar

import httpx
from flwr.app import ConfigRecord, Error, Message, MessageType, RecordDict
from flwr.serverapp import Grid

from kairosfl.engines.flower.wire import NUMBERS
from kairosfl.errors import UserError

PATIENCE = 120.0  # seconds after which a node that did not introduce itself is asked again
PAUSE = 2.0  # seconds between two looks at who is online
TROUBLE = 120.0  # seconds that the SuperLink may fail to answer before the server gives up
MOST_IDS = 10_000  # clients that one node may claim

# Flower's error codes. Only an exception's text (code 2) says more than its kind.
KINDS = {
    1: "its app could not be loaded",
    2: "it raised",
    3: "its message was lost",
    4: "its answer was lost",
    5: "its node went away",
    7: "it refused the app",
    8: "its process died",
}
DROPPED = (KINDS[3], KINDS[4])  # what Flower also says of a message that is overdue


def explain(error: Error) -> str:
    """An error of Flower in one line."""
    words = KINDS.get(error.code, f"it failed with code {error.code}")
    return clean(f"{words} {error.reason}" if error.code == 2 else words)


def clean(text: str) -> str:
    """A client's words as one short line that cannot pass for another line of the log."""
    line = "".join(letter if letter.isprintable() else " " for letter in text)
    return line if len(line) <= 200 else line[:199] + "…"


def fingerprint(key: bytes) -> str:
    """A short name for a public key."""
    return hashlib.sha256(key).hexdigest()[:16]


def parse_ids(text: str) -> list[int]:
    """Client ids written as `7`, `0-3` or `0-3,7`."""
    ids: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise UserError(f"clients = {text!r} is not understood; write client ids like '7' or '0-3,7'.")
        ids += range(int(first), int(last or first) + 1)
    return ids


class Roster:
    """Clients by id. `path`, where there is one, keeps the bindings when the server is started again."""

    def __init__(self, clients: int, path: Path | None = None) -> None:
        self.clients, self.path = clients, path
        self.keys: dict[int, str] = {}  # client → fingerprint of the key that it belongs to
        self.nodes: dict[int, int] = {}  # client → the node that serves it now
        if path is not None and path.exists():
            self.keys = {int(client): key for client, key in json.loads(path.read_text()).items()}

    def claim(self, node: int, key: bytes, ids: Iterable[int]) -> list[str]:
        """A node says that it serves these clients; a line for everything that somebody should know of."""
        mark, lines, bound = fingerprint(key), [], False
        for client in sorted(set(ids)):
            owner = self.keys.get(client, mark)
            if not 0 <= client < self.clients:
                lines.append(f"node {node} (key {mark}) claims client {client}, who does not exist: refused")
            elif owner != mark:
                lines.append(f"node {node} (key {mark}) claims client {client} of key {owner}: refused")
            else:
                bound |= client not in self.keys
                self.keys[client] = mark
                self.nodes[client] = node
                lines.append(f"client {client} is served by node {node} (key {mark})")
        if bound and self.path is not None:
            save(self.path, self.keys)
        return lines

    def recognise(self, node: int, key: bytes) -> list[str]:
        """A node with a known key serves the clients of that key."""
        mark = fingerprint(key)
        return self.claim(node, key, [client for client, owner in self.keys.items() if owner == mark])

    def forget(self, nodes: Iterable[int]) -> list[str]:
        """These nodes are gone; their clients stay bound to their keys."""
        gone = set(nodes)
        lost = sorted(client for client, node in self.nodes.items() if node in gone)
        for client in lost:
            del self.nodes[client]
        return [f"client {client} has no node any more" for client in lost]


def save(path: Path, keys: dict[int, str]) -> None:
    """Write the bindings of clients to keys."""
    temporary = path.with_name(f".{path.name}.part")
    temporary.write_text(json.dumps({str(client): keys[client] for client in sorted(keys)}, indent=1) + "\n")
    os.replace(temporary, path)


class Reception:
    """Keeps the roster: recognises nodes that come, or asks them whom they serve, and strikes those that leave."""

    def __init__(self, grid: Grid, roster: Roster, log: Callable[[str], None], ttl: float) -> None:
        self.grid, self.roster, self._log, self._ttl = grid, roster, log, ttl
        self._online: dict[int, bytes] = {}  # node → its key
        self._asked: dict[str, int] = {}  # question on its way → node
        self._again: dict[int, float] = {}  # node → when it is to be asked next
        self._next = 0.0

    @property
    def expecting(self) -> bool:
        """Whether a node that is online has not said yet whom it serves."""
        return bool(self._asked)

    def meet(self) -> None:
        """Look who is there; at most every two seconds."""
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + PAUSE
        online = {info.node_id: info.public_key for info in patiently(self.grid.get_nodes)}
        gone = self._online.keys() - online.keys()
        self._tell(self.roster.forget(gone))
        self._asked = {question: node for question, node in self._asked.items() if node not in gone}
        for node in online.keys() - self._online.keys():
            known = self.roster.recognise(node, online[node])
            self._tell(known)
            self._again[node] = float("inf") if known else 0.0
        self._online = online
        for node in [node for node in online if self._again[node] <= now]:
            self._again[node] = now + PATIENCE
            question = Message(RecordDict(), node, MessageType.QUERY, ttl=self._ttl)
            sent = push(self.grid, question)
            if sent:
                self._asked[sent] = node
        for sent, node in list(self._asked.items()):
            reply = pull(self.grid, sent)
            if reply is None:
                continue
            del self._asked[sent]
            ids = introduced(reply.content) if isinstance(reply, Message) else None
            if ids is not None:
                self.hear(node, ids)
            else:
                reason = reply if isinstance(reply, str) else "its answer is no list of clients"
                self._tell([f"node {node} did not introduce itself: {reason}"])

    def hear(self, node: int, ids: list[int]) -> None:
        """A node says whom it serves; whom it served before does not count."""
        if node in self._online:
            self._again[node] = float("inf")
            self.roster.forget([node])
            self._tell(self.roster.claim(node, self._online[node], ids))

    def _tell(self, lines: list[str]) -> None:
        for line in lines:
            self._log(line)


T = TypeVar("T")


def patiently(call: Callable[[], T]) -> T:
    """Ask the SuperLink again if it fails: under load its database is locked now and then."""
    until = time.monotonic() + TROUBLE
    while True:
        try:
            return call()
        except httpx.HTTPError as error:
            refused = isinstance(error, httpx.HTTPStatusError) and error.response.status_code < 500
            if refused or time.monotonic() > until:
                raise
            time.sleep(PAUSE)


def push(grid: Grid, message: Message) -> str | None:
    """Send a message; its id, or None if it was not taken."""
    return next(iter(patiently(lambda: grid.push_messages([message]))), None)


def pull(grid: Grid, sent: str) -> Message | str | None:
    """The answer to a message, or why it is none; None as long as nothing has come."""
    try:
        reply = next(iter(patiently(lambda: grid.pull_messages([sent]))), None)
    except httpx.HTTPError:
        raise
    except Exception as error:  # whatever bytes a client sends, they must cost nothing but its own report
        return f"its answer cannot be read ({type(error).__name__})"
    return explain(reply.error) if reply is not None and reply.has_error() else reply


def introduced(content: RecordDict) -> list[int] | None:
    """The clients that a node says it serves; None: it says nothing of the kind."""
    numbers = content.get(NUMBERS)
    ids = numbers.get("clients") if isinstance(numbers, ConfigRecord) else None
    if not isinstance(ids, list) or len(ids) > MOST_IDS:
        return None
    return [client for client in ids if isinstance(client, int)]
