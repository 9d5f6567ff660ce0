"""The measures of an item: numbers and curves computed from a run folder."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from kairosfl.detectors.stability import WINDOW, average, losses, measure
from kairosfl.runs.files import read_lines
from kairosfl.runs.history import final_tenth, rounds_to

Rows = list[dict[str, Any]]


@dataclass
class RecordedRun:
    """The records of a run, and the run with the same seed that it is compared with, if there is
    one.
    """

    path: Path
    baseline: RecordedRun | None = None

    @cached_property
    def rows(self) -> Rows:
        """The lines of metrics.jsonl."""
        return list(read_lines(self.path / "metrics.jsonl"))

    @cached_property
    def clients(self) -> Rows:
        """The lines of clients.jsonl."""
        return list(read_lines(self.path / "clients.jsonl"))

    def column(self, name: str) -> np.ndarray:
        """The values of a column that are not missing."""
        return np.array(
            [row[name] for row in self.rows if row.get(name) is not None], dtype=np.float64
        )


@dataclass(frozen=True)
class Measure:
    """The heading, the number of digits, and the difference up to which a published value counts as
    reproduced.

    `unit` is that of a difference; empty where the heading says it.
    """

    title: str
    digits: int
    tolerance: float
    of: Callable[[RecordedRun], float | None]
    unit: str = ""


def _mean(values: np.ndarray) -> float | None:
    return float(values.mean()) if len(values) else None


def _final(run: RecordedRun) -> float | None:
    values = run.column("accuracy")
    return 100 * float(values[-1]) if len(values) else None


def _best(run: RecordedRun) -> float | None:
    values = run.column("accuracy")
    return 100 * float(values.max()) if len(values) else None


def _last_tenth(run: RecordedRun) -> float | None:
    values = run.column("accuracy")
    return 100 * float(final_tenth(values).mean()) if len(values) else None


def _plain_tenth(run: RecordedRun) -> float | None:
    """Of the plain models, which are recorded apart only while models are averaged."""
    values = [
        row.get("plain_accuracy", row["accuracy"])
        for row in run.rows
        if row["accuracy"] is not None
    ]
    return 100 * float(np.mean(final_tenth(values))) if values else None


def _rounds_to(share: float) -> Callable[[RecordedRun], float | None]:
    """Rounds until this fraction of the baseline's final accuracy is first reached."""

    def measure(run: RecordedRun) -> float | None:
        if run.baseline is None or not len(scored := run.baseline.column("accuracy")):
            return None
        return rounds_to(run.rows, share * scored[-1])

    return measure


def _critical_until(run: RecordedRun) -> float | None:
    """The last critical round; 0 if there was none."""
    return (
        float(max((row["round"] for row in run.rows if row["critical"]), default=0))
        if run.rows
        else None
    )


def _sum(name: str) -> Callable[[RecordedRun], float | None]:
    return lambda run: float(run.column(name).sum()) if run.rows else None


def _average(name: str) -> Callable[[RecordedRun], float | None]:
    return lambda run: _mean(run.column(name))


def _megabytes(run: RecordedRun) -> float | None:
    return _mean((run.column("bytes_down") + run.column("bytes_up")) / 1e6)


def _fisher_megabytes(run: RecordedRun) -> float | None:
    values = run.column("fisher_bytes")
    return float(values.max()) / 1e6 if len(values) else None


def _ending(name: str) -> Callable[[RecordedRun], float | None]:
    return lambda run: _mean(final_tenth(run.column(name)))


def _stability(name: str) -> Callable[[RecordedRun], float | None]:
    """The mean over the clients with enough turns for all of PA3Fed's measures of one of them."""

    def of(run: RecordedRun) -> float | None:
        found = [measure(values) for values in losses(run.clients).values() if len(values) > WINDOW]
        return float(getattr(average(found), name)) if found else None

    return of


def _spread(critical: bool) -> Callable[[RecordedRun], float | None]:
    """Mean over clients of the standard deviation of their losses, in critical rounds or in the
    others.
    """

    def of(run: RecordedRun) -> float | None:
        inside = {row["round"] for row in run.rows if row["critical"] == critical}
        found = [
            measure(values)
            for values in losses(run.clients, rounds=inside).values()
            if len(values) > 1
        ]
        return average(found).standard_deviation if found else None

    return of


