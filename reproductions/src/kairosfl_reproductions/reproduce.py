"""Run an item of a paper as one sweep, and collect the results."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch

from kairosfl import data
from kairosfl.bench import wait
from kairosfl.errors import UserError
from kairosfl.progress import duration
from kairosfl.runs import experiment
from kairosfl.runs.config import RunConfig
from kairosfl.runs.folder import Folder
from kairosfl.runs.prepare import prepare, within_memory
from kairosfl.runs.sweep import Member, sweep
from kairosfl.wording import counted
from kairosfl_reproductions.item import Item, members
from kairosfl_reproductions.results import Results, collect, save

PATIENCE = 10.0  # seconds; on a CPU no second round is timed after a first one that took longer


class Progress(Protocol):
    """Shows a sweep before and while it runs, such as `progress.SweepProgress`."""

    def plan(self, rounds: dict[str, int]) -> None: ...
    def state(self, words: str) -> None: ...
    def begin(self, name: str, done: int) -> experiment.Notify: ...


def reproduce(
    item: Item,
    *,
    cells: Sequence[str] = (),
    seeds: int | None = None,
    first_seed: int = 0,
    rounds: int | None = None,
    changes: Sequence[str] = (),
    out: Path,
    results: Path | None = None,
    say: Callable[[str], None] = print,
    progress: Progress | None = None,
    command: str = "",
) -> Results:
    """Run the chosen cells and return the results, ready for `results.table`; run again, it
    resumes.

    `changes` are `section.key=value` overrides for every run; `results` is a directory to add the
    results to, those of the finished rounds if the runs are interrupted; `say` prints what is
    skipped and how long the rest will take; `progress` shows what is being done.
    """
    state = progress.state if progress else lambda words: None
    asked = members(item, cells, seeds, rounds, changes, first_seed)
    state("loading the data")
    runs = available(asked, say)
    if not runs:
        raise UserError(
            f"No cell of {item.key} can be run: the data of {counted(len(asked), 'run')} is missing; "
            "see the messages above."
        )
    left = sum(rounds_left(member, out) for member in runs)
    say(f"{item.key}: {counted(len(runs), 'run')} in {out}, {counted(left, 'round')} to go.")
    if progress:
        progress.plan({run.name: run.config.train.rounds for run in runs})
    if left:
        state("timing a round")
        with within_memory():
            seconds = estimate(runs, out)
        say(
            f"About {duration(seconds)}, estimated from the time of one round; less where runs share a GPU."
        )
    stopped: UserError | KeyboardInterrupt | None = None
    try:
        state("")
        sweep(runs, out, command=command, watch=progress.begin if progress else None, say=say)
    except (
        UserError,
        KeyboardInterrupt,
    ) as raised:  # an error of one run is raised when the others have finished
        stopped = raised
    found = _found(runs, out, item, changes)
    kept = save(found, results) if results and (found["cells"] or not stopped) else None
    if kept and isinstance(stopped, KeyboardInterrupt):
        say(f"The finished rounds are in {kept}.")
    if stopped and (isinstance(stopped, KeyboardInterrupt) or not found["cells"]):
        raise stopped
    if stopped:
        say(f"{stopped} Its finished rounds are included.")
    return found


def available(asked: Sequence[Member], say: Callable[[str], None]) -> list[Member]:
    """The runs whose data exists or can be downloaded; says once for every other data set what is
    missing.
    """
    missing: dict[str, str | None] = {}
    for member in asked:
        source = _source(member.config)
        if source not in missing:
            missing[source] = _problem(member.config)
    for source, problem in missing.items():
        if problem:
            count = sum(_source(member.config) == source for member in asked)
            say(f"Skipping {counted(count, 'run')}: {problem}")
    return [member for member in asked if not missing[_source(member.config)]]


def estimate(runs: Sequence[Member], out: Path) -> float:
    """Seconds for the remaining rounds: one run per task and detector is timed, others are scaled
    by work.
    """
    speeds: dict[str, float] = {}
    total = 0.0
    for member in runs:
        left = rounds_left(member, out)
        if left:
            kind, detector = member.config.model, member.config.run.detector
            task = _source(member.config) + repr((kind.name, dict(kind.options), detector))
            if task not in speeds:
                speeds[task] = seconds_per_round(member.config) / _effort(member.config)
            total += left * speeds[task] * _effort(member.config)
    return total


def seconds_per_round(config: RunConfig) -> float:
    """Seconds per round, from the second round of a throw-away run, or on a CPU from the first if
    that is slow.

    On a GPU the first round also compiles kernels and measures methods.
    """
    config = replace(config, train=replace(config.train, rounds=3))
    prepared = prepare(config)
    engine, device = prepared.engine, torch.device(prepared.about.run.device)
    took = 0.0
    with tempfile.TemporaryDirectory() as folder:
        rounds = experiment.record(prepared, Folder(Path(folder)))
        briefs = next(rounds)
        for _ in range(2):
            began = time.perf_counter()
            briefs = rounds.send(engine.train(briefs))
            wait(device)
            took = time.perf_counter() - began
            if took > PATIENCE and device.type == "cpu":
                break
        rounds.close()
    return took


def rounds_left(member: Member, out: Path) -> int:
    """How many rounds of a run remain."""
    folder = Folder(out / member.name)
    return (
        0 if folder.finished() else max(0, member.config.train.rounds - (folder.rounds_done() or 0))
    )


def _found(runs: Sequence[Member], out: Path, item: Item, changes: Sequence[str]) -> Results:
    """Results of the requested runs; earlier runs in the same folder serve as their baselines."""
    folders = [folder for member in runs if (folder := out / member.name).is_dir()]
    return collect(folders, item, changes, baselines=[out] if folders else [])


def _effort(config: RunConfig) -> float:
    """Passes over the whole data set per round."""
    return config.train.cohort * config.train.epochs / max(config.data.clients, 1)


def _source(config: RunConfig) -> str:
    options: Mapping[str, Any] = config.data.options
    return f"{config.data.name} {sorted(options.items())}"


def _problem(config: RunConfig) -> str | None:
    try:
        data.load(config.data.name, **config.data.options)
    except UserError as error:
        return str(error)
    return None
