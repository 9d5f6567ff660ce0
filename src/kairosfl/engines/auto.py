"""Which engine suits a task: by a short measurement, not a guess."""

from __future__ import annotations

import torch

from kairosfl.recipe import Recipe
from kairosfl.tasks.task import Task


def pick(task: Task, recipe: Recipe, device: torch.device) -> str:
    """"batched" on a GPU."""
    return "batched" if device.type == "cuda" else "loop"
