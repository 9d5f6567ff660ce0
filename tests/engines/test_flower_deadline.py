"""A round ends at its deadline whatever a node does: Flower's grid, a SuperLink in this process,
faults drawn.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flower_faults import SEEN, TOO_LARGE, draw, reasons
from flower_grid import Node
from flower_link import SuperLink, grid_of
from flwr.app import Message, MessageType, RecordDict
from torch import nn

from kairosfl.core.fields import Briefs, Reports
from kairosfl.engines.flower import collect, roster
from kairosfl.engines.flower.client import client_app
from kairosfl.engines.flower.server import Flower, Settings
from kairosfl.engines.flower.wire import Packing, report_limit
from kairosfl.engines.loop import Loop
from kairosfl.tasks.dataset import DataSet, Samples
from kairosfl.tasks.population import Population
from kairosfl.tasks.task import Task

pytestmark = pytest.mark.usefixtures("quick")
CLIENTS = 12
EVIL = [0, 1, 2, 4, 5, 7, 8, 10]  # the others are honest
DEADLINE = 2.0
GRACE = 5.0


@pytest.fixture(scope="module")
def task() -> Task:
    """Twelve clients with 4 points of three classes."""
    generator = np.random.default_rng(1)
    inputs = torch.from_numpy(generator.normal(size=(4 * CLIENTS, 2)).astype(np.float32))
    samples = Samples(inputs, torch.from_numpy(generator.integers(0, 3, 4 * CLIENTS)))
    torch.manual_seed(0)
    lists = np.arange(4 * CLIENTS).reshape(CLIENTS, 4)
    return Task(
        nn.Linear(2, 3), DataSet("points", samples, samples, 3), Population.from_lists(list(lists))
    )


def orders(task: Task, ids: list[int]) -> Briefs:
    return Briefs(
        seed=1,
        round=2,
        ids=torch.tensor(ids),
        start=task.start(),
        lr=0.1,
        momentum=0.0,
        weight_decay=0.0,
        clip=float("inf"),
        batch_size=4,
        epochs=1,
        scale=1.0,
        pull=0.0,
    )


def link_of(task: Task) -> SuperLink:
    app = client_app(lambda _: task)
    return SuperLink(
        {100 + client: Node(b"key%d" % client, app, str(client)) for client in range(CLIENTS)}
    )


def engine_of(
    link: SuperLink, task: Task, lines: list[str], folder: Path | None = None, **settings: Any
) -> Flower:
    given = Settings(**{"deadline": DEADLINE, "wait": 60.0, "quorum": 0.0} | settings)
    return Flower(grid_of(link), task, given, lines.append, folder=folder)


def fails(link: SuperLink, faults: dict[int, str], kind: str = MessageType.TRAIN) -> None:
    """Order these clients' nodes to fail, and no others."""
    link.orders = {(100 + client, kind): fault for client, fault in faults.items()}
    link.unfinished.clear()  # parts with the same contents have the same name


def timed(engine: Flower, briefs: Briefs) -> tuple[Reports, float]:
    """The reports of a round, and the seconds that it took once all briefs were sent."""
    sent: list[float] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine._board, "begin", lambda *_: sent.append(time.monotonic()))
        return engine.train(briefs), time.monotonic() - sent[0]


def check(engine: Flower, link: SuperLink, task: Task, faults: dict[int, str]) -> None:
    """A round in which these clients fail: it ends in time, the others count, and one line says
    what each did.
    """
    fails(link, faults)
    link.sizes.clear()
    reports, seconds = timed(engine, orders(task, list(range(CLIENTS))))
    honest = [client for client in range(CLIENTS) if client not in faults]
    assert seconds < DEADLINE + GRACE
    assert reports.ids.tolist() == honest
    assert torch.equal(reports.delta, Loop(task).train(orders(task, honest)).delta)
    assert [client for client, _ in reports.failed] == sorted(faults)
    for client, reason in reports.failed:
        assert reason in reasons(faults[client], DEADLINE), (faults[client], reason)
    assert sum(link.sizes) < CLIENTS << 16  # nothing beyond a report's limit was even read


def test_thirty_drawn_faults_cost_their_own_reports(task: Task) -> None:
    link, lines, drawn = link_of(task), list[str](), draw(30, seed=1)
    assert len({fault.partition(":")[0] for fault in drawn}) == 9
    engine = engine_of(link, task, lines)
    while drawn:
        check(engine, link, task, dict(zip(EVIL, drawn, strict=False)))
        drawn = drawn[len(EVIL) :]
    assert len(lines) == CLIENTS  # who is served by whom
    fails(link, {})
    assert engine.train(orders(task, list(range(CLIENTS)))).failed == ()


def test_the_faults_that_were_seen(task: Task) -> None:
    link = link_of(task)
    faults = dict(
        zip(EVIL, ["huge:30" if fault == "huge:300" else fault for fault in SEEN], strict=False)
    )
    check(engine_of(link, task, []), link, task, faults)


