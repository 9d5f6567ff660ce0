"""The command that searches: tune."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from kairosfl.cli import complete
from kairosfl.cli.common import Device, Engine, Json, Quiet, Set, asked, command, friendly
from kairosfl.cli.runs import found
from kairosfl.cli.screen import print_rows


def tune(
    file: Annotated[
        Path,
        typer.Argument(
            help="TOML configuration, with a [tune] section if the default ranges are not right, "
            "or a preset.",
            autocompletion=complete.file,
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", help="Folder of the search; by default runs/NAME-tune."),
    ] = None,
    trials: Annotated[
        int | None, typer.Option("--trials", help="Budget: number of trials; 30 by default.")
    ] = None,
    rounds: Annotated[
        int | None, typer.Option("--rounds", help="Budget: rounds of all trials together.")
    ] = None,
    megabytes: Annotated[
        float | None,
        typer.Option(
            "--bytes", metavar="MB", help="Budget: megabytes sent by all trials together."
        ),
    ] = None,
    minutes: Annotated[float | None, typer.Option("--minutes", help="Budget: minutes.")] = None,
    parallel: Annotated[
        int,
        typer.Option("--parallel", min=1, max=256, help="Trials at a time, on the batched engine."),
    ] = 16,
    changes: Set = [],  # noqa: B006
    engine: Engine = None,
    device: Device = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Search for a good learning rate, schedule, number of epochs and algorithm; run it again to
    continue.

    Trials are judged on validation samples, never on the test set. The best one is written to
    best.toml.
    """
    silent = quiet or as_json
    with friendly():
        path, preset = found(file, None, quiet=silent)
        assert path is not None
        name = preset if preset else path.stem
        folder = Path("runs") / f"{name}-tune" if out is None else out
    with friendly(lambda: f"Continue with the same command: {command()}"):
        from kairosfl.runs.config import change, checked, read

        tables = change(read(path), [*changes, *asked(engine=engine, device=device)])
        others = dict(tables)
        others.pop("tune", None)
        checked(others)
        from kairosfl.progress import TuneProgress
        from kairosfl.tune.budget import Budget
        from kairosfl.tune.page import write_page
        from kairosfl.tune.proposals import library
        from kairosfl.tune.result import result
        from kairosfl.tune.search import Search

        budget = Budget.of(trials=trials, rounds=rounds, megabytes=megabytes, minutes=minutes)
        library()
        with TuneProgress(quiet=silent) as show:
            search = Search(tables, folder, budget, show, parallel=parallel, command=command())
            search.run()
        outcome = result(search)
        outcome.write()
        page = write_page(outcome)
        if as_json:
            typer.echo(json.dumps(outcome.numbers()))
            return
        rows = outcome.mattered()
        if rows:
            print_rows(rows)
        else:
            typer.echo("Too few trials ended to say how much each parameter mattered.")
        for line in outcome.sentences():
            typer.echo(line)
        typer.echo(f"report: {page}\nrun it: kairosfl run {folder / 'best.toml'}")
