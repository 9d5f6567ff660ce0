"""An experiment: from a configuration to a task, an engine and a run folder that survives
interruptions.
"""

from __future__ import annotations

import json
import re
import signal
import sys
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kairosfl import data, models
from kairosfl.core.fields import Briefs, Reports
from kairosfl.core.round import recorded, result, rounds, verdicts
from kairosfl.core.run import Run, Setup
from kairosfl.detectors import parse_detectors
from kairosfl.engines.memory import spilling
from kairosfl.engines.protocol import Engine
from kairosfl.errors import UserError
from kairosfl.runs import STOPPED, metrics, taskfile
from kairosfl.runs.checkpoint import Checkpoints, model
from kairosfl.runs.config import GIVEN, RunConfig, tables
from kairosfl.runs.engines import build_engine, method, resolve_engine
from kairosfl.runs.fairness import measures_clients
from kairosfl.runs.files import append_json, read_json, write_json
from kairosfl.runs.folder import Folder, Say, silent
from kairosfl.runs.interrupt import undisturbed
from kairosfl.runs.keys import flatten
from kairosfl.runs.lock import Displaced
from kairosfl.runs.trackers import TRACKERS
from kairosfl.tasks.dataset import DataSet, held_out
from kairosfl.tasks.noise import noisy
from kairosfl.tasks.partitions import SETTINGS, partition
from kairosfl.tasks.population import Population
from kairosfl.tasks.task import Task
from kairosfl.wording import counted

IDLE_LIMIT = 10  # consecutive rounds without a good report that end a run
Notify = Callable[[dict[str, Any]], None]
Watch = Callable[[dict[str, Any], Tensor], bool | None]
RecordedRun = Generator[Briefs, Reports, dict[str, Any]]


@lru_cache(maxsize=2)
def _load(name: str, validation: float, normalise: bool, options: str) -> DataSet:
    dataset = data.load(name, **json.loads(options))  # the runs of a sweep share it
    dataset = dataset if normalise else replace(dataset, mean=(), std=())
    return held_out(dataset, validation) if validation else dataset


_NOISED: dict[
    str, tuple[DataSet, DataSet]
] = {}  # the last one, as the runs of a sweep share it too


def _noisy(dataset: DataSet, clients: Population, noise: float, seed: int) -> DataSet:
    key = f"{clients.hash()} {noise} {seed}"
    if key not in _NOISED or _NOISED[key][0] is not dataset:
        _NOISED.clear()
        _NOISED[key] = dataset, noisy(dataset, clients, noise, seed)
    return _NOISED[key][1]


def build_data(config: RunConfig) -> tuple[DataSet, Population]:
    """The data set and the clients that a configuration names."""
    if config.task.file:
        task = build_task(config)
        return task.dataset, task.clients
    for key, name in (("data.name", config.data.name), ("model.name", config.model.name)):
        if name.startswith(GIVEN):
            raise UserError(
                f"{key} = {name!r} was passed to kairosfl.simulate and is not stored; continue the run from Python, "
                "by calling simulate with the same arguments and the same out."
            )
    chosen = json.dumps(dict(config.data.options), sort_keys=True, default=str)
    dataset = _load(config.data.name, config.data.validation, config.data.normalise, chosen)
    clients = divide(config, dataset)
    noise = config.data.noise
    return _noisy(dataset, clients, noise, partition_seed(config)) if noise else dataset, clients


def partition_seed(config: RunConfig) -> int:
    """The seed of the partition."""
    return config.seed if config.data.partition_seed < 0 else config.data.partition_seed


def divide(config: RunConfig, dataset: DataSet) -> Population:
    """The clients among which a configuration divides a data set."""
    return partition(
        dataset,
        name=config.data.partition,
        clients=config.data.clients or None,
        seed=partition_seed(config),
        **{each: getattr(config.data, each) for each in SETTINGS},
    )


def build_task(config: RunConfig, client: int | None = None) -> Task:
    """The data, the clients and the model that a configuration names; `client`: a device that has
    only its own data.
    """
    with within_memory():
        task = taskfile.build(config, divide, client) if config.task.file else _build_task(config)
    if not len(task.dataset.test) and client is None:
        raise UserError(
            f"data set {task.dataset.name!r} has no test samples, so no model can be evaluated; add some, or set "
            "data.validation to a fraction of the training samples."
        )
    return task


