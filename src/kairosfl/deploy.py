"""Deployment over Flower: the server's side of a run, a new app, certificates, and rehearsals on this machine."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kairosfl.errors import UserError, nearest
from kairosfl.runs.checkpoint import model
from kairosfl.runs.config import RunConfig, change, dump, read, resolve, tables
from kairosfl.runs.engines import resolve_engine
from kairosfl.runs.experiment import Notify, build_data, conduct, given, record
from kairosfl.runs.files import read_lines, write
from kairosfl.runs.folder import Folder
from kairosfl.runs.lock import lock
from kairosfl.tasks.population import Population
from kairosfl.tasks.task import Task

try:
    from flwr.app import Context
    from flwr.serverapp import Grid, ServerApp

    from kairosfl.engines.flower.certs import authority, node_key
    from kairosfl.engines.flower.checks import Trust
    from kairosfl.engines.flower.roster import fingerprint, save
    from kairosfl.engines.flower.scaffold import files, rehearsal_files
    from kairosfl.engines.flower.server import Flower, Settings
    from kairosfl.engines.flower.stage import Stage
    from kairosfl.engines.flower.wire import Packing
except ImportError:
    raise UserError("Deployment needs Flower; install it with: pip install 'kairosfl[flower]'.") from None

MakeTask = Callable[[int | None], Task]
STALLED = 120.0  # seconds beyond deadline and wait without a round, after which something is wrong
HANDOVER = 60.0  # seconds in which a server that was told to end must have let go of its folder
ATTEMPTS = 3  # a rehearsal whose server ends this often without having done a round is given up


@dataclass(frozen=True, kw_only=True)
class Deploy:
    """[deploy]: how rounds are held, and how far clients are trusted."""

    clients: int = 0  # client ids are 0 to clients − 1; 0: as many as the task says
    start: str = ""  # a run folder whose model is the first one here
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

    @classmethod
    def of(cls, table: Mapping[str, Any]) -> Deploy:
        """From a table of a TOML file."""
        known: dict[str, type] = {entry.name: type(entry.default) for entry in fields(cls)}
        values: dict[str, Any] = {}
        for key, value in table.items():
            if key not in known:
                raise UserError(f"Unknown key deploy.{key}; {nearest(key, known)}")
            whole = isinstance(value, int) and not isinstance(value, bool)
            if not (isinstance(value, known[key]) or (known[key] is float and whole)) or isinstance(value, bool):
                raise UserError(f"deploy.{key} = {value!r} must be of type {known[key].__name__}.")
            values[key] = known[key](value)
        return cls(**values)

    def settings(self) -> Settings:
        """As the engine wants them."""
        own = {entry.name: getattr(self, entry.name) for entry in fields(Settings) if hasattr(self, entry.name)}
        trust = Trust(**{entry.name: getattr(self, entry.name) for entry in fields(Trust)})
        return Settings(**own, packing=Packing(self.update, self.keep), trust=trust)


class Remote(Population):
    """Clients whose samples are elsewhere: so many of them is all that is known here."""

    @classmethod
    def of(cls, clients: int) -> Remote:
        return cls(np.empty(0, np.int64), np.zeros(clients + 1, np.int64))

    def check(self, samples: int) -> None:
        """Nothing to refuse."""


def server_app(make: MakeTask) -> ServerApp:
    """A ServerApp for the model and the test set of `make(None)`; the run config names `run` (TOML) and `out`."""

    def main(grid: Grid, context: Context) -> None:
        run, out = Path(str(context.run_config["run"])), Path(str(context.run_config["out"]))
        with lock(out, patience=HANDOVER):  # the server before may not have ended yet
            serve(grid, make, run, out)

    app = ServerApp()
    app.main()(main)
    return app


def serve(grid: Grid, make: MakeTask, run: Path, out: Path) -> dict[str, Any]:
    """Hold the rounds of a run over a grid, from the last checkpoint in the folder `out` if there is one."""
    config, deploy = load(run)
    folder = Folder(out)
    if folder.finished():
        return folder.summary()
    begun = folder.begun()
    if begun:
        config = folder.config()
    task = make(None)
    if deploy.clients:
        if config.run.client_accuracy:
            raise UserError(
                "run.client_accuracy = true needs the clients' data, which stays with them; set it to false."
            )
        task = replace(task, clients=Remote.of(deploy.clients))
    out.mkdir(parents=True, exist_ok=True)
    settings = deploy.settings()
    named = ("deploy.start", deploy.start) if deploy.start else ("model.start", config.model.start)
    start, origin = (None, {}) if begun else given(*named)
    engine = Flower(grid, task, settings, folder.log, folder=out, start=start)
    task = engine.task
    here = replace(config.run, device="cpu", engine="loop", precision="float32")
    config, _ = resolve_engine(replace(config, run=here), task)
    torch.set_num_threads(config.run.threads)
    if not begun:
        write(out / "config.toml", dump(tables(config)))
        folder.describe(config, task, " ".join(sys.argv), engine="flower", **origin)
    else:
        folder.check(config, task)
    cohort = settings.asked(config.train.cohort, len(task.clients))
    config = replace(config, train=replace(config.train, cohort=cohort))
    return conduct(record(config, task, engine, folder, resume=begun), engine)


def load(path: Path, changes: Sequence[str] = ()) -> tuple[RunConfig, Deploy]:
    """The configuration in a TOML file, and its [deploy] section."""
    nested = change(read(path), changes)
    deploy = Deploy.of(nested.pop("deploy", {}))
    if deploy.clients:
        nested["data"] = {**nested.get("data", {}), "clients": deploy.clients}
    return resolve(nested), deploy


def model_of(folder: Path) -> Tensor:
    """The model in the newest checkpoint of a run folder: for going on with another algorithm."""
    return model(folder)[0]


def new(path: Path) -> list[Path]:
    """Write a Flower app with an example task, a configuration and the commands into a new folder."""
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise UserError(f"{path} is there already, and no empty folder; name a new one.")
    name = re.sub(r"[^a-z0-9]+", "-", path.absolute().name.lower()).strip("-") or "federation"
    return _write_all(path, files(name, str(path.absolute())))


def certs(path: Path, *, nodes: int, hosts: Sequence[str] = ("localhost", "127.0.0.1")) -> list[Path]:
    """Make TLS certificates for a server at these hosts and keys for nodes, and bind client i to the key of node i."""
    if path.exists() and (not path.is_dir() or any(path.iterdir())):
        raise UserError(f"{path} is there already, and no empty folder; keys are never overwritten, name a new one.")
    if nodes < 1 or not hosts:
        raise UserError(f"--nodes {nodes} must be 1 or more, and the server needs a host name or address.")
    path.mkdir(parents=True, exist_ok=True)
    authority(path, hosts)
    save(path / "roster.json", {i: fingerprint(node_key(path / f"node-{i}")) for i in range(nodes)})
    return sorted(path.iterdir())


def rehearse(
    file: Path, out: Path, *, nodes: int = 4, changes: Sequence[str] = (), notify: Notify | None = None
) -> dict[str, Any]:
    """Run a configuration over real Flower processes on this machine, with TLS and authenticated nodes.

    The run folder is `out/run`; `notify` is told of every round. A server that ends early is started again and goes
    on from its last checkpoint.
    """
    config, _ = load(file, changes)
    if nodes < 1:
        raise UserError(f"--nodes {nodes} must be 1 or more.")
    ids = np.array_split(np.arange(len(build_data(config)[1])), nodes)
    served = [f"{part[0]}-{part[-1]}" for part in ids if len(part)]
    run = out / "run.toml"
    write(run, dump(change(read(file), changes)))
    with Stage(out, served) as stage:
        return perform(stage, rehearsal_app(out / "app", config), run, out / "run", notify)


def rehearsal_app(path: Path, config: RunConfig) -> Path:
    """A Flower app whose task is a configuration's data and model; it knows nothing else of the configuration."""
    nested = {key: value for key, value in tables(config).items() if key in ("seed", "data", "model")}
    write(path.parent / "task.toml", dump(nested | {"train": {"cohort": 1}}))
    _write_all(path, rehearsal_files(str((path.parent / "task.toml").absolute())))
    return path


