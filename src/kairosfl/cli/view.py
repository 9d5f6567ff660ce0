"""Commands that show things: compare, report, watch, list, data show."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from kairosfl.cli import complete
from kairosfl.cli.common import Json, Set, friendly, print_pairs, print_table, warn

Target = Annotated[
    float | None,
    typer.Option("--target", help="Accuracy, or other main metric, up to which rounds and bytes are counted."),
]
Baseline = Annotated[
    str | None,
    typer.Option(
        "--baseline",
        help="Algorithm, or name or letter of a group, that the others are compared with; fedavg by default.",
    ),
]


class Listed(StrEnum):
    """What `kairosfl list` can list."""

    rules = "rules"
    data = "data"
    models = "models"
    partitions = "partitions"
    detectors = "detectors"
    presets = "presets"


def compare(
    folders: Annotated[list[Path], typer.Argument(help="Run folders, or folders that contain run folders.")],
    picture: Annotated[Path | None, typer.Option("--picture", help="Also plot the curves to this PNG file.")] = None,
    target: Target = None,
    as_json: Json = False,
) -> None:
    """Compare runs in a table: mean and standard deviation over seeds."""
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
            typer.echo(f"picture: {draw_comparison(folders, picture)}", err=True)


def report(
    folders: Annotated[list[Path], typer.Argument(help="Run folders, or folders that contain run folders.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="HTML file to write.")] = Path("report.html"),
    figures: Annotated[
        Path | None, typer.Option("--figures", help="Also export every figure to this directory.")
    ] = None,
    kind: Annotated[str, typer.Option("--kind", help="Format of --figures: svg, pdf or png.")] = "svg",
    tables: Annotated[
        Path | None, typer.Option("--tables", help="Also export every table to this directory, as CSV and LaTeX.")
    ] = None,
    target: Target = None,
    baseline: Baseline = None,
) -> None:
    """Write a self-contained HTML report about runs."""
    with friendly():
        from kairosfl.report.export import checked_kind, export_figures, export_tables
        from kairosfl.report.page import write_report
        from kairosfl.report.pictures import counted

        checked_kind(kind)
        damaged: list[str] = []
        written = write_report(folders, out, target=target, baseline=baseline, say=damaged.append)
        typer.echo(f"report: {written}")
        warn(damaged)
        if figures:
            typer.echo(f"{counted(len(export_figures(folders, figures, kind)), 'picture')} in {figures}")
        if tables:
            typer.echo(f"{counted(len(export_tables(folders, tables, target, baseline)), 'table')} in {tables}")


def watch(
    folder: Annotated[Path, typer.Argument(help="Run folder, or a folder that contains run folders.")],
    port: Annotated[int, typer.Option("--port", help="Local port.")] = 8765,
    target: Target = None,
    baseline: Baseline = None,
) -> None:
    """Serve the report live while a run or sweep is in progress."""
    with friendly():
        from kairosfl.report.watch import watch as serve

        serve(folder, port, target=target, baseline=baseline, say=lambda sentence: warn([sentence]))


def list_(
    what: Annotated[
        Listed | None, typer.Argument(metavar="[WHAT]", help=f"{', '.join(Listed)}; if omitted, how many of each.")
    ] = None,
    as_json: Json = False,
) -> None:
    """List the available rules, data sets, models, partitions, detectors or presets."""
    from kairosfl.listing import listing

    with friendly():
        if what is not None:
            print_pairs(listing(what.value), as_json)
            return
        counts = {each.value: len(listing(each.value)) for each in Listed}
        if as_json:
            typer.echo(json.dumps(counts, indent=1))
        else:
            print_pairs([(name, f"{count:3}  kairosfl list {name}") for name, count in counts.items()], as_json=False)


def show(
    name: Annotated[str, typer.Argument(help="Name of the data set.", autocompletion=complete.dataset)] = "digits",
    partition: Annotated[str, typer.Option(help="How it is partitioned among clients.")] = "dirichlet",
    clients: Annotated[int, typer.Option(help="Number of clients; with the natural partition, 0 means all.")] = 40,
    alpha: Annotated[float, typer.Option(help="Concentration of the Dirichlet distribution.")] = 0.3,
    changes: Set = [],  # noqa: B006
    seed: Annotated[int, typer.Option(help="Seed of the partition.")] = 0,
    picture: Annotated[
        Path | None, typer.Option("--picture", help="Plot the classes of each client to this PNG file.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Print the sizes and heterogeneity of a partition, and plot it."""
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
            typer.echo(f"picture: {picture}", err=True)
