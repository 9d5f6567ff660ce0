"""Commands that show things: compare, figure, report, watch, list, data show."""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from kairosfl import names as names_of
from kairosfl import presets
from kairosfl.cli import complete
from kairosfl.cli.common import Json, Set, friendly, warn
from kairosfl.cli.screen import print_comparison, print_pairs
from kairosfl.errors import UserError, nearest
from kairosfl.wording import counted

if TYPE_CHECKING:
    from kairosfl.report.read import Group

Folders = Annotated[
    list[Path], typer.Argument(help="Run folders, or folders that contain run folders.")
]
Name = Annotated[
    list[str],
    typer.Option(
        "--name", metavar="LABEL=TEXT", help="What to call the runs with this label; repeatable."
    ),
]
Target = Annotated[
    float | None,
    typer.Option(
        "--target", help="Accuracy, or other main metric, up to which rounds and bytes are counted."
    ),
]
Baseline = Annotated[
    str | None,
    typer.Option(
        "--baseline",
        help="Algorithm, or name or letter of a group, that the others are compared with; fedavg "
        "by default.",
    ),
]


class Against(StrEnum):
    """What the x-axis of a figure may be."""

    round = "round"
    bytes = "bytes"
    epochs = "epochs"


def compare(
    folders: Folders,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", "-o", help="Also write the table to this .tex file, or all numbers to .csv."
        ),
    ] = None,
    columns: Annotated[
        str | None,
        typer.Option(
            "--columns", help="Columns to show, separated by commas, such as 'final 10 %, MB'."
        ),
    ] = None,
    names: Name = [],  # noqa: B006
    caption: Annotated[
        str | None,
        typer.Option(
            "--caption",
            help="Caption of the LaTeX table, as LaTeX; by default it says what is in it.",
        ),
    ] = None,
    label: Annotated[
        str, typer.Option("--label", help="Label of the LaTeX table.")
    ] = "tab:results",
    picture: Annotated[
        Path | None,
        typer.Option("--picture", help="Also plot an overview to this PDF, SVG or PNG file."),
    ] = None,
    target: Target = None,
    as_json: Json = False,
) -> None:
    """Compare runs in a table: mean and standard deviation over seeds."""
    from kairosfl.runs.files import check_runs

    with friendly():
        check_runs(folders)
    from kairosfl.report import export, latex
    from kairosfl.report.comparison import compare as compared
    from kairosfl.report.draw import picture_kind
    from kairosfl.report.static import draw_comparison
    from kairosfl.report.words import in_words, renamed
    from kairosfl.runs.files import plain, write

    with friendly():
        if picture:
            picture_kind(picture)
        if out:
            export.checked_table(out)
        chosen = latex.chosen_columns(columns)
        comparison = compared(folders, target)
        labels = [row.label for row in comparison.rows]
        named = renamed(labels, names, list(map(in_words, labels)))
        if as_json:
            typer.echo(json.dumps(plain(comparison.numbers()), indent=1))
            warn(comparison.damaged)
        else:
            print_comparison(comparison, chosen if columns else None)
        if out:
            text = export.results_file(
                out,
                comparison.rows,
                comparison.target,
                names=named,
                chosen=chosen,
                caption=caption,
                label=label,
            )
            write(out, text)
            typer.echo(f"table: {out}", err=True)
        if picture:
            typer.echo(f"picture: {draw_comparison(folders, picture)}", err=True)


