"""A run folder: what is in it, where, and whether the run that is asked for is the one that began in it."""

from __future__ import annotations

import platform
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

import kairosfl
from kairosfl.errors import UserError
from kairosfl.runs import metrics
from kairosfl.runs.checkpoint import rounds_done
from kairosfl.runs.config import RunConfig, dump, load, tables
from kairosfl.runs.edits import edits, harmless, pinned
from kairosfl.runs.files import cut_lines, read_json, read_lines, write, write_json
from kairosfl.runs.keys import flatten
from kairosfl.runs.trackers import library
from kairosfl.tasks.task import Task

Say = Callable[[str], None]
NAMED = 4  # edits in one sentence
LINES = {"metrics.jsonl": metrics.NEEDED, "clients.jsonl": {}}  # files with a line a round, and what a line must hold


def silent(_: str) -> None:
    """Says nothing."""


@dataclass
class Folder:
    """A run folder: what is in it and where."""

    path: Path
    say: Say = silent  # told what the user should know at once, besides the log

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoint"

    def log(self, line: str) -> None:
        """One more line in the log."""
        try:
            with (self.path / "log.txt").open("a", encoding="utf-8") as handle:
                handle.write(line + "\n")
        except OSError as error:
            raise UserError(f"Cannot write {self.path / 'log.txt'}: {error.strerror}; free the disk.") from None

    def warn(self, line: str) -> None:
        """One more line in the log, which is also said."""
        self.log(line)
        self.say(line)

    def create(self, config: RunConfig, task: Task, command: str, **more: Any) -> None:
        """Write down what is about to run."""
        for name in config.run.track:
            library(name)
        if self.path.exists() and not self.path.is_dir():
            raise UserError(f"{self.path} is not a directory; give another --out.")
        if (self.path / "sweep.json").exists():
            raise UserError(f"{self.path} holds a sweep; give another --out.")
        if self.path.exists() and any(self.path.iterdir()):
            raise UserError(
                f"The folder {self.path} is not empty; give another --out, or `kairosfl resume {self.path}`."
            )
        write(self.path / "config.toml", dump(tables(config)))
        self.describe(config, task, command, **more)

    def describe(self, config: RunConfig, task: Task, command: str, **more: Any) -> None:
        """Write down on what and with what the run is made; `more` is added, or replaces what is there."""
        write_json(self.path / "run.json", describe(config, task, command) | more)
        write_json(self.path / "partition.json", metrics.partition_note(task))

    def finished(self) -> bool:
        """Whether the run came to its end, and was not given more rounds since."""
        done = self.summary().get("rounds")
        return done is not None and bool(done >= self.config().train.rounds)

    def summary(self) -> dict[str, Any]:
        """What was written down at the end; empty where it is not there, or damaged."""
        return read_json(self.path / "summary.json")

    def summarise(self, rounds: int, verdicts: list[str]) -> dict[str, Any]:
        """Write down what came out of so many rounds, and what the rules say about it."""
        rows = list(read_lines(self.path / "metrics.jsonl", self._damaged("metrics.jsonl"), metrics.NEEDED))
        write_json(self.path / "summary.json", summary := metrics.summary(rows, rounds) | {"verdicts": verdicts})
        write_json(self.path / "run.json", read_json(self.path / "run.json") | {"verdicts": verdicts})
        return summary

    def cut(self, rounds: int) -> None:
        """Drop the lines of rounds that are going to be trained again."""
        for name, needs in LINES.items():
            cut_lines(self.path / name, rounds, self._damaged(name), needs)

    def _damaged(self, name: str) -> Callable[[int], None]:
        def damaged(number: int) -> None:
            self.warn(f"line {number} of {self.path / name} is damaged: what it said of its round is lost")

        return damaged

    def begun(self) -> bool:
        """Whether a round was trained that there is a checkpoint of; before, a run may still be edited freely."""
        return any(path.name != f"checkpoint-{0:06d}.json" for path in self.checkpoints.glob("checkpoint-*.json"))

    def rounds_done(self) -> int | None:
        """Rounds in the newest checkpoint; None: there is none."""
        return rounds_done(self.checkpoints)

    def origin(self) -> dict[str, Any]:
        """The configuration that the run began with, by dotted keys; empty where that was not written down."""
        config = read_json(self.path / "run.json").get("config")
        return flatten(config) if isinstance(config, dict) and self.begun() else {}

    def config(self) -> RunConfig:
        """The configuration to go on with: as it was written down, and edited in nothing that changes the numbers."""
        file = self.path / "config.toml"
        if not file.is_file():
            if (self.path / "sweep.json").exists():
                raise UserError(f"{self.path} is a sweep; it goes on with the `kairosfl sweep` that began it.")
            raise UserError(f"{self.path} is not a run folder: it has no config.toml.")
        origin = self.origin()
        config = pinned(load(file), origin)
        changed = [str(edit) for edit in edits(config, origin) if not harmless(edit, config)] if origin else []
        if changed:
            more = f" and {len(changed) - NAMED} more" if len(changed) > NAMED else ""
            raise UserError(
                f"{file} was edited: {', '.join(changed[:NAMED])}{more}; that would be another run: put it back, or "
                f"start a new one from this model with `kairosfl run {file} --from {self.path}`."
            )
        return config

    def check(self, config: RunConfig, task: Task) -> None:
        """Before a run goes on: log what was edited, refuse other data or another model than it began with."""
        about, origin, now = read_json(self.path / "run.json"), self.origin(), facts(task)
        if str(about.get("version")).startswith("0.1."):
            raise UserError(
                f"{self.path} was begun with kairosfl {about['version']}, whose checkpoints this version does not "
                "read; finish it with that version, or start a new run."
            )
        for name, value in now.items():
            if name in about and about[name] != value:
                raise UserError(
                    f"{self.path} cannot be resumed: its {name.replace('_', ' ')} was {about[name]!r} and is {value!r} "
                    "now; bring back the data and the model it began with."
                )
        for name, value in versions(config).items():
            if about.get(name, value) != value:
                self.log(f"{name} was {about[name]} and is {value} now: the last digits may differ")
        for edit in edits(config, origin) if origin else ():
            self.warn(f"goes on with {edit}")
        if not origin:
            self.warn(f"{self.path / 'run.json'} does not say what the run began with: config.toml is trusted as it is")
            write_json(self.path / "run.json", describe(config, task, "") | about | {"config": tables(config)})

    def choices(self) -> dict[str, tuple[str, int]]:
        """What the engine chose by measuring, and in which round; what of it is damaged is measured again."""
        written = read_json(self.path / "choices.json")
        pairs = {name: (e.get("choice"), e.get("round")) for name, e in written.items() if isinstance(e, dict)}
        return {name: (c, r) for name, (c, r) in pairs.items() if isinstance(c, str) and isinstance(r, int)}

    def choose(self, made: Mapping[str, str], round: int) -> None:
        """Write down what the engine has chosen by now."""
        written = self.choices()
        new = {name: {"choice": choice, "round": written.get(name, ("", round))[1]} for name, choice in made.items()}
        write_json(self.path / "choices.json", new)


