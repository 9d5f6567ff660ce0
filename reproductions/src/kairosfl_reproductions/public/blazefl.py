"""BlazeFL: its benchmark repository (blazefl/benchmarks), CVPR Workshops 2026. A clock, not an
accuracy.
"""

from __future__ import annotations

from kairosfl_reproductions.item import Cell, Item

ITEMS = (
    Item(
        paper="public",
        name="blazefl",
        title="BlazeFL, CIFAR-10, all of 100 clients, two shards each, 5 rounds of 5 epochs",
        cells={
            "shards-fedavg": Cell(preset="blazefl-cifar10-lenet", printed={"total_seconds": 30.0}),
        },
        measures=("final", "total_seconds"),
        seeds=1,
        note="The published seconds are read off a plot: about 30 for BlazeFL at its best and about 93 for Flower.",
        hardware="not stated (seconds read off a plot)",
    ),
)
