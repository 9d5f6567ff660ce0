"""Commands and readers that other packages add, by entry points."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from kairosfl.cli.common import Command, Group, friendly
from kairosfl.errors import UserError
from kairosfl.plugins import Registry, in_reproductions

if TYPE_CHECKING:
    from kairosfl.report.read import Group as Runs

# A command is a function as Typer takes it.
COMMANDS: Registry[Callable[..., None]] = Registry("kairosfl.commands", {})
# By the ending of a file: reads curves that are not run folders. It is given the path and what
# --only names, and returns groups of runs and what a legend calls them.
CURVES: Registry[Callable[[Path, list[str]], tuple[list[Runs], list[str]]]] = Registry(
    "kairosfl.curves", {}
)


class Root(Group):
    """Our own commands, and then those of other packages."""

    def list_commands(self, ctx: Any) -> list[str]:
        own = super().list_commands(ctx)
        return list(dict.fromkeys([*own, *COMMANDS]))

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        own = super().get_command(ctx, cmd_name)
        if own is not None:
            return own
        if cmd_name in COMMANDS:
            return external_command(cmd_name)
        if cmd_name == "reproduce":
            return refusal(cmd_name, in_reproductions("kairosfl reproduce comes"))
        return None


def external_command(name: str) -> Any:
    """A command of another package; one that cannot be loaded says so when it is called."""
    try:
        function = COMMANDS[name]
    except UserError as error:
        return refusal(name, str(error))
    return built(name, function)


def refusal(name: str, sentence: str) -> Any:
    """A command that only says why it is not there."""

    def refuse() -> None:
        with friendly():
            raise UserError(sentence)

    refuse.__doc__ = sentence
    return built(name, refuse, allow_extra_args=True, ignore_unknown_options=True)


def built(name: str, function: Callable[..., None], **settings: bool) -> Any:
    """A command as Typer makes it, for a group that is there already."""
    alone = typer.Typer(add_completion=False, rich_markup_mode=None)
    alone.command(name, cls=Command, context_settings=settings)(function)
    return typer.main.get_command(alone)


def curves_in(file: Path, only: list[str]) -> tuple[list[Runs], list[str]]:
    """The curves in a file, with what a legend calls them."""
    kind = file.suffix.removeprefix(".")
    if kind not in CURVES:
        raise UserError(f"{file}: " + in_reproductions("what reads files of results comes"))
    return CURVES[kind](file, only)
