"""A run folder: its files, and whether the requested run is the one that began in it."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kairosfl.errors import UserError
from kairosfl.runs import metrics
from kairosfl.runs.checkpoint import rounds_done
from kairosfl.runs.config import RunConfig, load, text_of
from kairosfl.runs.files import (
    append_json,
    cut_lines,
    read_json,
    read_lines,
    recorded,
    write,
    write_json,
)
from kairosfl.runs.keys import flatten
from kairosfl.runs.lock import NAME, Lock, forget, lock, within_study
from kairosfl.runs.prepare import About
from kairosfl.runs.score import Score, scores
from kairosfl.runs.sensible import dotted, edits, harmful, pinned
from kairosfl.runs.trackers import library
from kairosfl.tasks.metrics import facts as facts_of
from kairosfl.tasks.task import Task
from kairosfl.version import __version__

Say = Callable[[str], None]
NAMED = 4  # edits listed in one message
NOTHING = {NAME, ".config.toml.part"}  # in a folder where nothing has begun yet
FILES = (
    *("config.toml", "run.json", "partition.json", "summary.json", "choices.json"),
    *("metrics.jsonl", "clients.jsonl"),
)


def silent(_: str) -> None:
    """Says nothing."""


@dataclass
class Folder:
    """A run folder and its files."""

    path: Path
    say: Say = silent  # called with what the user should see immediately, in addition to the log
    # held while a run is recorded: the folder's own, or that of its sweep
    guard: Lock | None = None

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoint"

    def log(self, line: str) -> None:
        """Append a line to the log."""
        try:
            with (self.path / "log.txt").open(
                "a", encoding="utf-8", errors="backslashreplace"
            ) as handle:
                handle.write(line + "\n")
        except OSError as error:
            raise UserError(
                f"Cannot write {self.path / 'log.txt'}: {error.strerror}; free the disk."
            ) from None

    def warn(self, line: str) -> None:
        """Append a line to the log and pass it to `say`."""
        self.log(line)
        self.say(line)

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes out; a folder that was made for it and stays empty is removed."""
        new = not self.path.exists()
        with lock(self.path) as self.guard, within_study(self.path):
            try:
                yield
            finally:
                if new:
                    forget(self.path)
        self.guard = None

    def check_lock(self) -> None:
        """Refuse to write where another process may."""
        if self.guard is not None:
            self.guard.check()

    def tidy(self) -> None:
        """Remove what a killed process was writing."""
        parts = [self.path / f".{name}.part" for name in FILES]
        for path in [*parts, *self.checkpoints.glob(".*.part")]:
            with suppress(OSError):
                path.unlink(missing_ok=True)

    def check_free(self) -> None:
        """Refuse a folder that has something in it."""
        if self.path.exists() and not self.path.is_dir():
            raise UserError(f"{self.path} is not a directory; give another --out.")
        if (self.path / "sweep.json").exists():
            raise UserError(f"{self.path} contains a sweep; give another --out.")
        if self.path.exists() and any(path.name not in NOTHING for path in self.path.iterdir()):
            raise UserError(
                f"The folder {self.path} is not empty; give another --out, or `kairosfl resume "
                f"{self.path}`."
            )

    def create(self, about: About, task: Task, command: str, **more: Any) -> None:
        """Create the folder and record what is about to run."""
        for name in about.run.track:
            library(name)
        self.check_free()
        write(self.path / "config.toml", text_of(about.settings))
        self.describe(about, task, command, **more)

    def describe(self, about: About, task: Task, command: str, **more: Any) -> None:
        """Record the run's configuration and environment, with `more` added or in its place."""
        write_json(self.path / "run.json", describe(about, task, command) | more)
        write_json(self.path / "partition.json", metrics.partition_note(task))

    def append(self, row: dict[str, Any], clients: dict[str, Any], *, first: bool) -> None:
        """Record a round: its metrics, and what its clients reported; `first` of this process."""
        self.check_lock()
        if not first:
            self.check_records("clients.jsonl")
            self.check_records("metrics.jsonl")
        append_json(self.path / "clients.jsonl", clients)
        append_json(self.path / "metrics.jsonl", row)

    def finished(self) -> bool:
        """Whether the run has finished and was not given more rounds since."""
        summary = self.summary()
        done = summary.get("rounds")
        if done is None:
            return False
        return bool(summary.get("finished")) or bool(done >= self.config().train.rounds)

    def summary(self) -> dict[str, Any]:
        """The summary written at the end; empty if it is missing or damaged."""
        return read_json(self.path / "summary.json")

    def summarise(
        self, rounds: int, ending: Mapping[str, Any], about: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Write the summary of this many rounds, with what the rules said at the end.

        `about` is what `run.json` said when the run started: it is written again where it was lost.
        """
        self.check_lock()
        file = self.path / "run.json"
        if about and not read_json(file):
            self.warn(f"{file} was removed or damaged while the run trained, and is written again")
            write_json(file, about)
        main = self.main()
        rows = self.rows(self._damaged("metrics.jsonl"))
        summary = {**ending, **metrics.summary(rows, rounds, main.name, main.higher)}
        write_json(self.path / "summary.json", summary)
        write_json(file, read_json(file) | {"verdicts": ending["verdicts"]})
        return summary

    def main(self) -> Score:
        """The main metric."""
        return scores(read_json(self.path / "run.json"))[0]

    def rows(self, damaged: Callable[[int], None] | None = None) -> list[dict[str, Any]]:
        """The lines of `metrics.jsonl` that are intact."""
        return list(
            read_lines(self.path / "metrics.jsonl", damaged, metrics.needed(self.main().name))
        )

    def cut(self, rounds: int) -> None:
        """Drop the lines of rounds that will be trained again."""
        if rounds:
            self.check_records("metrics.jsonl")
        for name, needs in (
            ("metrics.jsonl", metrics.needed(self.main().name)),
            ("clients.jsonl", {}),
        ):
            cut_lines(self.path / name, rounds, self._damaged(name), needs)

    def check_records(self, name: str) -> None:
        """Say that a file with the records of earlier rounds is gone."""
        if not (self.path / name).exists():
            self.warn(f"{self.path / name} was removed: the records of earlier rounds are lost")

    def _damaged(self, name: str) -> Callable[[int], None]:
        def damaged(number: int) -> None:
            self.warn(
                f"line {number} of {self.path / name} is damaged: the records of its round are lost"
            )

        return damaged

    def begun(self) -> bool:
        """Whether a trained round has a checkpoint; before that, a run may be edited freely."""
        names = {path.name for path in self.checkpoints.glob("checkpoint-*.json")}
        return bool(names - {"checkpoint-000000.json"})

    def rounds_done(self) -> int | None:
        """Rounds done in the newest checkpoint; None if there is none."""
        return rounds_done(self.checkpoints)

    def origin(self) -> dict[str, Any]:
        """The configuration that the run began with, by dotted keys; empty if not recorded."""
        config = read_json(self.path / "run.json").get("config")
        if isinstance(config, dict) and self.begun():
            return flatten(config)
        return {}

    def config(self) -> RunConfig:
        """The configuration to continue with: as recorded, without edits that change results."""
        file = recorded(self.path)
        origin = self.origin()
        config = pinned(load(file), origin)
        if not origin:
            return config
        changed = harmful(config, origin)
        if changed:
            raise UserError(
                f"{file} was edited: {_first_few(changed)}; that would be another run: undo the "
                "edit, or start a new one from this model with "
                f"`kairosfl run {file} --from {self.path}`."
            )
        return config

    def check_version(self) -> None:
        """Refuse the checkpoints of a version that this one does not read."""
        about = read_json(self.path / "run.json")
        version = str(about.get("version"))
        if version.startswith("0.1."):
            raise UserError(
                f"{self.path} was begun with kairosfl {version}, whose checkpoints this version "
                "does not read; finish it with that version, or start a new run."
            )
        # As many weights as nn.LSTM has, but in another order.
        if "layout_hash" not in about and self.origin().get("model.name") == "char_lstm":
            raise UserError(
                f"{self.path} was begun before char_lstm was nn.LSTM, and its weights are in "
                "another order; finish it with the version that began it, or start a new run."
            )

    def check_start(self, key: str) -> None:
        """Refuse a folder without a model to start from, which a key names."""
        if self.rounds_done() is None:
            raise UserError(
                f"{key} = {str(self.path)!r} is not a run folder with a checkpoint; name one."
            )
        self.check_version()

    def check_rounds(self, rounds: int) -> None:
        """Refuse fewer rounds than are done."""
        done = self.rounds_done() or 0
        if done > rounds:
            raise UserError(
                f"{self.path / 'config.toml'} has train.rounds = {rounds}, but {done} rounds are "
                f"done; set {done} or more."
            )

    def check_places(self) -> None:
        """Refuse a directory where a file will be written, before anything is changed."""
        names = ["metrics.jsonl", "clients.jsonl", "log.txt", "run.json", "summary.json"]
        if not self.begun():
            names.append("partition.json")
        for name in names:
            if (self.path / name).is_dir():
                raise UserError(
                    f"{self.path / name} is a directory, where a file is needed; move it away."
                )

    def check(self, about: About, task: Task) -> None:
        """Before a run resumes: log edits, and refuse other data or another model."""
        recorded_facts = read_json(self.path / "run.json")
        origin = self.origin()
        self.check_version()

        # --- data and model ---
        for name, value in facts(task).items():
            if name not in recorded_facts or recorded_facts[name] == value:
                continue
            before = recorded_facts[name]
            if name == "data_hashes":
                raise UserError(f"{self.path} cannot be resumed: {_changed(before, value)}")
            raise UserError(
                f"{self.path} cannot be resumed: its {name.replace('_', ' ')} was {before!r} and "
                f"is {value!r} now; restore the data and the model it began with."
            )

        # --- environment and settings ---
        for name, version in versions(about.run.device).items():
            before = recorded_facts.get(name, version)
            if before != version:
                self.log(f"{name} was {before} and is {version} now: the last digits may differ")
        if origin:
            for edit in edits(dotted(about.settings), origin):
                self.warn(f"continues with {edit}")
            return
        file = self.path / "run.json"
        self.warn(f"{file} does not record what the run began with: config.toml is used as it is")
        settings = {"config": about.settings}
        write_json(file, describe(about, task, "") | recorded_facts | settings)

    def choices(self) -> dict[str, tuple[str, int]]:
        """What the engine chose by measuring, and in which round.

        Damaged entries are left out, and measured again.
        """
        choices = {}
        for name, entry in read_json(self.path / "choices.json").items():
            if not isinstance(entry, dict):
                continue
            choice = entry.get("choice")
            round = entry.get("round")
            if isinstance(choice, str) and isinstance(round, int):
                choices[name] = choice, round
        return choices

    def choose(self, choices: Mapping[str, str], round: int) -> None:
        """Record what the engine has chosen so far, in this round or an earlier one."""
        written = self.choices()
        entries = {}
        for name, choice in choices.items():
            first_round = written[name][1] if name in written else round
            entries[name] = {"choice": choice, "round": first_round}
        write_json(self.path / "choices.json", entries)


def _changed(then: Mapping[str, str], now: Mapping[str, str]) -> str:
    """Which files of the data, or of the task, are not those that a run began with."""
    names = [name for name in {**then, **now} if then.get(name) != now.get(name)]
    return (
        f"{_first_few(names)} changed since it began; restore the data and the model it began with."
    )


def _first_few(names: Sequence[str]) -> str:
    """The first of these, and how many more there are."""
    text = ", ".join(names[:NAMED])
    if len(names) > NAMED:
        text += f" and {len(names) - NAMED} more"
    return text


def facts(task: Task) -> dict[str, Any]:
    """What identifies a run besides its configuration: it is not resumed with anything else."""
    metrics_of_task = facts_of(task.measures)
    if not metrics_of_task:
        metrics_of_task = [{"name": "loss", "better": "lower", "percent": False}]
    return {
        "parameters": task.layout.size,
        "layout_hash": task.layout.hash,
        "own": sorted(task.own_names),  # of the parameters that never leave a client
        "clients": len(task.clients),
        "partition": task.clients.dealt,
        "base_hash": task.base_hash,  # of the frozen part; null: the whole model is trained
        "population_hash": task.clients.hash(),
        "data_hashes": dict(task.dataset.hashes),
        "loss": getattr(task.loss, "__name__", type(task.loss).__name__),
        "metrics": metrics_of_task,
    }


def versions(device: str) -> dict[str, str]:
    """The environment of a run, on which its last digits depend."""
    machine = platform.machine()
    if device.startswith("cuda"):
        machine = torch.cuda.get_device_name()
    return {
        "version": __version__,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "device": machine,
    }


def describe(about: About, task: Task, command: str) -> dict[str, Any]:
    """What a reader needs in order to trust and repeat the numbers."""
    return {
        **versions(about.run.device),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "threads": torch.get_num_threads(),
        "engine": about.run.engine,
        "precision": about.run.precision,
        "git": _git(),
        "seed": about.seed,
        "algorithm": str(about.algorithm),
        "rules": list(map(repr, about.algorithm.rules)),  # including options at their defaults
        **facts(task),
        "client_accuracy_on": task.client_accuracy_on if about.measures_last else None,
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": command,
        "config": about.settings,
    }


def _git() -> str | None:
    """The commit of the sources, with `-dirty` if they were edited since.

    It is KAIROSFL_COMMIT, if that is set, for a copy without its repository.
    """
    commit = os.environ.get("KAIROSFL_COMMIT")
    if commit:
        return commit
    try:
        commit = _git_says("rev-parse", "HEAD").strip()
        if _git_says("status", "--porcelain", "--", "."):
            commit += "-dirty"
    except (OSError, subprocess.SubprocessError):
        return None
    return commit


def _git_says(*words: str) -> str:
    """What a command of git prints in the folder of the package."""
    package = Path(__file__).parents[1]
    done = subprocess.run(
        ["git", *words], cwd=package, capture_output=True, text=True, timeout=5, check=True
    )
    return done.stdout
