"""Which engine suits a task: by a short measurement, not a guess."""

from __future__ import annotations

import time
from dataclasses import replace

import numpy as np
import torch

from kairosfl.core.fields import Briefs
from kairosfl.core.recipe import Recipe
from kairosfl.engines.batched import Batched
from kairosfl.engines.loop import Loop
from kairosfl.tasks.population import Population
from kairosfl.tasks.task import Task

CLIENTS = 64  # at most, in the trial
BATCHES = 2  # of each client
WORTH = 0.9  # batched must take less than this part of the loop's time


def pick(task: Task, recipe: Recipe, device: torch.device) -> str:
    """ "batched" on a GPU, and on a CPU where it trains a small trial cohort quicker; else "loop"."""
    if device.type == "cuda":
        return "batched"
    trial = _trial(task, recipe)
    briefs = _briefs(trial, recipe)
    batched = Batched(trial, device)
    if not batched.stacks:
        return "loop"
    return "batched" if _seconds(batched, briefs) < WORTH * _seconds(Loop(trial, device), briefs) else "loop"


def _trial(task: Task, recipe: Recipe) -> Task:
    """The task with as many clients as a cohort has, each with its first few batches of samples."""
    count = min(len(task.clients), recipe.cohort, CLIENTS)
    chosen = np.linspace(0, len(task.clients) - 1, count).astype(int)
    samples = [task.clients[client][: BATCHES * recipe.batch_size] for client in chosen]
    return replace(task, clients=Population.from_lists(samples))


def _briefs(task: Task, recipe: Recipe) -> Briefs:
    told = recipe.told(0) | {"epochs": 1}
    return Briefs(seed=0, round=0, ids=torch.arange(len(task.clients)), start=task.start(), **told)


def _seconds(engine: Batched | Loop, briefs: Briefs) -> float:
    """The quicker of two goes, after one of the first client alone."""
    engine.train(briefs.take(torch.zeros(1, dtype=torch.int64)))
    times = []
    for _ in range(2):
        began = time.perf_counter()
        engine.train(briefs)
        times.append(time.perf_counter() - began)
    return min(times)
