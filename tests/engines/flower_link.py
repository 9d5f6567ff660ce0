"""A SuperLink in this process: Flower's own grid and client speak HTTP to it, and its nodes fail on
order.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import httpx
from flower_grid import Node
from flwr.app import ConfigRecord, Context, Error, Message, RecordDict
from flwr.app.message import remove_content_from_message
from flwr.common.serde import message_to_proto
from flwr.proto.message_pb2 import (
    ConfirmMessageReceivedRequest,
    ConfirmMessageReceivedResponse,
    ObjectTree,
    PullObjectRequest,
    PullObjectResponse,
    PushObjectRequest,
    PushObjectResponse,
)
from flwr.proto.node_pb2 import Node as NodeProto
from flwr.proto.node_pb2 import NodeInfo
from flwr.proto.runtime_pb2 import (
    GetNodesRequest,
    GetNodesResponse,
    PullAppMessagesRequest,
    PullAppMessagesResponse,
    PushAppMessagesRequest,
    PushAppMessagesResponse,
)
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
    iterate_object_tree,
    no_object_id_recompute,
)
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.run import Run
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.grid.http_grid import HttpGrid

NUMBERS = "numbers"


class Body(httpx.SyncByteStream):
    """The body of a response, which notes that it was read."""

    def __init__(self, content: bytes, read: Callable[[], None]) -> None:
        self._content, self._read = content, read

    def __iter__(self) -> Iterator[bytes]:
        self._read()
        yield self._content


class SuperLink:
    """Answers by the message that they answer, parts that are not there, and what was asked of it."""

    def __init__(self, nodes: Mapping[int, Node] | None = None) -> None:
        TaskIdentity.run_id, TaskIdentity.task_id, TaskIdentity.node_id = (
            1,
            1,
            1,
        )  # a message is stamped with them
        self.nodes = dict(nodes or {})
        self.orders: dict[tuple[int, str], str] = {}  # (node, type of message) → its fault
        self.answers: dict[str, tuple[Message, ObjectTree]] = {}
        self.parts: dict[str, bytes] = {}
        self.unfinished: dict[str, float] = {}  # part → how often it is asked for in vain
        self.troubled: set[str] = set()  # parts at which the SuperLink fails
        self.asked: list[str] = []
        self.sizes: list[int] = []  # of the bodies of parts that were read
        self.trouble = self.part_trouble = 0
        self._briefs: dict[str, set[str]] = {}  # message → its parts that are still missing
        self._pushing = threading.Lock()  # Flower pushes in two threads

    def put(
        self, sent: str, content: RecordDict | Error, *, written: str | None = None, fault: str = ""
    ) -> Message:
        """An answer to `sent`, which itself says that it answers `written`."""
        question = Message(RecordDict(), 7, "train")
        question.metadata.__dict__["_message_id"] = sent if written is None else written
        return self.answer(sent, Message(content, reply_to=question), fault)

    def answer(self, sent: str, reply: Message, fault: str) -> Message:
        """A node sends its answer, and fails."""
        kind, _, number = fault.partition(":")
        if reply.has_content():
            spoil(reply.content, kind, int(number or 0))
        with no_object_id_recompute():
            reply.metadata.__dict__["_message_id"] = reply.object_id
            self.parts |= {
                name: part.deflate() for name, part in get_all_nested_objects(reply).items()
            }
            tree = get_object_tree(reply)
        order = [part.object_id for part in iterate_object_tree(tree)]
        missing: list[str] = []
        if kind in ("die", "drop"):
            missing = order[int(number) :]
        if kind == "hole":
            missing = order[int(number) :][:1]
        if kind in ("dup", "slow"):
            missing = order
        self.unfinished |= dict.fromkeys(missing, float("inf"))
        self.answers[sent] = reply, tree
        return reply

    def handle(self, request: httpx.Request) -> httpx.Response:
        """A request over HTTP."""
        name = request.url.path.rpartition("/")[2]
        response = getattr(self, name.replace("-", "_"))(request.content)
        content = response.SerializeToString()
        read = self.sizes.append if name == "pull-object" else lambda size: None
        length = {"content-length": str(len(content))}
        return httpx.Response(200, headers=length, stream=Body(content, lambda: read(len(content))))

    def get_nodes(self, content: bytes) -> GetNodesResponse:
        GetNodesRequest.FromString(content)
        nodes = [
            NodeInfo(node_id=number, public_key=node.key) for number, node in self.nodes.items()
        ]
        return GetNodesResponse(nodes=nodes)

    def push_messages(self, content: bytes) -> PushAppMessagesResponse:
        request = PushAppMessagesRequest.FromString(content)
        missing: set[str] = set()
        for tree in request.message_object_trees:
            parts = {part.object_id for part in iterate_object_tree(tree)}
            self._briefs[tree.object_id] = parts - self.parts.keys()
            missing |= self._briefs[tree.object_id]
        ids = [message.metadata.message_id for message in request.messages_list]
        return PushAppMessagesResponse(
            message_ids=ids, objects_to_push=missing, session_id="session"
        )

    def push_object(self, content: bytes) -> PushObjectResponse:
        request = PushObjectRequest.FromString(content)
        with self._pushing:
            self.parts[request.object_id] = request.object_content
            for missing in self._briefs.values():
                missing.discard(request.object_id)
            complete = [sent for sent, missing in self._briefs.items() if not missing]
            for sent in complete:
                del self._briefs[sent]
                self._work(sent)
        return PushObjectResponse(stored=True)

    def pull_messages(self, content: bytes) -> PullAppMessagesResponse:
        request = PullAppMessagesRequest.FromString(content)
        self.asked.append(f"messages {len(request.message_ids)}")
        if self.trouble:
            self.trouble -= 1
            raise httpx.ReadTimeout("busy")
        response = PullAppMessagesResponse()
        for sent in [sent for sent in request.message_ids if sent in self.answers]:
            reply, tree = self.answers.pop(sent)
            response.message_object_trees.append(tree)
            about = message_to_proto(
                remove_content_from_message(reply) if reply.has_content() else reply
            )
            about.metadata.reply_to_message_id = sent  # as the SuperLink checked it
            response.messages_list.append(about)
        return response

    def pull_object(self, content: bytes) -> PullObjectResponse:
        request = PullObjectRequest.FromString(content)
        self.asked.append("part")
        if self.part_trouble:
            self.part_trouble -= 1
            raise httpx.ReadTimeout("busy")
        if request.object_id in self.troubled:
            raise httpx.ReadTimeout("too much")
        if request.object_id not in self.parts:
            return PullObjectResponse(object_found=False)
        if self.unfinished.get(request.object_id):
            self.unfinished[request.object_id] -= 1
            return PullObjectResponse(object_found=True, object_available=False)
        part = self.parts[request.object_id]
        return PullObjectResponse(object_found=True, object_available=True, object_content=part)

    def confirm_message_received(self, content: bytes) -> ConfirmMessageReceivedResponse:
        ConfirmMessageReceivedRequest.FromString(content)
        self.asked.append("done")
        return ConfirmMessageReceivedResponse()

    def _work(self, sent: str) -> None:
        """A node follows a message that is complete."""
        message = cast(
            Message, inflate_object_from_contents(sent, self.parts, keep_object_contents=True)
        )
        message.metadata.__dict__["_message_id"] = sent
        number = message.metadata.dst_node_id
        node = self.nodes[number]
        try:
            reply = node.app(
                message, Context(1, number, {"clients": node.clients}, RecordDict(), {})
            )
        except Exception as error:
            reply = Message(Error(2, f"{type(error)}:<'{error}'>"), reply_to=message)
        self.answer(sent, reply, self.orders.get((number, message.metadata.message_type), ""))


def spoil(content: RecordDict, kind: str, number: int) -> None:
    """Put more into an answer than belongs there."""
    if kind == "huge":
        content["more"] = ConfigRecord({"more": bytes(number << 20)})
    if kind == "fat":
        content[NUMBERS]["more"] = bytes(number << 20)
    if kind == "keys":
        numbers: Any = dict(content[NUMBERS]) | {f"more{i:0100}": i for i in range(number)}
        content[NUMBERS] = ConfigRecord(numbers)
    if kind == "many":
        for i in range(number):
            content[f"more{i}"] = ConfigRecord({"more": i})


def grid_of(link: SuperLink) -> HttpGrid:
    """Flower's grid, whose requests go to `link`."""
    client = RuntimeHttpClient("http://superlink")
    client._client = httpx.Client(transport=httpx.MockTransport(link.handle))
    grid = HttpGrid(token="token", insecure=True)
    grid._run, grid._client, grid.node = Run.create_empty(1), client, NodeProto(node_id=1)
    return grid
