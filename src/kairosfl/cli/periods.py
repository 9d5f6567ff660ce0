"""`kairosfl periods`: are there critical learning periods in your problem, and which detector sees them?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from kairosfl.cli import complete
from kairosfl.cli.common import Device, Engine, Json, Out, Quiet, Set, asked, command, friendly
from kairosfl.cli.screen import print_rows
from kairosfl.errors import UserError


def periods(
    file: Annotated[
        Path, typer.Argument(help="TOML configuration, or the name of a preset.", autocompletion=complete.file)
    ],
    deficit: Annotated[
        list[str], typer.Option("--deficit", help="cohort, clients or epochs; may be repeated. Default: the first two.")
    ] = [],  # noqa: B006
    windows: Annotated[int, typer.Option("--windows", help="Equal parts of the rounds.")] = 6,
    amount: Annotated[float, typer.Option("--amount", help="What a deficit leaves, as a fraction.")] = 0.2,
    seeds: Annotated[int, typer.Option("--seeds", help="Runs of each kind.")] = 3,
    detector: Annotated[list[str], typer.Option("--detector", help="Detectors to judge; may be repeated.")] = [],  # noqa: B006
    changes: Set = [],  # noqa: B006
    out: Out = None,
    engine: Engine = None,
    device: Device = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Train with deficits in windows over training: when does harm last, and which detector sees it?"""
    from kairosfl.cli.runs import found as named
    from kairosfl.progress import SweepProgress
    from kairosfl.report.periods import draw
    from kairosfl.runs.config import change, read
    from kairosfl.runs.files import write_json
    from kairosfl.runs.periods import DEFAULT, DETECTORS, findings, members
    from kairosfl.runs.sweep import sweep

    with friendly(lambda: f"Resume with the same command: {command()}"):
        source, _ = named(file, None, quiet=quiet or as_json)
        if source is None:
            raise UserError("Give a TOML configuration or the name of a preset.")
        folder = out or Path("runs") / f"{source.stem}-periods"
        tables = change(read(source), [*changes, *asked(engine=engine, device=device)])
        made = members(
            tables,
            number=windows,
            deficits=deficit or DEFAULT,
            amount=amount,
            seeds=seeds,
            detectors=detector or DETECTORS,
        )
        with SweepProgress({each.name: each.config.train.rounds for each in made}, quiet=quiet or as_json) as show:
            summaries = sweep(made, folder, command=command(), watch=show.begin, say=show.say)
        found = findings(folder, summaries, made, windows)
        write_json(folder / "periods.json", found)
        picture = draw(found, folder / "periods.svg")
    if as_json:
        typer.echo(json.dumps({"folder": str(folder)} | found))
        return
    heads = [f"{first}–{last}" for first, last in found["windows"]]
    rows = []
    for name, cells in found["harm"].items():
        texts = [
            f"{100 * c['mean']:+.1f}" + (f" ± {100 * c['error']:.1f}" if c["error"] is not None else "") for c in cells
        ]
        rows.append({"rounds": f"points lost: {name}"} | dict(zip(heads, texts, strict=True)))
    for name, shares in found["marked"].items():
        texts = [f"{100 * share:.0f} %" for share in shares]
        rows.append({"rounds": f"marked by {name}"} | dict(zip(heads, texts, strict=True)))
    typer.echo(f"without a deficit: {100 * found['none']['mean']:.2f} % in the final 10 % of rounds")
    print_rows(rows, turn=True)
    for line in found["verdict"]:
        typer.echo(line)
    typer.echo(f"picture: {picture}")
