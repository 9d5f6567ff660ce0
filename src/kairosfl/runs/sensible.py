"""Whether a configuration makes sense: it fits its task, every setting has an effect, and the run
that began with it can be continued.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from kairosfl.core.fields import FISHER, FISHER_SAMPLED
from kairosfl.core.recipe import Recipe
from kairosfl.detectors import parse_detectors
from kairosfl.errors import UserError
from kairosfl.runs.config import Data, Execution, RunConfig, tables
from kairosfl.runs.files import plain
from kairosfl.runs.keys import flatten
from kairosfl.tasks.kinds import CLASSED
from kairosfl.tasks.partitions import OPTIONS, SETTINGS
from kairosfl.tasks.task import Task
from kairosfl.tasks.vector import trained

# --- does it fit its task? ---


def check_fit(config: RunConfig, task: Task) -> None:
    """Try model, loss and metrics on a few samples, and what the rules and detectors need beyond
    them.

    Raises:
        UserError: Names what does not fit, and the fix.
    """
    first_parameter = next(iter(trained(task.model).values()))
    if first_parameter.is_meta:  # a deployed server keeps shapes only and trains nothing
        return

    task.check()
    comparing = config.algorithm.names("needs", "features")
    if comparing:
        task.check_features(" and ".join(comparing))

    detectors = parse_detectors(config.run.detector, config.run.allow)
    measures = {detector.measure for detector in detectors}
    if measures & {FISHER, FISHER_SAMPLED} and task.dataset.kind not in CLASSED:
        purpose = task.dataset.kind or "a task of its own"
        raise UserError(
            f"run.detector = {config.run.detector!r} measures the Fisher information of class "
            f"probabilities, but data set {task.dataset.name!r} is for {purpose}; use 'fgn' or "
            "'fgn.paired()'."
        )


# --- does every setting have an effect? ---


@dataclass(frozen=True)
class Need:
    """What a setting needs in order to have an effect: that another key is one of these values."""

    key: str
    values: tuple[Any, ...]

    def missing(self, config: RunConfig) -> str:
        """Why the setting has no effect; empty: it has one."""
        value = _value(config, self.key)
        if value in self.values:
            return ""
        if self.values == (True,):
            return f"without {self.key} = true"
        return f"with {self.key} = {value!r}"


@dataclass(frozen=True)
class Positive:
    """The same, where the other key must be above zero."""

    key: str

    def missing(self, config: RunConfig) -> str:
        """Why the setting has no effect; empty: it has one."""
        value = _value(config, self.key)
        if value > 0:
            return ""
        return f"with {self.key} = {value!r}"


def _partitions_with(option: str) -> tuple[str, ...]:
    """The partitions that use an option of [data]."""
    return tuple(name for name, options in OPTIONS.items() if option in options)


NEEDS: Mapping[str, Need | Positive] = {
    "train.gamma": Need("train.schedule", ("exponential", "steps")),
    "train.milestones": Need("train.schedule", ("steps",)),
    "train.lr_min": Need("train.schedule", ("cosine",)),
    "train.beta1": Need("train.optimizer", ("adamw",)),
    "train.beta2": Need("train.optimizer", ("adamw",)),
    "train.eps": Need("train.optimizer", ("adamw",)),
    "train.clip_after": Positive("train.clip"),
    **{f"data.{option}": Need("data.partition", _partitions_with(option)) for option in SETTINGS},
    "data.crops": Need("data.augment", (True,)),
    "data.padding": Need("data.augment", (True,)),
    "run.actors": Need("run.engine", ("ray",)),
}
MANY = 10_000_000  # local passes over a client's data in one round
DEFAULTS = {"train": Recipe(), "data": Data(), "run": Execution()}


def unused(configs: Sequence[RunConfig]) -> list[str]:
    """One sentence for every setting that differs from its default and has no effect in any of
    these runs.
    """
    by_run = [_unused(config) for config in configs]
    sentences = []
    for key, sentence in by_run[0].items():
        if all(key in run for run in by_run):
            sentences.append(sentence)
    return sentences


def _unused(config: RunConfig) -> dict[str, str]:
    """A sentence for every key without effect in one run."""
    sentences = {}
    for key, need in NEEDS.items():
        section, _, name = key.partition(".")
        if section == "data" and config.task.file:  # its function may use them as it likes
            continue
        value = _value(config, key)
        missing = need.missing(config)
        if missing and value != getattr(DEFAULTS[section], name):
            sentences[key] = f"{key} = {value!r} has no effect {missing}."

    passes = config.train.cohort * config.train.epochs
    if passes > MANY:
        sentences["train.epochs"] = (
            f"A round has {passes:,} passes over a client's data, and nothing is shown before it "
            "ends; lower train.epochs if that is not meant."
        )
    if config.train.schedule == "steps" and not config.train.milestones:
        sentences["train.schedule"] = (
            "train.schedule = 'steps' has no train.milestones: the learning rate stays the same."
        )
    return sentences


def _value(config: RunConfig, key: str) -> Any:
    """The value of a dotted key."""
    section, _, name = key.partition(".")
    return getattr(getattr(config, section), name)


# --- can the run be continued with it? ---

# What is recorded, when, and where clients train, not what they compute.
HARMLESS = frozenset(
    (
        "run.eval_every",
        "run.checkpoint_every",
        "run.client_accuracy",
        "run.cosines",
        "run.track",
        "run.actors",
        "run.ray_address",
        "run.allow",
    )
)
# Keys of [run] whose automatic choice stays as it was made when the run began.
AUTOMATIC = {"engine": "auto", "device": "auto", "precision": "auto", "threads": 0}


@dataclass(frozen=True)
class Edit:
    """One key that differs from what the run began with."""

    key: str
    then: Any
    now: Any

    def __str__(self) -> str:
        return f"{self.key} = {self.now!r} (it began with {self.then!r})"

    @property
    def matters(self) -> bool:
        """Whether the two values differ in more than the number of a device: which of several GPUs
        a run uses is all the same.
        """
        if self.key == "run.device":
            return str(self.then).partition(":")[0] != str(self.now).partition(":")[0]
        return bool(self.then != self.now)


def pinned(config: RunConfig, begun: Mapping[str, Any]) -> RunConfig:
    """The configuration with automatic choices as they were made when the run began."""
    choices = {}
    for key, automatic in AUTOMATIC.items():
        if getattr(config.run, key) == automatic and f"run.{key}" in begun:
            choices[key] = begun[f"run.{key}"]
    return replace(config, run=replace(config.run, **choices))


def edits(now: Mapping[str, Any], begun: Mapping[str, Any]) -> list[Edit]:
    """Every key in which a configuration differs from what the run began with; both by dotted keys,
    with JSON values, as `flat` gives them.
    """
    default = flat(RunConfig())  # for keys that did not exist when the run began
    gone = [key for key in begun if key not in now]
    changes = []
    for key in [*now, *gone]:
        edit = Edit(key, begun.get(key, default.get(key)), now.get(key))
        if edit.matters:
            changes.append(edit)
    return changes


def harmful(config: RunConfig, begun: Mapping[str, Any]) -> list[str]:
    """In words, the edits with which the remaining rounds would give other numbers.

    Slots are an exception: they may change the last digits, but a run that ran out of memory needs
    fewer to resume.
    """
    counting = config.algorithm.names("horizon")
    if config.train.schedule == "cosine":
        counting.append("the cosine")

    sentences = []
    for edit in edits(flat(config), begun):
        if edit.key == "train.rounds":
            if counting:
                depend = "depends" if len(counting) == 1 else "depend"
                sentences.append(f"{edit}, on which {' and '.join(counting)} {depend}")
            continue
        free_slots = edit.key == "run.slots" and not config.run.deterministic
        if edit.key not in HARMLESS and not free_slots:
            sentences.append(str(edit))
    return sentences


def flat(config: RunConfig) -> dict[str, Any]:
    """The configuration by dotted keys, with JSON values."""
    return dotted(tables(config))


def dotted(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Nested tables by dotted keys, with JSON values."""
    return {key: plain(value) for key, value in flatten(settings).items()}
