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
