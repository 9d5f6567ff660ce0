"""Tasks for simulating attacks: clients that train honestly on wrong labels."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch

from kairosfl.tasks.dataset import Samples
from kairosfl.tasks.task import Task


def flip_labels(task: Task, clients: Iterable[int]) -> Task:
    """The task in which these clients have the label C − 1 − y where the data says y, of C classes.

    Args:
        task: A classification task.
        clients: The clients that lie, such as `kairosfl.rules.attack.liars(seed, len(task.clients), 0.2)`.
    """
    train, targets = task.dataset.train, task.dataset.train.targets.clone()
    for client in clients:
        mine = torch.from_numpy(task.clients[int(client)].astype("int64"))
        targets[mine] = task.dataset.classes - 1 - targets[mine]
    return replace(task, dataset=replace(task.dataset, train=Samples(train.inputs, targets)))
