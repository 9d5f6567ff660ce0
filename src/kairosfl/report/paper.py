"""Figures as a paper prints them: its column's width, no title, labels in words, and a caption that
names the bands.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from kairosfl.errors import UserError
from kairosfl.report import draw
from kairosfl.report.figures import smoothed
from kairosfl.report.pictures import BAND, CRITICAL, HeatMap, Lines, Picture, counted
from kairosfl.report.read import Group

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.figure import Figure

COLUMN = 3.25  # inches: a column of ICML; NeurIPS and ICLR have one of 5.5
ASPECT = 0.62  # height of a panel by its width
_INCHES = {
    "in": 1.0,
    "cm": 1 / 2.54,
    "mm": 1 / 25.4,
    "pt": 1 / 72.27,
    "bp": 1 / 72,
}  # pt as TeX has it
_LARGEST = 100  # inches
_FONTS = {
    "sans": {"font.family": "sans-serif"},
    "serif": {
        "font.family": "STIXGeneral",
        "mathtext.fontset": "stix",
    },  # looks like Times, and comes with matplotlib
}
_PRINT = {
    "font.size": 8,
    "xtick.labelsize": 7,
    "ytick.labelsize": 7,
    "legend.fontsize": 7,
    "axes.linewidth": 0.6,
    "xtick.major.width": 0.6,
    "ytick.major.width": 0.6,
    "lines.linewidth": 1.1,
    "lines.markersize": 3,
    "legend.handlelength": 2.4,
    "legend.columnspacing": 1.2,
}


@dataclass(frozen=True, kw_only=True)
class Page:
    """How a figure is to look; lengths in inches."""

    width: float = COLUMN
    height: float | None = None  # by default from the width, the number of panels and the legend
    font: str = "sans"
    critical: bool = False  # whether critical learning periods are shaded
    followed: bool = False  # only those of detectors that a rule follows, or that were asked for
    y_range: tuple[float, float] | None = None  # of the first panel, as its axis shows it
    smooth: int = 1  # how many neighbouring points a mean is taken of

    def __post_init__(self) -> None:
        if self.font not in _FONTS:
            raise UserError(f"font = {self.font!r} is not known; use {' or '.join(_FONTS)}.")
        if self.smooth < 1:
            raise UserError(f"smooth = {self.smooth} is not a number of points; use 1 or more.")

    def style(self) -> AbstractContextManager[None]:
        """To draw and save in."""
        return draw.style(**_PRINT, **_FONTS[self.font], **draw.EMBEDDED)


def inches(text: str) -> float:
    """A length in the unit of the paper: 3.25in, 8.4cm, 84mm or 234pt."""
    found = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*(in|cm|mm|pt|bp)\s*", text)
    size = float(found[1]) * _INCHES[found[2]] if found else math.nan
    if not 0.5 <= size <= _LARGEST:
        raise UserError(
            f"{text!r} is not a length for a figure; give one with its unit: 3.25in, 8.4cm, 84mm or 234pt."
        )
    return size


def limits(text: str) -> tuple[float, float]:
    """The ends of an axis: 60:75."""
    low, _, high = text.partition(":")
    try:
        ends = float(low), float(high)
    except ValueError:
        ends = math.nan, math.nan
    if not -math.inf < ends[0] < ends[1] < math.inf:
        raise UserError(
            f"{text!r} is not a range of the y-axis; give LOW:HIGH as the axis shows them, such as 60:75."
        )
    return ends


def write_figure(
    pictures: Sequence[Picture],
    groups: Sequence[Group],
    names: Sequence[str],
    path: Path,
    page: Page,
) -> str:
    """Draw these pictures side by side into a PDF, SVG or PNG; returns a caption."""
    kind = draw.picture_kind(path)
    with page.style():
        draw.save(make_figure(pictures, groups, names, page), path, kind, dpi=600)
    return caption(pictures, groups, names, page)


def make_figure(
    pictures: Sequence[Picture], groups: Sequence[Group], names: Sequence[str], page: Page
) -> Figure:
    """The pictures side by side with one legend above them; to be called within `page.style()`."""
    figure = draw.new_figure(page.width, page.height or ASPECT * page.width / len(pictures))
    entries: dict[str, Artist] = {}
    for axes, picture in zip(
        figure.subplots(1, len(pictures), squeeze=False)[0], pictures, strict=True
    ):
        if isinstance(picture, HeatMap):
            draw.draw_heat(figure, axes, picture)
            continue
        draw.draw_lines(axes, smoothed(picture, page.smooth), names)
        strips = (
            draw.shade(axes, draw.periods(picture, groups, followed=page.followed))
            if page.critical
            else ""
        )
        handles, labels = axes.get_legend_handles_labels()
        entries |= dict(zip(labels, handles, strict=True)) if len(labels) > 1 else {}
        entries |= {
            str(each.get_label()): each for each in draw.explained(bands=False, strips=strips)
        }
    if page.y_range:
        figure.axes[0].set_ylim(*page.y_range)
    if entries:
        columns = draw.legend_columns(list(entries), page.width, 7)
        figure.legend(entries.values(), entries.keys(), loc="outside upper center", ncols=columns)
        if page.height is None:  # the legend takes nothing from the panels
            figure.set_figheight(figure.get_figheight() + 0.15 * math.ceil(len(entries) / columns))
    return figure


def caption(
    pictures: Sequence[Picture], groups: Sequence[Group], names: Sequence[str], page: Page
) -> str:
    """What the figure shows, and what lines, bands and shading are, for the paper's text."""
    shown = [_shown(picture, names) for picture in pictures]
    text = f"{shown[0]}." if len(shown) == 1 else f"From left to right: {'; '.join(shown)}."
    lines = [picture for picture in pictures if isinstance(picture, Lines)]
    if not lines:
        return text
    counts = [int(series.count.max()) for picture in lines for series in picture.series]
    least, most = min(counts), max(counts)
    seeds = counted(most, "seed") if least == most else f"{least} to {counted(most, 'seed')}"
    if any((series.deviation > 0).any() for picture in lines for series in picture.series):
        text += f" Lines: mean over {seeds}; bands: {BAND}."
    else:
        text += f" {'Mean over ' if most > 1 else ''}{seeds}{' per curve' if most == 1 < len(groups) else ''}."
    if len(groups) > 1 and any(
        picture.x_label != "round" and picture.section != "learning" for picture in lines
    ):
        text += " Seeds are compared at equal cost."
    if page.critical and any(
        draw.periods(picture, groups, followed=page.followed) for picture in lines
    ):
        text += f" {'Shaded' if len(groups) == 1 else 'Strips at the bottom'}: {CRITICAL}."
    if page.smooth > 1 and not all(picture.steps for picture in lines):
        text += f" Every point is the mean of {page.smooth} neighbouring ones."
    return text


def _shown(picture: Picture, names: Sequence[str]) -> str:
    if isinstance(picture, HeatMap):
        return f"{picture.title} ({names[picture.group]})"
    against = {
        "round": "by round",
        "MB": "against communication",
        "client epochs": "against local epochs",
    }
    title = picture.y_label[:1].upper() + picture.y_label[1:]
    return f"{title} {against.get(picture.x_label, f'by {picture.x_label}')}"
