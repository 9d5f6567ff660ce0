"""`kairosfl periods`: has your problem critical periods, and which detector sees them?"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kairosfl.cli import complete
from kairosfl.cli.common import Device, Engine, Json, Out, Quiet, Set, asked, command, friendly
from kairosfl.cli.screen import print_rows
from kairosfl.errors import UserError

if TYPE_CHECKING:
    from kairosfl.runs.score import Score


def periods(
    file: Annotated[
        Path,
        typer.Argument(
            help="TOML configuration, task file (.py) or preset.", autocompletion=complete.file
        ),
    ],
    deficit: Annotated[
        list[str],
        typer.Option(
            "--deficit",
            help="cohort, clients, epochs or labels; may be repeated. Default: the first two.",
        ),
    ] = [],  # noqa: B006
    windows: Annotated[int, typer.Option("--windows", help="Equal parts of the rounds.")] = 6,
    amount: Annotated[
        float, typer.Option("--amount", help="What a deficit leaves, as a fraction.")
    ] = 0.2,
    seeds: Annotated[int, typer.Option("--seeds", help="Runs of each kind.")] = 4,
    detector: Annotated[
        list[str], typer.Option("--detector", help="Detectors to judge; may be repeated.")
    ] = [],  # noqa: B006
    changes: Set = [],  # noqa: B006
    out: Out = None,
    engine: Engine = None,
    device: Device = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Train with deficits in windows over training: when does harm last, and which detector sees
    it?
    """
    from kairosfl.cli.runs import found as named
    from kairosfl.runs.config import change, checked, read

    silent = quiet or as_json
    with friendly():
        source, _ = named(file, None, quiet=silent)
        if source is None:
            raise UserError("Give a TOML configuration or the name of a preset.")
        tables = change(read(source), [*changes, *asked(engine=engine, device=device)])
        if "sweep" not in tables:  # refused in its own words
            checked(tables)
    from kairosfl.progress import SweepProgress
    from kairosfl.report.periods import draw, lost
    from kairosfl.runs.files import write_json
    from kairosfl.runs.periods import DEFAULT, DETECTORS, findings, members
    from kairosfl.runs.score import scores
    from kairosfl.runs.sweep import sweep

    with friendly(lambda: f"Resume with the same command: {command()}"):
        # --- the runs ---
        folder = Path("runs") / f"{source.stem}-periods" if out is None else out
        runs = members(
            tables,
            number=windows,
            deficits=deficit if deficit else DEFAULT,
            amount=amount,
            seeds=seeds,
            detectors=detector if detector else DETECTORS,
        )
        rounds = {run.name: run.config.train.rounds for run in runs}
        with SweepProgress(rounds, quiet=silent) as show:
            summaries = sweep(runs, folder, command=command(), watch=show.begin, say=show.say)

        # --- what they say ---
        study = findings(folder, summaries, runs, windows, amount)
        write_json(folder / "periods.json", study)
        picture = draw(study, folder / "periods.svg")
    if as_json:
        typer.echo(json.dumps({"folder": str(folder)} | study))
        return
    (score,) = scores({"metrics": [study["metric"]]})
    heads = [f"{first}–{last}" for first, last in study["windows"]]
    rows = []
    for name, cells in study["harm"].items():
        texts = [_lost(score, **cell) for cell in cells]
        rows.append({"rounds": f"{lost(score)}: {name}"} | dict(zip(heads, texts, strict=True)))
    for name, shares in study["marked"].items():
        texts = [f"{100 * share:.0f} %" for share in shares]
        rows.append({"rounds": f"marked by {name}"} | dict(zip(heads, texts, strict=True)))
    value = score.measured(study["none"]["mean"])
    typer.echo(f"without a deficit: {score.words} {value} in the final 10 % of rounds")
    deficits = [f"{name} ({remaining})" for name, remaining in study["left"].items()]
    typer.echo(f"deficits: {', '.join(deficits)}")
    print_rows(rows, turn=True)
    for line in study["verdict"]:
        typer.echo(line)
    typer.echo(f"picture: {picture}")


def _lost(score: Score, mean: float, error: float | None) -> str:
    """What a window cost, with its standard error if there is one."""
    digits = ".1f" if score.percent else ".2g"
    text = f"{score.scale * mean:+{digits}}"
    if error is not None:
        text += f" ± {score.scale * error:{digits}}"
    return text
