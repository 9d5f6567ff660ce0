"""Rehearsals: a configuration over real Flower processes on this machine."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kairosfl.deploy.local import LocalFederation
from kairosfl.deploy.server import HANDOVER
from kairosfl.deploy.settings import load
from kairosfl.deploy.templates import rehearsal_files, write_all
from kairosfl.engines.flower.roster import save
from kairosfl.errors import UserError
from kairosfl.runs.config import RunConfig, change, dump, read, tables
from kairosfl.runs.experiment import Notify
from kairosfl.runs.files import read_lines, write
from kairosfl.runs.folder import Folder
from kairosfl.runs.keys import updated
from kairosfl.runs.prepare import build_data

# seconds without a round, beyond deadline and wait, after which the processes are restarted
STALLED = 120.0
ATTEMPTS = 3  # a rehearsal fails when its server exits this many times without finishing a round


def rehearse(
    file: Path,
    out: Path,
    *,
    nodes: int = 4,
    changes: Sequence[str] = (),
    notify: Notify | None = None,
) -> dict[str, Any]:
    """Run a configuration over real Flower processes on this machine, with TLS and authenticated
    nodes.

    The run folder is `out/run`; `notify` is called with the metrics of every round. A server that
    exits early is restarted and resumes from its last checkpoint.
    """
    config, _ = load(file, changes)
    if nodes < 1:
        raise UserError(f"--nodes {nodes} must be 1 or more.")
    nested = change(read(file), changes)
    if config.task.file:  # the nodes run elsewhere
        nested = updated(nested, {"task.file": config.task.file})
    ids = np.array_split(np.arange(len(build_data(config)[1])), nodes)
    served = [f"{part[0]}-{part[-1]}" for part in ids if len(part)]
    run = out / "run.toml"
    write(run, dump(nested))
    with LocalFederation(out, served) as federation:
        return run_to_end(federation, rehearsal_app(out / "app", config), run, out / "run", notify)


def rehearsal_app(path: Path, config: RunConfig) -> Path:
    """A Flower app whose task is a configuration's data and model; it contains nothing else of the
    configuration.
    """
    nested = {
        key: value
        for key, value in tables(config).items()
        if key in ("seed", "data", "model", "task")
    }
    write(path.parent / "task.toml", dump(nested | {"train": {"cohort": 1}}))
    write_all(path, rehearsal_files(str((path.parent / "task.toml").absolute())))
    return path


def run_to_end(
    federation: LocalFederation, app: Path, run: Path, out: Path, notify: Notify | None = None
) -> dict[str, Any]:
    """Run an app on a local federation until it has finished; the nodes stay up for the next run."""
    folder, notified, failures = Folder(out), 0, 0
    settings = load(run)[1].settings()
    patience = settings.deadline + settings.wait + STALLED
    out.mkdir(parents=True, exist_ok=True)
    if not (out / "roster.json").exists():
        save(out / "roster.json", federation.roster())
    while not folder.finished():
        federation.ensure_superlink()
        process, before, last_news = federation.submit(app, run, out), notified, time.monotonic()
        while process.poll() is None and not folder.finished():
            done = _notify_new(out, notified, notify)
            if done > notified:
                last_news = time.monotonic()
            notified = done
            if time.monotonic() > last_news + patience:
                folder.log("stalled: restarting Flower's processes on the server")
                federation.kill("run")
                federation.kill("superlink")
            time.sleep(0.2)
        notified = _notify_new(out, notified, notify)
        failures = 0 if notified > before else failures + 1
        if not folder.finished() and failures == ATTEMPTS:
            raise UserError(
                f"The server exited {ATTEMPTS} times without finishing a round; see {federation.log('run')}."
            )
    try:
        process.wait(HANDOVER)
    except subprocess.TimeoutExpired:  # it shows the log of a run that Flower does not end
        federation.kill("run")
    return folder.summary()


def _notify_new(out: Path, done: int, notify: Notify | None) -> int:
    """Report the rounds recorded after round `done`; return the number of the last one."""
    for row in read_lines(out / "metrics.jsonl"):
        if row["round"] > done:
            done = row["round"]
            if notify:
                notify(row)
    return done
