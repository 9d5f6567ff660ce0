"""Rules, data sets, models and so on as (name, description) pairs, for `kairosfl list`."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from typing import Any

from kairosfl import presets
from kairosfl.data import DATASETS
from kairosfl.detectors import DETECTORS
from kairosfl.errors import UserError
from kairosfl.models import MODELS, describe
from kairosfl.plugins import Registry, origin
from kairosfl.rules import RULES
from kairosfl.tasks.partitions import PARTITIONS


def listing(what: str) -> list[tuple[str, str]]:
    """All rules, data sets, models, partitions, detectors or presets."""
    if what == "models":
        models = [(name, str(describe(name)).partition(": ")[2]) for name in MODELS.own]
        return [*models, *_others(MODELS)]
    if what == "rules":
        fedavg = "The empty algorithm: the mean of the clients' models, weighted by their samples."
        return [("fedavg", fedavg), *_specs(RULES.own), *_others(RULES)]
    if what == "presets":
        return presets.descriptions()
    if what == "detectors":
        return _specs(DETECTORS)
    if what == "data":
        return [*_functions(DATASETS.own), *_others(DATASETS)]
    return _functions(PARTITIONS)


def _functions(functions: Mapping[str, object]) -> list[tuple[str, str]]:
    return [(name, _first_line(function)) for name, function in functions.items()]


def _others(registry: Registry[Any]) -> list[tuple[str, str]]:
    """What other distributions add; one that cannot be loaded is listed with the reason."""
    rows = []
    for name, point in registry.others().items():
        try:
            rows.append((name, f"{_first_line(registry[name])} (from {origin(point)})".lstrip()))
        except UserError as error:
            rows.append((name, f"broken: {error}"))
    return rows


def _specs(classes: Mapping[str, type]) -> list[tuple[str, str]]:
    rows = []
    for name, cls in classes.items():
        defaults = ", ".join(f"{field.name}={field.default!r}" for field in dataclasses.fields(cls))
        rows.append((name, f"{_first_line(cls)} [{defaults}]"))
    return rows


def _first_line(thing: object) -> str:
    text = inspect.getdoc(thing)
    if text is None:
        return ""
    return text.partition("\n")[0]
