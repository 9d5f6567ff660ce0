"""The configurations and tasks of trials: the file's, with the settings of each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from kairosfl.runs.checkpoint import EVERY
from kairosfl.runs.config import RunConfig, resolve, tables
from kairosfl.runs.keys import updated
from kairosfl.runs.prepare import Shared, build_task, partition_seed
from kairosfl.tasks.task import Task
from kairosfl.tune.demands import shields

SCORED = 100  # evaluations of a run
SAVED = 10  # checkpoints of a run


class Variants:
    """What runs of trials are made of; trials share tasks where they can.

    Args:
        base: The file's configuration, which trials change.
        shared: The data that all of them share.
    """

    def __init__(self, base: RunConfig, shared: Shared) -> None:
        self.base = base
        self.shared = shared
        self.tasks: dict[str, Task] = {}

    def config(self, settings: Mapping[str, Any], rounds: int, number: int = 0) -> RunConfig:
        """The configuration of a trial in a stage.

        Its schedule is that of the whole run, in fewer rounds. With privacy it has a seed of its
        own, among the same clients: its noise must be independent of other runs'.

        Args:
            settings: The keys in which the trial differs from the file.
            rounds: Those of the stage.
            number: That of the trial.
        """
        config = resolve(updated(tables(self.base), settings))
        train = config.train
        part = rounds / train.rounds
        short: dict[str, Any] = {
            "train.rounds": rounds,
            "run.eval_every": max(1, rounds // SCORED),
            "run.checkpoint_every": _checkpoint_every(config, rounds),
            "run.client_accuracy": False,
        }
        if train.schedule == "exponential":
            short["train.gamma"] = train.gamma ** (1 / part)
        if train.schedule == "steps":
            short["train.milestones"] = [round(milestone * part) for milestone in train.milestones]
        if any(map(shields, config.algorithm.rules)):
            seeds = np.random.SeedSequence([config.seed, number, rounds])
            short["seed"] = int(seeds.generate_state(1)[0])
            short["data.partition_seed"] = partition_seed(config)
        return resolve(updated(tables(config), short))

    def task(self, config: RunConfig) -> Task:
        """The task of a configuration; one with a seed of its own is of that trial alone."""
        if config.seed != self.base.seed:
            return build_task(config, shared=self.shared)
        key = repr((config.data, config.model, config.seed))
        if key not in self.tasks:
            self.tasks[key] = build_task(config, shared=self.shared)
        return self.tasks[key]


def _checkpoint_every(config: RunConfig, rounds: int) -> int:
    """How often a run is saved: as the file says, but at most so many times."""
    every = config.run.checkpoint_every
    fewest = rounds // SAVED
    if fewest <= (every or EVERY):
        return every
    return fewest
