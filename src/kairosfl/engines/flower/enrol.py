"""What a node's task must have in common with the server's, by hash.

A node is asked in its first brief.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

from kairosfl.tasks.task import Task
from kairosfl.tasks.vector import trained

TASK, BASE = "task_hash", "base_hash"
SHOWN = 12  # digits of a hash in a message


def task_hash(task: Task) -> str:
    """A digest of what a vector means: layers, trained tensors, loss and kind of data.

    Weights and samples are not part of it.
    """
    tensors = []
    for name, tensor in trained(task.model).items():
        tensors.append((name, list(tensor.shape), str(tensor.dtype)))
    layers = []
    for name, module in task.model.named_modules():
        layers.append((name, type(module).__name__))
    loss = getattr(task.loss, "__qualname__", type(task.loss).__name__)
    parts: list[Any] = [layers, tensors, loss, task.dataset.kind]
    if task.own:
        parts.append(sorted(task.own_names))
    form = json.dumps(parts)
    return hashlib.sha256(form.encode()).hexdigest()


def wanted(task: Task) -> dict[str, str]:
    """What the server asks of a node."""
    hashes = {TASK: task_hash(task)}
    if task.base_hash is not None:
        hashes[BASE] = task.base_hash
    return hashes


def difference(hashes: Mapping[str, str], task: Task) -> str | None:
    """Why a node with this task cannot take part, where it is asked for these; None if it can."""
    if TASK in hashes and hashes[TASK] != (own := task_hash(task)):
        return (
            "the layers, the loss or the kind of data of this client's task have the hash "
            f"{own[:SHOWN]}, the server's {hashes[TASK][:SHOWN]}; give both the same task.py and "
            "the same packages."
        )
    if BASE in hashes and hashes[BASE] != task.base_hash:  # last: hashing gigabytes takes time
        return (
            "the frozen part of this client's model has the hash "
            f"{str(task.base_hash)[:SHOWN]}, the server's {hashes[BASE][:SHOWN]}; "
            "give both the same weights."
        )
    return None
