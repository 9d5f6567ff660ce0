"""The server of a deployed run: its rounds over a Flower grid, recorded in a run folder."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import Context
from flwr.serverapp import Grid, ServerApp
from torch import Tensor

from kairosfl.core.rule import Algorithm
from kairosfl.core.run import Setup
from kairosfl.deploy.settings import load
from kairosfl.engines.flower.server import Flower, Settings, new_mark
from kairosfl.engines.flower.trouble import insist
from kairosfl.errors import UserError
from kairosfl.runs.checkpoint import model
from kairosfl.runs.config import RunConfig, text_of
from kairosfl.runs.experiment import execute, given, record
from kairosfl.runs.files import read_json, write
from kairosfl.runs.folder import Folder
from kairosfl.runs.lock import lock
from kairosfl.runs.prepare import prepare
from kairosfl.runs.sensible import edits, flat
from kairosfl.tasks.function import MakeTask, for_client
from kairosfl.tasks.population import Population

HANDOVER = 60.0  # seconds that a server being shut down has to release its run folder


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
    check_private(config, settings)
    settings = replace(settings, cohort=config.train.cohort)
    named = ("deploy.start", deploy.start) if deploy.start else ("model.start", config.model.start)
    start, origin = (None, {}) if begun else given(*named)
    mark = read_json(out / "run.json").get("mark", "") if begun else new_mark()
    engine = Flower(grid, task, settings, folder.log, folder=out, start=start, mark=mark)
    task = engine.task
    here = replace(config.run, device="cpu", engine="loop", precision="float32")
    prepared = prepare(replace(config, run=here), task, engine)
    about = prepared.about
    torch.set_num_threads(about.run.threads)
    if not begun:
        write(out / "config.toml", text_of(about.settings))
        folder.describe(about, task, " ".join(sys.argv), engine="flower", mark=mark, **origin)
    else:
        folder.check(about, task)
    setup = replace(_widened(prepared.setup, settings), devices=True)
    return execute(record(replace(prepared, setup=setup), folder, resume=begun), engine)


def _widened(setup: Setup, settings: Settings) -> Setup:
    """The setup with the larger cohort that is asked, of which some may not answer in time."""
    recipe = setup.recipe
    cohort = settings.asked(recipe.cohort, setup.clients)
    rules = [rule.widened(cohort / recipe.cohort) for rule in setup.algorithm.rules]
    algorithm = Algorithm(tuple(rules))
    return replace(setup, algorithm=algorithm, recipe=replace(recipe, cohort=cohort))


def check_private(config: RunConfig, settings: Settings) -> None:
    """Refuse what would undo the privacy of a run: reports that are dropped by their number."""
    private = config.algorithm.names("private")
    for name in ("quorum", "over"):
        value = getattr(settings, name)
        if value and private:
            raise UserError(
                f"deploy.{name} = {value:g} cannot be used with {private[0]}: whether a "
                "client's report counts would depend "
                f"on how many others arrive; set {name} = 0."
            )


def _check_same(asked: RunConfig, begun: RunConfig, run: Path, folder: Folder) -> None:
    """Refuse a run file that asks for other numbers than the run in the folder; how it is carried
    out may differ.
    """
    ours = {"algorithm", "seed", "train", "run.detector"}
    wanted = [
        edit
        for edit in edits(flat(asked), flat(begun))
        if {edit.key, edit.key.partition(".")[0]} & ours
    ]
    if wanted:
        raise UserError(
            f"{run} asks for {wanted[0].key} = {wanted[0].now!r}, and the run in {folder.path} has {wanted[0].then!r}; "
            f"change it back, edit {folder.path / 'config.toml'}, or give another out."
        )


def model_of(folder: Path) -> Tensor:
    """The model in the newest checkpoint of a run folder: to continue with another algorithm."""
    return model(folder)[0]
