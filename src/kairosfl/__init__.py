"""Kairos: federated learning in which every round adapts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kairosfl import moved
from kairosfl.lazy import attach
from kairosfl.version import __version__

if TYPE_CHECKING:
    from kairosfl import data, detectors, engines, models, rules, tasks, testing
    from kairosfl.core.fields import Briefs, Reports
    from kairosfl.core.recipe import Recipe
    from kairosfl.core.round import drive, result, rounds
    from kairosfl.core.rule import Algorithm, Memory, Plan, Rule
    from kairosfl.core.run import Round, Run, Setup
    from kairosfl.core.traits import Traits
    from kairosfl.engines.batched import Batched
    from kairosfl.engines.loop import Loop
    from kairosfl.errors import UserError
    from kairosfl.rules import parse
    from kairosfl.runs.export import load
    from kairosfl.simulation import History, simulate
    from kairosfl.tasks.dataset import DataSet, Samples
    from kairosfl.tasks.metrics import Metric
    from kairosfl.tasks.population import Population
    from kairosfl.tasks.task import Task
    from kairosfl.testing import check_rule
else:
    __getattr__, __dir__ = attach(
        "kairosfl",
        {
            "Algorithm": "kairosfl.core.rule",
            "Batched": "kairosfl.engines.batched",
            "Briefs": "kairosfl.core.fields",
            "DataSet": "kairosfl.tasks.dataset",
            "History": "kairosfl.simulation",
            "Loop": "kairosfl.engines.loop",
            "Memory": "kairosfl.core.rule",
            "Metric": "kairosfl.tasks.metrics",
            "Plan": "kairosfl.core.rule",
            "Population": "kairosfl.tasks.population",
            "Recipe": "kairosfl.core.recipe",
            "Reports": "kairosfl.core.fields",
            "Round": "kairosfl.core.run",
            "Rule": "kairosfl.core.rule",
            "Traits": "kairosfl.core.traits",
            "Run": "kairosfl.core.run",
            "Samples": "kairosfl.tasks.dataset",
            "Setup": "kairosfl.core.run",
            "Task": "kairosfl.tasks.task",
            "UserError": "kairosfl.errors",
            "check_rule": "kairosfl.testing",
            "data": "kairosfl.data",
            "detectors": "kairosfl.detectors",
            "drive": "kairosfl.core.round",
            "engines": "kairosfl.engines",
            "load": "kairosfl.runs.export",
            "models": "kairosfl.models",
            "parse": "kairosfl.rules",
            "result": "kairosfl.core.round",
            "rounds": "kairosfl.core.round",
            "rules": "kairosfl.rules",
            "simulate": "kairosfl.simulation",
            "tasks": "kairosfl.tasks",
            "testing": "kairosfl.testing",
        },
    )

moved.install()

__all__ = [
    "Algorithm",
    "Batched",
    "Briefs",
    "DataSet",
    "History",
    "Loop",
    "Memory",
    "Metric",
    "Plan",
    "Population",
    "Recipe",
    "Reports",
    "Round",
    "Rule",
    "Run",
    "Samples",
    "Setup",
    "Task",
    "Traits",
    "UserError",
    "__version__",
    "check_rule",
    "data",
    "detectors",
    "drive",
    "engines",
    "load",
    "models",
    "parse",
    "result",
    "rounds",
    "rules",
    "simulate",
    "tasks",
    "testing",
]