@dataclass(frozen=True)
class Trace:
    """A column of the metrics as a curve: its heading, whether it is cumulative, and whether it is
    a percentage.
    """

    title: str
    column: str
    total: bool = False
    percent: bool = False
    before: str = ""  # what the column was called in older runs

    def of(self, run: RecordedRun) -> tuple[np.ndarray, np.ndarray]:
        """The rounds in which it is known, and its values."""
        rounds = np.array([row["round"] for row in run.rows])
        values = np.array(
            [row.get(self.column, row.get(self.before)) for row in run.rows], dtype=np.float64
        )  # None is NaN
        known = np.isfinite(values)
        return rounds[known], values[known].cumsum() if self.total else values[known]


TRACES: dict[str, Trace] = {
    "accuracy": Trace("test accuracy", "accuracy", percent=True),
    "train_loss": Trace("training loss", "train_loss"),
    "fgn": Trace("FGN", "fgn"),
    "fedfim": Trace("trace of the Fisher information", "fedfim", before="fisher"),
    "critical": Trace("critical (1) or not", "critical"),
    "cohort": Trace("clients per round", "cohort"),
    "elud": Trace("e-LUD", "elud"),
    "coherence": Trace("coherence", "coherence"),
    "consensus": Trace("‖mean update‖", "consensus"),
    "epochs": Trace("epochs per round", "epochs_total"),
    "epochs_so_far": Trace("epochs so far", "epochs_total", total=True),
}
MEASURES: dict[str, Measure] = {
    "final": Measure("final accuracy", 2, 2.0, _final, "points"),
    "best": Measure("accuracy, best round", 2, 2.0, _best, "points"),
    "last_tenth": Measure("accuracy, final 10 %", 2, 2.0, _last_tenth, "points"),
    "plain_tenth": Measure(
        "accuracy without averaging models, final 10 %", 2, 2.0, _plain_tenth, "points"
    ),
    "elud": Measure("e-LUDD", 2, 0.2, _average("elud")),
    "coherence": Measure("coherence, final 10 %", 3, 0.05, _ending("coherence")),
    "consensus": Measure("‖mean update‖, final 10 %", 4, 0.01, _ending("consensus")),
    "cohort": Measure("clients per round", 1, 1.0, _average("cohort")),
    "critical": Measure("critical rounds", 0, 2.0, _sum("critical")),
    "critical_until": Measure("last critical round", 0, 2.0, _critical_until),
    "train_loss": Measure("training loss, final 10 %", 3, 0.05, _ending("train_loss")),
    "rounds_to": Measure("rounds to the baseline's final accuracy", 0, 5.0, _rounds_to(1.0)),
    "rounds_to_half": Measure("rounds to half of that accuracy", 0, 5.0, _rounds_to(0.5)),
    "rounds_to_most": Measure("rounds to 90 % of that accuracy", 0, 5.0, _rounds_to(0.9)),
    "epochs": Measure("total epochs", 0, 100.0, _sum("epochs_total")),
    "epochs_round": Measure("epochs per round", 1, 5.0, _average("epochs_total")),
    "megabytes": Measure("megabytes per round", 1, 1.0, _megabytes),
    "seconds": Measure("seconds per round", 3, 0.1, _average("seconds")),
    "total_seconds": Measure("seconds of the run", 0, 0.0, _sum("seconds")),
    "fisher_megabytes": Measure("megabytes of memory for FedFIM", 0, 10.0, _fisher_megabytes),
    "fisher_seconds": Measure("seconds per round for FedFIM", 3, 0.1, _average("fisher_seconds")),
    "loss_std": Measure("standard deviation", 3, 0.01, _stability("standard_deviation")),
    "loss_moving": Measure(
        "deviation of the moving average", 3, 0.005, _stability("moving_deviation")
    ),
    "loss_mad": Measure("mean absolute deviation", 3, 0.01, _stability("mean_absolute_deviation")),
    "loss_range": Measure("range", 3, 0.03, _stability("range")),
    "loss_change": Measure("largest change", 3, 0.03, _stability("largest_change")),
    "loss_critical": Measure("loss deviation in critical rounds", 3, 0.01, _spread(True)),
    "loss_rest": Measure("loss deviation in other rounds", 3, 0.01, _spread(False)),
}
