"""Engine `flower` over a grid in this process: rounds, deadlines, quorums, the roster, and hostile
nodes.
"""

from __future__ import annotations

import copy
import json
import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flower_grid import App, FakeGrid, Node
from flwr.app import ConfigRecord, Context, Error, Message, MessageType, RecordDict
from torch import nn

from kairosfl.core.fields import Brief, Briefs
from kairosfl.core.recipe import Recipe
from kairosfl.core.round import drive, result, rounds
from kairosfl.core.run import Run, Setup
from kairosfl.detectors import FGN
from kairosfl.engines.flower import collect, enrol, mail, roster, server
from kairosfl.engines.flower.checks import Trust
from kairosfl.engines.flower.client import SEEDED, _insist, client_app
from kairosfl.engines.flower.mail import clean
from kairosfl.engines.flower.roster import Roster, fingerprint, parse_ids
from kairosfl.engines.flower.server import Flower, Settings
from kairosfl.engines.flower.wire import NUMBERS, Limit, Packing, Piece, asked_hashes, piece_record
from kairosfl.engines.loop import Loop
from kairosfl.errors import UserError
from kairosfl.rules import parse
from kairosfl.tasks.dataset import DataSet, Samples
from kairosfl.tasks.population import Population
from kairosfl.tasks.task import Task

pytestmark = pytest.mark.usefixtures("quick")

CLIENTS = 6


@pytest.fixture(scope="module")
def task() -> Task:
    """Six clients with 4, 8, ... 24 points of three classes."""
    generator = np.random.default_rng(1)
    sizes = [4 * (i + 1) for i in range(CLIENTS)]
    inputs = torch.from_numpy(generator.normal(size=(sum(sizes), 2)).astype(np.float32))
    samples = Samples(inputs, torch.from_numpy(generator.integers(0, 3, sum(sizes))))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2, 5), nn.Tanh(), nn.Linear(5, 3))
    population = Population(np.arange(sum(sizes)), np.concatenate([[0], np.cumsum(sizes)]))
    return Task(model, DataSet("points", samples, samples, 3), population)


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
        epochs=2,
        scale=1.0,
        pull=0.0,
    )


def grid_of(app: App, nodes: int = CLIENTS, **apps: App) -> FakeGrid:
    """A node for every client; `client3=app` gives client 3 another app."""
    return FakeGrid(
        {100 + i: Node(b"key%d" % i, apps.get(f"client{i}", app), str(i)) for i in range(nodes)}
    )


def engine_of(
    grid: FakeGrid, task: Task, lines: list[str] | None = None, **settings: object
) -> Flower:
    given = Settings(**{"deadline": 60.0, "wait": 0.0, "quorum": 0.0} | settings)  # type: ignore[arg-type]
    return Flower(grid, task, given, [].append if lines is None else lines.append)


@pytest.mark.parametrize(
    "text",
    [
        "scaffold + fedcl + alt + pa3fed",
        "budget(share=0.7) + average(share=1)",
        "moon",
        "fedmut + fedavgm",
        "fedavgm + privacy(clip=0.1)",
        "scaffold + localprivacy(clip=0.1)",
    ],
)
def test_the_bits_of_the_loop_engine(
    task: Task, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SEEDED, "1")
    algorithm = parse(text)
    recipe = Recipe(rounds=3, cohort=4, epochs=3, batch_size=4, lr=0.1, momentum=0.5)
    grid = FakeGrid(
        {
            7: Node(b"a", client_app(lambda _: task), "0-2"),
            9: Node(b"b", client_app(lambda _: task), "3,4-5"),
        }
    )
    setup, ends = Setup(algorithm, recipe, CLIENTS, task.layout, detectors=(FGN(),)), []
    for engine in (Loop(task), Flower(grid, task, Settings(), print)):
        run = Run.start(engine.start(), setup, seed=2)
        course = rounds(run, setup)
        ends.append([(result(run, setup), run.record.rejected) for run in drive(course, engine)])
        scores = engine.evaluate(ends[-1][-1][0])
    for (x, rejected), (y, also) in zip(*ends, strict=True):
        assert torch.equal(x, y)
        assert rejected == also == ()
    assert scores == Loop(task).evaluate(x)


