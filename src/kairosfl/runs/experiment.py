"""An experiment: a run that is recorded in a folder and survives interruptions."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kairosfl.core.fields import Briefs, Reports
from kairosfl.core.round import models, recorded, result, rounds, verdicts
from kairosfl.core.run import Run, Setup
from kairosfl.engines.evaluate import Sums, of_clients
from kairosfl.engines.memory import spilling
from kairosfl.engines.protocol import Engine
from kairosfl.errors import UserError
from kairosfl.runs import STOPPED, metrics, taskfile
from kairosfl.runs.checkpoint import Checkpoints, Writing, model
from kairosfl.runs.config import RunConfig
from kairosfl.runs.files import read_json, write_json
from kairosfl.runs.folder import Folder, Say, silent
from kairosfl.runs.interrupt import undisturbed
from kairosfl.runs.keys import flatten
from kairosfl.runs.lock import Displaced
from kairosfl.runs.prepare import Prepared, build_task, prepare, within_memory
from kairosfl.runs.trackers import TRACKERS
from kairosfl.wording import counted

__all__ = ["build_task"]  # where Flower apps of earlier versions find it

IDLE_LIMIT = 10  # consecutive rounds without a good report that end a run
TOGETHER = 1 << 26  # numbers of the clients' models that are put together for an evaluation
ON_TRAINING = (
    "no client has test samples of its own, so each one's model was evaluated on what it trained "
    "on: give clients their own test samples to see what they gain"
)
Notify = Callable[[dict[str, Any]], None]
Watch = Callable[[dict[str, Any], Tensor], bool | None]
RecordedRun = Generator[Briefs, Reports, dict[str, Any]]


def record(
    prepared: Prepared,
    folder: Folder,
    *,
    resume: bool = False,
    start: Tensor | None = None,
    notify: Notify | None = None,
    watch: Watch | None = None,
    writing: Writing | None = None,
) -> RecordedRun:
    """A run that is recorded in a folder: yields briefs, is sent reports, returns the summary.

    It writes a line of metrics after every round, and checkpoints as `run.checkpoint_every` says
    and when closed.

    Args:
        prepared: What the run needs.
        folder: Where it is recorded.
        resume: Whether to go on from the newest checkpoint.
        start: Replaces the engine's initial model.
        notify: Called with the metrics of every round.
        watch: Called with the metrics and the vector of every round; ends the run by returning
            False.
        writing: Shared by runs that train side by side, whose checkpoints take a tenth of the
            time together.
    """
    setup, about, engine = prepared.setup, prepared.about, prepared.engine
    folder.tidy()

    # --- the run as it begins, or where it stopped ---
    x = engine.start()
    if start is not None:
        if len(start) != len(x):
            raise UserError(
                f"model.start = {about.start!r} has a model of {len(start)} parameters, but this "
                f"one has {len(x)}; choose a run of the same model."
            )
        x = start.to(x)
    run = Run.start(x, setup, seed=about.seed, allocate=spilling)
    del x, start  # or the first model would be held to the end
    checkpoints = Checkpoints(folder.checkpoints, writing=Writing() if writing is None else writing)
    if resume:
        run, broken = checkpoints.load(run)
        for line in broken:
            folder.warn(line)
        folder.log(f"resumed after round {run.round}")
        folder.cut(run.round)
        engine.choices.restore(folder.choices(), run.round)
    else:
        folder.cut(0)  # rounds without a checkpoint
        checkpoints.save(run, {})

    # --- its rounds ---
    settings = flatten(about.settings)
    description = read_json(folder.path / "run.json")
    trackers = [TRACKERS[name](folder.path, settings, run.round) for name in about.run.track]
    listeners: list[Notify] = list(trackers)
    if notify:
        listeners.insert(0, notify)
    rounds_done = _record_rounds(prepared, folder, run, checkpoints, listeners, watch)
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
        for tracker in trackers:
            tracker.close()
    return folder.summarise(done, ending, description)


def _record_rounds(
    prepared: Prepared,
    folder: Folder,
    run: Run,
    checkpoints: Checkpoints,
    listeners: list[Notify],
    watch: Watch | None,
) -> Generator[Briefs, Reports, tuple[int, dict[str, Any]]]:
    """The rounds of a run, each recorded before the next one's reports; returns how many, and what
    the rules say.
    """
    setup, engine, about = prepared.setup, prepared.engine, prepared.about
    note = {"algorithm": str(setup.algorithm), "detector": about.run.detector}
    choices_written = len(engine.choices.made)
    saved = run.round
    recording = False  # whether a round has been trained and not yet been written
    stages = rounds(run, setup)
    begin = getattr(engine, "begin", None)
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
            # --- train ---
            began = time.perf_counter()
            reports = yield briefs
            with undisturbed() as held:
                recording = True
                before = run.round
                run, briefs = stages.send(reports)
                if run.round == before and briefs is not None:  # clients were only measured
                    recording = False
                    continue
                last = briefs is None
                if begin and briefs is not None:
                    begin(briefs)  # it trains while this round is evaluated and recorded

                # --- evaluate ---
                outcome = result(run, setup)
                measured = _measured(prepared, run, outcome, last=last)

                # --- record ---
                seconds = time.perf_counter() - began
                row = recorded(run, setup) | metrics.from_elsewhere(run)
                row |= metrics.row(run, prepared.task, measured, seconds)
                cosines = run.round in about.run.cosines
                clients = metrics.clients_row(
                    run, prepared.task, setup.algorithm, measured, cosines=cosines
                )
                folder.append(row, clients, first=run.round == first)
                _log_rejections(run, setup, folder)
                for listen in listeners:
                    listen(row)
                if len(engine.choices.made) > choices_written:
                    choices_written = len(engine.choices.made)
                    folder.choose(engine.choices.made, run.round)

                # --- keep ---
                is_due = checkpoints.due(run.round, about.run.checkpoint_every)
                if last or is_due or run.idle >= IDLE_LIMIT:
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
    unit, items = prepared.task.dataset.unit
    remarks = verdicts(run, setup) + _flicker(setup, folder.rows())
    if setup.personal and prepared.task.tests is None:
        remarks.append(ON_TRAINING)
    ending: dict[str, Any] = {"verdicts": remarks, "finished": run.finished or None}
    ending |= {"unit": unit, "unit_per_sample": items}
    return run.round, recorded(run, setup) | ending


def _measured(prepared: Prepared, run: Run, outcome: Tensor, *, last: bool) -> metrics.Measured:
    """What is evaluated after a round: the outcome, the clients where that is asked for, and the
    model itself where the outcome is another vector.
    """
    engine, about = prepared.engine, prepared.about
    if not last and run.round % about.run.eval_every:
        return metrics.Measured()
    if prepared.setup.personal and prepared.task.clients.sizes.any():
        return _measured_personal(prepared, run)
    scores = engine.evaluate(outcome)
    by_client = None
    if about.measures_last if last else about.measures_clients:
        by_client = engine.evaluate_clients(outcome)
    plain = None
    if outcome is not run.x:
        plain = engine.evaluate(run.x)
    return metrics.Measured(scores, by_client, plain)


def _measured_personal(prepared: Prepared, run: Run) -> metrics.Measured:
    """Every client's own model on its own data: the main metric is that of all these samples."""
    task, setup = prepared.task, prepared.setup
    together = max(1, TOGETHER // (setup.layout.size + setup.layout.own_size))
    sums: list[Sums] = []
    for ids in torch.arange(len(task.clients)).split(together):
        sums += prepared.engine.measure_clients(ids, models(run, setup, ids))
    return metrics.Measured(*of_clients(task, sums))


def _log_rejections(run: Run, setup: Setup, folder: Folder) -> None:
    if run.record:
        for client, reason in run.record.rejected:
            folder.log(f"round {run.round}: client {client} does not count: {reason}")
    if run.idle:
        line = f"round {run.round}: no good report"
        if not setup.algorithm.any("private"):  # whose model moves by noise alone
            line += ", the model does not change"
        folder.log(line)


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
        remark += (
            f"; run.detector = '{detector.name()}.paired()' compares each client with its own last "
            "report"
        )
    return [remark]


def _failed(run: Run, *, last: bool) -> bool:
    """Whether clients have not reported for too long, or have never."""
    never = 0 < run.idle == run.round
    return run.idle >= IDLE_LIMIT or (last and never)


def _idle(run: Run) -> str:
    why = "log.txt says why"  # of a run that was continued
    if run.record:
        reason = "none reported"
        if run.record.rejected:
            reason = run.record.rejected[-1][1]
        why = f"last reason: {reason}"
    return (
        f"{counted(run.idle, 'round')} in a row had no good report ({why}); the model is as after "
        f"round {run.round - run.idle}. Lower train.lr or train.weight_decay, see whether the loss "
        "is finite, or fix the clients."
    )


@contextmanager
def _as_the_file_says(file: str) -> Iterator[None]:
    """What the code of a task file raises during training, in one sentence."""
    if not file:
        yield
        return
    with taskfile.explained(file, "training"):
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
    """Run a configuration in a new folder; returns the summary.

    Args:
        config: The configuration.
        path: The folder.
        command: What was typed, for the record.
        notify: Called with the metrics of every round.
        say: Called with a line on how it is run.
    """
    folder = Folder(path, say)
    folder.check_free()
    prepared = prepare(config)
    with folder.locked():
        recorded = begin(prepared, folder, command=command, notify=notify)
        say(prepared.method)
        with _as_the_file_says(prepared.about.file):
            summary = execute(recorded, prepared.engine)
        ceiling = _Ceiling(prepared)
        del prepared, recorded  # whose memory the ceiling may need
        return summary | ceiling.reached(folder, summary)


class _Ceiling:
    """Which share of the device's ceiling a finished run reached, without its engine."""

    def __init__(self, prepared: Prepared) -> None:
        self.task = prepared.task
        self.recipe = prepared.setup.recipe
        self.run = prepared.about.run

    def reached(self, folder: Folder, summary: dict[str, Any]) -> dict[str, Any]:
        """What is added to the summary; empty if it is not measured."""
        from kairosfl.bench import of_the_ceiling

        if self.run.engine not in ("loop", "batched"):
            return {}
        device = torch.device(self.run.device)
        share = of_the_ceiling(self.task, self.recipe, device, self.run.precision, summary)
        if share is None:
            return {}
        with suppress(UserError):  # the disk may be full
            write_json(folder.path / "summary.json", summary | {"of_the_ceiling": share})
        return {"of_the_ceiling": share}


def begin(
    prepared: Prepared,
    folder: Folder,
    *,
    command: str = "",
    notify: Notify | None = None,
    watch: Watch | None = None,
    writing: Writing | None = None,
) -> RecordedRun:
    """A recorded run in a new folder."""
    task = prepared.task
    folder.check_lock()
    x, origin = given("model.start", prepared.about.start)
    typed = command or " ".join(sys.argv)
    folder.create(prepared.about, task, typed, why=prepared.engine.why, **origin)
    for name, count in task.dataset.notes.items():
        folder.log(f"data {task.dataset.name}: {name.replace('_', ' ')}: {count}")
    return record(prepared, folder, start=x, notify=notify, watch=watch, writing=writing)


def reopen(
    prepared: Prepared,
    folder: Folder,
    *,
    notify: Notify | None = None,
    watch: Watch | None = None,
    writing: Writing | None = None,
) -> RecordedRun:
    """A recorded run that was stopped, from its last intact checkpoint, or from the start if it has
    none.
    """
    folder.check_lock()
    folder.check_places()
    if folder.begun():
        folder.check(prepared.about, prepared.task)
        (folder.path / "summary.json").unlink(missing_ok=True)  # written after fewer rounds
        return record(prepared, folder, resume=True, notify=notify, watch=watch, writing=writing)
    x, origin = given("model.start", prepared.about.start)
    why = prepared.engine.why
    folder.describe(prepared.about, prepared.task, " ".join(sys.argv), why=why, **origin)
    return record(prepared, folder, start=x, notify=notify, watch=watch, writing=writing)


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
    folder.check_rounds(config.train.rounds)
    if folder.finished():
        return folder.summary()
    with folder.locked():
        prepared = prepare(config)
        say(prepared.method)
        recorded = reopen(prepared, folder, notify=notify)
        with _as_the_file_says(prepared.about.file):
            return execute(recorded, prepared.engine)
