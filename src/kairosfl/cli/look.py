"""Commands that look: compare, report, watch, list, data show."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from kairosfl.cli.common import Json, Set, friendly, print_pairs, print_table, warn

Target = Annotated[float | None, typer.Option("--target", help="Accuracy to count rounds and bytes to.")]


class Listed(StrEnum):
    """What `kairosfl list` knows."""

    rules = "rules"
    data = "data"
    models = "models"
    partitions = "partitions"
    detectors = "detectors"
    presets = "presets"


def compare(
    folders: Annotated[list[Path], typer.Argument(help="Run folders, or folders of run folders.")],
    picture: Annotated[Path | None, typer.Option("--picture", help="Also draw the curves into this PNG.")] = None,
    target: Target = None,
    as_json: Json = False,
) -> None:
    """Compare runs in a table: mean and deviation over seeds."""
    from kairosfl.report import tables
    from kairosfl.report.static import checked_png, draw_comparison
    from kairosfl.runs.files import plain

    with friendly():
        if picture:
            checked_png(picture)
        if as_json:
            found = tables.compare(folders, target)
            typer.echo(json.dumps(plain(found.numbers()), indent=1))
            warn(found.damaged)
        else:
            print_table(folders, target)
        if picture:
            typer.echo(f"drawn in {draw_comparison(folders, picture)}", err=True)


def report(
    folders: Annotated[list[Path], typer.Argument(help="Run folders, or folders of run folders.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The page to write.")] = Path("report.html"),
    figures: Annotated[Path | None, typer.Option("--figures", help="Also every picture, into this folder.")] = None,
    kind: Annotated[str, typer.Option("--kind", help="svg, pdf or png, for --figures.")] = "svg",
    tables: Annotated[Path | None, typer.Option("--tables", help="Also every table as CSV and LaTeX.")] = None,
    target: Target = None,
) -> None:
    """Write one self-contained HTML page that explains runs."""
    with friendly():
        from kairosfl.report.export import checked_kind, export_figures, export_tables
        from kairosfl.report.page import write_report
        from kairosfl.report.pictures import counted

        checked_kind(kind)
        damaged: list[str] = []
        typer.echo(f"report in {write_report(folders, out, target=target, say=damaged.append)}")
        warn(damaged)
        if figures:
            typer.echo(f"{counted(len(export_figures(folders, figures, kind)), 'picture')} in {figures}")
        if tables:
            typer.echo(f"{counted(len(export_tables(folders, tables, target)), 'table')} in {tables}")


def watch(
    folder: Annotated[Path, typer.Argument(help="Run folder, or a folder of run folders.")],
    port: Annotated[int, typer.Option("--port", help="Port on this machine.")] = 8765,
    target: Target = None,
) -> None:
    """Serve the report live while a run or sweep goes on."""
    with friendly():
        from kairosfl.report.watch import watch as serve

        serve(folder, port, target=target, say=lambda sentence: warn([sentence]))


def list_(what: Annotated[Listed, typer.Argument(help="What to list.")], as_json: Json = False) -> None:
    """List what there is: rules, data, models, partitions, detectors, presets."""
    from kairosfl.listing import listing

    with friendly():
        print_pairs(listing(what.value), as_json)


def show(
    name: Annotated[str, typer.Argument(help="Name of the data set.")] = "digits",
    partition: Annotated[str, typer.Option(help="How it is dealt to the clients.")] = "dirichlet",
    clients: Annotated[int, typer.Option(help="Number of clients; 0 with natural: all.")] = 40,
    alpha: Annotated[float, typer.Option(help="Of the Dirichlet distribution.")] = 0.3,
    changes: Set = [],  # noqa: B006
    seed: Annotated[int, typer.Option(help="Of the partition.")] = 0,
    picture: Annotated[Path | None, typer.Option("--picture", help="Draw clients by classes into this PNG.")] = None,
    as_json: Json = False,
) -> None:
    """Print the sizes and the heterogeneity of a partition, and draw it."""
    with friendly():
        from kairosfl.runs.config import resolve
        from kairosfl.runs.experiment import build_data
        from kairosfl.tasks.heterogeneity import describe
        from kairosfl.tasks.picture import draw_partition

        section = {"name": name, "partition": partition, "clients": clients, "alpha": alpha}
        config = resolve({"seed": seed, "data": section, "train": {"cohort": 1}}, changes)
        dataset, population = build_data(config)
        facts = describe(dataset, population)
        if as_json:
            typer.echo(json.dumps(facts, indent=1))
        else:
            width = max(map(len, facts))
            for key, value in facts.items():
                shown = f"{value:.4g}" if isinstance(value, float) else value
                typer.echo(f"{key.replace('_', ' '):<{width}}  {shown}")
        if picture:
            draw_partition(picture, dataset, population)
            typer.echo(f"drawn in {picture}", err=True)
