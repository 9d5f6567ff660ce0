"""Orders in flight are state: a run that is stopped anywhere goes on to the same bits."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "core"))
from fleets import ENGINES, lognormal, setup_of, task, waits

from kairosfl.core.round import drive, rounds
from kairosfl.core.run import Run
from kairosfl.runs.checkpoint import Checkpoints

PLANS = {
    "buffered": waits(size=2, concurrency=6, late="keep"),
    "one by one": waits(size=1, concurrency=8, late="keep", max_age=4),
    "deadline": waits(deadline=20.0, late="keep"),
    "over-committed": waits(over=0.5),
}
ROUNDS = 12


@pytest.mark.parametrize("engine", list(ENGINES))
@pytest.mark.parametrize("plan", list(PLANS))
def test_a_run_goes_on_from_every_round_to_the_same_bits(
    plan: str, engine: str, tmp_path: Path
) -> None:
    job, setup = task(), setup_of(PLANS[plan], lognormal(dropout=0.1), ROUNDS)
    first = Run.start(job.start(), setup, seed=5)
    folders = {}
    straight = []
    for run in drive(rounds(first, setup), ENGINES[engine](job)):
        straight.append(run)
        folders[run.round] = tmp_path / str(run.round)
        folders[run.round].mkdir()
        Checkpoints(folders[run.round]).save(run, {})
    assert any(len(run.flight) for run in straight)
    for number in range(1, ROUNDS, 2):
        blank = Run.start(job.start(), setup, seed=5)
        run, passed = Checkpoints(folders[number]).load(blank)
        assert not passed
        later = list(drive(rounds(run, setup), ENGINES[engine](job)))
        for after, before in zip(later, straight[number:], strict=True):
            assert torch.equal(after.x, before.x)
            assert after.time == before.time
            assert after.record is not None
            assert before.record is not None
            assert after.record.ids.tolist() == before.record.ids.tolist()
            assert after.record.rejected == before.record.rejected
            assert str(after.record.clock) == str(before.record.clock)
