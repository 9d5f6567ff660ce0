"""Messages to nodes and their answers. A request costs the SuperLink some 14 ms: one asks for all.

A client may send anything, at any pace or not at all, so whatever becomes of its answer costs at
most its own report.
"""

from __future__ import annotations

import contextlib
import copy
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import httpx
from flwr.app import Error, Message
from flwr.proto.message_pb2 import ConfirmMessageReceivedRequest
from flwr.proto.runtime_pb2 import PullAppMessagesRequest
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_object import iterate_object_tree
from flwr.supercore.inflatable.inflatable_protobuf_utils import make_pull_object_fn_protobuf
from flwr.supercore.inflatable.inflatable_utils import (
    ObjectPullError,
    ObjectUnavailableError,
    inflate_object_from_contents,
)
from flwr.superlink.grid.http_grid import HttpGrid

from kairosfl.engines.flower.pauses import AGAIN
from kairosfl.engines.flower.wire import Limit

PAUSE = 2.0  # seconds between two attempts, and at most until the next look for a part of an answer
PART = 10.0  # seconds that the SuperLink has to send a part before the other answers go first
FRAME = 64  # bytes by which a response is longer than the part in it
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
MOST_LETTERS = 200  # of a line of the log
DROPPED = (KINDS[3], KINDS[4])  # what Flower also reports for a message whose time is up


def explain(error: Error) -> str:
    """A Flower error in one line."""
    words = KINDS.get(error.code, f"it failed with code {error.code}")
    return clean(f"{words} {error.reason}" if error.code == 2 else words)


def clean(text: str) -> str:
    """Text from a client as one short line, so that it cannot forge a line of the log."""
    line = ""
    for letter in text[:MOST_LETTERS]:
        line += letter if letter.isprintable() else " "
    if len(text) > MOST_LETTERS:
        line = line[:-1] + "…"
    return line


T = TypeVar("T")


def with_retries(call: Callable[[], T]) -> T:
    """Retry a call to the SuperLink if it fails: under load its database is sometimes locked."""
    until = time.monotonic() + TROUBLE
    while True:
        try:
            return call()
        except httpx.HTTPError as error:
            if _refused(error) or time.monotonic() > until:
                raise
            time.sleep(PAUSE)


def push(grid: Grid, messages: Sequence[Message]) -> list[str | None]:
    """Send messages in one request; return their ids, None for those that were not accepted."""
    return list(with_retries(lambda: grid.push_messages(messages))) or [None] * len(messages)


class TooLarge(Exception):
    """A part of an answer has more bytes than the answer may have."""


@dataclass
class Arriving:
    """An answer that was announced, and the parts of it that are here."""

    root: str
    parts: list[str]  # the root first: a node sends it last, so that all others are there, too
    limit: Limit
    contents: dict[str, bytes] = field(default_factory=dict)
    vain: int = 0  # how often a part was not there yet
    due: float = 0.0  # when to look for the next part
    moved: float = field(default_factory=time.monotonic)  # when the last part came

    @property
    def room(self) -> int:
        """Bytes that the missing parts may have."""
        return self.limit.size - sum(map(len, self.contents.values()))

    def later(self) -> None:
        """The next part is not there yet: look for it less and less often."""
        self.due = time.monotonic() + min(AGAIN * 2.0 ** min(self.vain, 10), PAUSE)
        self.vain += 1


