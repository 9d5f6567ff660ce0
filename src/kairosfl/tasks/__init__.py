"""What a run learns: a model, a data set, and which samples belong to which client."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from kairosfl.lazy import attach

if TYPE_CHECKING:
    from kairosfl.data import load
    from kairosfl.tasks.dataset import DataSet, Samples
    from kairosfl.tasks.partitions import partition
    from kairosfl.tasks.population import Population
    from kairosfl.tasks.task import Task
else:
    _named, __dir__ = attach(
        "kairosfl.tasks",
        {
            "DataSet": "kairosfl.tasks.dataset",
            "Population": "kairosfl.tasks.population",
            "Samples": "kairosfl.tasks.dataset",
            "Task": "kairosfl.tasks.task",
            "load": "kairosfl.data",
            "partition": "kairosfl.tasks.partitions",
        },
    )

    def __getattr__(name: str) -> object:
        if name in ("data", "models"):  # moved to kairosfl.data and kairosfl.models
            return importlib.import_module(f"kairosfl.tasks.{name}")
        return _named(name)


__all__ = ["DataSet", "Population", "Samples", "Task", "load", "partition"]
