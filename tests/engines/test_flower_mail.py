"""Answers over Flower's grid with a stub of a SuperLink: one request for all, each attributed as the SuperLink says."""

from __future__ import annotations

from typing import Any, cast

import httpx
import pytest

pytest.importorskip("flwr")
from flwr.app import ConfigRecord, Error, Message, RecordDict
from flwr.app.message import remove_content_from_message
from flwr.common.serde import message_to_proto
from flwr.proto.message_pb2 import PullObjectResponse
from flwr.proto.node_pb2 import Node
from flwr.proto.runtime_pb2 import PullAppMessagesResponse
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects, get_object_tree
from flwr.supercore.run import Run
from flwr.supercore.task_identity import TaskIdentity
from flwr.superlink.grid.http_grid import HttpGrid

from kairosfl.engines.flower import mail
from kairosfl.engines.flower.mail import answers


class SuperLink:
    """Answers by the message that they answer; parts that are not there yet; and what was asked of it."""

    def __init__(self) -> None:
        self.answers: dict[str, Message] = {}
        self.parts: dict[str, bytes] = {}
        self.unfinished: dict[str, int] = {}  # part → how often it is asked for in vain
        self.asked: list[str] = []
        self.trouble = self.part_trouble = 0

    def put(self, sent: str, content: RecordDict | Error, *, written: str | None = None) -> Message:
        """An answer to `sent`, which itself says that it answers `written`."""
        question = Message(RecordDict(), 7, "train")
        question.metadata.__dict__["_message_id"] = sent if written is None else written
        reply = Message(content, reply_to=question)
        reply.metadata.__dict__["_message_id"] = reply.object_id
        self.parts |= {name: each.deflate() for name, each in get_all_nested_objects(reply).items()}
        self.answers[sent] = reply
        return reply

    def PullMessages(self, request: Any) -> PullAppMessagesResponse:
        self.asked.append(f"messages {len(request.message_ids)}")
        if self.trouble:
            self.trouble -= 1
            raise httpx.ReadTimeout("busy")
        response = PullAppMessagesResponse()
        for sent in [sent for sent in request.message_ids if sent in self.answers]:
            reply = self.answers.pop(sent)
            response.message_object_trees.append(get_object_tree(reply))
            about = message_to_proto(remove_content_from_message(reply))
            about.metadata.reply_to_message_id = sent  # as the SuperLink checked it
            response.messages_list.append(about)
        return response

    def PullObject(self, request: Any) -> PullObjectResponse:
        self.asked.append("part")
        if self.part_trouble:
            self.part_trouble -= 1
            raise httpx.ReadTimeout("busy")
        if request.object_id not in self.parts:
            return PullObjectResponse(object_found=False)
        if self.unfinished.get(request.object_id):
            self.unfinished[request.object_id] -= 1
            return PullObjectResponse(object_found=True, object_available=False)
        content = self.parts[request.object_id]
        return PullObjectResponse(object_found=True, object_available=True, object_content=content)

    def ConfirmMessageReceived(self, request: Any) -> None:
        self.asked.append("done")


@pytest.fixture
def link(monkeypatch: pytest.MonkeyPatch) -> SuperLink:
    TaskIdentity.run_id, TaskIdentity.task_id, TaskIdentity.node_id = 1, 1, 1
    monkeypatch.setattr(mail, "AGAIN", 0.001)
    monkeypatch.setattr(mail, "PAUSE", 0.0)
    return SuperLink()


def grid_of(link: SuperLink) -> HttpGrid:
    grid = HttpGrid(token="token", insecure=True)
    grid._run, grid._client, grid.node = Run.create_empty(1), cast(Any, link), Node(node_id=1)
    return grid


def number(value: int) -> RecordDict:
    return RecordDict({"numbers": ConfigRecord({"value": value})})


def read(link: SuperLink, waiting: list[str]) -> dict[str, Any]:
    found = dict(answers(grid_of(link), waiting))
    return {sent: each if isinstance(each, str) else each.content["numbers"]["value"] for sent, each in found.items()}


def test_one_request_asks_for_all_answers_and_parts_come_one_answer_at_a_time(link: SuperLink) -> None:
    for i in range(3):
        link.put(f"brief-{i}", number(i))
    found = answers(grid_of(link), [f"brief-{i}" for i in range(9)])
    assert next(found)[0] == "brief-0"
    assert link.asked == ["messages 9", "part", "part", "part", "done"]
    assert [sent for sent, _ in found] == ["brief-1", "brief-2"]
    assert link.asked.count("messages 9") == 1
    assert read(link, ["brief-5"]) == {}
    assert list(answers(grid_of(link), [])) == []


def test_an_answer_is_to_what_the_superlink_says_not_to_what_its_client_wrote(link: SuperLink) -> None:
    link.put("brief-1", number(1), written="brief-0")
    link.put("brief-2", number(2))
    assert read(link, ["brief-0", "brief-1", "brief-2"]) == {"brief-1": 1, "brief-2": 2}


def test_an_answer_that_cannot_be_read_costs_nobody_elses(link: SuperLink) -> None:
    broken = link.put("brief-0", number(0))
    link.parts[broken.object_id] = b"nonsense"
    lost = link.put("brief-1", number(1))
    del link.parts[lost.object_id]
    link.put("brief-2", Error(2, "no battery"))
    link.put("brief-3", number(3))
    found = read(link, [f"brief-{i}" for i in range(4)])
    assert found["brief-0"].startswith("its answer cannot be read (")
    assert found["brief-1"] == "its answer was lost"
    assert found["brief-2"] == "it raised no battery"
    assert found["brief-3"] == 3


def test_a_part_that_is_still_being_sent_is_asked_for_again_soon(link: SuperLink) -> None:
    reply = link.put("brief-0", number(0))
    link.unfinished[reply.object_id] = 3
    assert read(link, ["brief-0"]) == {"brief-0": 0}


def test_trouble_is_retried_without_losing_an_answer_that_the_superlink_gives_once(link: SuperLink) -> None:
    link.trouble = link.part_trouble = 2
    link.put("brief-0", number(0))
    assert read(link, ["brief-0"]) == {"brief-0": 0}
