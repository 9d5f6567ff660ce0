"""The command that measures how fast a task trains: bench."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kairosfl.cli import complete
from kairosfl.cli.common import Device, Json, Quiet, Set, Verbose, asked, friendly
from kairosfl.cli.runs import found
from kairosfl.cli.screen import print_rows
from kairosfl.wording import counted

if TYPE_CHECKING:
    from kairosfl.bench import Measured


def bench(
    file: Annotated[
        Path,
        typer.Argument(
            help="TOML configuration, task file (.py), or the name of a preset.",
            autocompletion=complete.file,
        ),
    ],
    seconds: Annotated[
        float, typer.Option("--seconds", min=0.0, help="Of each measurement, at least.")
    ] = 3.0,
    clients: Annotated[
        int | None,
        typer.Option(
            "--clients", min=1, help="Clients that train together; by default train.cohort."
        ),
    ] = None,
    precision: Annotated[
        list[str],
        typer.Option(
            "--precision",
            help="float32, tf32 or bfloat16; repeatable; by default all that the device has.",
        ),
    ] = [],  # noqa: B006
    changes: Set = [],  # noqa: B006
    device: Device = None,
    quiet: Quiet = False,
    verbose: Verbose = False,
    as_json: Json = False,
) -> None:
    """Measure how fast a task trains here: engine loop, engine batched, and one model on one large
    batch.
    """
    silent = quiet or as_json
    with friendly(verbose=verbose):
        path, _ = found(file, None, quiet=silent)
        from kairosfl.runs.config import read, resolve

        assert path is not None
        config = resolve(read(path), [*changes, *asked(engine="loop", device=device)])
        import torch

        from kairosfl.bench import bench as measure
        from kairosfl.engines.precision import Precision
        from kairosfl.runs.prepare import build_task, ready

        task = build_task(config)
        run = ready(config, task).about.run
        torch.set_num_threads(run.threads)
        where = torch.device(run.device)
        for name in precision:
            Precision.of(name, where)
        size = f"{task.layout.size:,} parameters"
        if not silent:
            typer.echo(f"{file}: {size}, on {run.device}", err=True)

        def show(line: Measured) -> None:
            if not silent:
                typer.echo(f"measured: {line.engine}, {line.precision}", err=True)

        measured = measure(
            task,
            config.train,
            where,
            clients=clients,
            seconds=seconds,
            chosen=precision,
            seed=config.seed,
            show=show,
        )
        if as_json:
            typer.echo(json.dumps(measured.numbers()))
            return
        print_rows(measured.rows(), first_out=("how", "memory", "times loop"))
        clients_words = counted(measured.clients, "client")
        typer.echo(f"{clients_words}, batches of {measured.batch}, {size}, {measured.device}")
