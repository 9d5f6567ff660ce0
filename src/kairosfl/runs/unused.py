"""Settings that a configuration has, but that its other settings leave without effect."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kairosfl.core.recipe import Recipe
from kairosfl.runs.config import Data, Execution, RunConfig
from kairosfl.tasks.partitions import OPTIONS, SETTINGS

Needed = Callable[[Any], tuple[bool, str]]


def _among(key: str, *values: str) -> Needed:
    """Needs this key to be one of these."""

    def holds(config: RunConfig) -> tuple[bool, str]:
        section, _, name = key.partition(".")
        value = getattr(getattr(config, section), name)
        return value in values, f"with {key} = {value!r}"

    return holds


NEEDS: Mapping[str, Needed] = {
    "train.gamma": _among("train.schedule", "exponential", "steps"),
    "train.milestones": _among("train.schedule", "steps"),
    "train.lr_min": _among("train.schedule", "cosine"),
    "train.beta1": _among("train.optimizer", "adamw"),
    "train.beta2": _among("train.optimizer", "adamw"),
    "train.eps": _among("train.optimizer", "adamw"),
    "train.clip_after": lambda config: (config.train.clip > 0, "with train.clip = 0.0"),
    **{
        f"data.{option}": _among(
            "data.partition", *(name for name, used in OPTIONS.items() if option in used)
        )
        for option in SETTINGS
    },
    "data.crops": lambda config: (config.data.augment, "without data.augment = true"),
    "data.padding": lambda config: (config.data.augment, "without data.augment = true"),
    "run.actors": _among("run.engine", "ray"),
}
MANY = 10_000_000  # local passes over a client's data in one round
DEFAULTS = {"train": Recipe(), "data": Data(), "run": Execution()}


def unused(configs: Sequence[RunConfig]) -> list[str]:
    """One sentence for every setting that differs from its default and has no effect in any of
    these runs.
    """
    found = [_unused(config) for config in configs]
    return [said for key, said in found[0].items() if all(key in each for each in found)]


def _unused(config: RunConfig) -> dict[str, str]:
    said = {}
    for key, needed in NEEDS.items():
        section, _, name = key.partition(".")
        if section == "data" and config.task.file:  # its function may use them as it likes
            continue
        value, (holds, why) = getattr(getattr(config, section), name), needed(config)
        if value != getattr(DEFAULTS[section], name) and not holds:
            said[key] = f"{key} = {value!r} has no effect {why}."
    passes = config.train.cohort * config.train.epochs
    if passes > MANY:
        said["train.epochs"] = (
            f"A round has {passes:,} passes over a client's data, and nothing is shown before it ends; lower "
            "train.epochs if that is not meant."
        )
    if config.train.schedule == "steps" and not config.train.milestones:
        said["train.schedule"] = (
            "train.schedule = 'steps' has no train.milestones: the learning rate stays the same."
        )
    return said
