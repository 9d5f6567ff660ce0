"""Fleets from text or a file: how fast devices are, how much they differ, and when they are online."""

from __future__ import annotations

import csv
import json
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kairosfl.core.clock import Always, Availability, Fleet
from kairosfl.core.spec import Spec, parse
from kairosfl.core.streams import key, stream
from kairosfl.errors import UserError, nearest

MEGABIT = 125_000  # bytes
COLUMNS = ("seconds", "down", "up", "latency")  # of a file
SLACK = 1e-6  # for instants that are rounded
LONGEST = 10_000  # periods in a row that are looked at for one in which a device is online

# --- how much devices differ: factors of the seconds, with a mean of 1 ---


class Distribution(Spec, ABC):
    """How much slower than the mean a device is."""

    @abstractmethod
    def draw(self, draw: np.random.Generator, count: int) -> np.ndarray:
        """So many factors."""

    def __call__(self, draw: np.random.Generator) -> float:
        """One factor."""
        return float(self.draw(draw, 1)[0])


@dataclass(frozen=True, kw_only=True)
class Equal(Distribution):
    """All devices are as fast as each other."""

    def draw(self, draw: np.random.Generator, count: int) -> np.ndarray:
        """Ones."""
        return np.ones(count)


@dataclass(frozen=True, kw_only=True)
class Lognormal(Distribution):
    """Most are near the mean, and some are many times slower.

    Args:
        sigma: Of the logarithm.
    """

    sigma: float = 1.0

    def __post_init__(self) -> None:
        self.check("sigma", self.sigma >= 0, "use 0 or more")

    def draw(self, draw: np.random.Generator, count: int) -> np.ndarray:
        """Factors with a mean of 1."""
        return np.exp(self.sigma * draw.standard_normal(count) - self.sigma**2 / 2)


@dataclass(frozen=True, kw_only=True)
class Halfnormal(Distribution):
    """The distance of a normal number from its mean, as in FLSim's experiments."""

    def draw(self, draw: np.random.Generator, count: int) -> np.ndarray:
        """Factors with a mean of 1."""
        return np.abs(draw.standard_normal(count)) * math.sqrt(math.pi / 2)


@dataclass(frozen=True, kw_only=True)
class Exponential(Distribution):
    """Durations without a memory."""

    def draw(self, draw: np.random.Generator, count: int) -> np.ndarray:
        """Factors with a mean of 1."""
        return draw.standard_exponential(count)


@dataclass(frozen=True, kw_only=True)
class Pareto(Distribution):
    """A few devices are slower than all others together.

    Args:
        a: The smaller, the heavier the tail; above 1.
    """

    a: float = 1.5

    def __post_init__(self) -> None:
        self.check("a", self.a > 1, "use a number above 1; the mean is infinite otherwise")

    def draw(self, draw: np.random.Generator, count: int) -> np.ndarray:
        """Factors with a mean of 1."""
        return (self.a - 1) / self.a * (1 + draw.pareto(self.a, count))


@dataclass(frozen=True, kw_only=True)
class Tiers(Distribution):
    """A few kinds of devices.

    Args:
        factors: How much longer each kind takes; their mean need not be 1.
        shares: How large a share of the devices each kind has; empty: equal shares.
    """

    factors: tuple[float, ...] = (0.5, 1.0, 2.0)
    shares: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        positive = bool(self.factors) and min(self.factors) > 0
        self.check("factors", positive, "use numbers above 0")
        fits = not self.shares or len(self.shares) == len(self.factors)
        self.check("shares", fits, "use as many as there are factors")
        self.check("shares", not self.shares or min(self.shares) > 0, "use numbers above 0")

    def draw(self, draw: np.random.Generator, count: int) -> np.ndarray:
        """Factors of these kinds."""
        shares = np.array(self.shares or [1.0] * len(self.factors))
        return draw.choice(np.array(self.factors), size=count, p=shares / shares.sum())


# --- when they are online ---


