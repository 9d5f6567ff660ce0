"""Tables and lists that fit the terminal: columns are left out, and named, before any is cut."""

from __future__ import annotations

import json
import os
import shutil
import sys
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from kairosfl.report.tables import Comparison

Rows = Sequence[dict[str, str]]
WORDS = ("reading", "how")  # columns of text, which may be wrapped like the first one
NARROWEST = 24  # characters for a column of text that is wrapped
GAP = 2
# The columns of `compare` by their place, those left out first at the front: epochs, seeds, MB, rounds and so on.
_COMPARED = (8, 1, 7, 2, 6, 4, 5)


def width() -> int | None:
    """Columns of the terminal; None where output goes elsewhere, unless COLUMNS says how wide that is."""
    if not (sys.stdout.isatty() or os.environ.get("COLUMNS")):
        return None
    return max(40, shutil.get_terminal_size().columns)


def print_comparison(found: Comparison, columns: Sequence[str] | None = None) -> None:
    """The table of results and the notes on its rows; what is damaged goes to standard error."""
    rows = found.table(columns)
    print_rows(rows, first_out=[list(rows[0])[place] for place in _COMPARED] if columns is None else ())
    for note in found.notes():
        typer.echo(note)
    for sentence in found.damaged:
        typer.echo(f"kairosfl: {sentence}", err=True)


def print_rows(rows: Rows, first_out: Sequence[str] = (), turn: bool = False) -> None:
    """A table. If it is too wide, these columns are left out first, then others from the right, but not the first two.

    With `turn`, rows and columns are exchanged before anything is left out.
    """
    from rich.console import Console
    from rich.table import Table

    most = width()
    if most and turn and _needed(rows, list(rows[0])) > most:
        rows = turned(rows)
    shown, left_out = fitted(rows, most, first_out)
    table = Table(box=None, header_style="bold", pad_edge=False)
    for place, name in enumerate(shown):
        text = place == 0 or name in WORDS
        table.add_column(name, justify="left" if text else "right", no_wrap=not text, overflow="fold")
    for row in rows:
        table.add_row(*(row[name] for name in shown))
    Console(width=most or _needed(rows, shown, wrapped=False)).print(table, soft_wrap=False)
    if left_out:
        typer.echo(f"Left out to fit {most} columns: {', '.join(left_out)}.")


def fitted(rows: Rows, most: int | None, first_out: Sequence[str] = ()) -> tuple[list[str], list[str]]:
    """The columns that fit this width, and those that are left out."""
    shown = list(rows[0])
    order = [*first_out, *(name for name in reversed(shown[2:]) if name not in first_out)]
    for name in order:
        if most is None or _needed(rows, shown) <= most:
            break
        shown.remove(name)
    return shown, [name for name in rows[0] if name not in shown]


def turned(rows: Rows) -> Rows:
    """Rows and columns exchanged; the first column gives the names."""
    corner, *others = rows[0]
    return [{corner: name} | {row[corner]: row[name] for row in rows} for name in others]


def _needed(rows: Rows, shown: Sequence[str], wrapped: bool = True) -> int:
    """How wide these columns are, with text wrapped or not."""

    def one(place: int, name: str) -> int:
        widest = max(len(name), *(len(row[name]) for row in rows))
        return min(widest, max(NARROWEST, len(name))) if wrapped and (place == 0 or name in WORDS) else widest

    return sum(one(place, name) for place, name in enumerate(shown)) + GAP * (len(shown) - 1)


def print_pairs(rows: Sequence[tuple[str, str]], as_json: bool) -> None:
    """Names with a line on each, which is wrapped next to its name on a terminal."""
    if as_json:
        typer.echo(json.dumps(dict(rows), indent=1))
        return
    longest, most = max(len(name) for name, _ in rows), width()
    place = longest + GAP if most is None or longest <= most // 2 else 4
    for name, line in rows:
        if place < longest + GAP:  # the name in a line of its own
            typer.echo(name)
            typer.echo(textwrap.indent(textwrap.fill(line, (most or 80) - place), " " * place))
        elif most is None:
            typer.echo(f"{name:<{place}}{line}".rstrip())
        else:
            lines = textwrap.wrap(line, most - place, break_on_hyphens=False) or [""]
            typer.echo(f"{name:<{place}}" + f"\n{'':<{place}}".join(lines))
