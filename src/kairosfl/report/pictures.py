"""Plots as plain data, which the page draws in a browser and the export with matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from kairosfl.report.checked import Array
from kairosfl.wording import counted as counted

# What shading means, wherever it is drawn: in the page, in exported plots and in the overview.
BAND = "± standard deviation over seeds"
CRITICAL = "critical learning periods"

# Okabe and Ito's colours, without the yellow, which is hard to see on white: safe for colour-blind
# readers.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7F7F7F")

SECTIONS = {
    "result": "Result",
    "cost": "What it cost",
    "learning": "How it learnt",
    "signals": "What the server measured",
    "decisions": "What the server decided",
    "inside": "Inside one run",
}


@dataclass(frozen=True)
class Series:
    """One curve: mean, deviation and number of seeds at each x, and every seed's own values."""

    group: int
    x: Array
    mean: Array
    deviation: Array
    count: Array
    seeds: Array  # [seeds, points]
    name: str = ""  # if a group has several curves in one plot
    dashed: bool = False
    of: Sequence[bool] | None = None  # the seeds that the mean is of; None: all


@dataclass(frozen=True)
class Lines:
    """Curves over rounds, bytes or epochs."""

    key: str
    section: str
    title: str
    note: str
    x_label: str
    y_label: str
    series: tuple[Series, ...]
    percent: bool = False
    steps: bool = False  # a value holds for its whole round


@dataclass(frozen=True)
class HeatMap:
    """A value per cell of one group's first run, NaN for none; row 0 is drawn at the bottom."""

    key: str
    section: str
    title: str
    note: str
    group: int
    x_label: str
    y_label: str
    value_label: str
    x_range: tuple[float, float]  # of the first column's left edge and the last one's right edge
    y_range: tuple[float, float]
    grid: Array  # [rows, columns]
    names: tuple[str, ...] = ()  # of the rows, where they are not numbers
    power: float = 1.0  # the colour is proportional to share ** power of the span
    from_zero: bool = True  # else from the least value: for values that are close together
    scale: tuple[float, float] | None = None  # instead of both, if plots are to be compared

    @property
    def span(self) -> tuple[float, float]:
        """The values of the first and the last colour."""
        if self.scale:
            return self.scale
        low = float(np.nanmin(self.grid))
        high = float(np.nanmax(self.grid))
        if self.from_zero:
            low = min(0.0, low)
        return low, high


@dataclass(frozen=True)
class LeftOut:
    """A picture that is not drawn, and why; of one group, or of all."""

    section: str
    title: str
    why: str
    group: int | None = None


Picture = Lines | HeatMap


def colour(group: int) -> str:
    """The colour of a group."""
    return COLOURS[group % len(COLOURS)]


def letter(group: int) -> str:
    """The letter of a group, beside its colour: A to Z, then AA, AB and so on."""
    tens, ones = divmod(group, 26)
    before = letter(tens - 1) if tens else ""
    return before + chr(ord("A") + ones)
