"""Shared by the commands: options, error messages, tables. No heavy imports at module level."""

from __future__ import annotations

import json
import math
import shlex
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from kairosfl.cli import complete
from kairosfl.errors import StageError, UserError, close
from kairosfl.wording import counted, measured

# Newer versions of Typer contain a copy of click and no longer bring the package: these are the
# classes in use.
_errors = import_module(typer.BadParameter.__module__)
_completion = import_module(f"{_errors.__package__}.shell_completion")
NoSuchOption: Any = _errors.NoSuchOption
UsageError: Any = _errors.UsageError
CompletionItem: Any = _completion.CompletionItem

Set = Annotated[
    list[str],
    typer.Option(
        "--set",
        metavar="SECTION.KEY=VALUE",
        help="Override one key; repeatable.",
        autocompletion=complete.change,
    ),
]
Out = Annotated[
    Path | None, typer.Option("--out", help="Run folder; by default a new one under runs/.")
]
Device = Annotated[str | None, typer.Option("--device", help="auto, cpu or cuda.")]
Engine = Annotated[
    str | None, typer.Option("--engine", help="auto, loop, batched or ray; for run, also flower.")
]
RayAddress = Annotated[
    str | None,
    typer.Option("--ray-address", help="Address of a Ray cluster, or auto; implies --engine ray."),
]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="Show no progress.")]
Verbose = Annotated[
    bool, typer.Option("--verbose", help="Show the traceback of what a task file raised.")
]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON on standard output.")]


class Command(TyperCommand):
    """A command whose help says `[required]`.

    Typer up to 0.20, which Flower asks for, escapes it for rich.
    """

    def get_help(self, ctx: Any) -> str:
        return super().get_help(ctx).replace("\\[", "[")

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Name the nearest option; for the name of a key, say how keys are set."""
        try:
            return super().parse_args(ctx, args)
        except NoSuchOption as error:
            name = error.option_name
            options = {option for parameter in self.params for option in parameter.opts}
            key = complete.key(name.lstrip("-").replace("-", "_"))
            fix = close(name, options)
            if key is not None and "--set" in options:
                fix = f"use --set {key}=VALUE."
            elif not fix:
                fix = f"see {ctx.command_path} --help."
            raise UsageError(f"There is no option {name}; {fix}", ctx) from None

    def shell_complete(self, ctx: Any, incomplete: str) -> list[Any]:
        """Asked where no argument is left, as after the `=` of `--set` in bash."""
        values = complete.after_equals(incomplete)
        if values is None:
            return super().shell_complete(ctx, incomplete)
        return list(map(CompletionItem, values))


class Group(TyperGroup):
    """Commands, of which the nearest is suggested once: click and Typer both do that."""

    def invoke(self, ctx: Any) -> Any:
        """Say that Ctrl-C stopped what no command catches, such as the imports before its work."""
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            typer.echo("\nStopped.", err=True)
            raise typer.Exit(130) from None

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        try:
            return super().resolve_command(ctx, args)
        except UsageError as error:
            if "Did you mean" in error.message and hasattr(error, "possibilities"):
                error.possibilities = None
            raise


@contextmanager
def friendly(resume: Callable[[], str] | None = None, verbose: bool = False) -> Iterator[None]:
    """Print a user error as one sentence and exit with 2; on Ctrl-C or SIGTERM, say how to resume.

    If `verbose`, the traceback of the exception that caused a user error is printed before the
    sentence; with engine `debug` it always is.
    """
    before = None
    if threading.current_thread() is threading.main_thread():
        before = signal.signal(signal.SIGTERM, _terminate)
    try:
        yield
    except UserError as error:
        traced = verbose or isinstance(error, StageError)
        if traced and error.__cause__ is not None:
            typer.echo("".join(traceback.format_exception(error.__cause__)).rstrip(), err=True)
        typer.echo(f"kairosfl: {printable(str(error))}", err=True)
        raise typer.Exit(2) from None
    except OSError as error:
        if error.filename is None:
            raise
        typer.echo(f"kairosfl: {error.filename}: {error.strerror}; choose another path.", err=True)
        raise typer.Exit(2) from None
    except KeyboardInterrupt as stopped:
        how = resume() if resume else ""
        typer.echo(f"\nStopped. {how}".rstrip(), err=True)
        raise typer.Exit(143 if isinstance(stopped, Terminated) else 130) from None
    finally:
        if before is not None:
            signal.signal(signal.SIGTERM, before)


def printable(text: str) -> str:
    """One line without control characters, which a key or a value in someone's file may contain."""
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in text)