@pytest.mark.parametrize("fault", ["huge:2", "fat:2", "keys:10000", "many:100"])
def test_an_answer_that_is_refused_does_not_hold_up_the_round(task: Task, fault: str) -> None:
    assert fault.partition(":")[0] in (*TOO_LARGE, "many")
    link = link_of(task)
    engine = engine_of(link, task, [], deadline=600.0)
    fails(link, {2: fault})
    reports, seconds = timed(engine, orders(task, [0, 2]))
    assert seconds < 60.0
    assert reports.failed == ((2, reasons(fault, 600.0)[0]),)


def test_a_node_that_dies_while_it_uploads_does_not_cost_the_whole_deadline(
    task: Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(collect, "STALLED", 0.0)
    link, lines = link_of(task), list[str]()
    engine = engine_of(link, task, lines, deadline=600.0)
    engine.train(orders(task, [0, 2]))
    fails(link, {2: "die:1"})
    answer = link.answer

    def die(sent: str, reply: Message, fault: str) -> Message:
        if fault:
            del link.nodes[102]
        return answer(sent, reply, fault)

    monkeypatch.setattr(link, "answer", die)
    reports, seconds = timed(engine, orders(task, [0, 2]))
    assert seconds < 60.0
    assert reports.ids.tolist() == [0]
    assert reports.failed == ((2, "its node went offline"),)
    assert lines[-1] == "client 2 no longer has a node"


def test_a_superlink_that_does_not_answer_holds_up_no_deadline(
    task: Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As while it stores a gigabyte that a node sent; the round counts what had arrived."""
    link = link_of(task)
    engine = engine_of(link, task, [])
    engine.train(orders(task, [0, 2]))
    fails(link, {2: "drop:0"})
    busy, pull = threading.Event(), link.pull_object

    def stuck(content: bytes) -> Any:
        response = pull(content)
        if not response.object_available:
            busy.wait(60.0)
        return response

    monkeypatch.setattr(link, "pull_object", stuck)
    monkeypatch.setattr(collect, "FAREWELL", 0.1)
    reports, seconds = timed(engine, orders(task, [0, 2]))
    busy.set()
    assert seconds < DEADLINE + GRACE
    assert reports.ids.tolist() == [0]
    assert reports.failed == ((2, "its answer did not arrive in full in 2 s"),)


def test_a_node_that_never_finishes_its_introduction_holds_up_no_round(
    task: Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(roster, "HOLD", 0.5)
    monkeypatch.setattr(roster, "PATIENCE", 1.0)
    link, lines = link_of(task), list[str]()
    fails(link, {2: "drop:1", 4: "many:3000", 5: "fat:20", 6: "drop:0"}, MessageType.QUERY)
    engine = engine_of(link, task, lines)
    for _ in range(3):
        began = time.monotonic()
        reports = engine.train(orders(task, [0, 1, 2]))
        assert time.monotonic() - began < 30.0  # of the 60 that it waits for clients to be online
        assert reports.ids.tolist() == [0, 1]
        assert reports.failed == ((2, "no node serves it"),)
    assert (
        "node 104 did not say which clients it serves: its answer has 3003 parts, above the 3 allowed"
        in lines
    )
    assert (
        "node 105 did not say which clients it serves: its answer has more than the 1.0 MB allowed"
        in lines
    )
    time.sleep(1.0)
    fails(link, {})
    engine.train(orders(task, [0]))
    assert "node 102 did not say which clients it serves: no answer" in lines
    assert engine.train(orders(task, [0, 2, 4, 5])).failed == ()


def test_an_error_in_the_collecting_thread_ends_the_round(
    task: Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = link_of(task)
    engine = engine_of(link, task, [], deadline=600.0)
    engine.train(orders(task, [0]))

    def broken() -> None:
        raise OSError("no disk")

    monkeypatch.setattr(engine._registry, "poll", broken)
    monkeypatch.setattr(engine, "_gather", lambda *_: None)
    fails(link, {2: "drop:0"})
    with pytest.raises(OSError, match="no disk"):
        engine.train(orders(task, [0, 2]))


@pytest.mark.parametrize(
    "packing", [Packing(), Packing("float16"), Packing(keep=0.3), Packing("float16", 0.5)]
)
@pytest.mark.parametrize("size", [3, 40_000, 300_000])
def test_an_honest_report_is_within_its_limit(
    packing: Packing, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects

    from kairosfl.core.fields import Report
    from kairosfl.engines.flower import wire

    monkeypatch.setattr(wire, "PIECE", 200_000)
    delta = torch.rand(size, generator=torch.Generator().manual_seed(0))
    report = Report(
        client=0, n=1, steps=1, epochs=1.0, delta=delta, loss=1.0, grad_sq=1.0, seconds=1.0
    )
    SuperLink()
    question = Message(RecordDict(), 7, "train")
    question.metadata.__dict__["_message_id"] = "brief"
    parts = get_all_nested_objects(
        Message(wire.report_record(report, 0, packing), reply_to=question)
    )
    limit = report_limit(size, torch.float32, packing)
    assert len(parts) <= limit.objects
    if size == 300_000:
        assert len(parts) == limit.objects
    assert sum(len(part.deflate()) for part in parts.values()) <= limit.size - 1_000_000
