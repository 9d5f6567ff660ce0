"""What clients keep on their devices, and everything else that a brief can ask, over Flower's own
records: the results of the loop.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from asking import (
    APFL,
    ASKED,
    BOTH,
    EVERYONE,
    Told,
    check_reports,
    check_same,
    course,
    line,
    nothing,
    setup_of,
)
from flower_grid import FakeGrid, Node
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from safetensors import safe_open

from kairosfl.client.trainer import Trainer
from kairosfl.core.fields import Brief, Briefs, Report
from kairosfl.core.round import drive, rounds
from kairosfl.core.run import Run
from kairosfl.engines.flower.client import client_app
from kairosfl.engines.flower.keep import KEPT, Store, digest
from kairosfl.engines.flower.server import Flower, Settings
from kairosfl.engines.flower.wire import NUMBERS, brief_record, read_brief
from kairosfl.engines.loop import Loop
from kairosfl.errors import UserError
from kairosfl.runs.checkpoint import Checkpoints
from kairosfl.tasks.task import Task

pytestmark = pytest.mark.usefixtures("quick")

MARK = "0123456789abcdef"


@pytest.fixture(autouse=True)
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("KAIROSFL_KEPT", str(tmp_path / "kept"))
    return tmp_path / "kept"


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """(round, client) of every brief that a trainer followed."""
    followed: list[tuple[int, int]] = []
    follow = Trainer.follow

    def noted(self: Trainer, brief: Brief, delta: Any = None) -> Report:
        if brief.epochs:
            followed.append((brief.round, brief.client))
        return follow(self, brief, delta)

    monkeypatch.setattr(Trainer, "follow", noted)
    return followed


def grid_of(task: Task, seen: list[RecordDict] | None = None) -> FakeGrid:
    """One node serves clients 0 and 1, another one client 2."""

    def watch(message: Message, context: Context, follow: Any) -> Message:
        reply: Message = follow(message, context)
        if seen is not None:
            seen.extend((message.content, reply.content))
        return reply

    app = client_app(lambda _: task, mods=[watch])
    return FakeGrid({7: Node(b"a", app, "0-1"), 9: Node(b"b", app, "2")})


def flower(task: Task, grid: FakeGrid | None = None, mark: str | None = MARK) -> Flower:
    settings = Settings(deadline=60.0, wait=0.0, quorum=0.0)
    return Flower(grid or grid_of(task), task, settings, lambda _: None, mark=mark)


def held(task: Task, client: int, mark: str = MARK) -> dict[str, torch.Tensor]:
    """What a client keeps."""
    visit = Store(mark, client, task.layout.hash).read()
    assert visit is not None
    return dict(visit.after)


@pytest.mark.parametrize("name", ASKED)
def test_the_bits_of_the_loop(name: str) -> None:
    rule, own = ASKED[name]
    task = line(own)
    loop = course(rule, task, Loop(task))
    devices = course(rule, task, flower(task), devices=True)
    check_same(loop, devices)
    assert len(devices[-1].kept) == 0  # the server has nothing of it
    if loop[-1].kept.default:
        for client in range(3):
            rows = loop[-1].kept.rows(torch.tensor([client]))
            kept = held(task, client)
            assert kept.keys() == rows.keys()
            for field, tensor in kept.items():
                assert torch.equal(tensor, rows[field][0]), field


@pytest.mark.parametrize("name", ["own", "apfl"])
def test_no_message_carries_what_is_kept(name: str) -> None:
    rule, own = ASKED[name]
    task = line(own)
    records: list[RecordDict] = []
    course(rule, task, flower(task, grid_of(task, records)), devices=True)
    contents = [_bytes(record) for record in records]
    assert len(contents) > 10
    kept = [tensor for client in range(3) for tensor in held(task, client).values()]
    assert kept
    for record, content in zip(records, contents, strict=True):
        names = {key.partition(".")[0] for part in record.values() for key in part}
        assert not names & {entry.row for entry in KEPT}
        for tensor in kept:
            assert tensor.numpy().tobytes() not in content


def _bytes(record: RecordDict) -> bytes:
    """Everything in a message, also numbers, as they are in memory."""
    parts = []
    for part in record.values():
        assert isinstance(part, ArrayRecord | ConfigRecord)
        for value in part.values():
            if isinstance(value, float):
                parts.append(torch.tensor(value, dtype=torch.float64).numpy().tobytes())
            elif isinstance(value, bytes):
                parts.append(value)
            elif hasattr(value, "data"):
                parts.append(bytes(value.data))
    return b"".join(parts)


def orders(task: Task, round: int = 0, **terms: Any) -> Briefs:
    return Briefs(
        seed=3,
        round=round,
        ids=EVERYONE,
        start=task.start(),
        lr=0.1,
        batch_size=2,
        counted=torch.tensor([-1, 0, -1]),
        **terms,
    )


def test_an_order_that_comes_twice_is_answered_without_training_twice(
    trained: list[tuple[int, int]],
) -> None:
    task = line(("b",))
    first = flower(task).train(orders(task))
    kept = [held(task, client) for client in range(3)]
    again = flower(task).train(orders(task))  # server, SuperLink and nodes were started again
    assert trained == [(0, 0), (0, 1), (0, 2)]
    check_reports(first, again)
    assert torch.equal(first.seconds, again.seconds)
    for client in range(3):
        assert torch.equal(held(task, client)["own"], kept[client]["own"])


def test_another_order_of_the_same_round_starts_from_what_was_kept_before() -> None:
    """A server went back to a checkpoint, and the operator changed the learning rate."""
    task = line(("b",))
    flower(task).train(orders(task))
    before = held(task, 0)["own"]
    flower(task).train(orders(task, 1))
    flower(task).train(replace(orders(task, 1), lr=torch.full((3,), 0.3).double()))
    after = held(task, 0)["own"]

    brief = next(orders(task, 1).each())
    expected = Loop(task).trainer.follow(replace(brief, own=before, lr=float(torch.tensor(0.3))))
    assert torch.equal(after, expected.own)


def test_measuring_moves_nothing_and_sees_what_is_kept() -> None:
    task = line(("b",))
    flower(task).train(orders(task))
    kept = held(task, 1)["own"]
    asked = orders(task, 1, epochs=0, measure=frozenset({"score_before"}))
    answers = flower(task).train(asked)
    assert answers.delta.shape == (3, 0)
    assert answers.steps.tolist() == [0, 0, 0]
    assert torch.equal(held(task, 1)["own"], kept)
    told = replace(asked, own=torch.stack([held(task, client)["own"] for client in range(3)]))
    check_reports(answers, Loop(task).train(told).without_kept())


def test_who_only_measured_must_not_claim_to_have_trained() -> None:
    task = line()
    seen: list[RecordDict] = []

    def lies(message: Message, context: Context, follow: Any) -> Message:
        reply: Message = follow(message, context)
        reply.content[NUMBERS]["steps"] = 3
        seen.append(reply.content)
        return reply

    app = client_app(lambda _: task, mods=[lies])
    grid = FakeGrid({7: Node(b"a", app, "0-2")})
    reports = flower(task, grid).train(orders(task, epochs=0, measure=frozenset({"score_before"})))
    assert reports.failed[0] == (0, "it did 3 steps, where none was ordered")


def test_a_client_is_told_which_of_its_reports_counted_last() -> None:
    task = line()
    rule = Told(told=APFL, keeps=BOTH)
    records: list[RecordDict] = []
    course(rule, task, flower(task, grid_of(task, records)), devices=True)
    told = {}
    for record in records:
        if "start.0" in record.get(NUMBERS, {}):
            brief, _ = read_brief(record)
            told[brief.round, brief.client] = brief.counted
    assert told == {(0, 0): -1, (0, 1): -1, (0, 2): -1, (1, 1): 0, (1, 2): 0, (2, 0): 0, (2, 2): 1}


def test_a_run_goes_on_after_everything_was_started_again(tmp_path: Path) -> None:
    task = line()
    rule = Told(told=APFL, keeps=BOTH)
    whole = course(rule, task, flower(task, mark="f" * 16), devices=True, number=4)

    setup = setup_of(rule, task, 4, devices=True)
    going = drive(rounds(Run.start(task.start(), setup, seed=3), setup), flower(task))
    run = next(going)
    Checkpoints(tmp_path).save(run, {})
    next(going)  # a round that the checkpoint does not know
    loaded, _ = Checkpoints(tmp_path).load(Run.start(task.start(), setup, seed=3))
    *_, last = drive(rounds(loaded, setup), flower(task))
    assert torch.equal(last.x, whole[-1].x)
    for client in range(3):
        theirs = held(task, client, "f" * 16)
        for name, tensor in held(task, client).items():
            assert torch.equal(tensor, theirs[name])


def test_another_run_starts_from_the_first_part() -> None:
    task = line(("b",))
    first = flower(task).train(orders(task))
    flower(task).train(orders(task, 1))
    again = flower(task, mark=None).train(orders(task))
    check_reports(first, again)


def test_a_damaged_file_is_put_aside_and_the_client_starts_anew(
    place: Path, trained: list[tuple[int, int]]
) -> None:
    task = line(("b",))
    first = flower(task).train(orders(task))
    file = place / MARK / "client-1.safetensors"
    content = bytearray(file.read_bytes())
    content[-3] ^= 1  # one bit of what is kept
    file.write_bytes(content)

    reports = flower(task).train(orders(task, 1))
    ((client, reason),) = reports.failed
    assert client == 1
    assert "what client 1 kept is damaged and is now client-1.damaged" in reason
    assert (place / MARK / "client-1.damaged").exists()
    assert (1, 1) not in trained
    again = flower(task).train(orders(task))
    row = torch.tensor([1])
    check_reports(first.take(row), again.take(row))  # as if for the first time


@pytest.mark.parametrize("content", [b"", b"nonsense", b"\xff" * 64])
def test_a_file_that_is_none_is_damaged(place: Path, content: bytes) -> None:
    task = line(("b",))
    (place / MARK).mkdir(parents=True)
    (place / MARK / "client-0.safetensors").write_bytes(content)
    with pytest.raises(UserError, match="what client 0 kept is damaged"):
        Store(MARK, 0, task.layout.hash).read()


def test_a_file_of_another_client_run_or_model_is_refused(place: Path) -> None:
    task = line(("b",))
    flower(task).train(orders(task))
    source = (place / MARK / "client-1.safetensors").read_bytes()
    (place / MARK / "client-0.safetensors").write_bytes(source)
    reports = flower(task).train(orders(task, 1))
    assert [client for client, _ in reports.failed] == [0]
    with pytest.raises(UserError, match="has the client 1, not 0: it belongs elsewhere; remove it"):
        Store(MARK, 0, task.layout.hash).read()
    with pytest.raises(UserError, match=f"has the layout {task.layout.hash}, not another"):
        Store(MARK, 1, "another").read()
    other = place / ("e" * 16)
    other.mkdir()
    (other / "client-1.safetensors").write_bytes(source)
    with pytest.raises(UserError, match=f"has the run {MARK}, not eeee"):
        Store("e" * 16, 1, task.layout.hash).read()


def test_a_full_disk_sends_no_update(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    task = line(("b",))
    flower(task).train(orders(task))
    kept = held(task, 0)["own"]

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.fsync", full)
        reports = flower(task).train(orders(task, 1))
    assert len(reports) == 0
    assert "cannot be written" in reports.failed[0][1]
    assert torch.equal(held(task, 0)["own"], kept)
    assert len(flower(task).train(orders(task, 1))) == 3


def test_a_mark_that_is_no_name_of_a_folder_is_refused() -> None:
    with pytest.raises(UserError, match=r"'\.\./\.\./etc', is not of 16 hex"):
        Store("../../etc", 0, "")


def test_a_server_that_has_lost_its_mark_sends_nothing() -> None:
    task = line(("b",))
    with pytest.raises(UserError, match=r"run\.json has lost its mark"):
        flower(task, mark="").train(orders(task))


def test_a_run_in_which_nothing_is_kept_leaves_no_file(place: Path) -> None:
    task = line()
    course(Told(told=nothing), task, flower(task), devices=True)
    assert not place.exists()


def test_only_what_asks_for_more_needs_a_new_client() -> None:
    task = line()
    plain = replace(orders(task), counted=None)
    versions = []
    for briefs in (
        plain,
        replace(plain, still=frozenset({0})),
        replace(plain, epochs=EVERYONE * 0),
    ):
        record = brief_record(next(briefs.each()), Settings().packing, {})
        versions.append(record[NUMBERS]["version"])
    assert versions == [4, 5, 5]


def test_the_digest_of_an_order_depends_on_everything_that_was_told() -> None:
    task = line()
    (brief, *_) = orders(task).each()
    changes: list[dict[str, Any]] = [
        {"round": 1},
        {"lr": 0.2},
        {"start": brief.start + 1},
        {"still": frozenset({1})},
        {"measure": frozenset({"fisher"})},
        {"counted": 4},
    ]
    digests = [digest(brief)] + [digest(replace(brief, **change)) for change in changes]
    assert len(set(digests)) == len(digests)
    assert digest(replace(brief, own=brief.start)) == digests[0]  # it is not told


def test_the_file_says_what_it_is(place: Path) -> None:
    task = line(("b",))
    flower(task).train(orders(task))
    with safe_open(place / MARK / "client-2.safetensors", "pt") as file:
        about = file.metadata()
        assert sorted(file.keys()) == ["after.own", "delta"]
    assert (about["run"], about["client"], about["round"]) == (MARK, "2", "0")
    assert about["layout"] == task.layout.hash
    assert [path.name for path in sorted((place / MARK).glob("*.part"))] == []
