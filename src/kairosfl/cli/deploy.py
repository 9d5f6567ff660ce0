"""Commands for real devices: deploy new, certs, node, status, rehearse."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Annotated

import typer

from kairosfl.cli.common import Json, Out, Quiet, Set, friendly, print_summary
from kairosfl.errors import UserError


def _deploy() -> ModuleType:
    """The deploy module, or an error that says what to install."""
    try:
        from kairosfl import deploy
    except ImportError as error:
        raise UserError(f'deploying needs {error.name}: pip install "kairosfl[flower]"') from None
    return deploy


def new(path: Annotated[Path, typer.Argument(help="A new directory.")]) -> None:
    """Create a Flower app with an example task, a configuration and the commands to run it."""
    with friendly():
        for file in _deploy().new(path):
            typer.echo(file)


def certs(
    path: Annotated[Path, typer.Argument(help="A new directory.")],
    nodes: Annotated[int, typer.Option("--nodes", help="Number of nodes that get a key.")] = 4,
    host: Annotated[
        list[str], typer.Option("--host", help="Host name or address of the server; repeatable.")
    ] = [  # noqa: B006
        "localhost",
        "127.0.0.1",
    ],
) -> None:
    """Create TLS certificates and node keys for a rehearsal or a small deployment."""
    with friendly():
        for file in _deploy().certs(path, nodes=nodes, hosts=host):
            typer.echo(file)


def node(context: typer.Context) -> None:
    """Run a node on a device. It takes the arguments of flower-supernode; see `flower-supernode
    --help`.

    It is Flower's node, with a worker that stays resident, so that a round does not wait for Python
    to start. With KAIROSFL_RESIDENT=0 it is flower-supernode itself.
    """
    with friendly():
        from kairosfl.deploy.node import main

        main(context.args)


def status(
    folder: Annotated[Path, typer.Argument(help="The run folder on the server.")],
    as_json: Json = False,
) -> None:
    """Show what a deployed run is doing: its round, who was asked, who reported and when, its
    metrics and faults.
    """
    with friendly():
        _deploy()
        from kairosfl.deploy.status import status as read
        from kairosfl.deploy.status import text

        state = read(folder)
        if as_json:
            typer.echo(json.dumps(state, indent=1))
        else:
            typer.echo("\n".join(text(state)))


def rehearse(
    file: Annotated[Path, typer.Argument(help="TOML configuration.")],
    nodes: Annotated[int, typer.Option("--nodes", help="Number of nodes.")] = 4,
    changes: Set = [],  # noqa: B006
    out: Out = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Run a configuration over real Flower processes on this machine, with TLS and authenticated
    nodes.
    """
    folder = Path("runs") / f"{file.stem}-rehearsal" if out is None else out
    with friendly(lambda: "Run the same command again to resume from the last checkpoint."):
        from kairosfl.runs.config import change, checked, read
        from kairosfl.runs.keys import updated

        tables = change(read(file), changes)
        deploy = tables.pop("deploy", {})
        if isinstance(deploy, dict) and deploy.get("clients"):
            tables = updated(tables, {"data.clients": deploy["clients"]})
        checked(tables)
        from kairosfl.progress import RunProgress

        module = _deploy()
        config, _ = module.load(file, changes)
        with RunProgress(
            config.train.rounds, quiet=quiet or as_json, critical=config.follows_detector
        ) as show:
            summary = module.rehearse(file, folder, nodes=nodes, changes=changes, notify=show)
        print_summary(folder / "run", summary, as_json)
