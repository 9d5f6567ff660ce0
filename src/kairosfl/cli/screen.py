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
    """Columns of the terminal, or as COLUMNS says; None where output goes elsewhere."""
    if not (sys.stdout.isatty() or os.environ.get("COLUMNS")):
        return None
    return max(40, shutil.get_terminal_size().columns)


def print_comparison(comparison: Comparison, columns: Sequence[str] | None = None) -> None:
    """The table of results and the notes on its rows; what is damaged goes to standard error."""
    from kairosfl.report.verdict import target_words

    rows = comparison.table(columns)
    first_out: list[str] = []
    if columns is None:
        heads = list(rows[0])
        first_out = [heads[place] for place in _COMPARED]
    print_rows(rows, first_out=first_out)
    if columns is None and not comparison.given and len(rows) > 1:
        target = target_words(comparison.rows, comparison.target, given=False)
        typer.echo(f"Target: {target}; --target sets another.")
    for note in comparison.notes():
        typer.echo(note)
    for sentence in comparison.damaged:
        typer.echo(f"kairosfl: {sentence}", err=True)


def print_rows(rows: Rows, first_out: Sequence[str] = (), turn: bool = False) -> None:
    """A table; if too wide, text is wrapped, then columns are left out, but not the first two.

    Those named are left out first, then others from the right. With `turn`, rows and columns are
    exchanged before.
    """
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    most = width()
    if most and turn and _needed(rows, list(rows[0])) > most:
        rows = turned(rows)
    names, left_out = fitted(rows, most, first_out)
    full = _needed(rows, names, wrapped=False)
    is_wrapped = most is not None and full > most
    table = Table(box=None, header_style="bold", pad_edge=False)
    for place, name in enumerate(names):
        is_text = place == 0 or name in WORDS
        head = name
        if is_wrapped:
            head = "\n".join(textwrap.wrap(_kept(name), _column(rows, place, name)))
        head = escape(head.replace("\u00a0", " "))
        justify: Literal["left", "right"] = "left" if is_text else "right"
        table.add_column(head, justify=justify, no_wrap=not is_text, overflow="fold")
    for row in rows:
        table.add_row(*(escape(row[name]) for name in names))
    Console(width=full if most is None else most).print(table)
    if left_out:
        typer.echo(f"Left out to fit {most} columns: {'; '.join(left_out)}.")


def fitted(
    rows: Rows, most: int | None, first_out: Sequence[str] = ()
) -> tuple[list[str], list[str]]:
    """The columns that fit this width, and those that are left out."""
    names = list(rows[0])
    order = [name for name in first_out if name in names]
    order += reversed(names[2:])
    left_out = []
    for name in dict.fromkeys(order):
        if most is None or _needed(rows, names) <= most:
            break
        names.remove(name)
        left_out.append(name)
    return names, sorted(left_out, key=list(rows[0]).index)


def turned(rows: Rows) -> Rows:
    """Rows and columns exchanged; the first column gives the names."""
    corner, *others = rows[0]
    return [{corner: name} | {row[corner]: row[name] for row in rows} for name in others]


def _needed(rows: Rows, names: Sequence[str], wrapped: bool = True) -> int:
    """How wide these columns are, with headings and text wrapped or not."""
    total = GAP * (len(names) - 1)
    for place, name in enumerate(names):
        if wrapped:
            total += _column(rows, place, name)
        else:
            total += max(len(name), *(len(row[name]) for row in rows))
    return total


def _column(rows: Rows, place: int, name: str) -> int:
    """The least width of a column: of its values, for text of their words, and of its heading."""
    values = [row[name] for row in rows]
    if place == 0 or name in WORDS:
        words = " ".join(values).split(" ")
        least = min(max(NARROWEST, *map(len, words)), max(map(len, values)))
    else:
        least = max(map(len, values))
    return max(least, *map(len, _kept(name).split(" ")))


def _kept(heading: str) -> str:
    """A number and its unit stay in one line."""
    return heading.replace(" %", "\u00a0%")


def print_pairs(rows: Sequence[tuple[str, str]], as_json: bool) -> None:
    """Names with a line on each, which is wrapped next to its name on a terminal."""
    if as_json:
        typer.echo(json.dumps(dict(rows), indent=1))
        return
    longest = max(map(len, dict(rows)))
    most = width()
    place = longest + GAP
    for name, line in rows:
        if most is None:
            typer.echo(f"{name:<{place}}{line}".rstrip())
        elif longest > most // 2:  # the name in a line of its own
            typer.echo(name)
            typer.echo(textwrap.indent(textwrap.fill(line, most - 4), " " * 4))
        else:
            lines = textwrap.wrap(line, most - place, break_on_hyphens=False)
            typer.echo(f"{name:<{place}}" + f"\n{'':<{place}}".join(lines))
