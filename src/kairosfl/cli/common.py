"""What the commands share: options, sentences for mistakes, printed tables. Nothing heavy is imported here."""

from __future__ import annotations

import json
import shlex
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from kairosfl.errors import UserError

Set = Annotated[list[str], typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Change one key; repeatable.")]
Out = Annotated[Path | None, typer.Option("--out", help="Folder of the run; by default a new one under runs/.")]
Device = Annotated[str | None, typer.Option("--device", help="auto, cpu or cuda.")]
Engine = Annotated[str | None, typer.Option("--engine", help="auto, loop, batched or ray; run: also flower.")]
RayAddress = Annotated[str | None, typer.Option("--ray-address", help="Of a Ray cluster, or auto; implies engine ray.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress.")]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON on standard output.")]


@contextmanager
def friendly(resume: Callable[[], str] | None = None) -> Iterator[None]:
    """A user's mistake is one sentence and exit code 2; Ctrl-C, or a scheduler's SIGTERM, says how to go on."""
    first = threading.current_thread() is threading.main_thread()
    before = signal.signal(signal.SIGTERM, _terminate) if first else None
    try:
        yield
    except UserError as error:
        typer.echo(f"kairosfl: {error}", err=True)
        raise typer.Exit(2) from None
    except OSError as error:
        if error.filename is None:
            raise
        typer.echo(f"kairosfl: {error.filename}: {error.strerror}; choose another path.", err=True)
        raise typer.Exit(2) from None
    except KeyboardInterrupt as stopped:
        typer.echo(f"\nStopped. {resume() if resume else ''}".rstrip(), err=True)
        raise typer.Exit(143 if isinstance(stopped, Terminated) else 130) from None
    finally:
        if before is not None:
            signal.signal(signal.SIGTERM, before)


class Terminated(KeyboardInterrupt):
    """SIGTERM, which ends a run as Ctrl-C does: its last round is saved."""


def _terminate(number: int, frame: object) -> None:
    raise Terminated


def asked(**options: str | None) -> list[str]:
    """Options of the command line as changes of [run]."""
    return [f"run.{key}={value}" for key, value in options.items() if value is not None]


def command() -> str:
    """The command line as it was typed, for the record."""
    return shlex.join(["kairosfl", *sys.argv[1:]])


def run_sweep(tables: dict[str, Any], folder: Path, quiet: bool) -> dict[str, dict[str, Any]]:
    from kairosfl.progress import ShowSweep
    from kairosfl.runs.sweep import expand, sweep

    members = expand(tables)
    with ShowSweep({member.name: member.config.train.rounds for member in members}, quiet=quiet) as show:
        return sweep(members, folder, command=command(), watch=show.begin, say=show.say)


def print_pairs(rows: list[tuple[str, str]], as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(dict(rows), indent=1))
        return
    width = max(len(name) for name, _ in rows)
    for name, line in rows:
        typer.echo(f"{name:<{width}}  {line}")


def print_table(folders: list[Path], target: float | None = None) -> None:
    from kairosfl.report.tables import compare_table

    print_rows(compare_table(folders, target))


def print_rows(rows: list[dict[str, str]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, header_style="bold", pad_edge=False)
    for name in rows[0]:
        table.add_column(name, justify="left" if name in ("algorithm", "cell", "reading") else "right", overflow="fold")
    for row in rows:
        table.add_row(*row.values())
    console = Console()
    if not console.is_terminal:
        console = Console(width=160)
    console.print(table)


def conclude(folder: Path, summary: dict[str, Any], as_json: bool) -> None:
    """What a run came to, and where it is."""
    if as_json:
        typer.echo(json.dumps({"folder": str(folder)} | summary))
        return
    rounds = "1 round" if summary["rounds"] == 1 else f"{summary['rounds']} rounds"
    typer.echo(f"accuracy {summary['accuracy']:.4f} after {rounds}, in {folder}")
    if summary.get("missing_rounds"):
        lost = ", ".join(map(str, summary["missing_rounds"]))
        typer.echo(f"The metrics of round {lost} are missing; {folder / 'log.txt'} says why.", err=True)
    if summary.get("rejected"):
        typer.echo(f"{summary['rejected']} reports were turned away; {folder / 'log.txt'} says why.", err=True)