@pytest.mark.parametrize(
    "changes", [{"optimizer": "adamw", "weight_decay": 0.1, "beta1": 0.5}, {"momentum": 0.5}]
)
def test_adamw_and_a_radius_arrive(task: Task, changes: dict[str, Any]) -> None:
    recipe = Recipe(rounds=2, cohort=4, epochs=2, batch_size=4, lr=0.1, clip=0.5, **changes)
    flower = engine_of(grid_of(client_app(lambda _: task)), task)
    ends = []
    for engine, text in (
        (Loop(task), "fedsam(rho=0.3)"),
        (flower, "fedsam(rho=0.3)"),
        (flower, "fedavg"),
    ):
        setup = Setup(parse(text), recipe, CLIENTS, task.layout, detectors=(FGN(),))
        *_, run = drive(rounds(Run.start(task.start(), setup, seed=2), setup), engine)
        assert run.record.rejected == ()
        ends.append(run.x)
    assert torch.equal(ends[0], ends[1])
    assert not torch.equal(ends[1], ends[2])


def test_a_devices_noise_is_its_own_and_new_in_every_message(task: Task) -> None:
    """Otherwise the server could draw it, or ask twice and subtract."""
    briefs = replace(orders(task, [1, 4]), update_clip=1.0, update_noise=0.5)  # type: ignore[arg-type]
    engine = engine_of(grid_of(client_app(lambda _: task)), task)
    found = [Loop(task).train(briefs).delta, engine.train(briefs).delta, engine.train(briefs).delta]
    noises = [delta - Loop(task).train(orders(task, [1, 4])).delta for delta in found]
    for i, one in enumerate(noises):
        assert 0.3 < float(one.std()) < 0.7
        for other in noises[:i]:
            assert (
                abs(float(torch.corrcoef(torch.stack([one.flatten(), other.flatten()]))[0, 1]))
                < 0.5
            )


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"update_clip": 1.0},
        {"update_clip": 2.0, "update_noise": 0.5},
        {"update_clip": 1.0, "update_noise": 0.4},
    ],
)
def test_a_device_insists_on_its_own_noise(task: Task, changes: dict[str, Any]) -> None:
    app = client_app(lambda _: task, update_clip=1.0, update_noise=0.5)
    reports = engine_of(grid_of(app), task).train(replace(orders(task, [1]), **changes))
    assert "update_clip = 1 and update_noise = 0.5 or stricter" in reports.failed[0][1]
    stricter: dict[str, Any] = {"update_clip": 0.9, "update_noise": 0.5}
    assert engine_of(grid_of(app), task).train(replace(orders(task, [1]), **stricter)).failed == ()


def test_a_device_that_adds_noise_does_not_stop_early(task: Task) -> None:
    told = Brief(
        **vars(next(orders(task, [1]).each()))
        | {"update_clip": 1.0, "update_noise": 1.0, "stop_below": 0.9}
    )
    with pytest.raises(
        UserError, match="does not stop early: how long it trained would tell about its data"
    ):
        _insist(told, 1.0, 0.5)
    _insist(told, math.inf, 0.0)


def test_a_device_with_only_its_own_data_follows_the_same_brief(task: Task) -> None:
    def mine(client: int | None) -> Task:
        rows = task.clients[client or 0]
        train = Samples(task.dataset.train.inputs[rows], task.dataset.train.targets[rows])
        dataset = replace(task.dataset, train=train)
        return replace(task, dataset=dataset, clients=Population.from_lists([np.arange(len(rows))]))

    briefs = orders(task, [1, 4])
    reports = engine_of(grid_of(client_app(mine)), task).train(briefs)
    assert torch.equal(reports.delta, Loop(task).train(briefs).delta)
    assert reports.n.tolist() == [8, 20]


def test_a_frozen_part_stays_with_the_task_and_is_never_sent(task: Task) -> None:
    model = copy.deepcopy(task.model)
    model[0].requires_grad_(False)
    model[0].register_buffer("constant", torch.arange(3))
    part = replace(task, model=model)
    engine = engine_of(grid_of(client_app(lambda _: part)), part)
    assert engine.task.base_hash == part.base_hash is not None
    assert [parameter.is_meta for parameter in engine.task.model.parameters()] == [
        False,
        False,
        True,
        True,
    ]
    briefs, loop = orders(part, [1, 4]), Loop(part)
    assert briefs.start.shape == (18,)
    reports = engine.train(briefs)
    assert torch.equal(reports.delta, loop.train(briefs).delta)
    assert engine.evaluate(briefs.start + reports.delta[0]) == loop.evaluate(
        briefs.start + reports.delta[0]
    )
    whole = engine_of(grid_of(client_app(lambda _: task)), part).train(orders(part, [1]))
    assert "the server's model has 18 parameters, but this client's has 33;" in whole.failed[0][1]


