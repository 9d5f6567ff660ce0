"""Which engine suits a task: by a rule, so that a configuration always has the same engine."""

from __future__ import annotations

import torch
from torch import nn

from kairosfl.core.recipe import Recipe
from kairosfl.engines.batched.layers import Unstackable
from kairosfl.engines.batched.stack import stack
from kairosfl.engines.precision import Precision
from kairosfl.tasks.task import Task

# On a CPU, stacking saves calls, not arithmetic. Measured on digits, random images and texts:
# `batched` takes 0.1 to 0.9 of the loop's time within these bounds, about as long with four
# clients, and longer beyond 2^22 and with recurrent layers, of which it runs every time step
# separately.
COHORT = 8  # clients
SMALL = 1 << 22  # parameters times samples in a batch


def pick(task: Task, recipe: Recipe, device: torch.device) -> tuple[str, str]:
    """ "batched" or "loop", and why."""
    if device.type == "cuda":
        return "batched", "a GPU trains clients side by side"
    if recipe.cohort < COHORT:
        return "loop", f"fewer than {COHORT} clients in a round on a CPU"
    work = f"{task.layout.size:,} parameters times {recipe.batch_size} samples"
    if task.layout.size * recipe.batch_size > SMALL:
        return "loop", f"{work} are enough work for a CPU"
    if any(isinstance(module, nn.RNNBase) for module in task.model.modules()):
        return "loop", "recurrent layers do not gain from stacking on a CPU"
    try:
        stack(task.model, task.trial()[0], Precision("float32"), device)
    except Unstackable as reason:
        return "loop", f"clients cannot train side by side: {reason}"
    return "batched", f"{work} are little work for a CPU"
