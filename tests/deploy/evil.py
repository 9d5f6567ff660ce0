"""A node that fails while it uploads, on order: `KAIROSFL_FAULTS` is the file that `kit.order`
writes.

A fault is a word, and for some a number after a colon. Others happen in the client's app
(`kit.MISCHIEF`).
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flwr.supercore.inflatable.inflatable_object import iterate_object_tree
from flwr.supernode import start_client_internal as loop

from kairosfl.deploy import node


def ordered(clients: str, message: Any) -> tuple[str, int]:
    """The fault of this node in the round of this message, and its number."""
    orders = json.loads(Path(os.environ["KAIROSFL_FAULTS"]).read_text()).get(clients, {})
    kind, _, number = orders.get(message.metadata.group_id, "").partition(":")
    return kind, int(number or 0)


def failing(push_messages: Callable[..., None], clients: str) -> Callable[..., None]:
    """Flower's function that sends the replies, over a connection that fails."""

    def push(send: Callable[..., Any], push_object: Callable[..., None], **state: Any) -> None:
        kind, number = "", 0

        def announce(message: Any, tree: Any, runtime: float) -> tuple[set[str], str]:
            nonlocal kind, number
            kind, number = ordered(clients, message)
            missing, session = send(message, tree, runtime)
            parts = [part.object_id for part in iterate_object_tree(tree)]
            if (
                kind == "dup"
            ):  # as after a response that was lost; the contents go to a session that was replaced
                send(message, tree, runtime)
                session = "replaced"
            if kind == "drop":
                missing = set(parts[:number])
            if kind == "hole":
                missing -= {parts[number % len(parts)]}
            if kind == "die" and not number:
                os.kill(os.getpid(), signal.SIGKILL)
            return missing, session

        def put(*part: Any) -> None:
            nonlocal number
            if kind == "slow":
                time.sleep(number)
            push_object(*part)
            number -= 1
            if kind == "die" and not number:
                os.kill(os.getpid(), signal.SIGKILL)

        push_messages(send=announce, push_object=put, **state)

    return push


if __name__ == "__main__":
    served = (
        next(given for given in sys.argv if given.startswith("clients="))
        .partition("=")[2]
        .strip('"')
    )
    loop._push_messages = failing(loop._push_messages, served)
    node.main(sys.argv[1:])