def test_a_node_with_another_frozen_part_is_rejected_and_the_others_hash_theirs_once(
    task: Task,
) -> None:
    def frozen(value: float) -> Task:
        model = copy.deepcopy(task.model)
        model[0].requires_grad_(False)
        model[0].weight.data.fill_(value)
        return replace(task, model=model)

    ours, other = frozen(1.0), frozen(2.0)
    grid = grid_of(client_app(lambda _: ours), client4=client_app(lambda _: other))
    engine = engine_of(grid, ours)
    for _ in range(2):
        reports = engine.train(orders(ours, [1, 4]))
        assert reports.ids.tolist() == [1]
        ((client, reason),) = reports.failed
        assert client == 4
        assert (
            f"the frozen part of this client's model has the hash {str(other.base_hash)[:12]}, the server's"
            in reason
        )
    sent = [message for message in grid.sent if message.metadata.message_type == MessageType.TRAIN]
    asked = [(message.metadata.dst_node_id, asked_hashes(message.content)) for message in sent]
    assert asked == [
        (101, enrol.wanted(ours)),
        (104, enrol.wanted(ours)),
        (101, {}),
        (104, enrol.wanted(ours)),
    ]
    assert enrol.wanted(ours)[enrol.BASE] == ours.base_hash


@pytest.mark.parametrize("other", ["layer", "name", "kind"])
def test_a_node_with_another_task_of_the_same_size_is_rejected(task: Task, other: str) -> None:
    model = copy.deepcopy(task.model)
    if other == "layer":
        model[1] = nn.ReLU()
    elif other == "name":
        model = nn.Sequential(*model[:2], nn.Identity(), model[2])
    theirs = replace(task, model=model)
    if other == "kind":
        theirs = replace(task, loss=lambda outputs, targets: outputs.sum(1))
    assert theirs.layout.size == task.layout.size
    grid = grid_of(client_app(lambda _: task), client4=client_app(lambda _: theirs))
    reports = engine_of(grid, task).train(orders(task, [1, 4]))
    assert reports.ids.tolist() == [1]
    ((client, reason),) = reports.failed
    assert client == 4
    assert (
        f"this client's task have the hash {enrol.task_hash(theirs)[:12]}, the server's" in reason
    )


