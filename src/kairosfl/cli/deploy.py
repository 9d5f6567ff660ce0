"""Commands about real devices: deploy new, certs, rehearse."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Annotated

import typer

from kairosfl.cli.common import Json, Out, Quiet, Set, conclude, friendly
from kairosfl.errors import UserError


def _deploy() -> ModuleType:
    """The module, or a sentence that says what to install."""
    try:
        from kairosfl import deploy
    except ImportError as error:
        raise UserError(f'deploying needs {error.name}: pip install "kairosfl[flower]"') from None
    return deploy


def new(path: Annotated[Path, typer.Argument(help="A new folder.")]) -> None:
    """Write a ready Flower app with an example task, a configuration and the commands."""
    with friendly():
        for file in _deploy().new(path):
            typer.echo(file)


def certs(
    path: Annotated[Path, typer.Argument(help="A new folder.")],
    nodes: Annotated[int, typer.Option("--nodes", help="How many nodes get a key.")] = 4,
    host: Annotated[list[str], typer.Option("--host", help="Name or address of the server; repeatable.")] = [  # noqa: B006
        "localhost",
        "127.0.0.1",
    ],
) -> None:
    """Make TLS certificates and node keys, for a rehearsal or a small deployment."""
    with friendly():
        for file in _deploy().certs(path, nodes=nodes, hosts=host):
            typer.echo(file)


def rehearse(
    file: Annotated[Path, typer.Argument(help="TOML configuration.")],
    nodes: Annotated[int, typer.Option("--nodes", help="How many nodes.")] = 4,
    changes: Set = [],  # noqa: B006
    out: Out = None,
    quiet: Quiet = False,
    as_json: Json = False,
) -> None:
    """Run a configuration over real Flower processes on this machine, with TLS and authenticated nodes."""
    folder = out or Path("runs") / f"{file.stem}-rehearsal"
    with friendly(lambda: "The same command goes on from the last checkpoint."):
        from kairosfl.progress import Show

        module = _deploy()
        config, _ = module.load(file, changes)
        with Show(config.train.rounds, quiet=quiet or as_json) as show:
            summary = module.rehearse(file, folder, nodes=nodes, changes=changes, notify=show)
        conclude(folder / "run", summary, as_json)
