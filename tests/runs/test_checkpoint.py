"""Checkpoints: whole or not there, only the rows that changed, and the one before when the last is
broken.
"""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from kairosfl import Recipe, Run, UserError, parse
from kairosfl.core.layout import Entry, Layout
from kairosfl.core.run import Setup
from kairosfl.detectors import FGN, Signals
from kairosfl.runs import checkpoint
from kairosfl.runs.checkpoint import Checkpoints, Writing, _checksum, rounds_done

D = 5


def blank():
    setup = Setup(
        parse("vrlsgd + pa3fed + fedavgm"),
        Recipe(),
        100,
        Layout((Entry("w", (D,), 0),)),
        detectors=(FGN(),),
    )
    return Run.start(torch.zeros(D), setup, seed=3)


def filled(rounds=7, clients=(4, 90, 17)):
    run = blank()
    drift, scores, *_ = run.tables
    ids = torch.tensor(clients)
    drift.write(ids, {"delta": torch.arange(len(ids) * D).reshape(-1, D).float()})
    scores.write(ids, {"score": torch.arange(len(ids)).double() - 0.5})
    return replace(
        run,
        round=rounds,
        x=torch.arange(D).float(),
        idle=2,
        signals=Signals(critical=False, values={"fgn": 1.5}, elud=2.5),
        states=(
            {},
            {"change": torch.tensor(0.5, dtype=torch.float64)},
            {"velocity": torch.full((D,), 0.25)},
            {"before": torch.tensor(1.25, dtype=torch.float64)},
        ),
        writes=tuple(table.writes for table in run.tables),
    )


def same(one, other):
    assert (one.seed, one.round, one.idle) == (other.seed, other.round, other.idle)
    assert repr(one.signals) == repr(other.signals)
    torch.testing.assert_close(one.x, other.x, rtol=0, atol=0)
    for a, b in zip(one.states, other.states, strict=True):
        assert a.keys() == b.keys()
        assert all(torch.equal(a[key], b[key]) for key in a)
    for a, b in zip(one.tables, other.tables, strict=True):
        assert a.ids == b.ids
        ids = torch.tensor(a.ids)
        assert all(
            torch.equal(a.rows(ids)[key].nan_to_num(7), b.rows(ids)[key].nan_to_num(7))
            for key in a.default
        )


def test_what_is_saved_is_loaded(tmp_path):
    run = filled()
    Checkpoints(tmp_path).save(run, {})
    loaded, passed = Checkpoints(tmp_path).load(blank())
    same(loaded, run)
    loaded.check_fresh()
    assert passed == []


def test_only_the_rows_that_changed_are_written_again(tmp_path):
    store = Checkpoints(tmp_path)
    run = filled(1, clients=tuple(range(40)))
    store.save(run, {})
    run.tables[0].write(torch.tensor([3]), {"delta": torch.full((1, D), 9.0)})
    store.save(replace(run, round=2), {})
    sizes = {path.name: path.stat().st_size for path in tmp_path.glob("rows-*")}
    assert sizes["rows-000002.safetensors"] < sizes["rows-000001.safetensors"] / 4
    same(Checkpoints(tmp_path).load(blank())[0], replace(run, round=2))


def test_two_checkpoints_are_kept_and_the_disk_does_not_fill(tmp_path):
    store = Checkpoints(tmp_path)
    run = filled(0, clients=tuple(range(30)))
    for done in range(60):
        ids = torch.tensor([done % 30, (done * 7 + 3) % 30]).unique()
        run.tables[0].write(ids, {"delta": torch.full((len(ids), D), float(done))})
        store.save(replace(run, round=done), {})
    assert len(list(tmp_path.glob("checkpoint-*.json"))) == 2
    assert len(list(tmp_path.glob("rows-*"))) <= 40
    same(Checkpoints(tmp_path).load(blank())[0], replace(run, round=59))


