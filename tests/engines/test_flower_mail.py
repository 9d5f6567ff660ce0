"""Answers over Flower's grid with a SuperLink in this process: one request for all, each attributed
as it says.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import Any

import httpx
import pytest

pytest.importorskip("flwr")
from flower_link import SuperLink, grid_of
from flwr.app import ConfigRecord, Error, Message, RecordDict
from flwr.supercore import heartbeat
from flwr.supercore.retry import http_retry

from kairosfl.engines.flower import mail
from kairosfl.engines.flower.mail import Mailbox
from kairosfl.engines.flower.trouble import insist, insistent, persist
from kairosfl.engines.flower.wire import INTRODUCTION, Limit


@pytest.fixture
def link(monkeypatch: pytest.MonkeyPatch) -> SuperLink:
    monkeypatch.setattr(mail, "AGAIN", 0.0)
    monkeypatch.setattr(mail, "PAUSE", 0.0)
    return SuperLink()


def number(value: int) -> RecordDict:
    return RecordDict({"numbers": ConfigRecord({"value": value})})


def looks(
    mailbox: Mailbox, waiting: Iterable[str], count: int = 1, limit: Limit = INTRODUCTION
) -> Iterator[tuple[str, Any]]:
    """What there is after so many looks."""
    for _ in range(count):
        mailbox.ask(dict.fromkeys(waiting, limit))
        for sent, reply in mailbox.arrived():
            yield sent, reply.content["numbers"]["value"] if isinstance(reply, Message) else reply


def read(link: SuperLink, waiting: Iterable[str], count: int = 1) -> dict[str, Any]:
    return dict(looks(Mailbox(grid_of(link)), waiting, count))


def test_one_request_asks_for_all_answers_and_parts_come_one_answer_at_a_time(
    link: SuperLink,
) -> None:
    for i in range(3):
        link.put(f"brief-{i}", number(i))
    found = looks(Mailbox(grid_of(link)), [f"brief-{i}" for i in range(9)])
    assert next(found)[0] == "brief-0"
    assert link.asked == ["messages 9", "part", "part", "part", "done"]
    assert [sent for sent, _ in found] == ["brief-1", "brief-2"]
    assert link.asked.count("messages 9") == 1
    assert read(link, ["brief-5"]) == {}
    link.asked.clear()
    assert read(link, []) == {}
    assert link.asked == []


def test_an_answer_is_to_what_the_superlink_says_not_to_what_its_client_wrote(
    link: SuperLink,
) -> None:
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


def test_a_part_that_is_still_being_sent_holds_up_nobody_and_is_looked_for_later(
    link: SuperLink,
) -> None:
    link.put("brief-0", number(0), fault="hole:0")
    link.put("brief-1", number(1))
    mailbox = Mailbox(grid_of(link))
    assert list(looks(mailbox, ["brief-0", "brief-1"])) == [("brief-1", 1)]
    assert mailbox.arriving == {"brief-0"}
    assert list(looks(mailbox, ["brief-0"], 3)) == []
    link.put("brief-2", number(2))  # one that was never waited for comes first
    link.unfinished.clear()
    assert list(looks(mailbox, ["brief-0", "brief-2"])) == [("brief-2", 2), ("brief-0", 0)]


def test_parts_are_looked_for_less_and_less_often_and_not_again_once_they_are_here(
    link: SuperLink, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mail, "AGAIN", 10.0)
    monkeypatch.setattr(mail, "PAUSE", 100.0)
    link.put("brief-0", number(0), fault="hole:0")
    mailbox = Mailbox(grid_of(link))
    assert list(looks(mailbox, ["brief-0"], 3)) == []
    assert link.asked.count("part") == 3  # all three, once
    assert 9.0 < mailbox.rest(60.0) <= 10.0
    assert mailbox.rest(1.0) == 1.0
    mailbox._arriving["brief-0"].due = 0.0
    assert list(looks(mailbox, ["brief-0"], 3)) == []
    assert link.asked.count("part") == 4
    assert 19.0 < mailbox.rest(60.0) <= 20.0
    assert mailbox.stalled(60.0) == []
    mailbox._arriving["brief-0"].moved = time.monotonic() - 61.0
    assert mailbox.stalled(60.0) == ["brief-0"]
    mailbox.drop(["brief-0"])
    assert mailbox.arriving == set()
    assert link.asked[-1] == "done"  # so that the SuperLink refuses the rest of it


def test_an_answer_with_too_many_parts_is_refused_before_anything_of_it_is_fetched(
    link: SuperLink,
) -> None:
    link.put("brief-0", number(0), fault="many:500")
    link.put("brief-1", number(1))
    assert read(link, ["brief-0", "brief-1"]) == {
        "brief-0": "its answer has 503 parts, above the 3 allowed",
        "brief-1": 1,
    }
    assert link.asked == ["messages 2", "done", "part", "part", "part", "done"]


def test_a_part_that_is_too_large_is_not_read(link: SuperLink) -> None:
    link.put("brief-0", number(0), fault="fat:2")
    link.put("brief-1", number(1))
    assert read(link, ["brief-0", "brief-1"]) == {
        "brief-0": "its answer has more than the 1.0 MB allowed",
        "brief-1": 1,
    }
    assert sum(link.sizes) < 5000


def test_all_parts_together_have_the_limit(link: SuperLink) -> None:
    parts = {f"more{i}": ConfigRecord({"more": bytes([i]) * (300 << 10)}) for i in range(4)}
    link.put("brief-0", RecordDict({**number(0), **parts}))
    found = dict(looks(Mailbox(grid_of(link)), ["brief-0"], limit=Limit(7, 1 << 20)))
    assert found == {"brief-0": "its answer has more than the 1.0 MB allowed"}
    assert sum(link.sizes) < 1 << 20
    link.put("brief-0", RecordDict({**number(0), **parts}))
    assert dict(looks(Mailbox(grid_of(link)), ["brief-0"], limit=Limit(7, 2 << 20))) == {
        "brief-0": 0
    }


def test_trouble_is_retried_without_losing_an_answer_that_the_superlink_gives_once(
    link: SuperLink,
) -> None:
    link.trouble = link.part_trouble = 2
    link.put("brief-0", number(0))
    assert read(link, ["brief-0"], 3) == {"brief-0": 0}


def test_a_part_at_which_the_superlink_fails_holds_up_nobody(link: SuperLink) -> None:
    link.troubled.add(link.put("brief-0", number(0)).object_id)
    link.put("brief-1", number(1))
    assert read(link, ["brief-0", "brief-1"], 3) == {"brief-1": 1}


def test_a_heartbeat_that_the_superlink_failed_to_answer_is_tried_again() -> None:
    def beat(sender: int) -> None:
        response = httpx.Response(sender, request=httpx.Request("POST", "http://superlink"))
        response.raise_for_status()

    attempt = insistent(beat)
    attempt(200)
    with pytest.raises(heartbeat.HeartbeatFailure):
        attempt(500)
    with pytest.raises(httpx.HTTPStatusError, match="401"):
        attempt(401)


def test_heartbeats_are_changed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    sender: Any = heartbeat.HeartbeatSender
    monkeypatch.setattr(sender, "_heartbeat", sender._heartbeat)
    monkeypatch.setattr(sender, "insists", False, raising=False)
    monkeypatch.delattr(sender, "insists")
    insist()
    changed = sender._heartbeat
    insist()
    assert sender._heartbeat is changed
    assert changed.__name__ == "attempt"


def test_a_request_of_a_node_that_the_superlink_failed_to_answer_is_tried_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise the node exits."""
    monkeypatch.setattr(http_retry, "_RETRYABLE_STATUS_CODES", http_retry._RETRYABLE_STATUS_CODES)
    statuses = iter([500, 500, 200])

    def request() -> int:
        response = httpx.Response(next(statuses), request=httpx.Request("POST", "http://superlink"))
        return response.raise_for_status().status_code

    invoker = http_retry.make_simple_http_retry_invoker()
    invoker.wait_function = lambda seconds: None
    persist()
    assert invoker.invoke(request) == 200
