"""A Flower grid in this process: real apps, real records through real bytes, no network."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from flwr.app import Context, Error, Message, RecordDict
from flwr.proto.node_pb2 import NodeInfo
from flwr.serverapp import Grid
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity

App = Callable[[Message, Context], Message]


@dataclass
class Node:
    """A node with a key, an app and a node config. `late`: pulls that its answers take to arrive."""

    key: bytes
    app: App
    clients: str
    late: int = 0


def over_the_wire(record: RecordDict) -> RecordDict:
    """The record as it comes out at the other end."""
    contents = {name: thing.deflate() for name, thing in get_all_nested_objects(record).items()}
    return inflate_object_from_contents(record.object_id, contents)


@dataclass
class FakeGrid(Grid):
    """Nodes by id. A message is answered when it is pushed, and the answer waits to be pulled."""

    nodes: dict[int, Node]
    answers: dict[str, tuple[int, Message]] = field(default_factory=dict)
    sent: list[Message] = field(default_factory=list)

    def __post_init__(self) -> None:
        TaskIdentity.run_id, TaskIdentity.task_id, TaskIdentity.node_id = (
            1,
            1,
            1,
        )  # a message is stamped with them

    def set_run(self, run: Run) -> None: ...

    @property
    def run(self) -> Run:
        raise AssertionError("nobody asks")

    def create_message(self, *_: object, **__: object) -> Message:
        raise AssertionError("nobody asks")

    def send_and_receive(self, *_: object, **__: object) -> list[Message]:
        raise AssertionError("nobody asks")

    def get_node_ids(self) -> list[int]:
        return list(self.nodes)

    def get_nodes(self) -> list[NodeInfo]:
        return [
            NodeInfo(node_id=node_id, public_key=node.key) for node_id, node in self.nodes.items()
        ]

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        ids = []
        for message in messages:
            ids.append(f"message-{len(self.sent)}")
            self.sent.append(message)
            message.metadata.__dict__["_message_id"] = ids[-1]
            node = self.nodes[message.metadata.dst_node_id]
            context = Context(
                1, message.metadata.dst_node_id, {"clients": node.clients}, RecordDict(), {}
            )
            message.content = over_the_wire(message.content)
            try:
                reply = node.app(message, context)
            except Exception as error:
                reply = Message(Error(2, f"{type(error)}:<'{error}'>"), reply_to=message)
            self.answers[ids[-1]] = (node.late, reply)
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        replies = []
        for name in message_ids:
            late, reply = self.answers.pop(name, (0, None))
            if late:
                self.answers[name] = (late - 1, reply)
            elif reply is not None:
                if reply.has_content():  # read here, where a real grid reads it
                    reply.content = over_the_wire(reply.content)
                replies.append(reply)
        return replies