def figure(
    folders: Annotated[
        list[Path],
        typer.Argument(
            help="Run folders, or a .json file that `kairosfl reproduce --results` wrote."
        ),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="PDF, SVG or PNG file to write.")] = Path(
        "figure.pdf"
    ),
    of: Annotated[
        list[str],
        typer.Option("--of", help="What to draw, by default the main metric; several are panels."),
    ] = [],  # noqa: B006
    against: Annotated[
        Against, typer.Option("--against", help="What is on the x-axis.")
    ] = Against.round,
    width: Annotated[
        str, typer.Option("--width", help="Width in the paper: in, cm, mm or pt.")
    ] = "3.25in",
    height: Annotated[
        str | None, typer.Option("--height", help="Height; by default from the width.")
    ] = None,
    font: Annotated[
        str, typer.Option("--font", help="sans, or serif for a paper set in Times.")
    ] = "sans",
    only: Annotated[
        list[str],
        typer.Option(
            "--only", help="Draw these groups, in this order: a label, or fed*; repeatable."
        ),
    ] = [],  # noqa: B006
    names: Name = [],  # noqa: B006
    y_range: Annotated[
        str | None,
        typer.Option(
            "--y-range", metavar="LOW:HIGH", help="Ends of the first panel's y-axis: 60:75."
        ),
    ] = None,
    smooth: Annotated[
        int, typer.Option("--smooth", help="Mean of this many neighbouring points.")
    ] = 1,
    critical: Annotated[
        bool, typer.Option("--critical", help="Shade the critical learning periods.")
    ] = False,
) -> None:
    """Draw a figure for a paper: in its width, without a title, fonts embedded. Prints a
    caption.
    """
    from kairosfl.runs.files import check_runs

    with friendly():
        check_runs([folder for folder in folders if folder.suffix != ".json"])
        from kairosfl.report.draw import picture_kind
        from kairosfl.report.figures import chart
        from kairosfl.report.paper import Page, inches, limits, write_figure
        from kairosfl.report.words import renamed

        picture_kind(out)
        page = Page(
            width=inches(width),
            height=None if height is None else inches(height),
            font=font,
            critical=critical,
            y_range=None if y_range is None else limits(y_range),
            smooth=smooth,
        )
        groups, words, damaged = drawn_groups(folders, only)
        named = renamed([group.label for group in groups], names, words)
        if not of:
            of = [""]
        charts = [chart(groups, key, against) for key in of]
        caption = write_figure(charts, groups, named, out, page)
        typer.echo(f"figure: {out}\ncaption: {caption}")
        warn(damaged)


def drawn_groups(folders: list[Path], only: list[str]) -> tuple[list[Group], list[str], list[str]]:
    """The groups to draw with their names in words, and what is damaged in their folders."""
    from kairosfl.cli.others import curves_in
    from kairosfl.report.read import chosen_groups, read_study
    from kairosfl.report.words import in_words

    files = [folder for folder in folders if folder.suffix == ".json"]
    if files and len(folders) > 1:
        raise UserError(
            f"Give {files[0]} alone: results of a paper cannot be drawn together with others."
        )
    if files:
        groups, words = curves_in(files[0], only)
        return groups, words, []
    study = read_study(folders)
    groups = chosen_groups(study.groups, only)
    return groups, [in_words(group.label) for group in groups], study.damaged


def report(
    folders: Folders,
    out: Annotated[Path, typer.Option("--out", "-o", help="HTML file to write.")] = Path(
        "report.html"
    ),
    figures: Annotated[
        Path | None, typer.Option("--figures", help="Also export every figure to this directory.")
    ] = None,
    kind: Annotated[
        str, typer.Option("--kind", help="Format of --figures: svg, pdf or png.")
    ] = "svg",
    tables: Annotated[
        Path | None,
        typer.Option(
            "--tables", help="Also export every table to this directory, as CSV and LaTeX."
        ),
    ] = None,
    target: Target = None,
    baseline: Baseline = None,
) -> None:
    """Write a self-contained HTML report about runs."""
    from kairosfl.runs.files import check_runs

    with friendly():
        check_runs(folders)
        from kairosfl.report.export import checked_kind, export_figures, export_tables
        from kairosfl.report.page import write_report

        checked_kind(kind)
        damaged: list[str] = []
        written = write_report(folders, out, target=target, baseline=baseline, say=damaged.append)
        typer.echo(f"report: {written}")
        warn(damaged)
        if figures:
            count = len(export_figures(folders, figures, kind))
            typer.echo(f"{counted(count, 'picture')} in {figures}")
        if tables:
            count = len(export_tables(folders, tables, target, baseline))
            typer.echo(f"{counted(count, 'file')} in {tables}: every table as CSV and LaTeX")