def _build_task(config: RunConfig) -> Task:
    dataset, clients = build_data(config)
    chosen = dict(config.model.options)
    if dataset.vocabulary and "vocabulary" in models.options(config.model.name):
        chosen.setdefault("vocabulary", dataset.vocabulary)
    model = models.build(
        config.model.name, shape=dataset.shape, classes=dataset.outputs, seed=config.seed, **chosen
    )
    return Task(model, dataset, clients, augment=config.data.augmentation())


def record(
    config: RunConfig,
    task: Task,
    engine: Engine,
    folder: Folder,
    *,
    resume: bool = False,
    start: Tensor | None = None,
    notify: Notify | None = None,
    watch: Watch | None = None,
) -> RecordedRun:
    """A run that is recorded in a folder: yields briefs, is sent reports, returns the summary.

    It writes a line of metrics after every round, and checkpoints as `run.checkpoint_every` says
    and when closed. `start` replaces the engine's initial model. `watch` is called with the metrics
    and the vector of every round, and ends the run by returning False.
    """
    folder.tidy()
    x = engine.start()
    if start is not None:
        if len(start) != len(x):
            raise UserError(
                f"model.start = {config.model.start!r} has a model of {len(start)} parameters, but this one has "
                f"{len(x)}; choose a run of the same model."
            )
        x = start.to(x)
    setup = Setup(
        config.algorithm,
        config.train,
        len(task.clients),
        task.layout,
        parse_detectors(config.run.detector),
        own=task.own_start(),
        sizes=task.clients.sizes,
    )
    run = Run.start(x, setup, seed=config.seed, allocate=spilling)
    del x, start  # or the first model would be held to the end
    checkpoints = Checkpoints(folder.checkpoints)
    if resume:
        run, passed = checkpoints.load(run)
        for line in passed:
            folder.warn(line)
        folder.log(f"resumed after round {run.round}")
        folder.cut(run.round)
        engine.choices.restore(folder.choices(), run.round)
    else:
        folder.cut(0)  # rounds without a checkpoint
        checkpoints.save(run, {})
    settings, about = flatten(tables(config)), read_json(folder.path / "run.json")
    tracked = [TRACKERS[name](folder.path, settings, run.round) for name in config.run.track]
    listeners: list[Notify] = [*([notify] if notify else []), *tracked]
    rounds_done = _record_rounds(
        config, task, engine, folder, setup, run, checkpoints, listeners, watch
    )
    del run
    try:
        with within_memory():
            done, ending = yield from rounds_done
    except Displaced:  # another process may be writing the log
        raise
    except UserError as error:
        with suppress(UserError):  # the disk may be full
            folder.log(f"{STOPPED}{error}")
        raise
    finally:
        for tracker in tracked:
            tracker.close()
    return folder.summarise(done, ending, about)


