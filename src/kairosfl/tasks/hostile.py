"""Tasks for simulating attacks: clients that train honestly on wrong labels."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch

from kairosfl.errors import UserError
from kairosfl.tasks.dataset import Samples
from kairosfl.tasks.task import Task


def flip_labels(task: Task, clients: Iterable[int]) -> Task:
    """The task in which these clients have the label C − 1 − y where the data says y, of C classes.

    Args:
        task: A classification task.
        clients: The clients that lie, such as `kairosfl.rules.attack.liars(seed, len(task.clients),
        0.2)`.
    """
    train = task.dataset.train
    if task.dataset.labels_of_train is None or not isinstance(train, Samples):
        raise UserError(
            f"data set {task.dataset.name!r} has no labels in memory that could be flipped."
        )
    targets = torch.from_numpy(task.dataset.labels_of_train.copy())
    for client in clients:
        samples = torch.from_numpy(task.clients[int(client)].astype("int64"))
        targets[samples] = task.dataset.classes - 1 - targets[samples]
    return replace(task, dataset=replace(task.dataset, train=Samples(train.inputs, targets)))
