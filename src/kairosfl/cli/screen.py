"""Tables and lists that fit the terminal: columns are left out, and named, before any is cut."""

from __future__ import annotations

import json
import os
import shutil
import sys
import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import typer

if TYPE_CHECKING:
    from kairosfl.report.comparison import Comparison

Rows = Sequence[dict[str, str]]
WORDS = ("reading", "how")  # columns of text, which may be wrapped like the first one
NARROWEST = 24  # characters for a column of text that is wrapped
GAP = 2
# The columns of `compare` by their place, those left out first at the front: epochs, seeds, MB,
# rounds and so on.
_COMPARED = (8, 1, 7, 2, 6, 4, 5)


def width() -> int | None:
    """Columns of the terminal; None where output goes elsewhere, unless COLUMNS says how wide that
    is.
    """
    if not (sys.stdout.isatty() or os.environ.get("COLUMNS")):
        return None
    return max(40, shutil.get_terminal_size().columns)


def print_comparison(found: Comparison, columns: Sequence[str] | None = None) -> None:
    """The table of results and the notes on its rows; what is damaged goes to standard error."""
    from kairosfl.report.verdict import target_words

    rows = found.table(columns)
    print_rows(
        rows, first_out=[list(rows[0])[place] for place in _COMPARED] if columns is None else ()
    )
    if columns is None and not found.given and len(rows) > 1:
        typer.echo(
            f"Target: {target_words(found.rows, found.target, given=False)}; --target sets another."
        )
    for note in found.notes():
        typer.echo(note)
    for sentence in found.damaged:
        typer.echo(f"kairosfl: {sentence}", err=True)


def print_rows(rows: Rows, first_out: Sequence[str] = (), turn: bool = False) -> None:
    """A table. If it is too wide, headings and text are wrapped, then columns are left out, but not
    the first two.

    Those named are left out first, then others from the right. With `turn`, rows and columns are
    exchanged before.
    """
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    most = width()
    if most and turn and _needed(rows, list(rows[0])) > most:
        rows = turned(rows)
    shown, left_out = fitted(rows, most, first_out)
    wrapped = most is not None and _needed(rows, shown, wrapped=False) > most
    table = Table(box=None, header_style="bold", pad_edge=False)
    for place, name in enumerate(shown):
        text = place == 0 or name in WORDS
        head = (
            "\n".join(textwrap.wrap(_kept(name), _column(rows, place, name))) if wrapped else name
        )
        justify: Literal["left", "right"] = "left" if text else "right"
        table.add_column(
            escape(head.replace("\u00a0", " ")), justify=justify, no_wrap=not text, overflow="fold"
        )
    for row in rows:
        table.add_row(*(escape(row[name]) for name in shown))
    Console(width=most or _needed(rows, shown, wrapped=False)).print(table)
    if left_out:
        typer.echo(f"Left out to fit {most} columns: {'; '.join(left_out)}.")


def fitted(
    rows: Rows, most: int | None, first_out: Sequence[str] = ()
) -> tuple[list[str], list[str]]:
    """The columns that fit this width, and those that are left out."""
    shown = list(rows[0])
    order = [*(name for name in first_out if name in shown), *reversed(shown[2:])]
    for name in dict.fromkeys(order):
        if most is None or _needed(rows, shown) <= most:
            break
        shown.remove(name)
    return shown, [name for name in rows[0] if name not in shown]


def turned(rows: Rows) -> Rows:
    """Rows and columns exchanged; the first column gives the names."""
    corner, *others = rows[0]
    return [{corner: name} | {row[corner]: row[name] for row in rows} for name in others]


def _needed(rows: Rows, shown: Sequence[str], wrapped: bool = True) -> int:
    """How wide these columns are, with headings and text wrapped or not."""

    def one(place: int, name: str) -> int:
        return (
            _column(rows, place, name)
            if wrapped
            else max(len(name), *(len(row[name]) for row in rows))
        )

    return sum(one(place, name) for place, name in enumerate(shown)) + GAP * (len(shown) - 1)


def _column(rows: Rows, place: int, name: str) -> int:
    """The least width of a column: of its values, or of the longest word in them if it is text, and
    in its heading.
    """
    values = [row[name] for row in rows]
    if place == 0 or name in WORDS:
        words = max(len(word) for value in values for word in value.split(" "))
        least = min(max(words, NARROWEST), max(map(len, values)))
    else:
        least = max(map(len, values))
    return max(least, *(len(word) for word in _kept(name).split(" ")))


def _kept(heading: str) -> str:
    """A number and its unit stay in one line."""
    return heading.replace(" %", "\u00a0%")


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
