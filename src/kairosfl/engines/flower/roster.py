"""The roster: which node serves which client, bound to the node's key.

Node ids are assigned by Flower and may change; client ids never change. A client id belongs to the
key that the operator wrote to `roster.json`, or else to the first key that claimed it: a node with
an unknown key is asked which clients it serves.
"""

from __future__ import annotations

import hashlib
import json
import os
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path

from flwr.app import ConfigRecord, Message, MessageType, RecordDict
from flwr.serverapp import Grid

from kairosfl.engines.flower.mail import Mailbox, push, with_retries
from kairosfl.engines.flower.wire import INTRODUCTION, NUMBERS
from kairosfl.errors import UserError, first_line

PATIENCE = (
    120.0  # seconds after which a node that has not said which clients it serves is asked again
)
HOLD = 60.0  # seconds for which the first question to a key may hold up a round
PAUSE = 2.0  # seconds between two polls of the nodes that are online
MOST_IDS = 10_000  # the most clients that one node may claim


def fingerprint(key: bytes) -> str:
    """A short identifier of a public key."""
    return hashlib.sha256(key).hexdigest()[:16]


def parse_ids(text: str) -> list[int]:
    """Client ids written as `7`, `0-3` or `0-3,7`."""
    ids: list[int] = []
    for part in text.split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise UserError(
                f"clients = {text!r} cannot be parsed; write client ids like '7' or '0-3,7'."
            )
        ids += range(int(first), int(last or first) + 1)
    return ids


class Roster:
    """Clients by id.

    The bindings are saved to `path`, if given, and survive a restart of the server.
    """

    def __init__(self, clients: int, path: Path | None = None) -> None:
        self.clients, self.path = clients, path
        self.keys: dict[int, str] = {}  # client → fingerprint of its key
        self.nodes: dict[int, int] = {}  # client → the node that currently serves it
        if path is not None and path.exists():
            self.keys = read(path)

    def claim(self, node: int, key: bytes, ids: Iterable[int]) -> list[str]:
        """A node claims to serve these clients; returns log lines about the outcome."""
        mark, lines, bound = fingerprint(key), [], False
        nodes = dict(self.nodes)  # replaced as a whole, for another thread may be reading it
        for client in sorted(set(ids)):
            owner = self.keys.get(client, mark)
            if not 0 <= client < self.clients:
                lines.append(
                    f"node {node} (key {mark}) claims client {client}, which does not exist: "
                    "rejected"
                )
            elif owner != mark:
                lines.append(
                    f"node {node} (key {mark}) claims client {client} of key {owner}: rejected"
                )
            else:
                bound |= client not in self.keys
                self.keys[client] = mark
                nodes[client] = node
                lines.append(f"client {client} is served by node {node} (key {mark})")
        self.nodes = nodes
        if bound and self.path is not None:
            save(self.path, self.keys)
        return lines

    def recognise(self, node: int, key: bytes) -> list[str]:
        """A node with a known key serves the clients of that key."""
        mark = fingerprint(key)
        return self.claim(
            node, key, [client for client, owner in self.keys.items() if owner == mark]
        )

    def forget(self, nodes: Iterable[int]) -> list[str]:
        """These nodes are offline; their clients stay bound to their keys."""
        gone = set(nodes)
        still_served: dict[int, int] = {}
        lines = []
        for client, node in sorted(self.nodes.items()):
            if node in gone:
                lines.append(f"client {client} no longer has a node")
            else:
                still_served[client] = node
        self.nodes = still_served
        return lines


def read(path: Path) -> dict[int, str]:
    """The bindings of clients to keys that were saved, or that an operator wrote."""
    try:
        keys: dict[int, str] = {}
        for client, key in json.loads(path.read_text(encoding="utf-8")).items():
            keys[int(client)] = key
    except (OSError, ValueError, AttributeError, RecursionError) as error:
        # Without it, the ids would be anybody's.
        raise UserError(
            f"{path} cannot be read: {first_line(error)}; restore it from a backup."
        ) from None
    for client, key in keys.items():
        if not isinstance(key, str):
            raise UserError(
                f"{path}: client {client} has the key {key!r}; write the fingerprint as text."
            )
    return keys


def save(path: Path, keys: dict[int, str]) -> None:
    """Save the bindings of clients to keys."""
    temporary = path.with_name(f".{path.name}.part")
    temporary.write_text(
        json.dumps({str(client): keys[client] for client in sorted(keys)}, indent=1) + "\n"
    )
    os.replace(temporary, path)


