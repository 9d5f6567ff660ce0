"""What devices the clients have, and how long an order takes on them.

    seconds = latency + bytes down / down + work / speed + bytes up / up

A fleet is data: one number for each client. Everything that it draws is a function of (seed,
client, round), so that the clock of a run repeats on every engine and after every interruption.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from kairosfl.core.fields import (
    NUMBER_BYTES,
    Briefs,
    Reports,
    fields,
)
from kairosfl.core.layout import Layout
from kairosfl.core.streams import stream
from kairosfl.errors import UserError

TRAINING = 3  # forward passes that training on a sample costs: a backward pass counts as two
Numbers = np.ndarray  # [N] float64: one for each client


class Availability(Protocol):
    """When devices are online. Times are seconds of the clock, and answers may be infinite."""

    def next_online(self, clients: np.ndarray, time: float) -> np.ndarray:
        """For each client, the first instant from `time` on at which it is online."""
        ...

    def online_until(self, clients: np.ndarray, time: float) -> np.ndarray:
        """For each client that is online at `time`, the instant at which it goes offline."""
        ...


@dataclass(frozen=True)
class Always:
    """Devices that are always online."""

    def next_online(self, clients: np.ndarray, time: float) -> np.ndarray:
        """Now."""
        return np.full(len(clients), time)

    def online_until(self, clients: np.ndarray, time: float) -> np.ndarray:
        """For ever."""
        return np.full(len(clients), math.inf)


class Variation(Protocol):
    """What changes from one order of a device to its next."""

    def __call__(self, draw: np.random.Generator) -> float:
        """The factor of the seconds that the work of one order takes."""
        ...


@dataclass(frozen=True, eq=False)
class Fleet:
    """The devices of all clients. A single number is the same for each of them.

    Args:
        clients: How many there are.
        seconds: What one unit of work takes: the reciprocal of the speed.
        unit: Units of work in training on one sample once: 1, where `seconds` is of a sample, or
            the floating-point operations, where it is of one of those.
        down: Bytes per second that a device receives.
        up: Bytes per second that it sends.
        latency: Seconds that every order takes in addition.
        availability: When devices are online.
        varies: A factor of the work's seconds that is drawn for every order.
        dropout: The chance that a device drops out in the middle of an order.
    """

    clients: int
    seconds: Numbers | float = 1.0
    unit: float = 1.0
    down: Numbers | float = math.inf
    up: Numbers | float = math.inf
    latency: Numbers | float = 0.0
    availability: Availability = Always()
    varies: Variation | None = None
    dropout: float = 0.0

    def __post_init__(self) -> None:
        for name in ("seconds", "down", "up", "latency"):
            numbers = np.asarray(getattr(self, name), dtype=np.float64)
            if numbers.ndim and numbers.shape != (self.clients,):
                raise UserError(
                    f"fleet.{name} has the shape {numbers.shape}, but there are {self.clients} "
                    "clients; give one number for each."
                )
            self._check(name, bool((numbers >= 0).all()), "0 or more for every client")
            object.__setattr__(self, name, np.broadcast_to(numbers, (self.clients,)))
        for name in ("down", "up"):
            self._check(name, bool((getattr(self, name) > 0).all()), "above 0 for every client")
        self._check("unit", 0 < self.unit < math.inf, "a number above 0")
        self._check("dropout", 0 <= self.dropout <= 1, "between 0 and 1")

    def _check(self, name: str, holds: bool, wanted: str) -> None:
        if not holds:
            raise UserError(f"fleet.{name} must be {wanted}.")

    def takes(
        self,
        seed: int,
        round: np.ndarray,
        clients: np.ndarray,
        samples: np.ndarray,
        bytes_down: np.ndarray,
        bytes_up: np.ndarray,
    ) -> np.ndarray:
        """The seconds from sending an order to its landing, for each of these clients.

        Args:
            seed: Of the run.
            round: Of each order: the rounds that were done when it was sent.
            clients: Who is asked.
            samples: How often each of them trains on a sample.
            bytes_down: Of the message to each client.
            bytes_up: Of each client's answer.
        """
        work = samples * self.unit * np.asarray(self.seconds)[clients]
        if self.varies is not None:
            work = work * self._factors(seed, round, clients)
        sending = bytes_down / np.asarray(self.down)[clients]
        answering = bytes_up / np.asarray(self.up)[clients]
        taken: np.ndarray = np.asarray(self.latency)[clients] + sending + work + answering
        return taken

    def _factors(self, seed: int, round: np.ndarray, clients: np.ndarray) -> np.ndarray:
        """The factor of each order."""
        assert self.varies is not None
        draws = zip(round.tolist(), clients.tolist(), strict=True)
        factors = [self.varies(stream(seed, "order", number, client)) for number, client in draws]
        return np.array(factors)

    def ends(
        self, seed: int, round: np.ndarray, clients: np.ndarray, time: float, seconds: np.ndarray
    ) -> np.ndarray:
        """When each device goes offline or drops out in the middle of an order sent at `time`.

        Infinite, where the order, which takes so many `seconds`, ends before.
        """
        ends = self.availability.online_until(clients, time)
        if self.dropout:
            orders = zip(round.tolist(), clients.tolist(), strict=True)
            drawn = [stream(seed, "dropping out", *order).random(2) for order in orders]
            chance, share = np.array(drawn).reshape(-1, 2).T
            drops = (chance < self.dropout) & np.isfinite(seconds)
            ends = np.where(drops, np.minimum(ends, time + share * seconds), ends)
        return np.where(ends < time + seconds, ends, math.inf)


# --- what an order costs ---


def samples_of(briefs: Briefs, n: np.ndarray, steps: np.ndarray | None = None) -> np.ndarray:
    """How often each client trains on a sample, with every other pass as a part of that, `[m]`.

    A pass forward alone is a third of training.

    Args:
        briefs: What the clients are told.
        n: Samples that each has.
        steps: What each did, where a rule may have stopped it; otherwise all that it was told.
    """
    work = briefs.work(n)
    done = work.steps if steps is None else steps
    passes = work.passes(done, classes=1, anew=True)
    forward_passes = passes.forward + (TRAINING - 1) * passes.backward
    samples: np.ndarray = forward_passes / TRAINING
    return samples


def least_steps(briefs: Briefs, n: np.ndarray) -> np.ndarray | None:
    """The fewest steps after which a stop rule may end each client; None: none can."""
    if briefs.stop_below is None:
        return None
    work = briefs.work(n)
    least = 1 if briefs.stop_per == "batch" else work.epoch.steps
    fewest: np.ndarray = np.minimum(least, work.steps)
    return fewest


def message_bytes(briefs: Briefs, layout: Layout, itemsize: int) -> tuple[np.ndarray, np.ndarray]:
    """Of the message to each client, and of its answer before there are reports, `[m]` each."""
    numbers = briefs.numbers() * NUMBER_BYTES
    vector = _lengths(briefs, layout) * itemsize
    others = (
        briefs.bytes(layout, itemsize) - numbers - briefs.vectors_down() * layout.size * itemsize
    )
    down = briefs.vectors_down() * vector + others
    if briefs.coded is not None:
        down = briefs.coded.numpy()

    # --- what a report will have ---
    vectors, columns = 0, 0
    for entry in fields(Reports):
        always = entry.default is not None
        if entry.travels and (always or (entry.when and entry.asked(briefs))):  # type: ignore[arg-type]
            columns += entry.number
            vectors += not entry.number
    vectors = 0 if briefs.measures_only() else vectors
    return down + numbers, vectors * vector + columns * NUMBER_BYTES


def _lengths(briefs: Briefs, layout: Layout) -> np.ndarray:
    """How many numbers of the model each client has."""
    if briefs.rank is None:
        return np.full(len(briefs), layout.size)
    return np.array([layout.size_at(rank) for rank in briefs.rank.tolist()])