class Terminated(KeyboardInterrupt):
    """SIGTERM, which stops a run like Ctrl-C: its last round is saved."""


def _terminate(number: int, frame: object) -> None:
    raise Terminated


def asked(**options: str | None) -> list[str]:
    """Command-line options as changes to [run]."""
    return [f"run.{key}={value}" for key, value in options.items() if value is not None]


def command() -> str:
    """The command line, for the record of the run."""
    return shlex.join(["kairosfl", *sys.argv[1:]])


def run_sweep(tables: dict[str, Any], folder: Path, quiet: bool) -> dict[str, dict[str, Any]]:
    from kairosfl.progress import SweepProgress
    from kairosfl.runs.sensible import unused
    from kairosfl.runs.sweep import expand, sweep

    members = expand(tables)
    if not quiet:
        warn(unused([member.config for member in members]))
    rounds = {member.name: member.config.train.rounds for member in members}
    critical = {member.name for member in members if member.config.follows_detector}
    with SweepProgress(rounds, quiet=quiet, critical=critical) as show:
        return sweep(members, folder, command=command(), watch=show.begin, say=show.say)


def print_table(folders: list[Path]) -> None:
    """The results of the runs in these folders."""
    from kairosfl.cli.screen import print_comparison
    from kairosfl.report.comparison import compare

    print_comparison(compare(folders))


def warn(sentences: Iterable[str]) -> None:
    """Name what is damaged or without effect where it does not get into the output."""
    for sentence in sentences:
        typer.echo(f"kairosfl: {sentence}", err=True)


def print_summary(folder: Path, summary: dict[str, Any], as_json: bool) -> None:
    """Print the result of a run, and where it is stored."""
    if as_json:
        typer.echo(json.dumps({"folder": str(folder)} | summary))
        return
    from kairosfl.report.read import read_run

    # --- the score ---
    name = summary.get("metric", "accuracy")
    score = "not measured"
    if summary[name] is not None and math.isfinite(summary[name]):
        score = measured(summary[name])
    done = counted(summary["rounds"], "round")
    typer.echo(f"{name.replace('_', ' ')} {score} after {done}, in {folder}")
    diverged = read_run(folder).diverged
    if diverged is not None:
        warning = "from there on its test loss is not finite, or has exploded."
        typer.echo(f"It diverged in round {diverged}: {warning}", err=True)

    # --- the speed ---
    speed = summary.get("samples_per_second")
    if speed:
        unit = summary.get("unit", "samples")
        items = summary.get("unit_per_sample", 1)
        line = f"{speed * items:,.0f} {unit} a second"
        share = summary.get("of_the_ceiling")
        if share is not None:
            line += f", {share:.0%} of the device's ceiling (one model on all clients' batches)"
        typer.echo(line)

    # --- what went wrong ---
    for verdict in summary.get("verdicts", ()):
        typer.echo(f"Note: {verdict}.", err=True)
    log = folder / "log.txt"
    missing = summary.get("missing_rounds")
    if missing:
        gaps = ", ".join(map(str, missing))
        what = "round" if len(missing) == 1 else "rounds"
        typer.echo(f"The metrics of {what} {gaps} are missing; {log} says why.", err=True)
    rejected = summary.get("rejected")
    if rejected:
        reports = "1 report does" if rejected == 1 else f"{rejected:,} reports do"
        typer.echo(f"{reports} not count; see {log} for the reasons.", err=True)
