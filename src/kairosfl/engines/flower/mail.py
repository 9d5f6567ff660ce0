"""Messages to nodes and their answers. Each request costs the SuperLink some 14 ms, so one asks for all answers.

A client may send anything, so whatever its answer contains costs at most its own report.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from functools import partial
from typing import TypeVar, cast

import httpx
from flwr.app import Error, Message
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest, ObjectTree
from flwr.proto.runtime_pb2 import PullAppMessagesRequest
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_object import iterate_object_tree
from flwr.supercore.inflatable.inflatable_protobuf_utils import make_pull_object_fn_protobuf
from flwr.supercore.inflatable.inflatable_utils import ObjectPullError, inflate_object_from_contents, pull_objects
from flwr.superlink.grid.http_grid import HttpGrid

from kairosfl.engines.flower.pauses import AGAIN

PAUSE = 2.0  # seconds between two attempts
TROUBLE = 120.0  # seconds that the SuperLink may fail before the server gives up

# Flower's error codes. Only code 2, an exception, has a message with more detail.
KINDS = {
    1: "its app could not be loaded",
    2: "it raised",
    3: "its message was lost",
    4: "its answer was lost",
    5: "its node went offline",
    7: "it rejected the app",
    8: "its process died",
}
DROPPED = (KINDS[3], KINDS[4])  # what Flower also reports for a message whose time is up


def explain(error: Error) -> str:
    """A Flower error in one line."""
    words = KINDS.get(error.code, f"it failed with code {error.code}")
    return clean(f"{words} {error.reason}" if error.code == 2 else words)


def clean(text: str) -> str:
    """Text from a client as one short line, so that it cannot forge a line of the log."""
    line = "".join(letter if letter.isprintable() else " " for letter in text)
    return line if len(line) <= 200 else line[:199] + "…"


T = TypeVar("T")


def with_retries(call: Callable[[], T]) -> T:
    """Retry a call to the SuperLink if it fails: under load its database is sometimes locked."""
    until = time.monotonic() + TROUBLE
    while True:
        try:
            return call()
        except httpx.HTTPError as error:
            refused = isinstance(error, httpx.HTTPStatusError) and error.response.status_code < 500
            if refused or time.monotonic() > until:
                raise
            time.sleep(PAUSE)


def push(grid: Grid, messages: Sequence[Message]) -> list[str | None]:
    """Send messages in one request; return their ids, None for those that were not accepted."""
    return list(with_retries(lambda: grid.push_messages(messages))) or [None] * len(messages)


def answers(grid: Grid, waiting: Collection[str]) -> Iterator[tuple[str, Message | str]]:
    """The answers that have arrived, or why there is none, each with the id of the message that it answers.

    They are fetched one at a time, since they may be large. Flower's `pull_messages` is not used for several messages:
    of an answer that it cannot read nobody would know whose it was, and which message an answer is to would be what the
    client wrote into it, not what the SuperLink checked.
    """
    if not isinstance(grid, HttpGrid):
        for sent in list(waiting):
            for reply in _read(partial(grid.pull_messages, [sent])):
                yield sent, reply
        return
    if not waiting:
        return
    client = grid._runtime_client
    found = with_retries(lambda: client.PullMessages(PullAppMessagesRequest(message_ids=list(waiting))))
    for message, tree in list(zip(found.messages_list, found.message_object_trees, strict=True)):
        if message.metadata.reply_to_message_id in waiting:
            for reply in _read(partial(_fetch, grid, tree)):
                yield message.metadata.reply_to_message_id, reply


def _read(read: Callable[[], Iterable[Message]]) -> list[Message | str]:
    """What there is to read, or why it cannot be read."""
    try:
        return [explain(reply.error) if reply.has_error() else reply for reply in with_retries(read)]
    except httpx.HTTPError:
        raise
    except ObjectPullError:
        return [KINDS[4]]
    except Exception as error:
        return [f"its answer cannot be read ({type(error).__name__})"]


def _fetch(grid: HttpGrid, tree: ObjectTree) -> list[Message]:
    """An answer that the SuperLink has, or will have soon: its parts may still be on their way."""
    client, run = grid._runtime_client, grid.run.run_id
    pull = make_pull_object_fn_protobuf(client.PullObject, grid.node, run)
    parts = [part.object_id for part in iterate_object_tree(tree)]
    contents = pull_objects(parts, lambda part: with_retries(lambda: pull(part)), initial_backoff=AGAIN)
    done = ConfirmMessageReceivedRequest(node=grid.node, run_id=run, message_object_id=tree.object_id)
    with_retries(lambda: client.ConfirmMessageReceived(done))
    return [cast(Message, inflate_object_from_contents(tree.object_id, contents))]
