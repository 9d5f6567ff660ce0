"""Which engine a run uses, and how it is made."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from kairosfl.core.fields import Briefs, Reports
from kairosfl.core.recipe import Recipe
from kairosfl.engines.evaluate import Evaluator, Scores
from kairosfl.engines.loop import Loop
from kairosfl.engines.protocol import Engine
from kairosfl.errors import UserError
from kairosfl.runs.config import Execution
from kairosfl.tasks.task import Task

if TYPE_CHECKING:
    from kairosfl.engines.batched import Batched

DEVICES = ("cpu", "cuda")
# Parameters times samples in a batch below which a second thread costs more than it gains.
SMALL = 1 << 22


def resolve_engine(run: Execution, recipe: Recipe, task: Task) -> tuple[Execution, str]:
    """[run] with `auto` replaced by what suits task and machine, and the reason if the engine was
    `auto`.

    The engine depends only on the configuration and the kind of device, so that a run started twice
    uses the same one.

    Args:
        run: How the run is to be carried out.
        recipe: How clients train.
        task: Data, clients and model.
    """
    device = _device(run.device)
    engine, because = run.engine, ""
    if engine == "auto":
        from kairosfl.engines.auto import pick

        engine, because = pick(task, recipe, torch.device(device))

    precision = run.precision
    if precision == "auto":
        on_gpu = device.startswith("cuda") and engine == "batched"
        precision = "tf32" if on_gpu else "float32"

    threads = run.threads
    if not threads:
        is_small = task.layout.size * recipe.batch_size < SMALL
        threads = 1 if is_small else (os.cpu_count() or 1)

    choices = {"device": device, "engine": engine, "precision": precision, "threads": threads}
    return replace(run, **choices), because  # type: ignore[arg-type]


def _device(name: str) -> str:
    """The device of this name, which must be on this machine."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        torch.empty(0, device=name)
        is_here = torch.device(name).type in DEVICES
    except (RuntimeError, AssertionError, ImportError):
        is_here = False
    if not is_here:
        raise UserError(f"run.device = {name!r} is not on this machine; use 'cpu' or 'auto'.")
    return name


def build_engine(run: Execution, task: Task, cohorts: Sequence[int], because: str = "") -> Engine:
    """The engine that a resolved [run] names; sets torch's number of threads.

    Args:
        run: How the run is carried out, with every choice made.
        task: Data, clients and model.
        cohorts: The largest cohorts of the runs that use it.
        because: Why it was chosen.
    """
    torch.set_num_threads(run.threads)
    engine = _engine(run, task, cohorts)
    if because:
        reasons = [engine.why, f"chosen because {because}"]
        engine.why = "; ".join(reason for reason in reasons if reason)
    return engine


def _engine(run: Execution, task: Task, cohorts: Sequence[int]) -> Engine:
    if run.engine == "batched":
        from kairosfl.engines.batched import Batched

        return Batched(
            task,
            run.device,
            precision=run.precision,
            slots=run.slots or None,
            deterministic=run.deterministic,
            cohorts=cohorts,
        )
    if run.engine == "ray":
        from kairosfl.engines.ray import Ray

        return Ray(
            task,
            actors=run.actors,
            address=run.ray_address or None,
            device=run.device,
            gpus=1.0 if run.device.startswith("cuda") else 0.0,
            threads=run.threads,
        )
    if run.engine == "debug":
        from kairosfl.engines.debug import Debug

        return Debug(task, run.device, precision=run.precision)
    return Loop(task, run.device, precision=run.precision)


def method(run: Execution, engine: Engine) -> str:
    """How a run is carried out, in one line."""
    line = f"engine {run.engine} on {run.device}, {run.precision}"
    if engine.why:
        line += f": {engine.why}"
    return line


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
