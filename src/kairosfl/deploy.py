"""Deployment over Flower: the server side of a run, new apps, certificates, and local rehearsals."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kairosfl.core.rule import Algorithm
from kairosfl.errors import UserError, nearest
from kairosfl.rules import Privacy
from kairosfl.rules.attack import Attack
from kairosfl.runs.checkpoint import model
from kairosfl.runs.config import RunConfig, change, dump, read, resolve, tables, text_of
from kairosfl.runs.edits import edits, flat
from kairosfl.runs.engines import resolve_engine
from kairosfl.runs.experiment import Notify, build_data, execute, given, record
from kairosfl.runs.files import read_lines, write
from kairosfl.runs.folder import Folder
from kairosfl.runs.keys import updated
from kairosfl.runs.lock import lock
from kairosfl.runs.taskfile import for_client
from kairosfl.tasks.population import Population
from kairosfl.tasks.task import Task

try:
    from flwr.app import Context
    from flwr.serverapp import Grid, ServerApp

    from kairosfl.engines.flower.certs import authority, check_host, node_key
    from kairosfl.engines.flower.checks import Trust
    from kairosfl.engines.flower.local import LocalFederation
    from kairosfl.engines.flower.roster import fingerprint, save
    from kairosfl.engines.flower.server import Flower, Settings
    from kairosfl.engines.flower.templates import files, rehearsal_files
    from kairosfl.engines.flower.trouble import insist
    from kairosfl.engines.flower.wire import Packing
except ImportError:
    raise UserError(
        "Deployment needs Flower; install it with: pip install 'kairosfl[flower]'."
    ) from None

MakeTask = Callable[[int | None], Task]
# seconds without a round, beyond deadline and wait, after which the processes are restarted
STALLED = 120.0
HANDOVER = 60.0  # seconds that a server being shut down has to release its run folder
ATTEMPTS = 3  # a rehearsal fails when its server exits this many times without finishing a round


@dataclass(frozen=True, kw_only=True)
class Deploy:
    """[deploy]: how rounds are run, and how far clients are trusted."""

    clients: int = 0  # client ids are 0 to clients − 1; 0: as many as the task has
    start: str = ""  # a run folder whose model this run starts from
    deadline: float = Settings.deadline
    quorum: float = Settings.quorum
    over: float = Settings.over
    wait: float = Settings.wait
    on_disk: int = Settings.on_disk
    update: str = Packing.dtype
    keep: float = Packing.keep
    max_norm: float = Trust.max_norm
    clip_norm: float = Trust.clip_norm
    max_samples: int = Trust.max_samples
    max_loss: float = Trust.max_loss
    min_loss: float = Trust.min_loss
    samples: tuple[int, ...] = ()

    @classmethod
    def from_table(cls, table: Any) -> Deploy:
        """From the table of a TOML file."""
        if not isinstance(table, Mapping):
            raise UserError(
                f"deploy = {table!r} must be a section: write [deploy] and its keys below."
            )
        known: dict[str, type] = {entry.name: type(entry.default) for entry in fields(cls)}
        values: dict[str, Any] = {}
        for key, value in table.items():
            if key not in known:
                raise UserError(f"Unknown key deploy.{key}; {nearest(key, known)}")
            value = tuple(value) if isinstance(value, list) else value
            whole = isinstance(value, int) and not isinstance(value, bool)
            if not (isinstance(value, known[key]) or (known[key] is float and whole)) or isinstance(
                value, bool
            ):
                raise UserError(f"deploy.{key} = {value!r} must be of type {known[key].__name__}.")
            values[key] = known[key](value)
        return cls(**values)

    def settings(self) -> Settings:
        """The settings of the engine."""
        own = {
            entry.name: getattr(self, entry.name)
            for entry in fields(Settings)
            if hasattr(self, entry.name)
        }
        trust = Trust(**{entry.name: getattr(self, entry.name) for entry in fields(Trust)})
        return Settings(**own, packing=Packing(self.update, self.keep), trust=trust)


class Remote(Population):
    """Clients whose samples are on their own devices: only their number is known here."""

    @classmethod
    def with_clients(cls, clients: int) -> Remote:
        return cls(np.empty(0, np.int64), np.zeros(clients + 1, np.int64))

    def check(self, samples: int) -> None:
        """Nothing to check: the samples are not here."""


def server_app(make: MakeTask) -> ServerApp:
    """A ServerApp for the model and test set of `make(None)`; the run config gives `run` (a TOML
    file) and `out`.
    """

    make = for_client(make)
    insist()

    def main(grid: Grid, context: Context) -> None:
        run, out = Path(str(context.run_config["run"])), Path(str(context.run_config["out"]))
        with lock(out, patience=HANDOVER):  # the previous server may still be shutting down
            serve(grid, make, run, out)

    app = ServerApp()
    app.main()(main)
    return app


def serve(grid: Grid, make: MakeTask, run: Path, out: Path) -> dict[str, Any]:
    """Run the rounds of a run over a grid, resuming from the last checkpoint in `out` if there is
    one.
    """
    config, deploy = load(run)
    folder = Folder(out)
    if folder.finished():
        return folder.summary()
    begun = folder.begun()
    if begun:
        asked, config = config, folder.config()
        _check_same(asked, config, run, folder)
    task = make(None)
    if deploy.clients:
        if config.run.client_accuracy is True:
            raise UserError(
                "run.client_accuracy = true needs the clients' data, which stays on their devices; set it to false."
            )
        task = replace(task, clients=Remote.with_clients(deploy.clients))
    out.mkdir(parents=True, exist_ok=True)
    settings = deploy.settings()
    _check_private(config, settings)
    settings = replace(settings, cohort=config.train.cohort)
    named = ("deploy.start", deploy.start) if deploy.start else ("model.start", config.model.start)
    start, origin = (None, {}) if begun else given(*named)
    engine = Flower(grid, task, settings, folder.log, folder=out, start=start)
    task = engine.task
    here = replace(config.run, device="cpu", engine="loop", precision="float32")
    config, _ = resolve_engine(replace(config, run=here), task)
    torch.set_num_threads(config.run.threads)
    if not begun:
        write(out / "config.toml", text_of(config))
        folder.describe(config, task, " ".join(sys.argv), engine="flower", **origin)
    else:
        folder.check(config, task)
    cohort = settings.asked(config.train.cohort, len(task.clients))
    algorithm = Algorithm(
        tuple(rule.widened(cohort / config.train.cohort) for rule in config.algorithm.rules)
    )
    config = replace(config, algorithm=algorithm, train=replace(config.train, cohort=cohort))
    return execute(record(config, task, engine, folder, resume=begun), engine)


def _check_private(config: RunConfig, settings: Settings) -> None:
    """Refuse what would undo the privacy of a run: noise that clients can draw, and reports dropped
    by their number.
    """
    rule = next((rule for rule in config.algorithm.rules if isinstance(rule, Privacy)), None)
    if rule and not rule.key:
        raise UserError(
            "privacy needs a key in a deployment: its noise follows from the seed, which briefs tell the clients; set "
            "privacy(key='KAIROSFL_NOISE') and, for the server, export KAIROSFL_NOISE=$(openssl rand -hex 32)."
        )
    for name in ("quorum", "over"):
        value = getattr(settings, name)
        if value and rule:
            raise UserError(
                f"deploy.{name} = {value:g} cannot be used with privacy: whether a client's report counts would depend "
                f"on how many others arrive; set {name} = 0."
            )


def _check_same(asked: RunConfig, begun: RunConfig, run: Path, folder: Folder) -> None:
    """Refuse a run file that asks for other numbers than the run in the folder; how it is carried
    out may differ.
    """
    ours = {"algorithm", "seed", "train", "run.detector"}
    wanted = [
        edit for edit in edits(asked, flat(begun)) if {edit.key, edit.key.partition(".")[0]} & ours
    ]
    if wanted:
        raise UserError(
            f"{run} asks for {wanted[0].key} = {wanted[0].now!r}, and the run in {folder.path} has {wanted[0].then!r}; "
            f"change it back, edit {folder.path / 'config.toml'}, or give another out."
        )


def load(path: Path, changes: Sequence[str] = ()) -> tuple[RunConfig, Deploy]:
    """Read the configuration in a TOML file, and its [deploy] section."""
    nested = change(read(path), changes)
    deploy = Deploy.from_table(nested.pop("deploy", {}))
    if deploy.clients:
        nested["data"] = {**nested.get("data", {}), "clients": deploy.clients}
    config = resolve(nested)
    if any(isinstance(rule, Attack) for rule in config.algorithm.rules):
        raise UserError(
            f"algorithm = {str(config.algorithm)!r}: attack is for simulations only; leave it out."
        )
    return config, deploy


def model_of(folder: Path) -> Tensor:
    """The model in the newest checkpoint of a run folder: to continue with another algorithm."""
    return model(folder)[0]


def new(path: Path) -> list[Path]:
    """Create a directory with a Flower app, an example task, a configuration and the commands to
    run it.
    """
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise UserError(f"{path} already exists and is not an empty directory; choose a new one.")
    name = re.sub(r"[^a-z0-9]+", "-", path.absolute().name.lower()).strip("-") or "federation"
    return _write_all(path, files(name, str(path.absolute())))


def certs(
    path: Path, *, nodes: int, hosts: Sequence[str] = ("localhost", "127.0.0.1")
) -> list[Path]:
    """Create TLS certificates for a server at these hosts, and node keys; client i is bound to the
    key of node i.
    """
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise UserError(
            f"{path} already exists and is not an empty directory; keys are never overwritten, choose a new one."
        )
    if nodes < 1 or not hosts:
        raise UserError(
            f"--nodes {nodes} must be 1 or more, and --host must name the server at least once."
        )
    for host in hosts:
        check_host(host)
    path.mkdir(parents=True, exist_ok=True)
    authority(path, hosts)
    save(path / "roster.json", {i: fingerprint(node_key(path / f"node-{i}")) for i in range(nodes)})
    return sorted(path.iterdir())


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
    _write_all(path, rehearsal_files(str((path.parent / "task.toml").absolute())))
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
            last_news = time.monotonic() if done > notified else last_news
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


def _write_all(path: Path, contents: Mapping[str, str]) -> list[Path]:
    for name, content in contents.items():
        write(path / name, content)
    return [path / name for name in contents]