def perform(stage: Stage, app: Path, run: Path, out: Path, notify: Notify | None = None) -> dict[str, Any]:
    """Hold one run on a stage to its end; the nodes stay up for the next one."""
    folder, told, failures = Folder(out), 0, 0
    settings = load(run)[1].settings()
    patience = settings.deadline + settings.wait + STALLED
    out.mkdir(parents=True, exist_ok=True)
    if not (out / "roster.json").exists():
        save(out / "roster.json", stage.roster())
    while not folder.finished():
        stage.mend()
        process, before, heard = stage.submit(app, run, out), told, time.monotonic()
        while process.poll() is None and not folder.finished():
            news = _tell(out, told, notify)
            heard = time.monotonic() if news > told else heard
            told = news
            if time.monotonic() > heard + patience:
                folder.log("stalled: Flower's processes on the server are started again")
                stage.kill("run")
                stage.kill("superlink")
            time.sleep(0.2)
        told = _tell(out, told, notify)
        failures = 0 if told > before else failures + 1
        if not folder.finished() and failures == ATTEMPTS:
            raise UserError(f"The server ended {ATTEMPTS} times without a round; see {stage.log('run')}.")
    process.wait()
    return folder.summary()


def _tell(out: Path, told: int, notify: Notify | None) -> int:
    """Pass on the rounds that were written down since; returns the last one's number."""
    for row in read_lines(out / "metrics.jsonl"):
        if row["round"] > told:
            told = row["round"]
            if notify:
                notify(row)
    return told


def _write_all(path: Path, contents: Mapping[str, str]) -> list[Path]:
    for name, content in contents.items():
        write(path / name, content)
    return [path / name for name in contents]
