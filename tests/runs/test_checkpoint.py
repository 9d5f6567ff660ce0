"""Checkpoints: whole or not there, only the rows that changed, and the one before when the last is broken."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from kairosfl import Recipe, Run, UserError, parse
from kairosfl.core.round import Setup
from kairosfl.detectors import Signals
from kairosfl.runs.checkpoint import Checkpoints
from kairosfl.tasks.vector import Entry, Layout

D = 5


def blank():
    setup = Setup(parse("vrlsgd + pa3fed + fedavgm"), Recipe(), 100, Layout((Entry("w", (D,), 0),)))
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
        signals=Signals(critical=False, fgn=1.5, elud=2.5),
        states=(
            {},
            {},
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
        assert all(torch.equal(a.rows(ids)[key].nan_to_num(7), b.rows(ids)[key].nan_to_num(7)) for key in a.default)


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


@pytest.mark.parametrize("broken", ["state-000008.safetensors", "rows-000008.safetensors", "checkpoint-000008.json"])
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
    assert (how == "gone" and path.suffix == ".json") or "checkpoint-000008.json is broken" in passed[0]


def test_no_whole_checkpoint_is_said(tmp_path):
    with pytest.raises(UserError, match="no whole checkpoint"):
        Checkpoints(tmp_path).load(blank())


def test_a_checkpoint_names_every_file_it_needs(tmp_path):
    Checkpoints(tmp_path).save(filled(), {"algorithm": "drift"})
    note = json.loads((tmp_path / "checkpoint-000007.json").read_text())
    assert set(note["sums"]) == {path.name for path in tmp_path.glob("*.safetensors")}
    assert note["about"] == {"algorithm": "drift"}
