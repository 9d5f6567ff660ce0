"""Kairos: federated learning in which every round adapts."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"

# Loaded on first use, so that `kairosfl --help` does not import torch.
_HOMES = {
    "Algorithm": "kairosfl.core.rule",
    "Briefs": "kairosfl.core.briefs",
    "DataSet": "kairosfl.tasks.dataset",
    "Loop": "kairosfl.engines.loop",
    "Population": "kairosfl.tasks.population",
    "Recipe": "kairosfl.core.recipe",
    "Reports": "kairosfl.core.briefs",
    "Round": "kairosfl.core.round",
    "Rule": "kairosfl.core.rule",
    "Run": "kairosfl.core.round",
    "Samples": "kairosfl.tasks.dataset",
    "Task": "kairosfl.tasks.task",
    "UserError": "kairosfl.errors",
    "drive": "kairosfl.core.round",
    "parse": "kairosfl.rules",
    "rounds": "kairosfl.core.round",
}

if TYPE_CHECKING:
    from kairosfl.core.briefs import Briefs, Reports
    from kairosfl.core.recipe import Recipe
    from kairosfl.core.round import Round, Run, drive, rounds
    from kairosfl.core.rule import Algorithm, Rule
    from kairosfl.engines.loop import Loop
    from kairosfl.errors import UserError
    from kairosfl.rules import parse
    from kairosfl.tasks.dataset import DataSet, Samples
    from kairosfl.tasks.population import Population
    from kairosfl.tasks.task import Task


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'kairosfl' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])


__all__ = [
    "Algorithm",
    "Briefs",
    "DataSet",
    "Loop",
    "Population",
    "Recipe",
    "Reports",
    "Round",
    "Rule",
    "Run",
    "Samples",
    "Task",
    "UserError",
    "__version__",
    "drive",
    "parse",
    "rounds",
]