def test_small_briefs_are_sent_in_one_request_and_large_ones_alone(
    task: Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes: list[int] = []

    class Counted(FakeGrid):
        def push_messages(self, messages: Iterable[Message]) -> list[str]:
            sizes.append(len(list(messages)))
            return super().push_messages(messages)

    grid = grid_of(client_app(lambda _: task))
    grid = Counted(grid.nodes)
    engine = engine_of(grid, task)
    engine.train(orders(task, [0]))  # nodes introduce themselves
    sizes.clear()
    wanted = engine.train(orders(task, [0, 2, 5])).delta
    assert sizes == [3]
    monkeypatch.setattr(server, "SMALL", 0)
    assert torch.equal(engine.train(orders(task, [0, 2, 5])).delta, wanted)
    assert sizes == [3, 1, 1, 1]


@pytest.mark.parametrize(
    "damage", ["", "[]", "null", '{"a": "x"}', '{"0": 5}', "\0", "[" * 100_000]
)
def test_a_damaged_roster_is_named_and_not_begun_anew(tmp_path: Path, damage: str) -> None:
    (tmp_path / "roster.json").write_text(damage)
    with pytest.raises(UserError, match=r"roster\.json"):
        Roster(2, tmp_path / "roster.json")
    assert (tmp_path / "roster.json").read_text() == damage


Change = Callable[[RecordDict], None]


def spoilt(task: Task, change: Change) -> App:
    """A client whose report is changed before it is sent."""
    honest = client_app(lambda _: task)

    def app(message: Message, context: Context) -> Message:
        reply = honest(message, context)
        if message.metadata.message_type == MessageType.TRAIN:
            change(reply.content)
        return reply

    return app


def number(name: str, value: object) -> Change:
    return lambda content: content[NUMBERS].__setitem__(name, value)


def update(array: np.ndarray) -> Change:
    piece = piece_record(Piece(array.dtype.name, array.shape, array.tobytes()))
    return lambda content: content.__setitem__("delta.0", piece)


def broken(task: Task, happens: Callable[[Message], Message]) -> App:
    """A client that introduces itself and then fails."""
    honest = client_app(lambda _: task)

    def app(message: Message, context: Context) -> Message:
        return (
            honest(message, context)
            if message.metadata.message_type == MessageType.QUERY
            else happens(message)
        )

    return app


def raises(message: Message) -> Message:
    raise OSError("no battery\nround 9: client 0 does not count: a forged line " + 300 * "x")


def dies(message: Message) -> Message:
    return Message(Error(8, "crashed"), reply_to=message)


D = 2 * 5 + 5 + 5 * 3 + 3


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (update(np.full(D, np.nan, np.float32)), "its update is not finite"),
        (update(np.zeros(D - 1, np.float32)), "its update has the shape (32,), not (33,)"),
        (
            update(np.zeros(1, np.float32)),
            "its update has the shape (1,), not (33,)",
        ),  # would broadcast
        (update(np.zeros((1, D), np.float32)), "its update has the shape (1, 33), not (33,)"),
        (
            update(np.full(D, 1e6, np.float32)),
            "its update has the norm 5.74e+06, above deploy.max_norm = 10000",
        ),
        (update(np.zeros(D, np.float64)), "its update is float64, not float32"),
        (number("round", 1), "its report is of round 2, not 3"),
        (number("client", 0), "it answered as client 0"),
        (number("n", 10**6), "it did 8 steps, where 500000 were ordered for its 1000000 samples"),
        (lambda content: content.clear(), "its answer is not a report"),
        (
            lambda content: content.__setitem__(
                "delta.0", ConfigRecord({"dtype": "float32", "shape": ["x"]})
            ),
            "its delta.0 has an unknown format",
        ),
    ],
)
def test_a_bad_report_touches_nothing(task: Task, change: Change, reason: str) -> None:
    honest = client_app(lambda _: task)
    engine = engine_of(grid_of(honest, client3=spoilt(task, change)), task)
    reports = engine.train(orders(task, [0, 3, 5]))
    assert reports.failed == ((3, reason),)
    assert torch.equal(reports.delta, Loop(task).train(orders(task, [0, 5])).delta)


def test_failures_in_one_line(task: Task) -> None:
    honest = client_app(lambda _: task)
    reports = engine_of(grid_of(honest, client3=broken(task, raises)), task).train(
        orders(task, [0, 3])
    )
    ((client, reason),) = reports.failed
    assert client == 3
    assert reason.startswith(
        "it raised <class 'OSError'>:<'no battery round 9: client 0 does not count"
    )
    assert len(reason) == 200
    assert "\n" not in reason
    reports = engine_of(grid_of(honest, client3=broken(task, dies)), task).train(
        orders(task, [0, 3])
    )
    assert reports.failed == ((3, "its process died"),)


def test_late_absent_and_missing(task: Task) -> None:
    grid = grid_of(client_app(lambda _: task), nodes=4)
    grid.nodes[101].late = 10**9  # its introduction is late, too
    reports = engine_of(grid, task, deadline=1.0).train(orders(task, [0, 1, 5]))
    assert reports.ids.tolist() == [0]
    assert reports.failed == ((1, "no node serves it"), (5, "no node serves it"))
    engine = engine_of(grid_of(client_app(lambda _: task)), task, deadline=1.0)
    engine.train(orders(task, [0]))
    engine.grid.nodes[101].late = 10**9
    reports = engine.train(orders(task, [0, 1, 5]))
    assert reports.ids.tolist() == [0, 5]
    assert reports.failed == ((1, "no answer in 1 s"),)
    engine.grid.nodes[101].late = 0
    again = engine.train(
        replace(orders(task, [0, 1, 5]), round=3)
    )  # the late report of round 2 is not looked at
    assert again.failed == ()