def _record_rounds(
    config: RunConfig,
    task: Task,
    engine: Engine,
    folder: Folder,
    setup: Setup,
    run: Run,
    checkpoints: Checkpoints,
    listeners: list[Notify],
    watch: Watch | None,
) -> Generator[Briefs, Reports, tuple[int, dict[str, Any]]]:
    """The rounds of a run, each recorded before the next one's reports; returns how many, and what
    the rules say.
    """
    note = {"algorithm": str(config.algorithm), "detector": config.run.detector}
    saved, chosen, recording = run.round, len(engine.choices.made), False
    clients_file, metrics_file = folder.path / "clients.jsonl", folder.path / "metrics.jsonl"
    stages, begin = rounds(run, setup), getattr(engine, "begin", None)
    first = run.round + 1

    def keep() -> None:
        nonlocal saved
        if run.round > saved:
            folder.check_lock()
            checkpoints.save(run, note)
            saved = run.round

    run, briefs = next(stages)
    if briefs is None and _failed(run, last=True):
        raise UserError(_idle(run))
    try:
        while briefs is not None:
            began = time.perf_counter()
            reports = yield briefs
            with undisturbed() as held:
                recording, told, before = True, briefs, run.round
                run, briefs = stages.send(reports)
                if run.round == before and briefs is not None:  # clients were only measured
                    recording = False
                    continue
                last = briefs is None
                if begin and briefs is not None:
                    begin(briefs)  # it trains while this round is evaluated and recorded
                outcome = result(run, setup)
                scores = (
                    engine.evaluate(outcome)
                    if last or run.round % config.run.eval_every == 0
                    else None
                )
                whole = scores is not None and measures_clients(config, task, last=last)
                own = engine.evaluate_clients(outcome) if whole else None
                plain = engine.evaluate(run.x) if scores and outcome is not run.x else None
                row = recorded(run, setup) | metrics.from_elsewhere(run)
                row |= metrics.row(run, task, scores, own, time.perf_counter() - began, plain)
                row["samples"] = (
                    run.record.reports.samples(told) if run.record and run.record.reports else 0
                )
                cosines = run.round in config.run.cosines
                folder.check_lock()
                if run.round > first:
                    folder.check_records(clients_file.name)
                    folder.check_records(metrics_file.name)
                append_json(
                    clients_file, metrics.clients_row(run, task, own, scores, cosines=cosines)
                )
                append_json(metrics_file, row)
                _log_rejections(run, setup, folder)
                for listen in listeners:
                    listen(row)
                if len(engine.choices.made) > chosen:
                    chosen = len(engine.choices.made)
                    folder.choose(engine.choices.made, run.round)
                if (
                    last
                    or checkpoints.due(run.round, config.run.checkpoint_every)
                    or run.idle >= IDLE_LIMIT
                ):
                    keep()
                if _failed(run, last=last):
                    raise UserError(_idle(run))
                recording = False
            if held:
                keep()
                signal.raise_signal(held[0])
            if watch is not None and watch(row, outcome) is False:
                keep()
                break
    except BaseException:  # also GeneratorExit and KeyboardInterrupt
        if not recording:  # between two rounds: only the round in flight is lost
            keep()
        raise
    if run.finished:
        folder.warn(f"finished after round {run.round}: {run.finished}")
    unit, items = task.dataset.unit
    remarks = verdicts(run, setup) + _flicker(setup, folder.rows())
    ending: dict[str, Any] = {"verdicts": remarks, "finished": run.finished or None}
    ending |= {"unit": unit, "unit_per_sample": items}
    return run.round, recorded(run, setup) | ending


def _log_rejections(run: Run, setup: Setup, folder: Folder) -> None:
    moves = setup.algorithm.any("private")  # by noise alone
    for client, reason in run.record.rejected if run.record else ():
        folder.log(f"round {run.round}: client {client} does not count: {reason}")
    if run.idle:
        folder.log(
            f"round {run.round}: no good report" + ("" if moves else ", the model does not change")
        )


def _flicker(setup: Setup, rows: list[dict[str, Any]]) -> list[str]:
    """That rules followed a detector whose answers made no period, if they did."""
    followers = setup.algorithm.names("periods")
    answers = metrics.judged([(row["round"], bool(row["critical"])) for row in rows])
    if not followers or not answers.endswith(metrics.FLICKER):
        return []
    detector = setup.detectors[0]
    switched = answers.removesuffix(f": {metrics.FLICKER}")
    remark = f"the detector {detector} {switched}, so {' and '.join(followers)} followed no period"
    if getattr(detector, "compare", "") == "rounds":
        remark += f"; run.detector = '{detector.name()}.paired()' compares each client with its own last report"
    return [remark]


def _failed(run: Run, *, last: bool) -> bool:
    """Whether clients have not reported for too long, or have never."""
    return run.idle >= IDLE_LIMIT or (last and 0 < run.idle == run.round)


def _idle(run: Run) -> str:
    why = "log.txt says why"  # of a run that was continued
    if run.record:
        why = (
            f"last reason: {run.record.rejected[-1][1] if run.record.rejected else 'none reported'}"
        )
    return (
        f"{counted(run.idle, 'round')} in a row had no good report ({why}); the model is as after round "
        f"{run.round - run.idle}. Lower train.lr or train.weight_decay, see whether the loss is finite, or fix the "
        "clients."
    )


