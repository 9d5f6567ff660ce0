"""Run an item of a paper as one sweep, and put what comes out beside what is printed."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

from kairosfl.errors import UserError
from kairosfl.papers.item import Item, members
from kairosfl.papers.results import Results, collect
from kairosfl.progress import duration
from kairosfl.runs import experiment
from kairosfl.runs.config import RunConfig
from kairosfl.runs.engines import build_engine, resolve_engine
from kairosfl.runs.folder import Folder
from kairosfl.runs.sweep import Member, sweep
from kairosfl.tasks import data

PATIENCE = 10.0  # seconds; a rehearsal does not wait for a second round after a first one that took longer


class Watcher(Protocol):
    """What shows a sweep while it runs, such as `progress.ShowSweep`."""

    def begin(self, name: str, done: int) -> experiment.Notify: ...


Watch = Callable[[dict[str, int]], AbstractContextManager[Watcher]]


def reproduce(
    item: Item,
    *,
    cells: Sequence[str] = (),
    seeds: int | None = None,
    rounds: int | None = None,
    changes: Sequence[str] = (),
    out: Path,
    say: Callable[[str], None] = print,
    watch: Watch | None = None,
    command: str = "",
) -> Results:
    """Run the chosen cells and return the results, ready for `results.table`; started again, it goes on where it was.

    `changes` are `section.key=value` texts for every run; `say` is told what is left out and how long the rest will
    take; `watch` makes what shows progress, from the rounds of every run.
    """
    asked = members(item, cells, seeds, rounds, changes)
    runs = available(asked, say)
    if not runs:
        raise UserError(f"Nothing of {item.key} can be run: the data of all {len(asked)} runs is missing.")
    left = sum(rounds_left(member, out) for member in runs)
    say(f"{item.key}: {len(runs)} runs in {out}, {left} rounds to go.")
    if left:
        with experiment.within_memory():
            seconds = estimate(runs, out)
        say(f"About {duration(seconds)}, by the time of a round measured now; less where runs share a GPU.")
    try:
        with watch({member.name: member.config.train.rounds for member in runs}) if watch else nullcontext() as show:
            sweep(runs, out, command=command, watch=show.begin if show else None, say=say)
    except UserError as error:  # the others have come to their end
        found = _found(runs, out, item, changes)
        if not found["cells"]:
            raise
        say(f"{error} It counts as far as it got.")
        return found
    return _found(runs, out, item, changes)


def available(asked: Sequence[Member], say: Callable[[str], None]) -> list[Member]:
    """The runs whose data is there or can be fetched; says once for every data set what is not."""
    missing: dict[str, str | None] = {}
    for member in asked:
        source = _source(member.config)
        if source not in missing:
            missing[source] = _problem(member.config)
    for source, problem in missing.items():
        if problem:
            count = sum(_source(member.config) == source for member in asked)
            say(f"Left out, {count} runs: {problem}")
    return [member for member in asked if not missing[_source(member.config)]]


def estimate(runs: Sequence[Member], out: Path) -> float:
    """Seconds for the rounds left: of every task one run is timed, the others by how much they train in a round."""
    speeds: dict[str, float] = {}
    total = 0.0
    for member in runs:
        left = rounds_left(member, out)
        if left:
            task = _source(member.config) + repr((member.config.model.name, dict(member.config.model.options)))
            if task not in speeds:
                speeds[task] = rehearse(member.config) / _effort(member.config)
            total += left * speeds[task] * _effort(member.config)
    return total


def rehearse(config: RunConfig) -> float:
    """Seconds of a round, from the second round of a run that is thrown away, or from the first if that is slow."""
    config = replace(config, train=replace(config.train, rounds=3))
    task = experiment.build_task(config)
    config, _ = resolve_engine(config, task)
    engine = build_engine(config, task)
    took = 0.0
    with tempfile.TemporaryDirectory() as folder:
        course = experiment.record(config, task, engine, Folder(Path(folder)))
        briefs = next(course)
        for _ in range(2):
            began = time.perf_counter()
            briefs = course.send(engine.train(briefs))
            took = time.perf_counter() - began
            if took > PATIENCE:
                break
        course.close()
    return took


def rounds_left(member: Member, out: Path) -> int:
    """How many rounds a run has before it."""
    folder = Folder(out / member.name)
    return 0 if folder.finished() else max(0, member.config.train.rounds - (folder.rounds_done() or 0))


def _found(runs: Sequence[Member], out: Path, item: Item, changes: Sequence[str]) -> Results:
    """Of the runs that were asked for; what was run into the same folder before serves as their baselines."""
    folders = [folder for member in runs if (folder := out / member.name).is_dir()]
    return collect(folders, item, changes, beside=[out] if folders else [])


def _effort(config: RunConfig) -> float:
    """Passes over the data of a client that a round takes, in clients' shares of the whole."""
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
