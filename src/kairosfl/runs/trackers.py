"""Metrics to TensorBoard and MLflow, through their own libraries."""

from __future__ import annotations

import math
import os
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import Any

from kairosfl.errors import UserError, nearest
from kairosfl.runs.files import write


class Tracker(ABC):
    """Receives the metrics of a run, one row per round."""

    @abstractmethod
    def __call__(self, row: dict[str, Any]) -> None:
        """Log one round."""

    @abstractmethod
    def close(self) -> None:
        """The run has ended."""


class TensorBoard(Tracker):
    """Event files in the run folder: `tensorboard --logdir runs`."""

    def __init__(self, folder: Path, settings: dict[str, Any], done: int) -> None:
        self.writer = library("tensorboard").SummaryWriter(
            str(folder / "tensorboard"), purge_step=done + 1
        )

    def __call__(self, row: dict[str, Any]) -> None:
        for name, value in numbers(row).items():
            self.writer.add_scalar(name, value, row["round"])

    def close(self) -> None:
        self.writer.close()


class MLflow(Tracker):
    """A run on the tracking server that MLflow's own settings name, beside other open runs."""

    def __init__(self, folder: Path, settings: dict[str, Any], done: int) -> None:
        self.library = library("mlflow")
        id_file = folder / "mlflow-run-id.txt"  # a resumed run keeps its identity
        with self._explained():
            self.client = self.library.MlflowClient()
            if id_file.is_file():
                self.id = id_file.read_text().strip()
                self.client.update_run(self.id, status="RUNNING")
                return
            self.id = self.client.create_run(self._experiment(), run_name=folder.name).info.run_id
            write(id_file, self.id)
            params = []
            for name, setting in settings.items():
                params.append(self.library.entities.Param(name, str(setting)))
            self.client.log_batch(self.id, params=params)

    def __call__(self, row: dict[str, Any]) -> None:
        now = int(time.time() * 1000)
        metrics = []
        for name, number in numbers(row).items():
            metrics.append(self.library.entities.Metric(name, number, now, row["round"]))
        with self._explained():
            self.client.log_batch(self.id, metrics=metrics)

    def close(self) -> None:
        # The server may be gone, but the run itself has ended.
        with suppress(self.library.MlflowException):
            self.client.set_terminated(self.id)

    def _experiment(self) -> str:
        """The experiment that MLflow's own variables name, created if it does not exist."""
        name = os.environ.get("MLFLOW_EXPERIMENT_NAME")
        if not name:
            return os.environ.get("MLFLOW_EXPERIMENT_ID", "0")
        experiment = self.client.get_experiment_by_name(name)
        if experiment:
            return str(experiment.experiment_id)
        return str(self.client.create_experiment(name))

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except self.library.MlflowException as error:
            words = str(error).strip().partition("\n")[0]
            raise UserError(
                f'run.track = "mlflow": {words} Set MLFLOW_TRACKING_URI to a reachable server, '
                "or install the full package: pip install mlflow."
            ) from None


TRACKERS: dict[str, type[TensorBoard] | type[MLflow]] = {
    "tensorboard": TensorBoard,
    "mlflow": MLflow,
}


LIBRARIES = {"tensorboard": "torch.utils.tensorboard", "mlflow": "mlflow"}


def library(name: str) -> Any:
    """The library of a tracker; a UserError if it is not installed."""
    try:
        return import_module(LIBRARIES[name])
    except ImportError:
        raise UserError(f'run.track = "{name}" needs its library: pip install {name}') from None


def check(names: tuple[str, ...]) -> None:
    """Refuse a tracker that does not exist."""
    for name in names:
        if name not in TRACKERS:
            raise UserError(
                f"run.track names {name!r}, which does not exist; {nearest(name, TRACKERS)}"
            )


def numbers(row: dict[str, Any]) -> dict[str, float]:
    """The loggable values of a row: everything but the round and what was not measured."""
    loggable = {}
    for name, number in row.items():
        if name in ("round", "metric", "evaluated") or number is None:
            continue
        if math.isfinite(number):
            loggable[name] = float(number)
    return loggable
