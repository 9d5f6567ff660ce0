"""Figures as a paper prints them: no title, labels in words, and a caption that names the bands."""

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
_INCHES = {"in": 1.0, "cm": 1 / 2.54, "mm": 1 / 25.4, "pt": 1 / 72.27, "bp": 1 / 72}  # TeX's pt
_LARGEST = 100  # inches
_FONTS = {
    "sans": {"font.family": "sans-serif"},
    # It looks like Times, and comes with matplotlib.
    "serif": {"font.family": "STIXGeneral", "mathtext.fontset": "stix"},
}
# What a curve is drawn against, in a caption.
_AGAINST = {
    "round": "by round",
    "MB": "against communication",
    "client epochs": "against local epochs",
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
    match = re.fullmatch(r"\s*(\d+\.?\d*|\.\d+)\s*(in|cm|mm|pt|bp)\s*", text)
    size = float(match[1]) * _INCHES[match[2]] if match else math.nan
    if not 0.5 <= size <= _LARGEST:
        raise UserError(
            f"{text!r} is not a length for a figure; give one with its unit: 3.25in, 8.4cm, 84mm "
            "or 234pt."
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
            f"{text!r} is not a range of the y-axis; give LOW:HIGH as the axis shows them, such "
            "as 60:75."
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
    height = page.height
    if height is None:
        height = ASPECT * page.width / len(pictures)
    figure = draw.new_figure(page.width, height)
    panels = figure.subplots(1, len(pictures), squeeze=False)[0]
    entries: dict[str, Artist] = {}
    for axes, picture in zip(panels, pictures, strict=True):
        if isinstance(picture, HeatMap):
            draw.draw_heat(figure, axes, picture)
            continue
        draw.draw_lines(axes, smoothed(picture, page.smooth), names)
        strips = draw.shade(axes, _periods(picture, groups, page))
        handles, labels = axes.get_legend_handles_labels()
        if len(labels) > 1:
            entries |= dict(zip(labels, handles, strict=True))
        for patch in draw.explained(bands=False, strips=strips):
            entries[str(patch.get_label())] = patch

    if page.y_range:
        figure.axes[0].set_ylim(*page.y_range)
    if entries:
        columns = draw.legend_columns(list(entries), page.width, 7)
        figure.legend(entries.values(), entries.keys(), loc="outside upper center", ncols=columns)
        if page.height is None:  # the legend takes nothing from the panels
            figure.set_figheight(figure.get_figheight() + 0.15 * math.ceil(len(entries) / columns))
    return figure


def _periods(
    picture: Lines, groups: Sequence[Group], page: Page
) -> dict[int, list[tuple[float, float, float]]]:
    """The critical periods to shade; none if the page has none."""
    if not page.critical:
        return {}
    return draw.periods(picture, groups, followed=page.followed)


def caption(
    pictures: Sequence[Picture], groups: Sequence[Group], names: Sequence[str], page: Page
) -> str:
    """What the figure shows, and what lines, bands and shading are, for the paper's text."""
    titles = [_title(picture, names) for picture in pictures]
    sentences = [f"{titles[0]}."]
    if len(titles) > 1:
        sentences = [f"From left to right: {'; '.join(titles)}."]
    lines = [picture for picture in pictures if isinstance(picture, Lines)]
    if not lines:
        return sentences[0]

    sentences.append(_mean_over(lines, len(groups)))
    if len(groups) > 1 and any(map(_is_against_cost, lines)):
        sentences.append("Seeds are compared at equal cost.")
    if any(_periods(picture, groups, page) for picture in lines):
        where = "Shaded" if len(groups) == 1 else "Strips at the bottom"
        sentences.append(f"{where}: {CRITICAL}.")
    if page.smooth > 1 and not all(picture.steps for picture in lines):
        sentences.append(f"Every point is the mean of {page.smooth} neighbouring ones.")
    return " ".join(sentences)


def _mean_over(pictures: Sequence[Lines], groups: int) -> str:
    """Of how many seeds the curves are, and what the bands are, if any can be seen."""
    counts: list[int] = []
    has_bands = False
    for picture in pictures:
        for series in picture.series:
            counts.append(int(series.count.max()))
            has_bands |= bool((series.deviation > 0).any())
    least, most = min(counts), max(counts)
    seeds = counted(most, "seed")
    if least < most:
        seeds = f"{least} to {seeds}"
    if has_bands:
        return f"Lines: mean over {seeds}; bands: {BAND}."
    if most > 1:
        return f"Mean over {seeds}."
    return f"{seeds} per curve." if groups > 1 else f"{seeds}."


def _is_against_cost(picture: Lines) -> bool:
    return picture.x_label != "round" and picture.section != "learning"


def _title(picture: Picture, names: Sequence[str]) -> str:
    if isinstance(picture, HeatMap):
        return f"{picture.title} ({names[picture.group]})"
    title = picture.y_label[:1].upper() + picture.y_label[1:]
    return f"{title} {_AGAINST.get(picture.x_label, f'by {picture.x_label}')}"
