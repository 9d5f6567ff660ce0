"""The picture of `kairosfl demo`: how every way to spend clients ends, above what it cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from kairosfl.report.draw import EMBEDDED, new_figure, picture_kind, save, style

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# By whether the model is averaged: its name, the shift of its marks, and their form.
KINDS = {
    False: ("plain model, mean of the final 10 % of rounds", -0.12, "s"),
    True: ("averaged model, after the last round", 0.12, "o"),
}


def draw(
    scores: Mapping[tuple[str, str, bool], Sequence[float]],
    sent: Mapping[str, float],
    schedules: Mapping[str, str],
    path: Path,
) -> Path:
    """Draw the picture.

    Args:
        scores: Per cent of every seed by way, schedule and whether the model is averaged.
        sent: Megabytes by way.
        schedules: Their names in words, a panel for each.
        path: The file.
    """
    kind = picture_kind(path)
    names = []
    for way, size in sent.items():
        in_lines = way.replace(", ", ",\n")
        names.append(f"{in_lines}\n{size:.1f} MB")
    with style(**EMBEDDED):
        figure = new_figure(8, 3.6)
        panels = figure.subplots(1, len(schedules), sharey=True)
        for axes, (schedule, words) in zip(panels, schedules.items(), strict=True):
            for averaged in KINDS:
                _draw_kind(axes, averaged, [scores[way, schedule, averaged] for way in sent])
            axes.set_title(words)
            axes.set_xticks(range(len(sent)), names)
            axes.set_xlim(-0.5, len(sent) - 0.5)
        figure.axes[0].set_ylabel("test accuracy (%)")
        figure.axes[0].legend(title="mean ± standard error; dots: seeds", loc="lower left")
        save(figure, path, kind)
    return path


def _draw_kind(axes: Axes, averaged: bool, scores: Sequence[Sequence[float]]) -> None:
    """The seeds of one kind of model as dots, with their mean and standard error, by way."""
    label, shift, mark = KINDS[averaged]
    colour = f"C{int(averaged)}"
    values = np.array(scores)
    ways, seeds = values.shape
    places = np.arange(ways) + shift
    axes.plot(np.repeat(places, seeds), values.ravel(), ".", color=colour, alpha=0.3, markersize=4)
    axes.errorbar(
        places,
        values.mean(1),
        values.std(1, ddof=1) / seeds**0.5,
        fmt=mark,
        color=colour,
        capsize=3,
        label=label,
    )