@contextmanager
def within_memory() -> Iterator[None]:
    """Turn running out of memory into an error that says how to fix it."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise UserError(
            "The GPU ran out of memory: stop other programs that use it, or set run.slots, the clients trained at the "
            "same time, in the run's config.toml; then `kairosfl resume`, or the same sweep again, continues from the "
            "last checkpoint."
        ) from error
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "DefaultCPUAllocator" not in str(error):
            raise
        wanted = re.search(r"allocate (\d+) bytes", str(error))
        asked = f" ({int(wanted[1]) / 1e9:,.1f} GB were asked for at once)" if wanted else ""
        raise UserError(
            f"The memory of this machine is too small{asked}: choose a smaller model or less data, or set run.slots, "
            "the clients trained at the same time."
        ) from error


@contextmanager
def _as_the_file_says(config: RunConfig) -> Iterator[None]:
    """What the code of a task file raises during training, in one sentence."""
    if not config.task.file:
        yield
        return
    with taskfile.explained(config.task.file, "training"):
        yield


def execute(recorded: RecordedRun, engine: Engine) -> dict[str, Any]:
    """Run one recorded run to its end on one engine."""
    try:
        with within_memory():
            briefs = next(recorded)
            while True:
                briefs = recorded.send(engine.train(briefs))
    except StopIteration as end:
        summary: dict[str, Any] = end.value
        return summary
    finally:
        recorded.close()


def start(
    config: RunConfig,
    path: Path,
    *,
    command: str = "",
    notify: Notify | None = None,
    say: Say = silent,
) -> dict[str, Any]:
    """Run a configuration in a new folder; returns the summary. `say` is called with a line on how
    it is run.
    """
    folder = Folder(path, say)
    folder.check_free()
    task = build_task(config)
    with within_memory():
        config, because = resolve_engine(config, task)
        engine = build_engine(config, task, because=because)
    with folder.locked():
        recorded = begin(config, task, engine, folder, command=command, notify=notify)
        say(method(config, engine))
        with _as_the_file_says(config):
            summary = execute(recorded, engine)
        del engine, recorded  # whose memory the ceiling may need
        return summary | _ceiling(config, task, folder, summary)


def _ceiling(
    config: RunConfig, task: Task, folder: Folder, summary: dict[str, Any]
) -> dict[str, Any]:
    """Which share of the device's ceiling a finished run reached, added to its summary; empty if
    not measured.
    """
    from kairosfl.bench import of_the_ceiling

    if config.run.engine not in ("loop", "batched"):
        return {}
    share = of_the_ceiling(
        task, config.train, torch.device(config.run.device), config.run.precision, summary
    )
    if share is None:
        return {}
    with suppress(UserError):  # the disk may be full
        write_json(folder.path / "summary.json", summary | {"of_the_ceiling": share})
    return {"of_the_ceiling": share}


def begin(
    config: RunConfig,
    task: Task,
    engine: Engine,
    folder: Folder,
    *,
    command: str = "",
    notify: Notify | None = None,
    watch: Watch | None = None,
) -> RecordedRun:
    """A recorded run in a new folder."""
    folder.check_lock()
    start, note = given("model.start", config.model.start)
    folder.create(config, task, command or " ".join(sys.argv), why=engine.why, **note)
    for name, count in task.dataset.notes.items():
        folder.log(f"data {task.dataset.name}: {name.replace('_', ' ')}: {count}")
    return record(config, task, engine, folder, start=start, notify=notify, watch=watch)


def reopen(
    config: RunConfig,
    task: Task,
    engine: Engine,
    folder: Folder,
    *,
    notify: Notify | None = None,
    watch: Watch | None = None,
) -> RecordedRun:
    """A recorded run that was stopped, from its last intact checkpoint, or from the start if it has
    none.
    """
    folder.check_lock()
    folder.check_places()
    if folder.begun():
        folder.check(config, task)
        (folder.path / "summary.json").unlink(missing_ok=True)  # written after fewer rounds
        return record(config, task, engine, folder, resume=True, notify=notify, watch=watch)
    start, note = given("model.start", config.model.start)
    folder.describe(config, task, " ".join(sys.argv), why=engine.why, **note)
    return record(config, task, engine, folder, start=start, notify=notify, watch=watch)


def given(key: str, folder: str) -> tuple[Tensor | None, dict[str, Any]]:
    """The model of the run folder that a key names, and its origin for `run.json`; None if the key
    is empty.
    """
    if not folder:
        return None, {}
    Folder(Path(folder)).check_start(key)
    x, round = model(Path(folder))
    return x, {"start": {"folder": str(Path(folder).absolute()), "round": round}}


def resume(path: Path, *, notify: Notify | None = None, say: Say = silent) -> dict[str, Any]:
    """Resume the run in a folder; a finished one is left as it is."""
    folder = Folder(path, say)
    config = folder.config()
    folder.check_rounds(config)
    if folder.finished():
        return folder.summary()
    with folder.locked():
        task = build_task(config)
        with within_memory():
            config, because = resolve_engine(config, task)
            engine = build_engine(config, task, because=because)
        say(method(config, engine))
        recorded = reopen(config, task, engine, folder, notify=notify)
        with _as_the_file_says(config):
            return execute(recorded, engine)