def test_a_message_that_flower_drops_when_it_is_due_had_no_answer(
    task: Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = engine_of(grid_of(client_app(lambda _: task)), task, deadline=0.3)
    engine.train(orders(task, [0]))
    began: dict[str, float] = {}

    def slowly(grid: FakeGrid, messages: list[Message]) -> list[str | None]:
        sent = mail.push(grid, messages)
        began[str(sent[0])] = time.monotonic()
        time.sleep(0.2)  # the first message is due before the server stops waiting
        return sent

    class Dropping(mail.Mailbox):
        def ask(self, waiting: Mapping[str, Limit]) -> bool:
            first = next(iter(began))
            if first in waiting and time.monotonic() >= began[first] + 0.3:
                self._ready.append((first, "its message was lost"))
            return super().ask({sent: limit for sent, limit in waiting.items() if sent != first})

    monkeypatch.setattr(server, "BATCH", 1)
    monkeypatch.setattr(server, "push", slowly)
    monkeypatch.setattr(collect, "Mailbox", Dropping)
    assert engine.train(orders(task, [1, 5])).failed == ((1, "no answer in 0.3 s"),)


def test_no_quorum_no_round(task: Task) -> None:
    grid = grid_of(
        client_app(lambda _: task), client3=broken(task, dies), client4=broken(task, dies)
    )
    reports = engine_of(grid, task, quorum=0.5).train(orders(task, [0, 3, 4]))
    assert len(reports) == 0
    assert reports.delta.shape == (0, D)
    missed = "1 accepted reports do not reach the quorum of 2"
    assert reports.failed == ((0, missed), (3, "its process died"), (4, "its process died"))
    assert len(engine_of(grid, task, quorum=0.5).train(orders(task, [0, 1, 3, 4]))) == 2


def test_over_selection(task: Task) -> None:
    settings = Settings(over=0.3)
    assert settings.asked(10, 100) == 13
    assert settings.asked(10, 12) == 12
    for cohort, clients in ((10, 100), (10, 12), (10, 10), (3, 100), (100, 100), (1, 7)):
        near = Settings(over=0.3, cohort=cohort)
        assert near.needed(near.asked(cohort, clients), clients) == cohort
    assert (
        Settings(over=0.3, cohort=100).needed(50, 100) == 38
    )  # fewer, by a rule: the slowest are not waited for
    assert Settings(over=0.3, cohort=10).needed(100, 100) == 76  # more, by a rule
    assert Settings(over=0.3, cohort=10).needed(8, 8) == 8
    assert [Settings(over=0.5).needed(m, 100) for m in (1, 2, 3)] == [1, 1, 2]
    grid = grid_of(client_app(lambda _: task))
    grid.nodes[100].late = 10
    engine = engine_of(grid, task, over=0.5, deadline=60.0, wait=60.0, quorum=1.0)
    engine.train(orders(task, [0]))
    reports = engine.train(orders(task, [0, 2, 4]))
    assert reports.ids.tolist() == [2, 4]
    assert reports.failed == ((0, "the round ended without it"),)


def test_updates_on_disk_and_packed(task: Task, tmp_path: Path) -> None:
    grid = grid_of(client_app(lambda _: task), client3=broken(task, dies))
    briefs = orders(task, [0, 2, 3, 5])
    wanted = Loop(task).train(orders(task, [0, 2, 5])).delta
    engine = Flower(grid, task, Settings(quorum=0.0, on_disk=0), print, folder=tmp_path)
    reports = engine.train(briefs)
    assert torch.equal(reports.delta, wanted)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "roster.json",
        "status.json",
    ]  # the file has no name
    half = engine_of(grid, task, packing=Packing("float16")).train(briefs)
    assert torch.equal(half.delta, wanted.half().float())
    top = engine_of(grid, task, packing=Packing(keep=0.1)).train(briefs)
    assert (top.delta != 0).sum(1).tolist() == [4, 4, 4]
    assert torch.equal(top.delta[top.delta != 0], wanted[top.delta != 0])


def test_an_update_above_the_clip_is_scaled(task: Task) -> None:
    grid = grid_of(client_app(lambda _: task))
    wanted = Loop(task).train(orders(task, [2])).delta[0]
    reports = engine_of(grid, task, trust=Trust(clip_norm=0.01)).train(orders(task, [2]))
    norm = float(wanted.double().norm())
    assert norm > 0.01
    assert torch.equal(reports.delta[0], wanted * (0.01 / norm))


