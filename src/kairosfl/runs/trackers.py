"""Metrics to TensorBoard and MLflow, through their own libraries."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any

from kairosfl.errors import UserError, nearest


class Tracker(ABC):
    """Takes the metrics of a run, one row a round."""

    @abstractmethod
    def __call__(self, row: dict[str, Any]) -> None:
        """One more round."""

    @abstractmethod
    def close(self) -> None:
        """Nothing more comes."""


class TensorBoard(Tracker):
    """Event files in the run folder: `tensorboard --logdir runs`."""

    def __init__(self, folder: Path, settings: dict[str, Any], done: int) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise UserError('run.track = "tensorboard" needs its library: pip install tensorboard') from None
        self.writer = SummaryWriter(str(folder / "tensorboard"), purge_step=done + 1)

    def __call__(self, row: dict[str, Any]) -> None:
        for name, value in numbers(row).items():
            self.writer.add_scalar(name, value, row["round"])

    def close(self) -> None:
        self.writer.close()


class MLflow(Tracker):
    """A run of the tracking server that MLflow's own settings name."""

    def __init__(self, folder: Path, settings: dict[str, Any], done: int) -> None:
        try:
            import mlflow
        except ImportError:
            raise UserError('run.track = "mlflow" needs its library: pip install mlflow-skinny') from None
        self.mlflow = mlflow
        known = folder / "mlflow-run-id.txt"  # a resumed run goes on under its old identity
        before = known.read_text().strip() if known.is_file() else None
        self.run = mlflow.start_run(run_id=before, run_name=folder.name)
        if before is None:
            known.write_text(self.run.info.run_id)
            mlflow.log_params(settings)

    def __call__(self, row: dict[str, Any]) -> None:
        self.mlflow.log_metrics(numbers(row), step=row["round"])

    def close(self) -> None:
        self.mlflow.end_run()


TRACKERS: dict[str, type[TensorBoard] | type[MLflow]] = {"tensorboard": TensorBoard, "mlflow": MLflow}


def check(names: tuple[str, ...]) -> None:
    """Refuse a tracker that does not exist."""
    for name in names:
        if name not in TRACKERS:
            raise UserError(f"run.track names {name!r}, which does not exist; {nearest(name, TRACKERS)}")


def numbers(row: dict[str, Any]) -> dict[str, float]:
    """What can be drawn of a row: everything but the round and what was not measured."""
    known = {name: value for name, value in row.items() if name != "round" and value is not None}
    return {name: float(value) for name, value in known.items() if math.isfinite(value)}
