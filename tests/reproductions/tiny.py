"""An item of a paper that does not exist, on digits, small enough to run in a test."""

from __future__ import annotations

from kairosfl_reproductions.catalogue import Cell, Item

SECTIONS = {
    "data": {"name": "digits", "clients": 10, "partition": "dirichlet", "alpha": 0.5},
    "model": {"name": "mlp", "hidden": [8]},
    "train": {"rounds": 6, "cohort": 3, "epochs": 1, "batch_size": 32, "lr": 0.1},
    "run": {"checkpoint_every": 1, "device": "cpu", "engine": "loop"},
}


def cell(algorithm, printed, reading="text", baseline="", **sections):
    settings = {**SECTIONS, **sections, "algorithm": algorithm}
    return Cell(
        preset="fedaware-cifar10-cnn",
        settings=settings,
        printed={"last_tenth": printed},
        reading=reading,
        baseline=baseline,
    )


MISSING = {"data": {"name": "folder", "path": "there/is/no/such/folder", "clients": 10}}
ITEM = Item(
    paper="tiny",
    name="table1",
    title="Table 1: digits",
    cells={
        "digits-fedavg": cell("fedavg", 40.0),
        "digits-fedavgm": cell("fedavgm(beta=0.5)", 45.0, "half the momentum", "digits-fedavg"),
        "folder-fedavg": cell("fedavg", 50.0, **MISSING),
    },
    measures=("last_tenth", "rounds_to", "cohort"),
    seeds=2,
    claim="Momentum helps.",
)
