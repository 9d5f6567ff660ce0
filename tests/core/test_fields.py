"""The one list of fields: rows and columns, stacking, what is believed, and a field that is added
in one line.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import shutil
import subprocess
import sys
from dataclasses import MISSING, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dummy import GIVEN, trained

import kairosfl
from kairosfl.core.fields import REALS, SLACK, Brief, Briefs, Field, Reports, fields, reals, table

START = torch.arange(4.0)


def briefs(**changes: Any) -> Briefs:
    made = Briefs(seed=3, round=2, ids=torch.tensor([4, 7, 9]), start=START, lr=0.5)
    return replace(made, **changes)


def reports(**changes: Any) -> Reports:
    made = Reports(
        ids=torch.tensor([4, 7, 9]),
        n=torch.tensor([10, 20, 30]),
        steps=torch.tensor([1, 2, 3]),
        epochs=torch.tensor([1.0, 1.5, 2.0], dtype=torch.float64),
        delta=torch.arange(12.0).view(3, 4),
        loss=torch.tensor([0.5, 0.25, 0.125], dtype=torch.float64),
        grad_sq=torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64),
        seconds=torch.tensor([0.1, 0.2, 0.3], dtype=torch.float64),
    )
    return replace(made, **changes)


def doubles(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_a_plain_number_is_every_clients() -> None:
    made = briefs(epochs=3, momentum=1)
    assert made.lr.tolist() == [0.5] * 3
    assert (made.lr.dtype, made.momentum.dtype, made.epochs.dtype) == (
        torch.float64,
        torch.float64,
        torch.int64,
    )
    assert made.momentum.tolist() == [1.0] * 3
    assert made.epochs.tolist() == [3] * 3
    assert made.clip.tolist() == [math.inf] * 3  # and so is a default
    assert made.stop_below is None
    given = doubles(1, 2, 3)
    assert briefs(lr=given).lr is given
    listed = briefs(lr=[1, 2, 3], epochs=[4, 5, 6])  # and a list has one for each
    assert (listed.lr.tolist(), listed.lr.dtype) == ([1.0, 2.0, 3.0], torch.float64)
    assert (listed.epochs.tolist(), listed.epochs.dtype) == ([4, 5, 6], torch.int64)


def test_take_picks_rows_and_leaves_alone_what_is_shared() -> None:
    push = torch.arange(12.0).view(3, 4)
    some = briefs(lr=doubles(1, 2, 3), push=push).take(torch.tensor([2, 0]))
    assert some.ids.tolist() == [9, 4]
    assert some.lr.tolist() == [3, 1]
    assert some.push is not None
    assert torch.equal(some.push, push[[2, 0]])
    assert some.start is START
    assert (some.stop_below, some.seed, some.optimizer) == (None, 3, "sgd")
    answered = reports(failed=((5, "lost"),)).take(torch.tensor([1]))
    assert answered.delta.tolist() == [[4, 5, 6, 7]]
    assert answered.failed == ((5, "lost"),)
    assert answered.mass is None
    assert reports(mass=doubles(7, 8, 9)).take(torch.tensor([1, 2])).mass.tolist() == [8, 9]


def test_take_of_nobody() -> None:
    nobody = torch.empty(0, dtype=torch.int64)
    told, answered = briefs(push=torch.zeros(3, 4)).take(nobody), reports().take(nobody)
    assert len(told) == len(answered) == 0
    assert (told.push.shape, told.lr.shape, answered.delta.shape) == ((0, 4), (0,), (0, 4))  # type: ignore[union-attr]
    assert list(told.each()) == list(answered.each()) == []
    assert len(answered.take(nobody)) == 0


def test_each_gives_one_clients_plain_numbers_and_views_of_its_vectors() -> None:
    push = torch.arange(12.0).view(3, 4)
    made = briefs(lr=doubles(1, 2, 3), push=push, measure=frozenset({"fisher"}), stop_below=0.5)
    rows = list(made.each())
    assert [type(row) for row in rows] == [Brief] * 3
    assert [(row.client, row.lr, row.epochs) for row in rows] == [
        (4, 1.0, 1),
        (7, 2.0, 1),
        (9, 3.0, 1),
    ]
    assert (type(rows[0].client), type(rows[0].lr)) == (int, float)
    assert all(row.start is START and row.seed == 3 and row.measure == {"fisher"} for row in rows)
    assert [row.push.tolist() for row in rows] == push.tolist()
    assert rows[1].push.data_ptr() == push[1].data_ptr()
    assert [row.stop_below for row in rows] == [0.5] * 3
    assert [row.similarity for row in reports().each()] == [None] * 3


def test_a_previous_model_is_for_clients_with_a_contrast_alone() -> None:
    previous = torch.arange(12.0).view(3, 4)
    rows = list(briefs(contrast=doubles(0, 0.5, 1), previous=previous).each())
    assert rows[0].previous is None
    assert [row.previous.tolist() for row in rows[1:]] == previous[1:].tolist()
    assert [row.previous for row in briefs(previous=previous).each()] == [None] * 3


def test_one_clients_record_takes_names_only_and_can_be_changed() -> None:
    brief = next(briefs().each())
    assert replace(brief, lr=0.25).lr == 0.25
    assert brief.lr == 0.5
    with pytest.raises(TypeError):
        Brief(1)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match="lr"):
        Brief(seed=1, round=0, client=3, start=START)
    report = next(reports().each())
    assert replace(report, loss=9.0).loss == 9.0
    for local in ("mass", "failed"):
        assert not hasattr(report, local)
    with pytest.raises(AttributeError):
        report.loss = 1.0


def test_stacking_what_was_taken_apart_gives_it_back() -> None:
    whole = reports(
        similarity=doubles(0.9, 0.8, 0.7),
        fisher=doubles(1, 2, 3),
        fisher_bytes=torch.tensor([5, 6, 7]),
    )
    again = Reports.stack(list(whole.each()), whole.delta, ((8, "lost"),))
    assert again.failed == ((8, "lost"),)
    for entry in fields(Reports):
        one, other = getattr(whole, entry.name), getattr(again, entry.name)
        if isinstance(one, torch.Tensor):
            assert one.dtype == other.dtype, entry.name
            assert torch.equal(one, other), entry.name
        elif not entry.local:
            assert one is other is None, entry.name
    assert again.delta is whole.delta


def test_stacking_nobody() -> None:
    nobody = Reports.stack([], torch.empty(0, 4), ((1, "lost"),))
    assert len(nobody) == 0
    assert (nobody.n.dtype, nobody.loss.dtype) == (torch.int64, torch.float64)
    assert nobody.similarity is None
    assert nobody.faults() == {}


def test_numbers_and_vectors_that_travel() -> None:
    plain = sum(entry.shape != "vector" and entry.default is not None for entry in fields(Briefs))
    assert briefs().numbers() == plain
    assert briefs(stop_below=0.5).numbers() == plain + 1
    assert briefs(next_lr=0.1).numbers() == plain
    assert briefs(push=torch.zeros(4)).numbers() == plain
    assert briefs().vectors_down() == 1
    assert briefs(push=torch.zeros(3, 4), stop_reference=START).vectors_down() == 3
    assert (
        reports(mass=doubles(1, 2, 3)).numbers() == 7
    )  # client, n, steps, epochs, loss, grad_sq, seconds
    assert reports(score_after=doubles(1, 2, 3)).numbers() == 8


def test_reals_lie_in_the_order_of_the_list() -> None:
    stacked = [entry for entry in fields(Briefs) if entry.travels and not entry.alone]
    assert tuple(entry.name for entry in stacked if entry.kind is float) == REALS
    found = reals(briefs(lr=doubles(1, 2, 3), temperature=0.7))
    assert found.shape == (3, len(REALS))
    assert found[:, REALS.index("lr")].tolist() == [1, 2, 3]
    assert found[:, REALS.index("temperature")].tolist() == [0.7] * 3
    assert np.isnan(found[:, REALS.index("stop_below")]).all()
    assert reals(briefs(stop_below=0.5))[:, REALS.index("stop_below")].tolist() == [0.5] * 3


@pytest.mark.parametrize(
    ("name", "values", "fault"),
    [
        ("n", torch.tensor([1, 0, 3]), "its number of samples is 0"),
        ("steps", torch.tensor([1, -2, 3]), "its number of steps is -2"),
        ("epochs", doubles(5e-324, 0, 3), "its number of epochs is 0"),
        ("loss", doubles(-1, math.inf, 3), "its loss is inf"),
        ("loss", doubles(-1, math.nan, 3), "its loss is nan"),
        ("grad_sq", doubles(0, -1e-9, 3), "its grad_sq is -1e-09"),
        ("seconds", doubles(0, -1, 3), "its seconds is -1"),
        ("similarity", doubles(1 + SLACK / 2, -1.5, 0), "its similarity is -1.5"),
        ("score_after", doubles(0, math.nan, 0), "its score_after is nan"),
        ("fisher_seconds", doubles(0, -1, 0), "its fisher_seconds is -1"),
        ("fisher_bytes", torch.tensor([0, -1, 0]), "its fisher_bytes is -1"),
    ],
)
def test_numbers_that_cannot_be_used(name: str, values: torch.Tensor, fault: str) -> None:
    assert reports(**{name: values}).faults() == {1: fault}


def test_the_first_fault_of_a_report_is_named_and_limits_act_both_ways() -> None:
    assert reports().faults() == {}
    bad = reports(n=torch.tensor([0, 20, 30]), loss=doubles(math.inf, -9, 9))
    assert bad.faults() == {0: "its number of samples is 0"}
    assert bad.faults({"max_loss": 5}) == {
        0: "its number of samples is 0",
        1: "its loss is -9",
        2: "its loss is 9",
    }
    assert reports().faults({"max_samples": 20}) == {2: "its number of samples is 30"}
    assert (
        reports(ids=torch.tensor([-4, 7, 9])).faults() == {}
    )  # who it is from is looked at by `accept`


def test_what_a_brief_asks_for() -> None:
    plain, stops, measured = (
        next(b.each()) for b in (briefs(), briefs(stop_below=0.5), briefs().measured("fisher"))
    )
    entries = {entry.name: entry for entry in fields(Reports)}
    assert all(entries[name].asked(plain) for name in ("n", "loss", "delta"))
    assert [entries["similarity"].asked(brief) for brief in (plain, stops, measured)] == [
        False,
        True,
        False,
    ]
    for name in ("fisher", "fisher_seconds", "fisher_bytes"):
        assert [entries[name].asked(brief) for brief in (plain, stops, measured)] == [
            False,
            False,
            True,
        ]
    assert not entries["score_before"].asked(measured)


def test_a_value_is_in_range_or_wrong() -> None:
    entry = Field(float, "each", "a test", MISSING, low=0, high=2)
    assert entry.wrong([-0.1, 0, 2, 2.1, math.nan, math.inf]).tolist() == [
        True,
        False,
        False,
        True,
        True,
        True,
    ]
    assert entry.wrong([0.5, 1.5], limit=1).tolist() == [False, True]
    assert Field(float, "each", "a test", MISSING).wrong([-1e300, math.inf]).tolist() == [
        False,
        True,
    ]


@pytest.mark.parametrize("record", [Briefs, Reports])
def test_the_table_names_every_field(record: type) -> None:
    header, rule, *lines = table(record).splitlines()
    assert header == "| field | per | default | rules that may write it | meaning |"
    assert set(rule) == {"|", "-"}
    assert [line.split(" | ")[0] for line in lines] == [
        f"| `{entry.name}`" for entry in fields(record)
    ]
    assert all(line.count("|") == header.count("|") for line in lines)
    assert table(record).endswith("|\n")


def test_lines_of_the_table() -> None:
    lines = table(Briefs).splitlines()
    assert "| `lr` | client |  | many | learning rate |" in lines
    assert "| `momentum` | client | `0.0` | many | momentum of sgd |" in lines
    assert "| `push` | vector `[d]` | – | many | added to every gradient |" in lines
    assert "| `optimizer` | cohort | `sgd` | one | 'sgd' or 'adamw' |" in lines
    assert "| `seed` | cohort |  | core | seed of the run |" in lines


def test_which_fields_only_one_rule_may_write() -> None:
    """Adding to pull, push, scale, lr or a measurement composes; a start or a stop rule does not."""
    writers = {entry.name: entry.writers for entry in fields(Briefs)}
    assert {writers[name] for name in ("pull", "push", "scale", "lr", "epochs", "measure")} == {
        "many"
    }
    assert {
        writers[name]
        for name in ("start", "optimizer", "radius", "stop_below", "contrast", "previous")
    } == {"one"}
    assert {writers[name] for name in ("seed", "round", "ids", "drop_last")} == {"core"}


# A field is one line: the copy of the package below has one more, in the middle of the real
# numbers.

LINE = '    dummy: Tensor = each(float, "a test", 0.25, writers="many")\n'
BEFORE = "    momentum: Tensor = each("


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What `dummy.py` finds with one more line in core/fields.py."""
    folder = tmp_path_factory.mktemp("copy")
    package = folder / "kairosfl"
    shutil.copytree(
        Path(kairosfl.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__")
    )
    source = package / "core" / "fields.py"
    text = source.read_text()
    assert text.count(BEFORE) == 1
    source.write_text(text.replace(BEFORE, LINE + BEFORE))
    script = Path(__file__).with_name("dummy.py")
    done = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def test_a_new_field_is_in_the_clients_records(copy: dict[str, Any]) -> None:
    assert copy["default"] == [0.25] * 3
    assert copy["rows"] == GIVEN
    assert "| `dummy` | client | `0.25` | many | a test |" in copy["table"]


def test_a_new_field_moves_the_others_and_is_found_in_the_slots(copy: dict[str, Any]) -> None:
    position = REALS.index("momentum")
    assert tuple(copy["order"]) == (*REALS[:position], "dummy", *REALS[position:])
    assert copy["reals"] == GIVEN
    expected = zip(GIVEN, [0.5, 0.6, 0.7], strict=True)
    assert copy["slots"] == [
        pytest.approx([client, *values]) for client, values in enumerate(expected)
    ]


def test_a_new_field_moves_the_rows_that_kernels_read(copy: dict[str, Any]) -> None:
    if copy["kernels"] is None:
        pytest.skip("Triton is not installed")
    assert copy["kernels"] == {name: copy["order"].index(name) for name in copy["kernels"]}


def test_a_new_field_travels_with_flower(copy: dict[str, Any]) -> None:
    pytest.importorskip("flwr")
    assert copy["flower"] == GIVEN


def test_a_new_field_travels_with_ray(copy: dict[str, Any]) -> None:
    if importlib.util.find_spec("ray") is None:
        pytest.skip("Ray is not installed")
    assert copy["ray"] == [GIVEN[2], GIVEN[0]]


def test_a_new_field_that_nobody_uses_changes_no_bit(copy: dict[str, Any]) -> None:
    assert len(copy["trained"]) == 8
    assert copy["trained"] == trained()
