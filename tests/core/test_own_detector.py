"""A detector of one's own is recorded under its name: in the signals, in the metrics, and in the
report's pictures.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from kairosfl import Loop, parse
from kairosfl.core.recipe import Recipe
from kairosfl.core.round import drive, rounds
from kairosfl.core.rule import Detector, Memory, Round, State
from kairosfl.core.run import Run, Setup
from kairosfl.detectors import FGN
from kairosfl.errors import UserError
from kairosfl.report.read import read_run
from kairosfl.rules import FedProx
from kairosfl.runs import experiment
from kairosfl.runs.config import resolve
from kairosfl.runs.files import read_lines
from kairosfl.testing import _task


@dataclass(frozen=True, kw_only=True)
class Length(Detector):
    """Critical while the longest update is longer than half the longest so far."""

    def server(self, now: Round) -> State:
        return {"most": torch.tensor(0.0, dtype=torch.float64)}

    def value(self, memory: Memory, now: Round) -> float:
        return float(now.reports.delta.norm(dim=1).max())

    def decide(self, value: float, memory: Memory, now: Round) -> tuple[bool, Memory]:
        most = max(value, float(memory.state["most"]))
        return value > most / 2, memory.replace(
            state={"most": torch.tensor(most, dtype=torch.float64)}
        )


def test_it_is_in_the_signals_beside_the_others() -> None:
    job = _task(torch.float64, FedProx())
    detectors = (Length(), FGN(), FGN.paired())
    setup = Setup(parse("fedcl"), Recipe(rounds=3, cohort=4, lr=0.1), 7, job.layout, detectors)
    blank = Run.start(job.start(), setup, seed=0)
    names = [Length.name(), "fgn", "fgn(compare='visits')"]
    assert list(blank.signals.values) == names
    for run in drive(rounds(blank, setup), Loop(job)):
        longest = float(run.record.reports.delta.norm(dim=1).max())
        assert run.signals.values[Length.name()] == pytest.approx(longest, rel=1e-12)
        assert run.signals.fgn == run.record.values[1]
        np.testing.assert_equal([*run.signals.values.values()], [*run.record.values])


def test_it_is_in_the_metrics_and_in_the_report(tmp_path: Path) -> None:
    name = f"{__name__}.Length"
    tables = {"data": {"name": "digits", "clients": 12}, "model": {"name": "mlp", "hidden": [8]}}
    tables |= {"train": {"rounds": 3, "cohort": 3}, "run": {"device": "cpu", "engine": "loop"}}
    tables["run"] |= {"detector": f"{name} + fedfim", "allow": [__name__]}
    experiment.start(resolve(tables), tmp_path / "run")
    rows = list(read_lines(tmp_path / "run" / "metrics.jsonl"))
    assert all(row[name] > 0 and row["fedfim"] > 0 for row in rows)
    assert "fgn" not in rows[0]
    run = read_run(tmp_path / "run")
    assert name in run.recorded
    np.testing.assert_array_equal(run.column(name), [row[name] for row in rows])

    text = (tmp_path / "run" / "metrics.jsonl").read_text()
    (tmp_path / "run" / "metrics.jsonl").write_text(
        text.replace('"fedfim":', '"fisher":')
    )  # as until 0.2
    np.testing.assert_array_equal(
        read_run(tmp_path / "run").column("fedfim"), [row["fedfim"] for row in rows]
    )


def test_without_a_detector_every_round_is_critical_and_nobody_may_ask_one() -> None:
    job = _task(torch.float64, FedProx())
    setup = Setup(parse("fedavg"), Recipe(rounds=1, cohort=4, lr=0.1), 7, job.layout)
    assert Run.start(job.start(), setup, seed=0).signals.critical
    with pytest.raises(
        UserError, match="fedcl acts by a detector of critical periods, and there is none"
    ):
        Setup(parse("fedcl"), Recipe(rounds=1, cohort=4, lr=0.1), 7, job.layout)