@pytest.mark.parametrize(
    "broken", ["state-000008.safetensors", "rows-000008.safetensors", "checkpoint-000008.json"]
)
@pytest.mark.parametrize("how", ["cut", "flipped", "gone"])
def test_a_broken_checkpoint_is_named_and_the_one_before_it_used(tmp_path, broken, how):
    store = Checkpoints(tmp_path)
    first = filled(7)
    store.save(first, {})
    expected = Checkpoints(tmp_path).load(blank())[0]
    first.tables[0].write(torch.tensor([4, 5]), {"delta": torch.ones(2, D)})
    store.save(replace(first, round=8), {})
    path = tmp_path / broken
    content = path.read_bytes()
    if how == "cut":
        path.write_bytes(content[: len(content) // 2])
    elif how == "flipped":
        middle = content.index(b'"sums"') + 3 if path.suffix == ".json" else len(content) - 2
        path.write_bytes(content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :])
    else:
        path.unlink()
    loaded, passed = Checkpoints(tmp_path).load(blank())
    same(loaded, expected)
    assert (
        how == "gone" and path.suffix == ".json"
    ) or "checkpoint-000008.json is broken" in passed[0]


def test_no_whole_checkpoint_is_said(tmp_path):
    with pytest.raises(UserError, match="no intact checkpoint"):
        Checkpoints(tmp_path).load(blank())


def test_a_checkpoint_names_every_file_it_needs(tmp_path):
    Checkpoints(tmp_path).save(filled(), {"algorithm": "drift"})
    note = json.loads((tmp_path / "checkpoint-000007.json").read_text())
    assert set(note["sums"]) == {path.name for path in tmp_path.glob("*.safetensors")}
    assert note["about"] == {"algorithm": "drift"}


def _directory(path):
    path.unlink()
    path.mkdir()


def _content(**changes):
    def change(path):
        note = json.loads(path.read_text()) | changes
        path.write_text(
            json.dumps({key: value for key, value in note.items() if value is not GONE})
        )

    return change


def _state(change):
    """Rewrite the state with good checksums: what it holds is wrong, not its bytes."""

    def rewrite(path):
        state = path.parent / "state-000008.safetensors"
        tensors = load_file(state)
        change(tensors)
        save_file(tensors, state)
        note = json.loads(path.read_text())
        note["sums"][state.name] = _checksum(state)
        path.write_text(json.dumps(note))

    return rewrite


GONE = object()
BROKEN = {
    "empty": lambda path: path.write_bytes(b""),
    "truncated": lambda path: path.write_bytes(path.read_bytes()[:100]),
    "a list": lambda path: path.write_text("[1, 2]"),
    "null": lambda path: path.write_text("null"),
    "a number": lambda path: path.write_text("3"),
    "nested": lambda path: path.write_text("[" * 100_000),
    "not UTF-8": lambda path: path.write_bytes(b'{"round": "\xff"}'),
    "a directory": _directory,
    "a dangling link": lambda path: (path.unlink(), path.symlink_to("nowhere")),
    **{
        f"no {key}": _content(**{key: GONE})
        for key in ("round", "seed", "idle", "signals", "rows", "sums")
    },
    **{
        f"{key} is text": _content(**{key: "8"})
        for key in ("round", "seed", "idle", "signals", "rows", "sums")
    },
    "another round": _content(round=9),
    "a negative round": _content(round=-1),
    "unknown signals": _content(signals={"nonsense": 1.0}),
    "no checksums": _content(sums={}),
    "other checksums": _content(
        sums=dict.fromkeys((f"{n}.safetensors" for n in ("state-000008", "rows-000008")), 1)
    ),
    "rows that are numbers": _content(rows=[1, 2]),
    "a file elsewhere": _content(rows=["../../rows-000008.safetensors"]),
    "state gone": lambda path: (path.parent / "state-000008.safetensors").unlink(),
    "state a directory": lambda path: _directory(path.parent / "state-000008.safetensors"),
    "state empty": lambda path: (path.parent / "state-000008.safetensors").write_bytes(b""),
    "rows gone": lambda path: (path.parent / "rows-000008.safetensors").unlink(),
    "no model": _state(lambda tensors: tensors.pop("x")),
    "a longer model": _state(lambda tensors: tensors.update(x=torch.zeros(D + 1))),
    "a model of another type": _state(
        lambda tensors: tensors.update(x=torch.zeros(D, dtype=torch.float64))
    ),
    "no velocity": _state(lambda tensors: tensors.pop("state.2.velocity")),
    "a shorter velocity": _state(
        lambda tensors: tensors.update({"state.2.velocity": torch.zeros(D - 1)})
    ),
    "a state too many": _state(
        lambda tensors: tensors.update({"state.7.velocity": torch.zeros(D)})
    ),
    "no table": _state(lambda tensors: tensors.pop("table.0.ids")),
    "a row that is not there": _state(lambda tensors: tensors["table.0.row"].fill_(99)),
    "a file that is not there": _state(lambda tensors: tensors["table.0.file"].fill_(99)),
    "a table too short": _state(
        lambda tensors: tensors.update({"table.0.row": tensors["table.0.row"][:-1]})
    ),
}


@pytest.mark.parametrize("how", BROKEN)
def test_whatever_is_wrong_with_a_checkpoint_the_one_before_it_is_used(tmp_path, how):
    store = Checkpoints(tmp_path)
    first = filled(7)
    store.save(first, {})
    expected = Checkpoints(tmp_path).load(blank())[0]
    first.tables[0].write(torch.tensor([4, 5]), {"delta": torch.ones(2, D)})
    store.save(replace(first, round=8), {})
    BROKEN[how](tmp_path / "checkpoint-000008.json")
    rounds_done(tmp_path)  # whatever it says, it says it
    again = Checkpoints(tmp_path)
    loaded, (line,) = again.load(blank())
    same(loaded, expected)
    assert line.startswith("checkpoint-000008.json is broken (")
    assert "\n" not in line
    for done in (8, 9):  # and the run goes on over it
        again.save(replace(loaded, round=done), {})
    assert Checkpoints(tmp_path).load(blank())[0].round == 9
    assert [path.name for path in sorted(tmp_path.glob("checkpoint-*.json"))] == [
        "checkpoint-000008.json",
        "checkpoint-000009.json",
    ]


def test_when_all_are_broken_every_one_is_named(tmp_path):
    store = Checkpoints(tmp_path)
    for done in (7, 8):
        store.save(filled(done), {})
        (tmp_path / f"checkpoint-{done:06d}.json").write_text("null")
    sentence = (
        r"no intact checkpoint .*\(checkpoint-000008.json: it does not hold a JSON object; "
        r"checkpoint-000007.json: it"
    )
    with pytest.raises(UserError, match=sentence):
        Checkpoints(tmp_path).load(blank())
    assert len(list(tmp_path.glob("checkpoint-*.json"))) == 2


def test_memory_that_runs_out_is_no_fault_of_the_checkpoint(tmp_path, monkeypatch):
    Checkpoints(tmp_path).save(filled(), {})

    def none(*_):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(checkpoint, "load_file", none)
    with pytest.raises(torch.OutOfMemoryError):
        Checkpoints(tmp_path).load(blank())


def test_by_itself_writing_takes_at_most_a_tenth_of_the_time(tmp_path, monkeypatch):
    clock = 100.0
    monkeypatch.setattr(checkpoint.time, "perf_counter", lambda: clock)
    checkpoints = Checkpoints(tmp_path)
    for took, pause, wanted in [
        (0.9, 0.1, True),
        (2.0, 0.1, False),
        (2.0, 19.9, False),
        (2.0, 20.0, True),
    ]:
        checkpoints.took, checkpoints.ended, clock = took, 100.0, 100.0 + pause
        assert checkpoints.due(20, 0) is wanted
        assert not checkpoints.due(21, 0)
        assert checkpoints.due(21, 7)  # asked for
        assert not checkpoints.due(20, 7)


def test_runs_share_the_tenth(tmp_path, monkeypatch):
    clock, writing = 100.0, Writing()
    runs = [Checkpoints(tmp_path / name, writing=writing) for name in "ab"]
    monkeypatch.setattr(checkpoint.time, "perf_counter", lambda: clock)
    write = Checkpoints._write

    def slowly(self, *given):
        nonlocal clock
        clock += 2.0
        write(self, *given)

    monkeypatch.setattr(Checkpoints, "_write", slowly)
    for each in runs:
        each.folder.mkdir()
        each.save(filled(clients=()), {})  # no rows: one file, two seconds
    assert [each.took for each in runs] == [2.0, 2.0]
    clock = 104.0 + 19.9
    assert [each.due(20, 0) for each in runs] == [False, False]
    clock = 104.0 + 20.0
    assert [each.due(20, 0) for each in runs] == [
        False,
        True,
    ]  # since the first ended, four seconds were written
    clock = 102.0 + 40.0
    assert [each.due(20, 0) for each in runs] == [True, True]
    assert writing.seconds == 4.0
    assert Checkpoints(tmp_path / "c").writing.seconds == 0.0  # a run apart from these
