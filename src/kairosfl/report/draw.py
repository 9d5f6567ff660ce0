"""Plots drawn with matplotlib: the same data as in the page, for papers and for a quick overview."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kairosfl.errors import UserError
from kairosfl.report.checked import Array
from kairosfl.report.figures import critical_periods
from kairosfl.report.pictures import BAND, COLOURS, CRITICAL, HeatMap, Lines, Picture, Series, colour, letter
from kairosfl.report.read import Group
from kairosfl.runs.files import write

if TYPE_CHECKING:
    from matplotlib.artist import Artist
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

_STYLE: dict[Any, Any] = {
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e6e6e6",
    "grid.linewidth": 0.6,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "legend.frameon": False,
    "svg.fonttype": "none",
    "svg.hashsalt": "kairosfl",  # the same picture gives the same file
    "pdf.fonttype": 42,
}
STRIPS = 12  # at most: more would hide the curves


def style() -> AbstractContextManager[None]:
    """The style of all plots, for as long as the context lasts."""
    try:
        import matplotlib
    except ImportError:
        raise UserError("Drawing needs matplotlib; install it with: pip install 'kairosfl[cli]'.") from None
    return matplotlib.rc_context(_STYLE)


def new_figure(width: float, height: float) -> Figure:
    """An empty figure that is not registered with pyplot."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def save(figure: Figure, path: Path, kind: str) -> None:
    """Write a figure without the date, which would make every file different."""
    metadata = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(kind, {})
    write(path, lambda at: figure.savefig(at, format=kind, dpi=180, metadata=metadata))


def draw(picture: Picture, groups: Sequence[Group]) -> Figure:
    """One plot in its own figure."""
    figure = new_figure(6.4, 3.8)
    axes = figure.subplots()
    if isinstance(picture, Lines):
        shading = draw_lines(axes, picture, groups)
        handles = [*(axes.get_legend_handles_labels()[0] if len(picture.series) > 1 else []), *shading]
        if len(picture.series) > 4:  # more entries would cover the curves
            figure.legend(handles=handles, fontsize=7, loc="outside lower center", ncols=2)
        elif handles:
            axes.legend(handles=handles, fontsize=7)
    else:
        _heat(figure, axes, picture)
        axes.set_title(f"{picture.title}\n{_short(groups[picture.group].label)}")
    return figure


def draw_lines(axes: Axes, picture: Lines, groups: Sequence[Group]) -> list[Artist]:
    """Curves with a band of one deviation, and the critical periods shaded if x is the round.

    Returns what a legend needs to explain the shading that was drawn.
    """
    from matplotlib.patches import Patch

    scale = 100.0 if picture.percent else 1.0
    banded = [_curve(axes, series, scale, _name(series, groups), picture) for series in picture.series]
    shown = list(dict.fromkeys(series.group for series in picture.series))
    strips = _shade(axes, shown, groups) if picture.x_label == "round" else ""
    axes.set_title(picture.title)
    axes.set_xlabel(picture.x_label)
    if picture.x_label == "round":
        whole(axes.xaxis)
        axes.margins(x=0.01)
    axes.set_ylabel(f"{picture.y_label} (%)" if picture.percent else picture.y_label)
    drawn = [(f"bands: {BAND}", 0.3)] * any(banded) + [(f"{strips}: {CRITICAL}", 0.7)] * bool(strips)
    return [Patch(color="0.5", alpha=strength, linewidth=0, label=label) for label, strength in drawn]


def whole(axis: Axis) -> None:
    """Whole numbers only, for rounds and clients."""
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator("auto", steps=[1, 2, 5, 10], integer=True))


def _curve(axes: Axes, series: Series, scale: float, name: str, picture: Lines) -> bool:
    """Draw one; returns whether it has a visible band."""
    turn = series.group // len(COLOURS)
    style = "--" if series.dashed else ("-", "-.", ":")[turn % 3]
    own = colour(series.group)
    shape = "steps-mid" if picture.steps else "default"
    low, high = (edge * scale for edge in band(series, picture.percent))
    look: dict[str, Any] = {"color": own, "linestyle": style, "drawstyle": shape, "linewidth": 1.4, "label": name}
    plot(axes, series.x, series.mean * scale, low, high, **look)
    return bool((series.deviation > 0).any())


def plot(axes: Axes, x: Array, mean: Array, low: Array, high: Array, **look: Any) -> None:
    """A line, or a dot for a single point, with a band if there is one."""
    dot = "o" if np.isfinite(mean).sum() == 1 else None
    axes.plot(x, mean, marker=dot, **look)
    if np.isfinite(low).any():
        fill: dict[str, Any] = {"step": "mid"} if look.get("drawstyle") == "steps-mid" else {}
        axes.fill_between(x, low, high, color=look["color"], alpha=0.15, linewidth=0, **fill)


def band(series: Series, percent: bool) -> tuple[Array, Array]:
    """One deviation to either side, but not below zero if no seed is, and no share above one."""
    low, high = series.mean - series.deviation, series.mean + series.deviation
    signed = any((seed < 0).any() for seed in series.seeds)
    return low if signed else np.maximum(low, 0), np.minimum(high, 1) if percent else high


def _shade(axes: Axes, shown: Sequence[int], groups: Sequence[Group]) -> str:
    """One group: the whole height, shaded lightly. Several: a strip each at the bottom; many: none. Returns which."""
    if len(shown) > STRIPS:
        return ""
    height = 1.0 if len(shown) == 1 else 0.018
    periods = [critical_periods(groups[number]) for number in shown]
    if len(shown) > 1 and any(periods):  # room for the strips below the curves
        low, high = axes.get_ylim()
        axes.set_ylim(low - (high - low) * 0.026 * len(shown), high)
    for row, number in enumerate(shown):
        for left, right, share in periods[row]:
            strength = (0.12 if len(shown) == 1 else 0.7) * share
            foot = row * 0.024 if len(shown) > 1 else 0.0
            axes.axvspan(left, right, foot, foot + height, color=colour(number), alpha=strength, linewidth=0)
    return "" if not any(periods) else "shaded" if len(shown) == 1 else "strips"


def _heat(figure: Figure, axes: Axes, picture: HeatMap) -> None:
    from matplotlib.colors import PowerNorm

    extent = (*picture.x_range, *picture.y_range)
    low, high = picture.span
    norm = PowerNorm(picture.power, vmin=low, vmax=high)
    image = axes.imshow(
        picture.grid, extent=extent, origin="lower", aspect="auto", cmap="viridis", norm=norm, interpolation="nearest"
    )
    axes.grid(visible=False)
    for axis in (axes.xaxis, axes.yaxis):
        whole(axis)
    if picture.names and len(picture.names) <= 30:
        axes.set_yticks(range(len(picture.names)), picture.names)
    axes.set_xlabel(picture.x_label)
    axes.set_ylabel(picture.y_label)
    figure.colorbar(image, ax=axes, label=picture.value_label)


def _name(series: Series, groups: Sequence[Group]) -> str:
    own = f"{letter(series.group)}  {_short(groups[series.group].label)}" if len(groups) > 1 else ""
    return ", ".join(filter(None, [own, series.name])) or _short(groups[series.group].label)


def _short(text: str, most: int = 60) -> str:
    """Shortened in the middle: what distinguishes groups is often at the end."""
    return text if len(text) <= most else f"{text[: most // 2]}…{text[1 - most // 2 :]}"
