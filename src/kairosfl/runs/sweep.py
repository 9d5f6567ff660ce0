"""Sweeps: one configuration with lists for some keys, every combination a run of its own folder.

    [sweep]
    seed = [0, 1, 2]
    algorithm = ["fedavg", "scaffold"]
    data.alpha = [0.1, 0.5]

A sweep that is started again in the same folder continues: finished runs are left alone, unfinished
ones resume.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from kairosfl.errors import UserError
from kairosfl.runs import experiment
from kairosfl.runs.checkpoint import Writing
from kairosfl.runs.combinations import combinations
from kairosfl.runs.config import RunConfig, resolve, tables
from kairosfl.runs.files import write_json
from kairosfl.runs.folder import Folder, Say, silent
from kairosfl.runs.keys import flatten
from kairosfl.runs.lock import Displaced, Lock, lock
from kairosfl.runs.pool import Pending, Together
from kairosfl.runs.prepare import Shared, build_task, ready, within_memory

Watch = Callable[[str, int], experiment.Notify]
LONGEST = 200  # characters in the name of a folder


@dataclass(frozen=True)
class Member:
    """One run of a sweep."""

    name: str
    settings: Mapping[str, Any]
    config: RunConfig


def expand(tables: Mapping[str, Any]) -> list[Member]:
    """Every combination of the lists under [sweep], in the order in which they are written."""
    members: list[Member] = []
    named: dict[str, int] = {}  # name without a number -> how many have it
    twins: dict[str, str] = {}  # configuration -> the name of its run
    for settings, combination in combinations(tables):
        name = "-".join(map(_short, settings, settings.values()))[:LONGEST]
        if not name:
            name = "run"
        config = resolve(combination)
        key = repr(config)
        if key in twins:
            raise UserError(
                f"[sweep] asks twice for the same run, as {twins[key]!r} and as {name!r}; leave "
                "one out."
            )
        twins[key] = name
        named[name] = named.get(name, 0) + 1
        if named[name] > 1:
            name = f"{name}~{named[name]}"
        members.append(Member(name, settings, config))
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

    `watch` is called for each run with its name and the rounds it has done, and returns a listener
    for its metrics; `say` is called with a line on how the runs of an engine are run. A run that
    fails does not stop the others; it is named at the end.
    """
    if (out / "config.toml").exists():
        raise UserError(
            f"{out} contains a run, and a sweep needs its own folder; give another --out."
        )
    for member in members:
        start = member.config.model.start
        if start and not (out / member.name / "config.toml").is_file():
            Folder(Path(start)).check_start("model.start")
    with lock(out) as guard, within_memory():
        return _run_members(members, out, command, watch, say, guard)


def _run_members(
    members: list[Member], out: Path, command: str, watch: Watch | None, say: Say, guard: Lock
) -> dict[str, Any]:
    # --- what there is ---
    listed = []
    for member in members:
        entry = {"name": member.name, "path": member.name, "settings": dict(member.settings)}
        listed.append(entry)
    write_json(out / "sweep.json", {"runs": listed})
    listeners = {}
    if watch:
        for member in members:
            done = Folder(out / member.name).rounds_done()
            listeners[member.name] = watch(member.name, 0 if done is None else done)

    # --- alone, or put aside to train together ---
    say = cache(say)  # the same line once
    summaries: dict[str, Any] = {}
    failed: dict[str, str] = {}
    together: dict[str, list[Pending]] = {}
    shared = Shared()
    writing = Writing()
    for member in members:
        folder = Folder(out / member.name, say, guard)
        begun = (folder.path / "config.toml").is_file()
        if begun:
            _unchanged(member, folder)
        if folder.finished():
            summaries[member.name] = folder.summary()
            continue
        config = folder.config() if begun else member.config
        run = ready(config, build_task(config, shared=shared))
        notify = listeners.get(member.name)
        pending = Pending(member.name, run, folder, begun, notify, writing=writing)
        if run.kind:
            together.setdefault(run.kind, []).append(pending)
            continue
        engine = run.build()
        say(run.on(engine).method)
        try:
            summaries[member.name] = experiment.execute(pending.open(engine, command), engine)
        except Displaced:
            raise
        except UserError as error:
            failed[member.name] = str(error)

    # --- together ---
    for group in together.values():
        summaries |= _share(group, command, failed, say)
    if failed:
        name, reason = next(iter(failed.items()))
        raise UserError(f"{len(failed)} of {len(members)} runs failed; the first, {name}: {reason}")
    return {member.name: summaries[member.name] for member in members}


def _unchanged(member: Member, folder: Folder) -> None:
    """Refuse a run that was begun with other settings than the sweep asks for now."""
    then = flatten(tables(folder.config()))
    now = flatten(tables(member.config))
    for key, value in now.items():
        matters = key == "run.detector" or not key.startswith("run.")
        if matters and then.get(key) != value:
            raise UserError(
                f"{folder.path} was begun with {key} = {then.get(key)!r}, but the sweep now has "
                f"{value!r}; give another --out, or restore the old value."
            )


def _share(group: list[Pending], command: str, failed: dict[str, str], say: Say) -> dict[str, Any]:
    """Runs on one batched engine."""
    from kairosfl.engines.batched import Batched

    first = group[0]
    engine = first.ready.build([run.ready.largest for run in group])
    assert isinstance(engine, Batched)
    say(first.ready.on(engine).method)
    pool = Together(engine, command)
    for run in group:
        pool.add(run)
    summaries: dict[str, Any] = {}
    try:
        while pool:
            for run, outcome in pool.advance():
                if isinstance(outcome, UserError):
                    failed[run.name] = str(outcome)
                else:
                    summaries[run.name] = outcome
    except Displaced:
        raise
    except UserError as error:  # the engine's own: none of the runs can continue
        failed |= {run.name: str(error) for run in (*pool.active, *pool.waiting)}
    finally:
        pool.close()
    return summaries


def _short(key: str, value: Any) -> str:
    """A piece of a folder name: `scaffold`, `seed0`, `alpha0.1`."""
    text = re.sub(r"[^A-Za-z0-9.+_]+", "_", str(value).replace(" ", "")).strip("_")[:60]
    if key == "algorithm":
        return text
    return key.rpartition(".")[2] + text
