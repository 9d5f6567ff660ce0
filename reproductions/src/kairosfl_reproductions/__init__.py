"""The four papers' tables and figures, searches in their settings, and public benchmarks, with the
pages of results of this repository.

One file per paper or source, data only. `kairosfl reproduce` lists the items, `kairosfl reproduce
PAPER/ITEM` runs one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from kairosfl.lazy import attach

if TYPE_CHECKING:
    from kairosfl_reproductions.catalogue import ITEMS, find, list_items
    from kairosfl_reproductions.item import Cell, Item
else:
    __getattr__, __dir__ = attach(
        "kairosfl_reproductions",
        {
            "Cell": "kairosfl_reproductions.item",
            "ITEMS": "kairosfl_reproductions.catalogue",
            "Item": "kairosfl_reproductions.item",
            "find": "kairosfl_reproductions.catalogue",
            "list_items": "kairosfl_reproductions.catalogue",
        },
    )

__all__ = ["ITEMS", "Cell", "Item", "find", "list_items"]
