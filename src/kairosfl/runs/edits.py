"""Which edits of `config.toml` a run can be resumed with: those that do not change its results."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from kairosfl.runs.config import RunConfig, tables
from kairosfl.runs.files import plain
from kairosfl.runs.keys import flatten

# What is recorded, when, and where clients train, not what they compute.
HARMLESS = frozenset(
    f"run.{key}"
    for key in (
        "eval_every",
        "checkpoint_every",
        "client_accuracy",
        "cosines",
        "track",
        "actors",
        "ray_address",
        "allow",
    )
)
AUTOMATIC = {
    "engine": "auto",
    "device": "auto",
    "precision": "auto",
    "threads": 0,
}  # [run]: keep the earlier decision


@dataclass(frozen=True)
class Edit:
    """One key that differs from what the run began with."""

    key: str
    then: Any
    now: Any

    def __str__(self) -> str:
        return f"{self.key} = {self.now!r} (it began with {self.then!r})"


def pinned(config: RunConfig, begun: Mapping[str, Any]) -> RunConfig:
    """The configuration with automatic choices as they were made when the run began."""
    run = config.run
    open_ = {
        key
        for key, value in AUTOMATIC.items()
        if getattr(run, key) == value and f"run.{key}" in begun
    }
    return replace(config, run=replace(run, **{key: begun[f"run.{key}"] for key in open_}))


def edits(config: RunConfig, begun: Mapping[str, Any]) -> list[Edit]:
    """Every key in which a configuration differs from what the run began with (dotted keys, JSON
    values).
    """
    now = flat(config)
    default = flat(RunConfig())  # for keys that did not exist when the run began
    keys = [*now, *(key for key in begun if key not in now)]
    pairs = [Edit(key, begun.get(key, default.get(key)), now.get(key)) for key in keys]
    return [edit for edit in pairs if _kind(edit.key, edit.then) != _kind(edit.key, edit.now)]


def harmful(config: RunConfig, begun: Mapping[str, Any]) -> list[str]:
    """In words, the edits with which the remaining rounds would give other numbers.

    Slots are an exception: they may change the last digits, but a run that ran out of memory needs
    fewer to resume.
    """
    counting = config.algorithm.names("horizon")
    counting += ["the cosine"] if config.train.schedule == "cosine" else []
    found = []
    for edit in edits(config, begun):
        if edit.key == "train.rounds" and counting:
            depend = "depends" if len(counting) == 1 else "depend"
            found.append(f"{edit}, on which {' and '.join(counting)} {depend}")
        elif edit.key not in {*HARMLESS, "train.rounds"} and (
            edit.key != "run.slots" or config.run.deterministic
        ):
            found.append(str(edit))
    return found


def flat(config: RunConfig) -> dict[str, Any]:
    """The configuration by dotted keys, with JSON values."""
    return {key: plain(value) for key, value in flatten(tables(config)).items()}


def _kind(key: str, value: Any) -> Any:
    """The device without its number: which of several GPUs a run uses does not matter."""
    return str(value).partition(":")[0] if key == "run.device" else value