def watch(
    folder: Annotated[
        Path, typer.Argument(help="Run folder, or a folder that contains run folders.")
    ],
    port: Annotated[int, typer.Option("--port", help="Local port.")] = 8765,
    target: Target = None,
    baseline: Baseline = None,
) -> None:
    """Serve the report live while a run or sweep is in progress."""
    with friendly():
        if not folder.is_dir():
            wrong = "is not a directory" if folder.exists() else "does not exist"
            raise UserError(f"{folder} {wrong}; give the folder that a run or a sweep writes to.")
        from kairosfl.report.watch import watch as serve

        serve(folder, port, target=target, baseline=baseline, say=lambda sentence: warn([sentence]))


def list_(
    what: Annotated[
        str | None,
        typer.Argument(
            metavar="WHAT",
            help=f"{', '.join(complete.LISTED)}; if omitted, how many of each.",
            autocompletion=complete.listed,
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """List the available rules, data sets, models, partitions, detectors or presets."""
    with friendly():
        if what is not None:
            if what not in complete.LISTED:
                raise UserError(f"There is no list of {what!r}; {nearest(what, complete.LISTED)}")
            from kairosfl.listing import listing

            print_pairs(listing(what), as_json)
            return
        counts = {name: _count(name) for name in complete.LISTED}
        if as_json:
            typer.echo(json.dumps(counts, indent=1))
            return
        pairs = []
        for name, count in counts.items():
            pairs.append((name, f"{count:3}  kairosfl list {name}"))
        print_pairs(pairs, as_json=False)


def _count(what: str) -> int:
    """How many of these there are, from their names alone."""
    if what == "presets":
        return len(presets.names())
    count = len(names_of.known(what.removesuffix("s")))
    if what == "rules":
        return count + 1  # fedavg is the empty sum
    return count


def show(
    name: Annotated[
        str, typer.Argument(help="Name of the data set.", autocompletion=complete.dataset)
    ] = "digits",
    partition: Annotated[
        str, typer.Option(help="How it is partitioned among clients.")
    ] = "dirichlet",
    clients: Annotated[
        int, typer.Option(help="Number of clients; with the natural partition, 0 means all.")
    ] = 40,
    alpha: Annotated[
        float, typer.Option(help="Concentration of the Dirichlet distribution.")
    ] = 0.3,
    changes: Set = [],  # noqa: B006
    seed: Annotated[int, typer.Option(help="Seed of the partition.")] = 0,
    picture: Annotated[
        Path | None,
        typer.Option("--picture", help="Plot the classes of each client to this PNG file."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Print the sizes and heterogeneity of a partition, and plot it."""
    with friendly():
        from kairosfl.runs.config import resolve

        section = {"name": name, "partition": partition, "clients": clients, "alpha": alpha}
        config = resolve({"seed": seed, "data": section, "train": {"cohort": 1}}, changes)
        from kairosfl.runs.prepare import build_data
        from kairosfl.tasks.heterogeneity import describe
        from kairosfl.tasks.picture import draw_partition

        dataset, population = build_data(config)
        facts = describe(dataset, population)
        if as_json:
            typer.echo(json.dumps(facts, indent=1))
        else:
            width = max(map(len, facts))
            for key, fact in facts.items():
                text = f"{fact:.4g}" if isinstance(fact, float) else fact
                typer.echo(f"{key.replace('_', ' '):<{width}}  {text}")
        if picture:
            draw_partition(picture, dataset, population)
            typer.echo(f"picture: {picture}", err=True)