class NodeRegistry:
    """Keeps the roster current.

    It recognises new nodes or asks whom they serve, and drops those that leave.

    A round polls in one thread and assigns in another.
    """

    def __init__(self, grid: Grid, roster: Roster, log: Callable[[str], None], ttl: float) -> None:
        self.grid, self.roster, self._log, self._ttl = grid, roster, log, ttl
        self._online: dict[int, bytes] = {}  # node → its key
        self._asked: dict[str, int] = {}  # pending query → node
        self._again: dict[int, float] = {}  # node → when to ask it next
        self._held: dict[bytes, float] = {}  # key → until when a round waits for its first answer
        self._mailbox = Mailbox(grid)
        self._next = 0.0
        self._polling, self._changing = threading.Lock(), threading.RLock()

    @property
    def pending(self) -> bool:
        """Whether a node that is online may soon say for the first time which clients it serves."""
        now = time.monotonic()
        for node in list(self._asked.values()):
            key = self._online.get(node, b"")
            if now < self._held.get(key, 0.0):
                return True
        return False

    def online(self, node: int) -> bool:
        """Whether a node was online at the last poll."""
        return node in self._online

    def rest(self, most: float) -> float:
        """Seconds until the next poll, at most `most`."""
        return self._mailbox.rest(most)

    def poll(self) -> None:
        """Update the roster, at most every two seconds and not while another thread does."""
        if not self._polling.acquire(blocking=False):
            return
        try:
            if time.monotonic() >= self._next:
                self._next = time.monotonic() + PAUSE
                self._look()
            for sent, reply in self._mailbox.arrived():
                self._answered(self._asked.pop(sent, None), reply)
        finally:
            self._polling.release()

    def _look(self) -> None:
        """Look who is online, and ask those who are not known."""
        online = {info.node_id: info.public_key for info in with_retries(self.grid.get_nodes)}
        now = time.monotonic()
        with self._changing:
            gone = self._online.keys() - online.keys()
            self._log_all(self.roster.forget(gone))
            for node in online.keys() - self._online.keys():
                recognised = self.roster.recognise(node, online[node])
                self._log_all(recognised)
                self._again[node] = float("inf") if recognised else 0.0
            self._online = online
        self._give_up(gone)
        for node in [node for node in online if self._again[node] <= now]:
            for late in self._give_up([node]):
                self._answered(late, "no answer")
            self._again[node] = now + PATIENCE
            self._held.setdefault(online[node], now + HOLD)
            question = Message(RecordDict(), node, MessageType.QUERY, ttl=self._ttl)
            (sent,) = push(self.grid, [question])
            if sent:
                self._asked[sent] = node
        self._mailbox.ask(dict.fromkeys(self._asked, INTRODUCTION))

    def _give_up(self, nodes: Iterable[int]) -> list[int]:
        """Forget the questions to these nodes; return the nodes that had one."""
        gone = set(nodes)
        late: list[int] = []
        questions: list[str] = []
        for question, node in self._asked.items():
            if node in gone:
                questions.append(question)
                late.append(node)
        self._mailbox.drop(questions)
        for question in questions:
            del self._asked[question]
        return late

    def _answered(self, node: int | None, reply: Message | str) -> None:
        """A node said which clients it serves, or something else."""
        if node is None:
            return
        ids = claimed_ids(reply.content) if isinstance(reply, Message) else None
        if ids is not None:
            self.assign(node, ids)
            return
        reason = "its answer is not a list of clients"
        if isinstance(reply, str):
            reason = reply
        self._log_all([f"node {node} did not say which clients it serves: {reason}"])

    def assign(self, node: int, ids: list[int]) -> None:
        """Replace the clients that a node serves by those it now claims."""
        with self._changing:
            if node in self._online:
                self._again[node] = float("inf")
                self.roster.forget([node])
                self._log_all(self.roster.claim(node, self._online[node], ids))

    def _log_all(self, lines: list[str]) -> None:
        for line in lines:
            self._log(line)


def claimed_ids(content: RecordDict) -> list[int] | None:
    """The clients that a node claims to serve; None if the message contains no such claim."""
    numbers = content.get(NUMBERS)
    ids = numbers.get("clients") if isinstance(numbers, ConfigRecord) else None
    if not isinstance(ids, list) or len(ids) > MOST_IDS:
        return None
    return [client for client in ids if isinstance(client, int)]
