"""Sweeps: one configuration with lists for some keys, every combination a run of its own folder.

    [sweep]
    seed = [0, 1, 2]
    algorithm = ["fedavg", "scaffold"]
    data.alpha = [0.1, 0.5]

A sweep that is started again in the same folder continues: finished runs are left alone, unfinished ones resume.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kairosfl.core.fields import Reports
from kairosfl.engines.protocol import Engine
from kairosfl.errors import UserError, nearest
from kairosfl.runs import experiment
from kairosfl.runs.config import SECTIONS, RunConfig, resolve, tables
from kairosfl.runs.engines import SharedEngine, build_engine, largest, method, resolve_engine
from kairosfl.runs.files import write_json
from kairosfl.runs.folder import Folder, Say, silent
from kairosfl.runs.keys import flatten, updated
from kairosfl.runs.lock import lock
from kairosfl.tasks.task import Task

if TYPE_CHECKING:
    from kairosfl.engines.batched.jobs import Ticket

Watch = Callable[[str, int], experiment.Notify]
LONGEST = 200  # characters in the name of a folder
ENGINE = ("device", "precision", "slots", "deterministic")  # keys of [run] that define an engine


@dataclass(frozen=True)
class Member:
    """One run of a sweep."""

    name: str
    settings: Mapping[str, Any]
    config: RunConfig


def expand(tables: Mapping[str, Any]) -> list[Member]:
    """Every combination of the lists under [sweep], in the order in which they are written."""
    rest = {key: value for key, value in tables.items() if key != "sweep"}
    lists = flatten(tables.get("sweep", {}))
    for key, values in lists.items():
        if not isinstance(values, list) or not values:
            raise UserError(f"sweep.{key} = {values!r} must be a list of values to try.")
        section = key.partition(".")[0]
        if section not in {"algorithm", "seed", *SECTIONS}:
            raise UserError(f"Unknown key sweep.{key}; {nearest(section, ['algorithm', 'seed', *SECTIONS])}")
    members: list[Member] = []
    for values in itertools.product(*lists.values()):
        settings = dict(zip(lists, values, strict=True))
        name = "-".join(_short(key, value) for key, value in settings.items())[:LONGEST] or "run"
        taken = sum(member.name == name or member.name.startswith(f"{name}~") for member in members)
        config = resolve(updated(rest, settings))
        twin = next((member for member in members if member.config == config), None)
        if twin is not None:
            raise UserError(f"[sweep] asks twice for the same run, as {twin.name!r} and as {name!r}; leave one out.")
        members.append(Member(f"{name}~{taken + 1}" if taken else name, settings, config))
    return members


def sweep(
    members: list[Member],
    out: Path,
    *,
    command: str = "",
    watch: Watch | None = None,
    say: Say = silent,
) -> dict[str, Any]:
    """Run all members under `out`, those with the batched engine together; their summaries by name.

    `watch` is called for each run with its name and the rounds it has done, and returns a listener for its metrics;
    `say` is called with a line on how the runs of an engine are run. A run that fails does not stop the others; it is
    named at the end.
    """
    if (out / "config.toml").exists():
        raise UserError(f"{out} contains a run, and a sweep needs its own folder; give another --out.")
    with lock(out), experiment.within_memory():
        return _run_members(members, out, command, watch, say)


def _run_members(members: list[Member], out: Path, command: str, watch: Watch | None, say: Say) -> dict[str, Any]:
    listed = [{"name": m.name, "path": m.name, "settings": dict(m.settings)} for m in members]
    write_json(out / "sweep.json", {"runs": listed})
    say = cache(say)  # the same line once
    summaries: dict[str, Any] = {}
    failed: dict[str, str] = {}
    together: dict[str, list[_Pending]] = {}
    done = {member.name: Folder(out / member.name).rounds_done() or 0 for member in members}
    told = {name: watch(name, rounds) for name, rounds in done.items()} if watch else {}
    for member in members:
        folder = Folder(out / member.name, say)
        begun = (folder.path / "config.toml").is_file()
        if begun:
            _unchanged(member, folder)
        if folder.finished():
            summaries[member.name] = folder.summary()
            continue
        config = folder.config() if begun else member.config
        task = experiment.build_task(config)
        config, because = resolve_engine(config, task)
        opened = _Pending(member.name, config, task, folder, begun, told.get(member.name), because)
        if config.run.engine == "batched":
            together.setdefault(f"{_kind(config)} {task.base_hash}", []).append(opened)
        else:
            engine = build_engine(config, task, because=because)
            say(method(config, engine))
            try:
                summaries[member.name] = experiment.execute(opened.open(engine, command), engine)
            except UserError as error:
                failed[member.name] = str(error)
    for group in together.values():
        summaries |= _share(group, command, failed, say)
    if failed:
        name, reason = next(iter(failed.items()))
        raise UserError(f"{len(failed)} of {len(members)} runs failed; the first, {name}: {reason}")
    return {member.name: summaries[member.name] for member in members}


def _unchanged(member: Member, folder: Folder) -> None:
    """Refuse a run that was begun with other settings than the sweep asks for now."""
    then, now = (flatten(tables(config)) for config in (folder.config(), member.config))
    for key in now:  # of [run], only the detector matters
        if (key == "run.detector" or not key.startswith("run.")) and then.get(key) != now[key]:
            raise UserError(
                f"{folder.path} was begun with {key} = {then.get(key)!r}, but the sweep now has {now[key]!r}; give "
                "another --out, or restore the old value."
            )


@dataclass(eq=False)
class _Pending:
    """A run that is to be executed."""

    name: str
    config: RunConfig
    task: Task
    folder: Folder
    begun: bool
    notify: experiment.Notify | None
    because: str  # why this engine was chosen

    @property
    def largest(self) -> int:
        """Its largest cohort."""
        return largest(self.config, self.task)

    def open(self, engine: Engine, command: str) -> experiment.RecordedRun:
        if self.begun:
            return experiment.reopen(self.config, self.task, engine, self.folder, notify=self.notify)
        return experiment.begin(self.config, self.task, engine, self.folder, command=command, notify=self.notify)


def _share(group: list[_Pending], command: str, failed: dict[str, str], say: Say) -> dict[str, Any]:
    """Runs on one batched engine: the clients of all of them share one queue for its slots."""
    from kairosfl.engines.batched import Batched

    first = group[0]
    engine = build_engine(first.config, first.task, [run.largest for run in group], first.because)
    assert isinstance(engine, Batched)
    say(method(first.config, engine))
    waiting = list(group)
    active: dict[_Pending, experiment.RecordedRun] = {}
    training: dict[Ticket, _Pending] = {}
    summaries: dict[str, Any] = {}

    def advance(run: _Pending, reports: Reports | None) -> None:
        """The next round of a run, the first without reports; or its end."""
        try:
            with experiment.within_memory():
                if run not in active:
                    active[run] = run.open(SharedEngine(engine, run.task), command)
                briefs = next(active[run]) if reports is None else active[run].send(reports)
                training[engine.submit(run.task, briefs)] = run
        except StopIteration as end:
            summaries[run.name] = end.value
            del active[run]
        except UserError as error:
            failed[run.name] = str(error)
            active.pop(run, None)

    try:
        while waiting or training:
            for run in _next(waiting, list(active), engine.room):
                waiting.remove(run)
                advance(run, None)
            if training:
                with experiment.within_memory():
                    ticket = engine.collect()
                advance(training.pop(ticket), ticket.reports())
    except UserError as error:  # the engine's own: none of the runs can continue
        failed |= {run.name: str(error) for run in (*active, *waiting)}
    finally:
        for recorded in active.values():
            recorded.close()
    return summaries


def _next(waiting: Sequence[_Pending], active: Sequence[_Pending], room: int) -> list[_Pending]:
    """Which runs to begin in addition to the active ones, so that their largest cohorts fit; one run always does."""
    chosen: list[_Pending] = []
    taken = sum(run.largest for run in active)
    for run in waiting:
        if not (active or chosen) or taken + run.largest <= room:
            chosen.append(run)
            taken += run.largest
    return chosen


def _kind(config: RunConfig) -> str:
    """What runs must have in common to share an engine."""
    data = config.data
    threads = config.run.threads if config.run.device == "cpu" else None
    engine = [threads, *(getattr(config.run, name) for name in ENGINE)]
    noised = (data, experiment.partition_seed(config)) if data.noise else ()  # then samples depend on the clients
    task = (data.name, data.options, data.augment, data.validation, data.normalise, noised, config.model)
    return repr((*task, engine))


def _short(key: str, value: Any) -> str:
    """A piece of a folder name: `scaffold`, `seed0`, `alpha0.1`."""
    text = re.sub(r"[^A-Za-z0-9.+_]+", "_", str(value).replace(" ", "")).strip("_")[:60]
    return text if key == "algorithm" else key.rpartition(".")[2] + text
