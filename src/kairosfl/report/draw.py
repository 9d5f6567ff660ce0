"""Plots drawn with matplotlib: the same data as in the page, for papers and for a quick overview."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kairosfl.errors import UserError
from kairosfl.report.checked import Array
from kairosfl.report.figures import critical_periods, followed_periods
from kairosfl.report.pictures import BAND, CRITICAL, HeatMap, Lines, Series, colour
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
KINDS = ("svg", "pdf", "png")
EMBEDDED = {"svg.fonttype": "path"}  # the text of an SVG looks the same everywhere
# A curve is distinguished by more than its colour, which print may not have.
STYLES = ("-", "--", "-.", ":")
# An axis in words: label, size of the unit, and how much there must be of it, the largest first.
_UNITS = {"MB": (("communication (GB)", 1000.0, 10_000.0), ("communication (MB)", 1.0, 0.0))}


def style(**more: Any) -> AbstractContextManager[None]:
    """A context in which plots have the style of all, with further settings of matplotlib."""
    try:
        import matplotlib
    except ImportError:
        raise UserError(
            "Drawing needs matplotlib; install it with: pip install 'kairosfl[cli]'."
        ) from None
    return matplotlib.rc_context(_STYLE | more)


def new_figure(width: float, height: float) -> Figure:
    """An empty figure that is not registered with pyplot."""
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def picture_kind(path: Path) -> str:
    """The format that the name of a file asks for: pdf, svg or png."""
    kind = path.suffix.lower().removeprefix(".")
    if kind not in KINDS:
        raise UserError(f"{path} does not end in .pdf, .svg or .png; rename it.")
    return kind


def save(figure: Figure, path: Path, kind: str, dpi: float = 180) -> None:
    """Write a figure as the same file on every machine: undated, and an SVG with few digits."""
    metadata = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(kind, {})
    if kind != "svg":
        write(path, lambda at: figure.savefig(at, format=kind, dpi=dpi, metadata=metadata))
        return
    drawn = io.StringIO()
    figure.savefig(drawn, format=kind, dpi=dpi, metadata=metadata)
    write(path, _steady(drawn.getvalue()))


def _steady(svg: str) -> str:
    """An SVG with positions rounded, and with counted ids instead of hashes of all digits.

    Two processors may differ in the last digit of a position. Numbers below 1, such as the scale of
    letters, stay.
    """
    hashed = dict.fromkeys(re.findall(r'id="(\w*[0-9a-f]{10})"', svg))
    names = {name: f"{name[0]}{number}" for number, name in enumerate(hashed, 1)}
    svg = re.sub(r"\w*[0-9a-f]{10}\b", lambda match: names.get(match[0], match[0]), svg)
    return re.sub(r"<[^!>][^>]*>", _rounded, svg)


def _rounded(tag: re.Match[str]) -> str:
    return re.sub(r"[1-9]\d*\.\d{5,}", _four_digits, tag[0])


def _four_digits(number: re.Match[str]) -> str:
    return f"{float(number[0]):.4f}".rstrip("0").rstrip(".")


def draw_lines(axes: Axes, picture: Lines, names: Sequence[str]) -> bool:
    """Curves with a band of one deviation, named by their groups; whether any band is visible."""
    label, unit = _unit(picture)
    scale = 100.0 if picture.percent else 1.0
    # Where dashes tell the curves of a group apart, groups differ by their colours alone.
    has_dashes = any(series.dashed for series in picture.series)
    has_bands = False
    for series in picture.series:
        style = "-" if has_dashes else STYLES[series.group % len(STYLES)]
        low, high = band(series, picture.percent)
        plot(
            axes,
            series.x / unit,
            series.mean * scale,
            low * scale,
            high * scale,
            color=colour(series.group),
            linestyle="--" if series.dashed else style,
            label=_name(series, names),
            drawstyle="steps-mid" if picture.steps else "default",
        )
        has_bands |= bool((series.deviation > 0).any())

    axes.set_xlabel(_capital(label))
    if picture.x_label == "round":
        whole(axes.xaxis)
        axes.margins(x=0.01)
    axes.set_ylabel(_capital(f"{picture.y_label} (%)" if picture.percent else picture.y_label))
    return has_bands


def _unit(picture: Lines) -> tuple[str, float]:
    """The label of the x-axis, and the size of its unit."""
    largest = max(float(series.x[-1]) for series in picture.series)
    for label, size, least in _UNITS.get(picture.x_label, ()):
        if largest >= least:
            return label, size
    return picture.x_label, 1.0


def explained(bands: bool, strips: str) -> list[Artist]:
    """What a legend needs to explain shading: whether there are bands, and what `shade` returned."""
    from matplotlib.patches import Patch

    patches: list[Artist] = []
    if bands:
        patches.append(Patch(color="0.5", alpha=0.3, linewidth=0, label=f"bands: {BAND}"))
    if strips:
        patches.append(Patch(color="0.5", alpha=0.7, linewidth=0, label=f"{strips}: {CRITICAL}"))
    return patches


def whole(axis: Axis) -> None:
    """Whole numbers only, for rounds and clients."""
    from matplotlib.ticker import MaxNLocator

    axis.set_major_locator(MaxNLocator("auto", steps=[1, 2, 5, 10], integer=True))


def plot(axes: Axes, x: Array, mean: Array, low: Array, high: Array, **look: Any) -> None:
    """A line, or a dot for a single point, with a band if there is one."""
    dot = "o" if np.isfinite(mean).sum() == 1 else None
    axes.plot(x, mean, marker=dot, **look)
    if np.isfinite(low).any():
        fill: dict[str, Any] = {"step": "mid"} if look.get("drawstyle") == "steps-mid" else {}
        axes.fill_between(x, low, high, color=look["color"], alpha=0.15, linewidth=0, **fill)


def band(series: Series, percent: bool) -> tuple[Array, Array]:
    """One deviation to either side, but not below zero if no seed is, and no share above one."""
    low = series.mean - series.deviation
    high = series.mean + series.deviation
    if not (series.seeds < 0).any():
        low = np.maximum(low, 0)
    if percent:
        high = np.minimum(high, 1)
    return low, high


def periods(
    picture: Lines, groups: Sequence[Group], *, followed: bool = False
) -> dict[int, list[tuple[float, float, float]]]:
    """The critical periods to shade, by group; none unless a few groups are drawn over rounds.

    With `followed` only those of detectors that a rule follows, or that were asked for.
    """
    numbers = list(dict.fromkeys(series.group for series in picture.series))
    if picture.x_label != "round" or len(numbers) > STRIPS:
        return {}
    find = followed_periods if followed else critical_periods
    spans = {number: find(groups[number]) for number in numbers}
    return spans if any(spans.values()) else {}


def shade(axes: Axes, spans: dict[int, list[tuple[float, float, float]]]) -> str:
    """Shade periods: of one group over the whole height, of several in a strip each.

    Returns what was drawn: "shaded", "strips", or nothing.
    """
    if not spans:
        return ""
    if len(spans) == 1:
        ((group, stretches),) = spans.items()
        _shade(axes, group, stretches, (0.0, 1.0), 0.12)
        return "shaded"

    low, high = axes.get_ylim()
    axes.set_ylim(low - (high - low) * 0.026 * len(spans), high)  # room below the curves
    for row, (group, stretches) in enumerate(spans.items()):
        foot = row * 0.024
        _shade(axes, group, stretches, (foot, foot + 0.018), 0.7)
    return "strips"


def _shade(
    axes: Axes,
    group: int,
    stretches: Sequence[tuple[float, float, float]],
    height: tuple[float, float],
    strength: float,
) -> None:
    look: dict[str, Any] = {"color": colour(group), "linewidth": 0}
    for left, right, share in stretches:
        axes.axvspan(left, right, *height, alpha=strength * share, **look)


def draw_heat(figure: Figure, axes: Axes, picture: HeatMap) -> None:
    """A heat map with the scale of its colours."""
    from matplotlib.colors import PowerNorm

    extent = (*picture.x_range, *picture.y_range)
    low, high = picture.span
    norm = PowerNorm(picture.power, vmin=low, vmax=high)
    image = axes.imshow(
        picture.grid,
        extent=extent,
        origin="lower",
        aspect="auto",
        cmap="viridis",
        norm=norm,
        interpolation="nearest",
    )
    axes.grid(visible=False)
    for axis in (axes.xaxis, axes.yaxis):
        whole(axis)
    if picture.names and len(picture.names) <= 30:
        axes.set_yticks(range(len(picture.names)), picture.names)
    axes.set_xlabel(_capital(picture.x_label))
    axes.set_ylabel(_capital(picture.y_label))
    figure.colorbar(image, ax=axes, label=_capital(picture.value_label))


def short(text: str, most: int = 60) -> str:
    """Shortened in the middle: what distinguishes groups is often at the end."""
    return text if len(text) <= most else f"{text[: most // 2]}…{text[1 - most // 2 :]}"


def _name(series: Series, names: Sequence[str]) -> str:
    """Its group, and its own name where a group has several curves."""
    if len(names) == 1 and series.name:
        return series.name
    return ", ".join(filter(None, [names[series.group], series.name]))


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def legend_columns(labels: Sequence[str], width: float, points: float) -> int:
    """As many as fit the width in inches; entries are spread evenly over the lines."""
    inches = (max(map(len, labels)) + 8) * points / 133  # of an entry
    most = max(1, min(len(labels), int(width / inches)))
    lines = math.ceil(len(labels) / most)
    return math.ceil(len(labels) / lines)
