"""What a run learns: a model, a data set, and which samples belong to which client."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kairosfl.lazy import attach

if TYPE_CHECKING:
    from kairosfl.tasks import data, models
    from kairosfl.tasks.data import load
    from kairosfl.tasks.dataset import DataSet, Samples
    from kairosfl.tasks.partitions import partition
    from kairosfl.tasks.population import Population
    from kairosfl.tasks.task import Task
else:
    __getattr__, __dir__ = attach(
        "kairosfl.tasks",
        {
            "DataSet": "kairosfl.tasks.dataset",
            "Population": "kairosfl.tasks.population",
            "Samples": "kairosfl.tasks.dataset",
            "Task": "kairosfl.tasks.task",
            "data": "kairosfl.tasks.data",
            "load": "kairosfl.tasks.data",
            "models": "kairosfl.tasks.models",
            "partition": "kairosfl.tasks.partitions",
        },
    )

__all__ = ["DataSet", "Population", "Samples", "Task", "data", "load", "models", "partition"]
