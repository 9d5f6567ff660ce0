"""The picture of `kairosfl demo`: how every way to spend clients ends, plain and averaged, above
what it cost.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from kairosfl.report.draw import EMBEDDED, new_figure, picture_kind, save, style

KINDS = {
    False: ("plain model, mean of the final 10 % of rounds", -0.12),
    True: ("averaged model, after the last round", 0.12),
}


def draw(
    scores: Mapping[tuple[str, str, bool], Sequence[float]],
    sent: Mapping[str, float],
    schedules: Mapping[str, str],
    path: Path,
) -> Path:
    """Per cent of every seed by way, schedule and kind of model, with mean and standard error;
    megabytes by way.
    """
    kind = picture_kind(path)
    names = [f"{way.replace(', ', ',' + chr(10))}\n{size:.1f} MB" for way, size in sent.items()]
    with style(**EMBEDDED):
        figure = new_figure(8, 3.6)
        for axes, (schedule, words) in zip(
            figure.subplots(1, len(schedules), sharey=True), schedules.items(), strict=True
        ):
            for averaged, (label, shift) in KINDS.items():
                values = np.array([scores[way, schedule, averaged] for way in sent])
                places = np.arange(len(sent)) + shift
                errors = values.std(1, ddof=1) / values.shape[1] ** 0.5
                colour = f"C{int(averaged)}"
                axes.plot(
                    np.repeat(places, values.shape[1]),
                    values.ravel(),
                    ".",
                    color=colour,
                    alpha=0.3,
                    markersize=4,
                )
                axes.errorbar(
                    places,
                    values.mean(1),
                    errors,
                    fmt="o" if averaged else "s",
                    color=colour,
                    capsize=3,
                    label=label,
                )
            axes.set_title(words)
            axes.set_xticks(range(len(sent)), names)
            axes.set_xlim(-0.5, len(sent) - 0.5)
        figure.axes[0].set_ylabel("test accuracy (%)")
        figure.axes[0].legend(title="mean ± standard error; dots: seeds", loc="lower left")
        save(figure, path, kind)
    return path
