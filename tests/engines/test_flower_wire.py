"""Briefs and reports through Flower's own bytes, and what is refused on the way."""

from __future__ import annotations

from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from flower_grid import over_the_wire
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from kairosfl.core.fields import ACCURACY_AFTER, FISHER, SCORE_AFTER, Brief, Report
from kairosfl.engines.flower import wire
from kairosfl.engines.flower.wire import (
    Malformed,
    Packing,
    brief_record,
    read_brief,
    read_report,
    report_record,
)
from kairosfl.errors import UserError

START = torch.tensor([0.5, -1.0, 2.0, 0.0, 3.0])
BRIEF = Brief(
    seed=2**62,
    round=3,
    client=7,
    start=START,
    lr=0.1,
    momentum=0.9,
    weight_decay=1e-4,
    batch_size=16,
    epochs=2,
    scale=0.5,
    pull=0.01,
    push=START.flip(0),
    drop_last=True,
    stop_below=0.9,
    stop_statistic="min",
    stop_per="batch",
    stop_reference=START + 1,
    contrast=5.0,
    temperature=0.5,
    previous=START - 1,
    measure=frozenset({ACCURACY_AFTER, FISHER, SCORE_AFTER}),
)
REPORT = Report(
    client=7,
    n=40,
    steps=5,
    epochs=2.0,
    delta=torch.tensor([1.0, -4.0, 0.25, 3.0, -2.0]),
    loss=1.5,
    grad_sq=2.25,
    seconds=0.5,
    similarity=0.95,
    score_after=1.25,
    accuracy_after=0.75,
    fisher=10.0,
    fisher_seconds=0.125,
)


def same(a: Brief | Report, b: Brief | Report) -> None:
    for name in (entry.name for entry in fields(a)):
        left, right = getattr(a, name), getattr(b, name)
        if isinstance(left, torch.Tensor):
            assert torch.equal(left, right), name
            assert left.dtype == right.dtype, name
        else:
            assert left == right, name


@pytest.mark.parametrize("brief", [BRIEF, Brief(seed=0, round=0, client=0, start=START, lr=0.1)])
def test_a_brief_arrives_as_it_was(brief: Brief) -> None:
    packing = Packing("float16", 0.25)
    arrived, how = read_brief(over_the_wire(brief_record(brief, packing, {})))
    same(brief, arrived)
    assert how == packing


def test_a_vector_that_briefs_share_is_packed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "SMALL", 0)  # every vector is large
    monkeypatch.setattr(wire, "PIECE", 8)  # two numbers a piece
    packed: dict[int, list[Array]] = {}
    first = brief_record(BRIEF, Packing(), packed)
    second = brief_record(replace(BRIEF, client=8), Packing(), packed)
    assert [f"start.{i}" in first[wire.VECTORS] for i in range(4)] == [True, True, True, False]
    assert first[wire.VECTORS]["start.2"] is second[wire.VECTORS]["start.2"]
    same(BRIEF, read_brief(over_the_wire(first))[0])


@pytest.mark.parametrize("small", [0, wire.SMALL])
def test_large_and_small_vectors_arrive(monkeypatch: pytest.MonkeyPatch, small: int) -> None:
    monkeypatch.setattr(wire, "SMALL", small)
    monkeypatch.setattr(wire, "PIECE", 8)
    told, report = brief_record(BRIEF, Packing(), {}), answer()
    assert set(told) == ({wire.NUMBERS} if small else {wire.NUMBERS, wire.VECTORS})
    assert set(report) == (
        {wire.NUMBERS} if small else {wire.NUMBERS, "delta.0", "delta.1", "delta.2"}
    )
    same(BRIEF, read_brief(over_the_wire(told))[0])
    same(REPORT, read_report(report, Packing(), torch.empty(5))[0])


def test_a_client_refuses_records_of_another_version() -> None:
    record = brief_record(BRIEF, Packing(), {})
    record[wire.NUMBERS]["version"] = 1
    with pytest.raises(Malformed, match="version 1 of the records, this client 5"):
        read_brief(record)


def answer(report: Report = REPORT, packing: Packing = Packing()) -> RecordDict:  # noqa: B008
    return over_the_wire(report_record(report, 3, packing))


def test_a_report_arrives_as_it_was() -> None:
    report, round = read_report(answer(), Packing(), torch.empty(5))
    same(REPORT, report)
    assert round == 3


def test_packed_updates() -> None:
    half = Packing("float16")
    delta = torch.tensor([1.0, -4.0, 0.1, 3.0, 1e-9])
    report, _ = read_report(answer(replace(REPORT, delta=delta), half), half, torch.empty(5))
    assert report.delta.tolist() == [1.0, -4.0, float(np.float16(0.1)), 3.0, 0.0]
    top = Packing(keep=0.5)  # 3 of 5: the entries -4, 3 and -2
    report, _ = read_report(answer(REPORT, top), top, torch.empty(5))
    assert report.delta.tolist() == [0.0, -4.0, 0.0, 3.0, -2.0]
    both = Packing("float16", 0.2)
    report, _ = read_report(answer(REPORT, both), both, torch.empty(5))
    assert report.delta.tolist() == [0.0, -4.0, 0.0, 0.0, 0.0]