def facts(task: Task) -> dict[str, Any]:
    """What a run is made of besides its configuration: a run does not go on with others."""
    return {
        "parameters": task.layout.size,
        "clients": len(task.clients),
        "base_hash": task.base_hash,  # of what is not trained; null: all of the model is
        "population_hash": task.clients.hash(),
        "data_hashes": dict(task.dataset.hashes),
    }


def versions(config: RunConfig) -> dict[str, str]:
    """What a run is carried out with, on which its last digits depend."""
    return {
        "version": kairosfl.__version__,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "device": torch.cuda.get_device_name() if config.run.device.startswith("cuda") else platform.machine(),
    }


def describe(config: RunConfig, task: Task, command: str) -> dict[str, Any]:
    """What a reader needs in order to trust and repeat the numbers."""
    return {
        **versions(config),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "threads": torch.get_num_threads(),
        "engine": config.run.engine,
        "precision": config.run.precision,
        "git": _git(),
        "seed": config.seed,
        "algorithm": str(config.algorithm),
        "rules": list(map(repr, config.algorithm.rules)),  # with the options that have their defaults
        **facts(task),
        "client_accuracy_on": task.client_accuracy_on if config.run.client_accuracy else None,
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": command,
        "config": tables(config),
    }


def _git() -> str | None:
    """The commit of the sources, where they lie in a repository."""
    here = Path(__file__).parent
    try:
        done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=here, capture_output=True, text=True, timeout=5)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
