"""When a model is measured on every client's own data: on request, or after the last round where
that is cheap.
"""

from __future__ import annotations

from kairosfl.runs.config import RunConfig
from kairosfl.tasks.streamed import Streamed
from kairosfl.tasks.task import Task

CHEAP = 0.05  # of the arithmetic of the run
TRAINING = 3  # passes: a backward pass costs about two forward passes


def measures_clients(config: RunConfig, task: Task, *, last: bool = True) -> bool:
    """Whether this evaluation, the last one of the run or another, also measures every client."""
    asked = config.run.client_accuracy
    return last and _cheap(config, task) if asked == "auto" else bool(asked)


def _cheap(config: RunConfig, task: Task) -> bool:
    """Decided by counting, not by a stopwatch, so that a run that is repeated records the same."""
    train, run, clients = config.train, config.run, task.clients
    samples = task.dataset.test if task.tests is not None else task.dataset.train
    held = int(clients.sizes.sum())  # none: the data are on the clients' own devices
    if not held or isinstance(samples, Streamed):
        return False
    if config.algorithm.any("promises"):
        return False  # such numbers have no noise
    trained = train.rounds * min(train.cohort, len(clients)) * train.epochs * held / len(clients)
    evaluated = train.rounds // run.eval_every * len(task.dataset.test)
    return len(samples) <= CHEAP * (TRAINING * trained + evaluated)