@pytest.mark.parametrize(("dtype", "keep"), [("bfloat16", 1.0), ("float32", 0.0), ("float32", 1.5)])
def test_packings_that_do_not_exist(dtype: str, keep: float) -> None:
    with pytest.raises(UserError, match=r"deploy\.(update|keep) = "):
        Packing(dtype, keep)


def array(values: object, dtype: str = "float32") -> ConfigRecord:
    raw = np.asarray(values, dtype=dtype)
    return wire.piece_record(wire.Piece(dtype, raw.shape, raw.tobytes()))


def test_what_is_no_report() -> None:
    def refused(record: RecordDict, packing: Packing = Packing()) -> str:  # noqa: B008
        with pytest.raises(Malformed) as caught:
            read_report(over_the_wire(record), packing, torch.empty(5))
        return str(caught.value)

    def changed(**numbers: object) -> RecordDict:
        record = answer()
        record[wire.NUMBERS] = ConfigRecord({**record[wire.NUMBERS], **numbers})
        return record

    def holding(**vectors: ConfigRecord) -> RecordDict:
        record = RecordDict({wire.NUMBERS: bare})
        record.update({name.replace("_", "."): each for name, each in vectors.items()})
        return record

    bare = ConfigRecord(
        {key: value for key, value in answer()[wire.NUMBERS].items() if not key.startswith("delta")}
    )

    assert refused(RecordDict()) == "its answer is not a report"
    assert refused(RecordDict({wire.NUMBERS: ArrayRecord({}), wire.VECTORS: ArrayRecord({})})) == (
        "its answer is not a report"
    )
    less = answer()
    del less[wire.NUMBERS]["n"]
    assert refused(less) == "its report lacks 'n'"
    assert refused(changed(n=2.0)) == "its n is of type float"
    assert refused(changed(steps=True)) == "its steps is of type bool"
    assert refused(changed(loss="low")) == "its loss is of type str"
    assert refused(changed(loss=[1.0])) == "its loss is of type list"
    assert refused(holding()) == "its report contains no update"
    assert refused(holding(delta_1=array([1.0] * 5))).startswith("its delta has dtype 'nothing'")
    assert refused(holding(delta_0=array([1.0]))) == "its update has the shape (1,), not (5,)"
    assert (
        refused(holding(delta_0=array([[1.0] * 5]))) == "its update has the shape (1, 5), not (5,)"
    )
    assert refused(holding(delta_0=array([1.0] * 3), delta_1=array([1.0] * 3))) == (
        "its update has the shape (6,), not (5,)"
    )
    assert (
        refused(holding(delta_0=array([1.0] * 5, "float64")))
        == "its update is float64, not float32"
    )
    assert refused(holding(delta_0=array([1.0] * 5, "int64"))).startswith(
        "its delta has dtype 'int64' in an unknown format"
    )
    good = array([1.0] * 5)
    for change in (
        {"dtype": 5},
        {"shape": 5},
        {"shape": [True]},
        {"shape": [5.0]},
        {"data": "0" * 20},
    ):
        other = ConfigRecord({**good, **change})
        assert refused(holding(delta_0=other)) == "its delta.0 has an unknown format"
    foreign = RecordDict({wire.NUMBERS: bare, "delta.0": ArrayRecord([np.ones(5, np.float32)])})
    assert refused(foreign) == "its delta.0 has an unknown format"
    assert refused(holding(delta_0=ConfigRecord({**good, "shape": [-5, -1]}))) == (
        "its update has the shape (-5, -1), not (5,)"
    )
    short = ConfigRecord({**good, "data": b"0" * 16})
    assert (
        refused(holding(delta_0=short))
        == "the number of bytes of its delta does not match its shape"
    )
    among = {"delta.0": b"0" * 20, "delta.0.dtype": "float32"}
    for change, reason in (
        ({"delta.0.dtype": "float64"}, "its update has the shape (2,), not (5,)"),
        ({"delta.0": b"0" * 23}, "the number of bytes of its delta does not match its shape"),
        ({"delta.0": b"0" * 4}, "its update has the shape (1,), not (5,)"),
        ({"delta.0.dtype": "object"}, "its delta.0 has an unknown format"),
        ({"delta.0.dtype": 5}, "its delta.0 has an unknown format"),
        ({"delta.0.dtype": ["float32"]}, "its delta.0 has an unknown format"),
        ({"delta.0": 5.0}, "its report contains no update"),
        ({"n": b"7"}, "its n has an unknown format"),
    ):
        assert (
            refused(RecordDict({wire.NUMBERS: ConfigRecord({**bare, **among, **change})})) == reason
        )
    top = Packing(keep=0.4)
    places = [[-1, 2], [2, 2], [3, 1], [0, 5]]
    for where in places:
        record = holding(delta_0=array([1.0, 2.0]), where_0=array(where, "int32"))
        assert refused(record, top) == "the indices of its update are not ascending or out of range"
    assert refused(holding(delta_0=array([1.0, 2.0])), top) == "its report contains no update"
