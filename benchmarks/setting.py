"""The settings of the studies in one place: what data, how many clients, and how they train.

The scripts in the folders put this one on their path:
`sys.path.insert(0, str(Path(__file__).parents[1]))`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from kairosfl import (
    Batched,
    DataSet,
    Population,
    Recipe,
    Run,
    Setup,
    Task,
    data,
    drive,
    models,
    parse,
    rounds,
)
from kairosfl.detectors import FGN
from kairosfl.engines.protocol import Engine
from kairosfl.tasks.partitions import partition


@dataclass(frozen=True, kw_only=True)
class Setting:
    """A data set among clients, and the recipe. With `alpha` None, clients are alike."""

    data: str = "digits"
    clients: int
    alpha: float | None
    rounds: int
    cohort: int
    epochs: int
    batch_size: int
    lr: float

    def dataset(self) -> DataSet:
        return load(self.data)

    def population(self, seed: int) -> Population:
        if self.alpha is None:
            return partition(self.dataset(), name="iid", clients=self.clients, seed=seed)
        return partition(
            self.dataset(), name="dirichlet", clients=self.clients, seed=seed, alpha=self.alpha
        )

    def task(self, seed: int, clients: Population | None = None) -> Task:
        """An MLP on the data, with these clients instead of those of the setting if given."""
        if clients is None:
            clients = self.population(seed)
        dataset = self.dataset()
        model = models.build("mlp", shape=dataset.shape, classes=dataset.classes, seed=seed)
        return Task(model, dataset, clients)

    def recipe(self, **changes: Any) -> Recipe:
        keys = ("rounds", "cohort", "epochs", "batch_size", "lr")
        own = {key: getattr(self, key) for key in keys}
        return Recipe(**(own | changes))


# Pairs of rules (studies/pairs.py).
PAIRS = Setting(clients=40, alpha=0.3, rounds=60, cohort=8, epochs=2, batch_size=16, lr=0.05)
# Clients that lie (studies/lies.py, studies/attacks.py): everyone takes part in every round.
LIES = Setting(clients=10, alpha=None, rounds=25, cohort=10, epochs=1, batch_size=32, lr=0.2)
# Windows of averaged models (studies/averaging.py).
AVERAGING = {
    "digits": Setting(clients=40, alpha=0.1, rounds=100, cohort=8, epochs=2, batch_size=16, lr=0.1),
    "fashion_mnist": Setting(
        data="fashion_mnist",
        clients=200,
        alpha=0.1,
        rounds=100,
        cohort=8,
        epochs=1,
        batch_size=32,
        lr=0.1,
    ),
}
# FedAWARE's solvers (studies/aware_solver.py), as a configuration.
SOLVERS: dict[str, Any] = {
    "data": {"name": "digits", "clients": 60, "alpha": 0.1},
    "model": {"name": "mlp"},
    "train": {"rounds": 120, "cohort": 6, "epochs": 3, "batch_size": 16, "lr": 0.02},
}
# The pictures of docs/gallery.md (gallery.py), as a configuration.
GALLERY: dict[str, Any] = {
    "data": {"clients": 40, "alpha": 0.1},
    "train": {"rounds": 60, "cohort": 8, "epochs": 2, "batch_size": 16},
    "run": {
        "engine": "batched",
        "device": "cpu",
        "detector": "fgn.paired()",
        "checkpoint_every": 60,
    },
}


@cache
def load(name: str) -> DataSet:
    return data.load(name)


def begin(
    engine: Batched, algorithm: str, recipe: Recipe, seed: int, through: Engine | None = None
) -> tuple[Setup, Iterator[Run]]:
    """A run, and its states after each round; `through` is an engine around this one."""
    task = engine.task
    setup = Setup(parse(algorithm), recipe, len(task.clients), task.layout, detectors=(FGN(),))
    run = Run.start(engine.start(), setup, seed=seed)
    if through is None:
        through = engine
    return setup, drive(rounds(run, setup), through)
