"""Which engine a run uses, and how it is made."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kairosfl.core.fields import Briefs, Reports
from kairosfl.engines.evaluate import Evaluator, Scores
from kairosfl.engines.loop import Loop
from kairosfl.engines.protocol import Engine
from kairosfl.errors import UserError
from kairosfl.runs import fits
from kairosfl.runs.config import RunConfig
from kairosfl.tasks.task import Task

if TYPE_CHECKING:
    from kairosfl.engines.batched import Batched

DEVICES = ("cpu", "cuda")
SMALL = (
    1 << 22
)  # parameters times samples in a batch below which a second thread costs more than it gains


def resolve_engine(config: RunConfig, task: Task) -> tuple[RunConfig, str]:
    """The configuration with `auto` replaced by what suits task and machine, and the reason if the
    engine was `auto`.

    Refuses what does not fit together. The engine depends only on the configuration and the kind of
    device, so that a run started twice uses the same one.
    """
    fits.check(config, task)
    device = config.run.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=device)
        there = torch.device(device).type in DEVICES
    except (RuntimeError, AssertionError, ImportError):
        there = False
    if not there:
        raise UserError(f"run.device = {device!r} is not on this machine; use 'cpu' or 'auto'.")
    small = task.layout.size * config.train.batch_size < SMALL
    threads = config.run.threads or (1 if small else os.cpu_count() or 1)
    engine, precision, because = config.run.engine, config.run.precision, ""
    if engine == "auto":
        from kairosfl.engines.auto import pick

        engine, because = pick(task, config.train, torch.device(device))
    if precision == "auto":
        precision = "tf32" if device.startswith("cuda") and engine == "batched" else "float32"
    resolved = replace(
        config.run, device=device, engine=engine, precision=precision, threads=threads
    )
    return replace(config, run=resolved), because


def largest(config: RunConfig, task: Task) -> int:
    """The largest cohort that a run may have."""
    return config.algorithm.largest_cohort(config.train.cohort, len(task.clients))


def build_engine(
    config: RunConfig, task: Task, cohorts: Sequence[int] = (), because: str = ""
) -> Engine:
    """The engine that a resolved configuration names; sets torch's number of threads.

    `cohorts` are the largest cohorts of the runs that use it, by default of this run; `because` is
    why it was chosen.
    """
    torch.set_num_threads(config.run.threads)
    engine = _engine(config, task, cohorts)
    if because:
        engine.why = (
            f"{engine.why}; chosen because {because}" if engine.why else f"chosen because {because}"
        )
    return engine


def _engine(config: RunConfig, task: Task, cohorts: Sequence[int]) -> Engine:
    if config.run.engine == "batched":
        from kairosfl.engines.batched import Batched

        return Batched(
            task,
            config.run.device,
            precision=config.run.precision,
            slots=config.run.slots or None,
            deterministic=config.run.deterministic,
            cohorts=cohorts or (largest(config, task),),
        )
    if config.run.engine == "ray":
        from kairosfl.engines.ray import Ray

        return Ray(
            task,
            actors=config.run.actors,
            address=config.run.ray_address or None,
            device=config.run.device,
            gpus=1.0 if config.run.device.startswith("cuda") else 0.0,
            threads=config.run.threads,
        )
    return Loop(task, config.run.device, precision=config.run.precision)


def method(config: RunConfig, engine: Engine) -> str:
    """How a resolved configuration is run, in one line."""
    run = config.run
    return f"engine {run.engine} on {run.device}, {run.precision}" + (
        f": {engine.why}" if engine.why else ""
    )


class SharedEngine(Evaluator):
    """One run's view of an engine that it shares: its own clients and start, the engine's model and
    test set.
    """

    def __init__(self, engine: Batched, task: Task) -> None:
        super().__init__(task, engine.device, engine.predict, engine.test)
        self.engine, self.why, self.choices = engine, engine.why, engine.choices

    def start(self) -> Tensor:
        """The run's own model before training."""
        return self.task.start().to(self.engine.home)

    def evaluate(self, x: Tensor) -> Scores:
        """By the engine: the runs share the test set."""
        return self.engine.evaluate(x)

    def train(self, briefs: Briefs) -> Reports:
        """Never called: the sweep submits the briefs of all runs together."""
        raise UserError(
            "A run on a shared engine trains together with the others; use Batched.submit."
        )