class Mailbox:
    """Answers that have arrived or are arriving. Nothing here waits for a node.

    What an answer consists of is known before it is fetched: how many parts from its announcement,
    and how large a part is from the header of the response that carries it. An answer beyond its
    limit is dropped, and the SuperLink refuses what is still being sent of it.

    Flower's `pull_messages` is not used: it waits for hours for a part that was announced, of an
    answer that it cannot read nobody would know whose it was, and which message an answer is to
    would be what the client wrote into it, not what the SuperLink checked.
    """

    def __init__(self, grid: Grid) -> None:
        self._grid = grid
        self._arriving: dict[str, Arriving] = {}  # by the message that they answer
        self._ready: list[tuple[str, Message | str]] = []

    @property
    def arriving(self) -> set[str]:
        """The messages whose answer was announced and is not complete."""
        return set(self._arriving)

    def rest(self, most: float) -> float:
        """Seconds until the next look for a part, at most `most`."""
        due = min((answer.due for answer in list(self._arriving.values())), default=float("inf"))
        return max(0.0, min(most, due - time.monotonic()))

    def stalled(self, seconds: float) -> list[str]:
        """The messages of whose announced answer no part came for so long."""
        then = time.monotonic() - seconds
        return [sent for sent, answer in self._arriving.items() if answer.moved < then]

    def ask(self, waiting: Mapping[str, Limit]) -> bool:
        """Ask which answers to these messages were sent; whether there are new ones."""
        unannounced = [sent for sent in waiting if sent not in self._arriving]
        if not isinstance(self._grid, HttpGrid):
            return self._pull_whole(self._grid, unannounced)
        if not unannounced:
            return False
        request = PullAppMessagesRequest(message_ids=unannounced)
        client = self._grid._runtime_client
        response = with_retries(lambda: client.PullMessages(request))
        announced = zip(response.messages_list, response.message_object_trees, strict=True)
        for message, tree in announced:
            sent = message.metadata.reply_to_message_id
            if sent in waiting:
                parts = [part.object_id for part in iterate_object_tree(tree)]
                self._announce(sent, Arriving(tree.object_id, parts[::-1], waiting[sent]))
        return len(response.messages_list) > 0

    def arrived(self) -> Iterator[tuple[str, Message | str]]:
        """The complete answers, or why there is none, each with the message that it answers.

        One at a time, since they may be large; those that were never waited for come first.
        """
        while self._ready:
            yield self._ready.pop(0)
        for sent in sorted(self._arriving, key=lambda sent: self._arriving[sent].vain):
            answer = self._arriving[sent]
            if answer.due > time.monotonic():
                continue
            reply = self._read(answer)
            if reply is not None:
                del self._arriving[sent]
                yield sent, reply

    def drop(self, sents: Iterable[str]) -> None:
        """Wait for these answers no longer; the SuperLink refuses what is still being sent."""
        for sent in sents:
            answer = self._arriving.pop(sent, None)
            if answer is not None:
                self._refuse(answer)

    @property
    def _client(self) -> Any:
        """Flower's client, which tries again for ever; this one lets others go first."""
        client = copy.copy(cast(HttpGrid, self._grid)._runtime_client)
        client._retry_invoker = None
        hooks = client._client.event_hooks
        if _check_length not in hooks["response"]:
            before, after = [*hooks["request"], _limit_time], [*hooks["response"], _check_length]
            client._client.event_hooks = {"request": before, "response": after}
        return client

    def _announce(self, sent: str, answer: Arriving) -> None:
        """Wait for an answer, if it has no more parts than it may have."""
        if len(answer.parts) <= answer.limit.objects:
            self._arriving[sent] = answer
            return
        count, most = len(answer.parts), answer.limit.objects
        self._ready.append((sent, f"its answer has {count} parts, above the {most} allowed"))
        self._refuse(answer)

    def _read(self, answer: Arriving) -> Message | str | None:
        """The answer, why it cannot be read, or None if a part of it is not there yet."""
        try:
            self._fetch(answer)
            self._confirm(answer)
            reply = inflate_object_from_contents(answer.root, answer.contents)
            return _content(cast(Message, reply))
        except ObjectUnavailableError:
            answer.later()
            return None
        except httpx.HTTPError as error:
            if _refused(error):
                raise
            answer.later()
            return None
        except ObjectPullError:
            return KINDS[4]
        except TooLarge:
            self._refuse(answer)
            return f"its answer has more than the {answer.limit.size / 1e6:.1f} MB allowed"
        except Exception as error:
            return f"its answer cannot be read ({type(error).__name__})"

    def _fetch(self, answer: Arriving) -> None:
        """Fetch the parts that are missing, until one is not there yet."""
        grid = cast(HttpGrid, self._grid)
        pull = make_pull_object_fn_protobuf(self._client.PullObject, grid.node, grid.run.run_id)
        for part in answer.parts:
            if part not in answer.contents:
                with _room_for(answer.room):
                    answer.contents[part] = pull(part)
                answer.moved, answer.vain = time.monotonic(), 0

    def _confirm(self, answer: Arriving) -> None:
        """The SuperLink may delete what it has of this answer."""
        grid = cast(HttpGrid, self._grid)
        run = grid.run.run_id
        request = ConfirmMessageReceivedRequest(
            node=grid.node, run_id=run, message_object_id=answer.root
        )
        self._client.ConfirmMessageReceived(request)

    def _refuse(self, answer: Arriving) -> None:
        """Confirm an answer that is not wanted; if that fails, it is kept until the run ends."""
        with contextlib.suppress(httpx.HTTPError):
            self._confirm(answer)

    def _pull_whole(self, grid: Grid, sents: Iterable[str]) -> bool:
        """Over a grid in this process: the answers come whole."""
        before = len(self._ready)
        for sent in sents:
            try:
                replies = list(grid.pull_messages([sent]))
            except Exception as error:
                self._ready.append((sent, f"its answer cannot be read ({type(error).__name__})"))
                continue
            self._ready += [(sent, _content(reply)) for reply in replies]
        return len(self._ready) > before


def _content(reply: Message) -> Message | str:
    """The reply, or the error that it consists of."""
    return explain(reply.error) if reply.has_error() else reply


_room = threading.local()  # `left`: bytes that the next response of this thread may have


@contextlib.contextmanager
def _room_for(size: int) -> Iterator[None]:
    _room.left = size + FRAME
    try:
        yield
    finally:
        del _room.left


def _limit_time(request: httpx.Request) -> None:
    """Called before a request: one for a part holds up the others only for a short time."""
    if hasattr(_room, "left"):
        request.extensions["timeout"] = {**request.extensions.get("timeout", {}), "read": PART}


def _check_length(response: httpx.Response) -> None:
    """Called between the header of a response and its body, which is not read if too large."""
    if int(response.headers.get("content-length", 0)) > getattr(_room, "left", float("inf")):
        raise TooLarge


def _refused(error: httpx.HTTPError) -> bool:
    """Whether another attempt would be refused as well."""
    return isinstance(error, httpx.HTTPStatusError) and error.response.status_code < 500
