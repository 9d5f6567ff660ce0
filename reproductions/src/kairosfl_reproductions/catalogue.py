"""The four papers' tables and figures, searches in their settings, and public benchmarks: what to
run and to compare.

One file per paper or source, data only. `kairosfl reproduce` lists the items, `kairosfl reproduce
PAPER/ITEM` runs one.
"""

from __future__ import annotations

import re

from kairosfl.errors import UserError, nearest
from kairosfl.wording import counted
from kairosfl_reproductions import alt, beyond, fedaware, fedcl, pa3fed, public
from kairosfl_reproductions.item import Cell, Item

ITEMS: dict[str, Item] = {
    item.key: item
    for paper in (fedaware, pa3fed, fedcl, alt, public, beyond)
    for item in paper.ITEMS
}


def find(name: str) -> Item:
    """The item called PAPER/ITEM."""
    if name not in ITEMS:
        word = name.rpartition("/")[2].lower()
        named = [
            key
            for key, item in ITEMS.items()
            if re.search(rf"\b{re.escape(word)}\b", item.title.lower())
        ]
        near = ", ".join([key for key in ITEMS if name in key.split("/")] or named)
        raise UserError(
            f"There is no item {name!r}; {f'choose one of {near}' if near else nearest(name, ITEMS)}"
        )
    return ITEMS[name]


def list_items() -> list[tuple[str, str]]:
    """Name and title of every item, with its number of cells and how many of them have a published
    value.
    """
    return [(name, f"{item.title} [{_size(item)}]") for name, item in ITEMS.items()]


def _size(item: Item) -> str:
    printed = sum(bool(cell.printed) for cell in item.cells.values())
    return f"{counted(len(item.cells), 'cell')}, " + (
        f"{printed} with published values" if printed else "no published numbers"
    )


__all__ = ["ITEMS", "Cell", "Item", "find", "list_items"]
