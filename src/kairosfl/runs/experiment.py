"""An experiment: from a configuration to a task, an engine and a run folder that survives anything."""

from __future__ import annotations

import json
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

import kairosfl
from kairosfl.core.fields import Briefs, Reports
from kairosfl.core.round import Run, Setup, result, rounds, verdicts
from kairosfl.detectors import parse_detectors
from kairosfl.engines.protocol import Engine
from kairosfl.errors import UserError
from kairosfl.runs import STOPPED, metrics
from kairosfl.runs.alone import alone
from kairosfl.runs.checkpoint import Checkpoints, about
from kairosfl.runs.config import Config, dump, load, tables
from kairosfl.runs.engines import build_engine, method, settle
from kairosfl.runs.files import append_json, cut_lines, read_lines, write, write_json
from kairosfl.runs.interrupt import undisturbed
from kairosfl.runs.keys import flatten
from kairosfl.runs.trackers import TRACKERS, library
from kairosfl.tasks import data, models
from kairosfl.tasks.dataset import DataSet, held_out
from kairosfl.tasks.partitions import partition
from kairosfl.tasks.population import Population
from kairosfl.tasks.task import Task

IDLE_LIMIT = 10  # rounds without a good report, one after another, end a run
Notify = Callable[[dict[str, Any]], None]
Course = Generator[Briefs, Reports, dict[str, Any]]
Say = Callable[[str], None]


def silent(_: str) -> None:
    """Says nothing."""


@lru_cache(maxsize=2)
def _load(name: str, validation: float, options: tuple[tuple[str, Any], ...]) -> DataSet:
    dataset = data.load(name, **dict(options))  # the runs of a sweep share it
    return held_out(dataset, validation) if validation else dataset


def build_data(config: Config) -> tuple[DataSet, Population]:
    """The data set and the clients that a configuration names."""
    options = {key: tuple(value) if isinstance(value, list) else value for key, value in config.data.options.items()}
    dataset = _load(config.data.name, config.data.validation, tuple(sorted(options.items())))
    seed = config.seed if config.data.partition_seed < 0 else config.data.partition_seed
    clients = partition(
        dataset,
        name=config.data.partition,
        clients=config.data.clients or None,
        seed=seed,
        alpha=config.data.alpha,
        minimum=config.data.minimum,
        shards=config.data.shards,
        balance=config.data.balance,
    )
    return dataset, clients


def build_task(config: Config) -> Task:
    """The data, the clients and the model that a configuration names."""
    dataset, clients = build_data(config)
    chosen = dict(config.model.options)
    if dataset.vocabulary and "vocabulary" in models.options(config.model.name):
        chosen.setdefault("vocabulary", dataset.vocabulary)
    model = models.build(config.model.name, shape=dataset.shape, classes=dataset.classes, seed=config.seed, **chosen)
    return Task(model, dataset, clients, augment=config.data.augment)


@dataclass
class Folder:
    """A run folder: what is in it and where."""

    path: Path

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

    def create(self, config: Config, task: Task, command: str, **more: str) -> None:
        """Write down what is about to run."""
        for name in config.run.track:
            library(name)
        if self.path.exists() and not self.path.is_dir():
            raise UserError(f"{self.path} is no folder; give another --out.")
        if (self.path / "sweep.json").exists():
            raise UserError(f"{self.path} holds a sweep; give another --out.")
        if self.path.exists() and any(self.path.iterdir()):
            raise UserError(
                f"The folder {self.path} is not empty; give another --out, or `kairosfl resume {self.path}`."
            )
        write(self.path / "config.toml", dump(tables(config)))
        self.describe(config, task, command, **more)

    def describe(self, config: Config, task: Task, command: str, **more: str) -> None:
        """Write down on what and with what the run is made; `more` is added, or in place of what stands there."""
        write_json(self.path / "run.json", describe(config, task, command) | more)
        write_json(self.path / "partition.json", metrics.partition_note(task))

    def finished(self) -> bool:
        """Whether the run came to its end, and was not given more rounds since."""
        if not (self.path / "summary.json").is_file():
            return False
        return bool(self.summary()["rounds"] >= self.config().train.rounds)

    def summary(self) -> dict[str, Any]:
        """What was written down at the end."""
        whole: dict[str, Any] = json.loads((self.path / "summary.json").read_text())
        return whole

    def rounds_done(self) -> int | None:
        """Rounds in the newest checkpoint; None: there is none."""
        done: int | None = about(self.checkpoints).get("round")
        return done

    def config(self) -> Config:
        """The configuration that was written down."""
        if not (self.path / "config.toml").is_file():
            if (self.path / "sweep.json").exists():
                raise UserError(f"{self.path} is a sweep; it goes on with the `kairosfl sweep` that began it.")
            raise UserError(f"{self.path} is no run folder: it has no config.toml.")
        return load(self.path / "config.toml")


