"""The command `kairosfl`. Nothing heavy is imported before a command needs it."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from kairosfl import __version__
from kairosfl.errors import UserError

app = typer.Typer(
    help="Federated learning in which every round adapts: who trains, for how long, how much each counts, "
    "and which way the model moves.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Set = Annotated[list[str], typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Change one key; repeatable.")]
Out = Annotated[Path | None, typer.Option("--out", help="Folder of the run; by default a new one under runs/.")]
Device = Annotated[str | None, typer.Option("--device", help="auto, cpu or cuda.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON on standard output.")]


class Listed(StrEnum):
    """What `kairosfl list` knows."""

    rules = "rules"
    data = "data"
    models = "models"
    partitions = "partitions"
    detectors = "detectors"


@contextmanager
def friendly(resume: Callable[[], str] | None = None) -> Iterator[None]:
    """A user's mistake is one sentence and exit code 2; Ctrl-C says how to go on and exits with 130."""
    try:
        yield
    except UserError as error:
        typer.echo(f"kairosfl: {error}", err=True)
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        typer.echo(f"\nStopped. {resume() if resume else ''}".rstrip(), err=True)
        raise typer.Exit(130) from None


def _version(value: bool) -> None:
    if value:
        typer.echo(f"kairosfl {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[bool, typer.Option("--version", callback=_version, is_eager=True, help="Print it.")] = False,
) -> None:
    """Options of the command itself."""


