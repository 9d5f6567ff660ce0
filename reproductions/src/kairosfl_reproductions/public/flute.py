"""FLUTE: the comparison in its README (microsoft/msrflute): FLUTE, FedML and Flower on the same
workload.
"""

from __future__ import annotations

from kairosfl_reproductions.item import Cell, Item

ITEMS = (
    Item(
        paper="public",
        name="flute-mnist",
        title="FLUTE, logistic regression on MNIST, 10 of 1,000 clients, 100 rounds",
        cells={
            "shards-fedavg": Cell(
                preset="flute-mnist-logistic",
                printed={"final": 81.0, "total_seconds": 95.0},
                comparable=False,
            ),
        },
        measures=("final", "total_seconds"),
        seeds=1,
        note="Published: FLUTE 1:35 min, FedML 3:09 min, Flower 1.0 1 h 22 min on two GPUs, at 80 to 81 %. Their "
        "clients come from FedML's files; ours have two shards each, so the accuracies are not compared.",
        hardware="GPUs, not stated which",
    ),
)