def describe(config: Config, task: Task, command: str) -> dict[str, Any]:
    """What a reader needs in order to trust and repeat the numbers."""
    return {
        "version": kairosfl.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "platform": platform.platform(),
        "device": torch.cuda.get_device_name() if config.run.device.startswith("cuda") else platform.machine(),
        "threads": torch.get_num_threads(),
        "engine": config.run.engine,
        "precision": config.run.precision,
        "git": _git(),
        "seed": config.seed,
        "algorithm": str(config.algorithm),
        "rules": list(map(repr, config.algorithm.rules)),  # with the options that have their defaults
        "parameters": task.layout.size,
        "clients": len(task.clients),
        "base_hash": task.base_hash,  # of what is not trained; null: all of the model is
        "client_accuracy_on": task.client_accuracy_on if config.run.client_accuracy else None,
        "population_hash": task.clients.hash(),
        "data_hashes": dict(task.dataset.hashes),
        "started": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        "command": command,
    }


def check_base(folder: Folder, task: Task) -> None:
    """Refuse to resume with another base than the run began with: its checkpoints hold what was trained on top."""
    try:
        began = json.loads((folder.path / "run.json").read_text())
    except (OSError, ValueError):
        return
    if isinstance(began, dict) and began.get("base_hash", task.base_hash) != task.base_hash:
        raise UserError(
            f"{folder.path} was begun with other frozen parameters or buffers (base_hash {began['base_hash']}) than "
            f"the model has now ({task.base_hash}); resume it with those, or start a new run."
        )


def _git() -> str | None:
    """The commit of the sources, where they lie in a repository."""
    here = Path(__file__).parent
    try:
        done = subprocess.run(["git", "rev-parse", "HEAD"], cwd=here, capture_output=True, text=True, timeout=5)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def record(
    config: Config, task: Task, engine: Engine, folder: Folder, *, resume: bool = False, notify: Notify | None = None
) -> Course:
    """A run that writes itself down: yields briefs, is sent reports, returns the summary.

    After every round a line of metrics; every `checkpoint_every` rounds, and when closed, a checkpoint.
    """
    setup = Setup(config.algorithm, config.train, len(task.clients), task.layout, parse_detectors(config.run.detector))
    run = Run.start(engine.start(), setup, seed=config.seed)
    checkpoints = Checkpoints(folder.checkpoints)
    if resume:
        check_base(folder, task)
        run, passed = checkpoints.load(run)
        for line in passed:
            folder.log(line)
        folder.log(f"resumed after round {run.round}")
        for name in ("metrics.jsonl", "clients.jsonl"):
            cut_lines(folder.path / name, run.round)
    else:
        checkpoints.save(run, {})
    settings = flatten(tables(config))
    tracked = [TRACKERS[name](folder.path, settings, run.round) for name in config.run.track]
    listeners: list[Notify] = [*([notify] if notify else []), *tracked]
    course = _write_down(config, task, engine, folder, setup, run, checkpoints, listeners)
    del run  # or the first model would be held to the end
    try:
        with within_memory():
            said = yield from course
    except UserError as error:
        with suppress(UserError):  # of a full disk
            folder.log(f"{STOPPED}{error}")
        raise
    finally:
        for tracker in tracked:
            tracker.close()
    summary = metrics.summary(list(read_lines(folder.path / "metrics.jsonl"))) | {"verdicts": said}
    write_json(folder.path / "summary.json", summary)
    return summary