def uniform(seed: int, clients: np.ndarray, period: np.ndarray | int) -> np.ndarray:
    """A number from 0 to 1 for each client in each period: a function of the three alone."""
    word = np.uint64(seed) ^ (clients.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15))
    word = word + np.asarray(period, dtype=np.uint64) * np.uint64(0xD1342543DE82EF95)
    word = (word ^ (word >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    word = (word ^ (word >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    word = word ^ (word >> np.uint64(31))
    drawn: np.ndarray = (word >> np.uint64(11)).astype(np.float64) / 2**53
    return drawn


class Pattern(Spec, ABC):
    """When devices are online, as text."""

    @abstractmethod
    def of(self, seed: int) -> Availability:
        """For the devices of a run with this seed."""


@dataclass(frozen=True, kw_only=True)
class AlwaysOnline(Pattern):
    """Devices are always online."""

    @classmethod
    def name(cls) -> str:
        """As it is written."""
        return "always"

    def of(self, seed: int) -> Availability:
        """The same for every seed."""
        return Always()


@dataclass(frozen=True, kw_only=True)
class Bernoulli(Pattern):
    """A coin decides for each device and each period.

    Args:
        p: The chance of being online.
        every: Seconds of a period.
    """

    p: float = 0.5
    every: float = 3600.0

    def __post_init__(self) -> None:
        self.check("p", 0 <= self.p <= 1, "use a number between 0 and 1")
        self.check("every", self.every > 0, "use a number above 0")

    def of(self, seed: int) -> Availability:
        """The coins of this seed."""
        return Coins(self.p, self.every, key(seed, "availability") % 2**64)


@dataclass(frozen=True)
class Coins:
    """Periods in which a device is online, or is not."""

    p: float
    every: float
    seed: int

    def _online(self, clients: np.ndarray, period: int) -> np.ndarray:
        coins: np.ndarray = uniform(self.seed, clients, period) < self.p
        return coins

    def next_online(self, clients: np.ndarray, time: float) -> np.ndarray:
        """The beginning of the first period in which each is online, or now."""
        return self._first(clients, time, wanted=True)

    def online_until(self, clients: np.ndarray, time: float) -> np.ndarray:
        """The beginning of the first period in which each is not."""
        return self._first(clients, time, wanted=False)

    def _first(self, clients: np.ndarray, time: float, *, wanted: bool) -> np.ndarray:
        moments = np.full(len(clients), math.inf)
        if self.p == (0.0 if wanted else 1.0):
            return moments
        searching = np.arange(len(clients))
        period = math.floor(time / self.every + SLACK)
        for number in range(period, period + LONGEST):
            found = self._online(clients[searching], number) == wanted
            moments[searching[found]] = max(time, number * self.every)
            searching = searching[~found]
            if not len(searching):
                break
        return moments


@dataclass(frozen=True, kw_only=True)
class Diurnal(Pattern):
    """Each device is online for some hours of the day, from an hour of its own on.

    Args:
        hours: For how long each day.
        spread: Over how many hours of the day the devices' first hours are spread; 24: evenly over
            the day, 0: all devices come at once.
    """

    hours: float = 8.0
    spread: float = 24.0

    def __post_init__(self) -> None:
        self.check("hours", 0 < self.hours <= 24, "use a number above 0, at most 24")
        self.check("spread", 0 <= self.spread <= 24, "use a number between 0 and 24")

    def of(self, seed: int) -> Availability:
        """With the first hours of this seed."""
        return Days(self.hours * 3600, self.spread * 3600, key(seed, "availability") % 2**64)


@dataclass(frozen=True)
class Days:
    """The same span of every day."""

    seconds: float
    spread: float
    seed: int
    day: float = 86400.0

    def _since(self, clients: np.ndarray, time: float) -> np.ndarray:
        """Seconds since each client's last first hour."""
        first = uniform(self.seed, clients, 0) * self.spread
        since: np.ndarray = np.mod(time - first, self.day)
        since[self.day - since < SLACK] = 0.0  # at a first hour, whatever was rounded
        return since

    def next_online(self, clients: np.ndarray, time: float) -> np.ndarray:
        """Now, or the client's first hour of its next day."""
        since = self._since(clients, time)
        return np.where(since < self.seconds, time, time + self.day - since)

    def online_until(self, clients: np.ndarray, time: float) -> np.ndarray:
        """The end of the client's day."""
        if self.seconds >= self.day:
            return np.full(len(clients), math.inf)
        return time + self.seconds - self._since(clients, time)


DEVICES: dict[str, type[Spec]] = {
    made.name(): made for made in (Equal, Lognormal, Halfnormal, Exponential, Pareto, Tiers)
}
AVAILABILITY: dict[str, type[Spec]] = {
    made.name(): made for made in (AlwaysOnline, Bernoulli, Diurnal)
}

# --- a fleet ---


def fleet_of(
    devices: str,
    clients: int,
    seed: int,
    *,
    seconds: float = 0.01,
    down: float = 0.0,
    up: float = 0.0,
    latency: float = 0.0,
    availability: str = "always",
    dropout: float = 0.0,
    redraw: bool = False,
) -> Fleet:
    """The fleet of a run.

    Args:
        devices: How much devices differ, such as "lognormal(sigma=1.0)", or a CSV or JSON file.
        clients: How many there are.
        seed: Of the run.
        seconds: Of training on one sample, on an average device.
        down: Mbit/s that a device receives; 0: receiving takes no time.
        up: Mbit/s that it sends; 0: sending takes no time.
        latency: Seconds that every order takes in addition.
        availability: When devices are online, such as "bernoulli(p=0.3)".
        dropout: The chance that a device drops out in the middle of an order.
        redraw: Whether a device's speed is drawn anew for every order.
    """
    pattern = _one("fleet.availability", availability, AVAILABILITY)
    assert isinstance(pattern, Pattern)
    settings: dict[str, Any] = {
        "seconds": seconds,
        "down": down * MEGABIT or math.inf,
        "up": up * MEGABIT or math.inf,
        "latency": latency,
        "availability": pattern.of(seed),
        "dropout": dropout,
    }
    if devices.endswith((".csv", ".json")):
        return Fleet(clients, **settings | _read(Path(devices), clients))
    distribution = _one("fleet.devices", devices, DEVICES)
    assert isinstance(distribution, Distribution)
    if redraw:
        return Fleet(clients, **settings, varies=distribution)
    factors = distribution.draw(stream(seed, "fleet"), clients)
    return Fleet(clients, **settings | {"seconds": seconds * factors})


def check(devices: str, availability: str) -> None:
    """Refuse text that names no devices or no availability."""
    if not devices.endswith((".csv", ".json")):
        _one("fleet.devices", devices, DEVICES)
    _one("fleet.availability", availability, AVAILABILITY)


def _one(kind: str, text: str, known: dict[str, type[Spec]]) -> Spec:
    specs = parse(kind, text, known)
    if len(specs) > 1:
        raise UserError(f"{kind} = {text!r} names {len(specs)}; give one of them.")
    return specs[0]


def _read(path: Path, clients: int) -> dict[str, np.ndarray]:
    """The columns of a file with a row for each client."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise UserError(
            f"fleet.devices = {str(path)!r} cannot be read: {error.strerror}."
        ) from None
    rows = _rows(path, text)
    if len(rows) != clients:
        raise UserError(
            f"fleet.devices = {str(path)!r} has {len(rows)} devices, but there are {clients} clients; "
            "give a row for each."
        )
    names = list(rows[0]) if rows else []
    for name in names:
        if name not in COLUMNS:
            raise UserError(
                f"fleet.devices = {str(path)!r} has a column {name!r}; {nearest(name, COLUMNS)}"
            )
    columns: dict[str, np.ndarray] = {}
    for name in names:
        try:
            columns[name] = np.array([float(row[name]) for row in rows])
        except (KeyError, TypeError, ValueError):
            raise UserError(
                f"fleet.devices = {str(path)!r}: {name!r} is not a number in every row."
            ) from None
    for name in ("down", "up"):
        if name in columns:
            columns[name] = columns[name] * MEGABIT
    return columns


def _rows(path: Path, text: str) -> Sequence[dict[str, Any]]:
    if path.suffix == ".csv":
        return list(csv.DictReader(text.splitlines()))
    try:
        rows = json.loads(text)
    except ValueError as error:
        raise UserError(f"fleet.devices = {str(path)!r} is not valid JSON: {error}.") from None
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise UserError(
            f"fleet.devices = {str(path)!r} must be a list with an object for each client."
        )
    return rows
