"""The roster: which node serves which client, bound to the node's key.

Node ids change and are chosen by Flower; a client's id is forever. A node says which clients it serves, and an id
belongs to the key that first claimed it, or to the key that the operator wrote into `roster.json` beforehand.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

from kairosfl.errors import UserError
from kairosfl.runs.files import write_json


def fingerprint(key: bytes) -> str:
    """A short name for a public key."""
    return hashlib.sha256(key).hexdigest()[:16]


def parse_ids(text: str | int) -> list[int]:
    """Client ids written as `7`, `0-3` or `0-3,7`."""
    ids: list[int] = []
    for part in str(text).split(","):
        first, dash, last = part.strip().partition("-")
        if not first.isdecimal() or (dash and not last.isdecimal()):
            raise UserError(f"clients = {text!r} is not understood; write client ids like '7' or '0-3,7'.")
        ids += range(int(first), int(last or first) + 1)
    return ids


class Roster:
    """Clients by id. `path`, where there is one, keeps the bindings over restarts of the server."""

    def __init__(self, clients: int, path: Path | None = None) -> None:
        self.clients, self.path = clients, path
        self.keys: dict[int, str] = {}  # client → fingerprint of the key that it belongs to
        self.nodes: dict[int, int] = {}  # client → the node that serves it now
        if path is not None and path.exists():
            self.keys = {int(client): key for client, key in json.loads(path.read_text()).items()}

    def claim(self, node: int, key: bytes, ids: Iterable[int]) -> list[str]:
        """A node says that it serves these clients; a line for every event that somebody should know of."""
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
                if self.nodes.get(client) != node:
                    lines.append(f"client {client} is served by node {node} (key {mark})")
                self.nodes[client] = node
        if bound and self.path is not None:
            write_json(self.path, {str(client): self.keys[client] for client in sorted(self.keys)})
        return lines

    def forget(self, nodes: Iterable[int]) -> list[str]:
        """These nodes are gone; their clients stay bound to their keys."""
        gone = set(nodes)
        lost = [client for client, node in self.nodes.items() if node in gone]
        for client in lost:
            del self.nodes[client]
        return [f"client {client} has no node any more" for client in sorted(lost)]
