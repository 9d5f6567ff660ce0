"""What the sketches of algorithms share: a run that is driven by hand, and clients in numpy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from test_visits import ENGINES, LR, SIZES, slope, task

from kairosfl.core.fields import Briefs
from kairosfl.core.recipe import Recipe
from kairosfl.core.round import brief, conclude, drive, rounds
from kairosfl.core.rule import Algorithm, Rule, State, changed
from kairosfl.core.run import Run, Setup, upcoming

SHARES = np.array(SIZES) / sum(SIZES)


class Order(NamedTuple):
    """One client's brief on its way, with what rules sent along."""

    briefs: Briefs
    sent: dict[int, State]


class Hand:
    """A run of which the orders are sent, and land, one by one, as a clock would have it."""

    def __init__(self, rule: Rule, engine: str, *, size: int, epochs: int = 1) -> None:
        job = task()
        how = Recipe(rounds=99, cohort=size, batch_size=8, lr=LR, epochs=epochs)
        self.size = size
        self.setup = Setup(Algorithm((rule,)), how, len(SIZES), job.layout)
        self.engine = ENGINES[engine](job)
        self.run = Run.start(job.start(), self.setup, seed=0)

    @property
    def x(self) -> np.ndarray:
        return self.run.x.numpy().copy()

    def send(self, client: int) -> Order:
        """An order of the model as it is now."""
        now = changed(upcoming(self.run, self.setup), size=self.size)
        return Order(*brief(self.run, self.setup, now, torch.tensor([client])))

    def land(self, *orders: Order) -> None:
        """One round of orders of any versions, which train together."""
        briefs = Briefs.join([order.briefs for order in orders])
        reports = self.engine.train(briefs)
        now = changed(upcoming(self.run, self.setup), size=self.size)
        self.run = conclude(self.run, self.setup, now, briefs, reports, _together(orders))


def _together(orders: Sequence[Order]) -> dict[int, State]:
    """What was sent along, in the order of the client ids."""
    by_id = sorted(orders, key=lambda order: int(order.briefs.ids[0]))
    return {
        rule: {name: torch.cat([order.sent[rule][name] for order in by_id]) for name in rows}
        for rule, rows in by_id[0].sent.items()
    }


def trained(
    x: np.ndarray, client: int, steps: int = 1, *, push: np.ndarray | float = 0.0
) -> np.ndarray:
    """The model of a client after so many steps on all of its samples."""
    w = x.copy()
    for _ in range(steps):
        w = w - LR * (slope(w, client) + push)
    return w


def course(
    rule: Rule, engine: str, own: tuple[str, ...] = (), number: int = 3, **recipe: object
) -> Iterator[Run]:
    """The run after every round; what clients keep is overwritten by the next."""
    job = task(own)
    how = Recipe(rounds=number, cohort=len(SIZES), batch_size=8, lr=LR, **recipe)  # type: ignore[arg-type]
    setup = Setup(Algorithm((rule,)), how, len(SIZES), job.layout, own=job.own_start())
    return drive(rounds(Run.start(job.start(), setup, seed=0), setup), ENGINES[engine](job))
