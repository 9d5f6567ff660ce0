"""The command `kairosfl`. Heavy modules are imported only by the commands that need them."""

from __future__ import annotations

import io
import sys
from typing import Annotated

import typer

from kairosfl.cli import bench, demo, deploy, periods, runs, view
from kairosfl.cli.common import Command, Group
from kairosfl.cli.others import Root
from kairosfl.cli.tune import tune
from kairosfl.version import __version__

app = typer.Typer(
    cls=Root,
    help="Federated learning in which every round adapts: who trains, for how long, how much "
    "each counts, and which way the model moves.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(value: bool) -> None:
    if value:
        typer.echo(f"kairosfl {__version__}")
        raise typer.Exit


@app.callback()
def main(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Global options."""
    # Names of folders may hold bytes that are not UTF-8.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


training = (runs.run, runs.resume, runs.sweep, tune, bench.bench, demo.demo, runs.export)
commands = (*training, view.compare, view.figure, view.report, view.watch)
for function in commands:
    app.command(cls=Command)(function)
app.command("list", cls=Command)(view.list_)
app.command(cls=Command)(periods.periods)

data = typer.Typer(
    cls=Group,
    help="Inspect data sets and how they are partitioned among clients.",
    no_args_is_help=True,
)
data.command(cls=Command)(view.show)
app.add_typer(data, name="data")

deployment = typer.Typer(cls=Group, help="Train on real devices with Flower.", no_args_is_help=True)
for deploy_command in (deploy.new, deploy.certs, deploy.rehearse, deploy.status):
    deployment.command(cls=Command)(deploy_command)
passed_on = {"allow_extra_args": True, "ignore_unknown_options": True}
deployment.command(cls=Command, context_settings=passed_on)(deploy.node)
app.add_typer(deployment, name="deploy")