def _write_down(
    config: Config,
    task: Task,
    engine: Engine,
    folder: Folder,
    setup: Setup,
    run: Run,
    checkpoints: Checkpoints,
    listeners: list[Notify],
) -> Generator[Briefs, Reports, list[str]]:
    """The rounds of a run, each written down before the next begins; returns what its rules say about it."""
    note = {"algorithm": str(config.algorithm), "detector": config.run.detector}
    saved = run.round
    course = rounds(run, setup)
    run, briefs = next(course)
    if briefs is None and run.idle >= IDLE_LIMIT:
        raise UserError(_idle(run))
    while briefs is not None:
        began = time.perf_counter()
        try:
            reports = yield briefs
        except GeneratorExit:  # stopped between two rounds: nothing but the round in flight is lost
            if run.round > saved:
                checkpoints.save(run, note)
            raise
        with undisturbed() as held:
            run, briefs = course.send(reports)
            last = briefs is None
            outcome = result(run, setup)
            scores = engine.evaluate(outcome) if last or run.round % config.run.eval_every == 0 else None
            own = engine.evaluate_clients(outcome) if scores and config.run.client_accuracy else None
            row = metrics.row(run, task, scores, own, time.perf_counter() - began)
            cosines = run.round in config.run.cosines
            append_json(folder.path / "clients.jsonl", metrics.clients_row(run, own, cosines=cosines))
            append_json(folder.path / "metrics.jsonl", row)
            _log_rejections(run, folder)
            for listen in listeners:
                listen(row)
            if last or run.round % config.run.checkpoint_every == 0 or run.idle >= IDLE_LIMIT:
                checkpoints.save(run, note)
                saved = run.round
            if run.idle >= IDLE_LIMIT:
                raise UserError(_idle(run))
        if held:
            if run.round > saved:
                checkpoints.save(run, note)
            signal.raise_signal(held[0])
    return verdicts(run, setup)


def _log_rejections(run: Run, folder: Folder) -> None:
    for client, reason in run.record.rejected if run.record else ():
        folder.log(f"round {run.round}: client {client} rejected: {reason}")
    if run.idle:
        folder.log(f"round {run.round}: no good report, the model stays as it was")


def _idle(run: Run) -> str:
    why = run.record.rejected[-1][1] if run.record and run.record.rejected else "none reported"
    return (
        f"{run.idle} rounds in a row had no good report (last reason: {why}); the model is as after round "
        f"{run.round - run.idle}. Lower train.lr or mend the clients."
    )


@contextmanager
def within_memory() -> Iterator[None]:
    """A GPU whose memory runs out is a user's to mend."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise UserError(
            "The GPU's memory ran out: free it of other programs, or set run.slots, the clients at once, in the run's "
            "config.toml; then `kairosfl resume`, or the same sweep again, goes on from the last checkpoint."
        ) from error


def conduct(course: Course, engine: Engine) -> dict[str, Any]:
    """Drive one recorded run to its end on one engine."""
    try:
        with within_memory():
            briefs = next(course)
            while True:
                briefs = course.send(engine.train(briefs))
    except StopIteration as end:
        summary: dict[str, Any] = end.value
        return summary
    finally:
        course.close()


def start(
    config: Config, path: Path, *, command: str = "", notify: Notify | None = None, say: Say = silent
) -> dict[str, Any]:
    """Run a configuration in a new folder; returns the summary. `say` is told in a line how it is run."""
    task = build_task(config)
    with within_memory():
        config = settle(config, task)
        engine = build_engine(config, task)
    say(method(config, engine))
    course = begin(config, task, engine, Folder(path), command=command, notify=notify)
    with alone(path):
        return conduct(course, engine)


def begin(
    config: Config, task: Task, engine: Engine, folder: Folder, *, command: str = "", notify: Notify | None = None
) -> Course:
    """A recorded run in a new folder."""
    if config.train.cohort > len(task.clients):
        raise UserError(
            f"train.cohort = {config.train.cohort} is more than the {len(task.clients)} clients there are; lower it."
        )
    folder.create(config, task, command or " ".join(sys.argv), why=engine.why)
    return record(config, task, engine, folder, notify=notify)


def reopen(config: Config, task: Task, engine: Engine, folder: Folder, *, notify: Notify | None = None) -> Course:
    """A recorded run that was stopped, from its last whole checkpoint, or from the start if it never got that far."""
    begun = any(folder.checkpoints.glob("checkpoint-*.json"))
    (folder.path / "summary.json").unlink(missing_ok=True)  # of fewer rounds
    if not begun:
        folder.describe(config, task, " ".join(sys.argv), why=engine.why)
    return record(config, task, engine, folder, resume=begun, notify=notify)


def resume(path: Path, *, notify: Notify | None = None, say: Say = silent) -> dict[str, Any]:
    """Go on with the run in a folder; one that has come to its end is left as it is."""
    folder = Folder(path)
    config = folder.config()
    if folder.finished():
        return folder.summary()
    with alone(path):
        task = build_task(config)
        with within_memory():
            config = settle(config, task)
            engine = build_engine(config, task)
        say(method(config, engine))
        return conduct(reopen(config, task, engine, folder, notify=notify), engine)
