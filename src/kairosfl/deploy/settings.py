"""The section [deploy] of a configuration, and reading a configuration that has one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from kairosfl.core.rule import Algorithm
from kairosfl.engines.flower.checks import Trust
from kairosfl.engines.flower.server import Settings
from kairosfl.engines.flower.wire import Packing
from kairosfl.errors import UserError, nearest
from kairosfl.runs.config import RunConfig, change, read, resolve


@dataclass(frozen=True, kw_only=True)
class Deploy:
    """[deploy]: how rounds are run, and how far clients are trusted."""

    clients: int = 0  # client ids are 0 to clients − 1; 0: as many as the task has
    start: str = ""  # a run folder whose model this run starts from
    deadline: float = Settings.deadline
    quorum: float = Settings.quorum
    over: float = Settings.over
    wait: float = Settings.wait
    on_disk: int = Settings.on_disk
    update: str = Packing.dtype
    keep: float = Packing.keep
    max_norm: float = Trust.max_norm
    clip_norm: float = Trust.clip_norm
    max_samples: int = Trust.max_samples
    max_loss: float = Trust.max_loss
    min_loss: float = Trust.min_loss
    samples: tuple[int, ...] = ()

    @classmethod
    def from_table(cls, table: Any) -> Deploy:
        """From the table of a TOML file."""
        if not isinstance(table, Mapping):
            raise UserError(
                f"deploy = {table!r} must be a section: write [deploy] and its keys below."
            )
        kinds: dict[str, type] = {entry.name: type(entry.default) for entry in fields(cls)}
        settings: dict[str, Any] = {}
        for key, value in table.items():
            if key not in kinds:
                raise UserError(f"Unknown key deploy.{key}; {nearest(key, kinds)}")
            settings[key] = _of_kind(kinds[key], key, value)
        return cls(**settings)

    def settings(self) -> Settings:
        """The settings of the engine."""
        names = [entry.name for entry in fields(Settings) if hasattr(self, entry.name)]
        trust = Trust(**{entry.name: getattr(self, entry.name) for entry in fields(Trust)})
        packing = Packing(self.update, self.keep)
        return Settings(
            **{name: getattr(self, name) for name in names}, packing=packing, trust=trust
        )


def _of_kind(kind: type, key: str, value: Any) -> Any:
    """A value of TOML as the setting has it: lists are tuples, and whole numbers pass for floats."""
    if isinstance(value, list):
        value = tuple(value)
    passes = isinstance(value, kind) or (kind is float and isinstance(value, int))
    if isinstance(value, bool) or not passes:
        raise UserError(f"deploy.{key} = {value!r} must be of type {kind.__name__}.")
    return kind(value)


def load(path: Path, changes: Sequence[str] = ()) -> tuple[RunConfig, Deploy]:
    """Read the configuration in a TOML file, and its [deploy] section.

    Args:
        path: The file.
        changes: Settings in place of the file's, as `train.rounds=3`.
    """
    nested = change(read(path), changes)
    deploy = Deploy.from_table(nested.pop("deploy", {}))
    if deploy.clients:
        nested["data"] = {**nested.get("data", {}), "clients": deploy.clients}
    config = resolve(nested)
    check_deployable(config.algorithm)
    return config, deploy


def check_deployable(algorithm: Algorithm) -> None:
    """Refuse rules that say themselves that they cannot be deployed.

    Args:
        algorithm: Of the run.
    """
    for traits in algorithm.traits:
        if traits.undeployable:
            raise UserError(f"algorithm = {str(algorithm)!r}: {traits.undeployable}.")