@app.command()
def run(
    file: Annotated[Path | None, typer.Argument(help="TOML configuration; without one the defaults run.")] = None,
    changes: Set = [],  # noqa: B006
    out: Out = None,
    device: Device = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Run one experiment."""
    from kairosfl.progress import Show
    from kairosfl.runs.config import read, resolve
    from kairosfl.runs.experiment import start

    folder = out or _fresh(file)
    with friendly(lambda: _how_to_resume(folder)):
        asked = [*changes, *([f"run.device={device}"] if device else [])]
        config = resolve(read(file) if file else {}, asked)
        with Show(config.train.rounds, quiet=quiet or as_json) as show:
            summary = start(config, folder, command=shlex.join(["kairosfl", *sys.argv[1:]]), notify=show)
    _conclude(folder, summary, quiet, as_json)


@app.command()
def resume(
    folder: Annotated[Path, typer.Argument(help="Run folder.")], quiet: Quiet = False, as_json: Json = False
) -> None:
    """Go on with a run that was stopped, from its last checkpoint."""
    from kairosfl.progress import Show
    from kairosfl.runs import experiment
    from kairosfl.runs.checkpoint import about

    with friendly(lambda: _how_to_resume(folder)):
        rounds = experiment.Folder(folder).config().train.rounds
        done = about(folder / "checkpoint").get("round", 0)
        with Show(rounds, quiet=quiet or as_json, done=done) as show:
            summary = experiment.resume(folder, notify=show)
    _conclude(folder, summary, quiet, as_json)


@app.command()
def sweep(
    file: Annotated[Path, typer.Argument(help="TOML configuration with a [sweep] section of lists.")],
    changes: Set = [],  # noqa: B006
    out: Out = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Run every combination of the lists under [sweep]; started again, it goes on where it was."""
    from kairosfl.runs.config import change, read

    folder = out or Path("runs") / file.stem
    with friendly(lambda: f"Go on with the same command, or: kairosfl sweep {file} --out {folder}"):
        summaries = _sweep(change(read(file), changes), folder, quiet or as_json)
        if as_json:
            typer.echo(json.dumps({"folder": str(folder), "runs": summaries}))
        elif not quiet:
            _print_table([folder])
            typer.echo(f"runs in {folder}")


@app.command()
def compare(
    folders: Annotated[list[Path], typer.Argument(help="Run folders, or folders of run folders.")],
    picture: Annotated[Path | None, typer.Option("--picture", help="Also draw the curves into this PNG.")] = None,
    target: Annotated[float | None, typer.Option("--target", help="Accuracy to count rounds and bytes to.")] = None,
    as_json: Json = False,
) -> None:
    """Compare runs in a table: mean and deviation over seeds."""
    from kairosfl.report.tables import compare_table

    with friendly():
        if as_json:
            typer.echo(json.dumps(compare_table(folders, target), indent=1))
        else:
            _print_table(folders, target)
        if picture:
            from kairosfl.report.static import draw_comparison

            typer.echo(f"drawn in {draw_comparison(folders, picture)}", err=True)


@app.command()
def report(
    folders: Annotated[list[Path], typer.Argument(help="Run folders, or folders of run folders.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The page to write.")] = Path("report.html"),
    figures: Annotated[Path | None, typer.Option("--figures", help="Also every picture, into this folder.")] = None,
    kind: Annotated[str, typer.Option("--kind", help="svg, pdf or png, for --figures.")] = "svg",
    tables: Annotated[Path | None, typer.Option("--tables", help="Also every table as CSV and LaTeX.")] = None,
    target: Annotated[float | None, typer.Option("--target", help="Accuracy to count rounds and bytes to.")] = None,
) -> None:
    """Write one self-contained HTML page that explains runs."""
    with friendly():
        from kairosfl.report.export import export_figures, export_tables
        from kairosfl.report.page import write_report

        typer.echo(f"report in {write_report(folders, out, target=target)}")
        if figures:
            typer.echo(f"{len(export_figures(folders, figures, kind))} pictures in {figures}")
        if tables:
            typer.echo(f"{len(export_tables(folders, tables, target))} tables in {tables}")


@app.command()
def watch(
    folder: Annotated[Path, typer.Argument(help="Run folder, or a folder of run folders.")],
    port: Annotated[int, typer.Option("--port", help="Port on this machine.")] = 8765,
) -> None:
    """Serve the report live while a run or sweep goes on."""
    with friendly():
        from kairosfl.report.watch import watch as serve

        serve(folder, port)


@app.command()
def demo(
    out: Annotated[Path, typer.Option("--out", help="Folder of the demonstration.")] = Path("runs/demo"),
    quiet: Quiet = False,
) -> None:
    """Compare FedAvg with two compositions on non-IID handwritten digits, in about a minute."""
    import shutil

    from kairosfl.runs.config import read

    with friendly(lambda: "Start it again with: kairosfl demo"):
        from kairosfl.report.page import write_report
        from kairosfl.report.static import draw_comparison

        if (out / "sweep.json").is_file():
            shutil.rmtree(out)  # a demonstration is shown from the beginning
        _sweep(read(Path(__file__).with_name("demo.toml")), out, quiet)
        _print_table([out])
        typer.echo(f"picture: {draw_comparison([out], out / 'comparison.png')}")
        typer.echo(f"report:  {write_report([out], out / 'report.html')}  (open it in a browser)")


data = typer.Typer(help="Look at data sets and at how they are dealt to clients.", no_args_is_help=True)
app.add_typer(data, name="data")


@data.command()
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


@app.command("list")
def list_(what: Annotated[Listed, typer.Argument(help="What to list.")], as_json: Json = False) -> None:
    """List what there is: rules, data, models, partitions, detectors."""
    from kairosfl.listing import listing

    with friendly():
        rows = listing(what.value)
    if as_json:
        typer.echo(json.dumps(dict(rows), indent=1))
        return
    width = max(len(name) for name, _ in rows)
    for name, line in rows:
        typer.echo(f"{name:<{width}}  {line}")


def _fresh(file: Path | None) -> Path:
    """A folder under runs/ that does not exist yet, named after the file."""
    stem = "default" if file is None else file.parent.name if file.stem == "config" and file.parent.name else file.stem
    names = (f"{stem}{f'-{n}' if n > 1 else ''}" for n in range(1, 10**6))
    return next(path for name in names if not (path := Path("runs") / name).exists())


def _sweep(tables: dict[str, Any], folder: Path, quiet: bool) -> dict[str, dict[str, Any]]:
    from kairosfl.progress import ShowSweep
    from kairosfl.runs.sweep import expand, sweep

    members = expand(tables)
    with ShowSweep({member.name: member.config.train.rounds for member in members}, quiet=quiet) as show:
        return sweep(members, folder, command=shlex.join(["kairosfl", *sys.argv[1:]]), watch=show.begin)


def _print_table(folders: list[Path], target: float | None = None) -> None:
    from rich.console import Console
    from rich.table import Table

    from kairosfl.report.tables import compare_table

    rows = compare_table(folders, target)
    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in rows[0]:
        table.add_column(name, justify="left" if name == "algorithm" else "right", overflow="fold")
    for row in rows:
        table.add_row(*row.values())
    console = Console()
    if not console.is_terminal:
        console = Console(width=160)
    console.print(table)


def _how_to_resume(folder: Path) -> str:
    if any((folder / "checkpoint").glob("checkpoint-*.json")):
        return f"Go on with: kairosfl resume {shlex.quote(str(folder))}"
    return "Nothing was trained yet."


def _conclude(folder: Path, summary: dict[str, Any], quiet: bool, as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps({"folder": str(folder)} | summary))
    elif not quiet:
        accuracy = summary["accuracy"]
        typer.echo(f"accuracy {accuracy:.4f} after {summary['rounds']} rounds, in {folder}")
