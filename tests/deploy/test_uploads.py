"""Nodes that fail while they upload, with real processes: each costs its own report, and no round
its deadline.

`python -m pytest tests/deploy/test_uploads.py -m slow -s` prints the times.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import torch
from kit import CLIENTS, Evil, configure, lines, make_app, order, seconds

from kairosfl.deploy import model_of, run_to_end

sys.path.insert(0, str(Path(__file__).parents[1] / "engines"))
from flower_faults import SEEN, draw, reasons

pytestmark = pytest.mark.slow
DEADLINE = 60.0
GRACE = 5.0


def held(tmp_path: Path, rounds: Sequence[Mapping[int, str]]) -> Path:
    """The folder of a run in whose rounds these clients fail, and nobody in the last."""
    folder, out = tmp_path / "federation", tmp_path / "out"
    make_app(folder, {})
    faults: dict[int, dict[int, str]] = {client: {} for client in range(CLIENTS)}
    for number, failing in enumerate(rounds, 1):
        for client, fault in failing.items():
            faults[client][number] = fault
    order(folder, faults)
    run = configure(folder, "uploads.toml", rounds=len(rounds) + 1, deadline=DEADLINE, quorum=0.0)
    began = time.monotonic()
    with Evil(tmp_path / "stage", folder) as stage:
        run_to_end(stage, folder / "app", run, out)
    print(
        f"{time.monotonic() - began:.0f} s; {[round(each, 1) for each in seconds(out)]} s: {rounds}"
    )
    return out


def check(out: Path, rounds: Sequence[Mapping[int, str]]) -> None:
    """Every round ended in time, the others' reports count, and the log has one line for each
    fault.
    """
    assert max(seconds(out)) < DEADLINE + GRACE
    assert bool(torch.isfinite(model_of(out)).all())
    text = (out / "log.txt").read_text().splitlines()
    for number, (row, failing) in enumerate(
        zip(lines(out, "metrics.jsonl"), rounds, strict=False), 1
    ):
        assert row["reported"] == CLIENTS - len(failing)
        told = [line for line in text if line.startswith(f"round {number}:")]
        assert len(told) == len(failing)
        for client, fault in failing.items():
            wanted = [
                f"round {number}: client {client} does not count: {why}"
                for why in reasons(fault, DEADLINE)
            ]
            assert set(wanted) & set(told), (fault, told)


def test_the_faults_that_were_seen(tmp_path: Path) -> None:
    """The one that is hardest on the SuperLink comes last: its database may stay locked for a
    minute.
    """
    die, drop, dup, huge, many = SEEN
    rounds = [{3: drop}, {3: dup}, {3: huge}, {2: many, 3: die}]
    check(held(tmp_path, rounds), rounds)


def test_ten_drawn_faults(tmp_path: Path) -> None:
    drawn = draw(10, seed=1, without=("die",))  # a node that is killed cannot fail again
    rounds = [{1: drawn[i], 3: drawn[i + 1]} for i in range(0, 10, 2)]
    out = held(tmp_path, rounds)
    check(out, rounds)
    assert lines(out, "metrics.jsonl")[-1]["reported"] == CLIENTS