def test_a_second_claimant_is_refused(task: Task, tmp_path: Path) -> None:
    honest = client_app(lambda _: task)
    grid, lines = grid_of(honest, nodes=2), []
    engine = Flower(
        grid, task, Settings(deadline=0.2, wait=0.0, quorum=0.0), lines.append, folder=tmp_path
    )
    engine.train(orders(task, [0, 1]))
    owner, thief = fingerprint(b"key1"), fingerprint(b"thief")
    assert lines == [
        f"client 0 is served by node 100 (key {fingerprint(b'key0')})",
        f"client 1 is served by node 101 (key {owner})",
    ]
    lines.clear()
    grid.nodes[200] = Node(b"thief", honest, "1,2,77")
    engine.train(orders(task, [0, 1]))
    assert lines == [
        f"node 200 (key {thief}) claims client 1 of key {owner}: rejected",
        f"client 2 is served by node 200 (key {thief})",
        f"node 200 (key {thief}) claims client 77, which does not exist: rejected",
    ]
    assert grid.sent[-1].metadata.dst_node_id == 101
    # The owner leaves, and the thief stays refused, also by a server that was started again.
    lines.clear()
    del grid.nodes[101]
    reports = engine.train(orders(task, [0, 1]))
    assert lines == ["client 1 no longer has a node"]
    assert reports.failed == ((1, "no node serves it"),)
    fresh = Flower(
        grid, task, Settings(deadline=0.2, wait=0.0, quorum=0.0), lines.append, folder=tmp_path
    )
    assert fresh.train(orders(task, [0, 1])).failed == ((1, "no node serves it"),)
    # The owner comes back as another node with the same key: known, and not asked again.
    grid.nodes[300] = Node(b"key1", honest, "1")
    grid.sent.clear()
    assert fresh.train(orders(task, [0, 1])).failed == ()
    assert [message.metadata.message_type for message in grid.sent] == [MessageType.TRAIN] * 2
    assert json.loads((tmp_path / "roster.json").read_text()) == {
        "0": fingerprint(b"key0"),
        "1": owner,
        "2": thief,
    }


def test_a_node_that_says_nonsense_is_asked_again(
    task: Task, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(roster, "PATIENCE", 0.0)
    said = iter([{"clients": "all"}, {"clients": list(range(20_000))}, {"clients": [0]}])

    def app(message: Message, context: Context) -> Message:
        if message.metadata.message_type == MessageType.QUERY:
            return Message(RecordDict({NUMBERS: ConfigRecord(next(said))}), reply_to=message)
        return client_app(lambda _: task)(message, context)

    lines: list[str] = []
    reports = engine_of(grid_of(app, nodes=1), task, lines, wait=60.0).train(orders(task, [0]))
    assert len(reports) == 1
    assert (
        lines[:2]
        == ["node 100 did not say which clients it serves: its answer is not a list of clients"] * 2
    )


def test_a_client_does_not_follow_another_clients_brief(task: Task) -> None:
    grid = grid_of(client_app(lambda _: task))
    engine = engine_of(grid, task)
    engine.train(orders(task, [0]))
    grid.nodes[101].clients = "2"  # restarted in a blink, with another client
    assert engine.train(orders(task, [0, 1])).failed == ((1, "its node no longer serves it"),)
    assert engine.roster.nodes == {
        0: 100,
        2: 102,
        3: 103,
        4: 104,
        5: 105,
    }  # client 2 belongs to another key
    small = replace(task, model=nn.Linear(2, 3))
    ((_, reason),) = (
        engine_of(grid_of(client_app(lambda _: small)), task).train(orders(task, [0])).failed
    )
    assert reason.endswith(
        "the server's model has 33 parameters, but this client's has 9; give both the same task.py.'>"
    )


def test_ids_and_names() -> None:
    assert parse_ids("7") == [7]
    assert parse_ids("0-2, 5") == [0, 1, 2, 5]
    for wrong in ("", "a", "1-", "-1", "1,,2"):
        with pytest.raises(UserError, match="cannot be parsed; write client ids like"):
            parse_ids(wrong)
    assert clean("a\nb\x1b[31mc") == "a b [31mc"
    assert Roster(3).claim(1, b"k", []) == []


@pytest.mark.parametrize(
    "wrong", [{"deadline": 0.0}, {"quorum": 1.5}, {"over": -0.1}, {"wait": -1.0}, {"on_disk": -1}]
)
def test_settings_that_make_no_sense(wrong: dict[str, float]) -> None:
    with pytest.raises(UserError, match=rf"deploy\.{next(iter(wrong))} = "):
        Settings(**wrong)  # type: ignore[arg-type]


def test_a_start_of_another_size(task: Task) -> None:
    with pytest.raises(
        UserError,
        match=r"deploy\.start has 3 parameters, but the model has 33; give a run of the same model\.",
    ):
        Flower(grid_of(client_app(lambda _: task)), task, Settings(), print, start=torch.zeros(3))
