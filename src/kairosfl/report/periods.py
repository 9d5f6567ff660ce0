"""The picture of `kairosfl periods`: harm against the window, and what the detectors marked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kairosfl.errors import UserError
from kairosfl.report.draw import picture_kind, save
from kairosfl.runs.score import Score, scores

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def lost(score: Score) -> str:
    """What harm is called: it takes from what should be high, and adds to what should be low."""
    unit = "points" if score.percent else score.words
    return f"{unit} lost" if score.higher else f"{unit} added"


def draw(findings: Mapping[str, Any], path: Path) -> Path:
    """Harm, with two standard errors, for every deficit; the share of windows that detectors mark.

    Args:
        findings: What `kairosfl periods` found, as it is stored.
        path: The file.
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise UserError(
            "Drawing needs matplotlib; install it with: pip install 'kairosfl[cli]'."
        ) from None
    marked = findings["marked"]
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[3, 0.45 * len(marked) + 0.2])
    _draw_harm(above, findings)
    _draw_marks(below, findings["windows"], marked)
    save(figure, path, picture_kind(path))
    return path


def _draw_harm(axes: Axes, findings: Mapping[str, Any]) -> None:
    """A line for every deficit; a ring where harm lasts."""
    (score,) = scores({"metrics": [findings["metric"]]})
    windows = findings["windows"]
    last_round = windows[-1][1]
    middles = [(first + last) / 2 for first, last in windows]
    axes.axhline(0, color="0.6", linewidth=0.8)
    for i, (deficit, rows) in enumerate(findings["harm"].items()):
        # Side by side, so that error bars do not hide each other.
        shift = (i - (len(findings["harm"]) - 1) / 2) * 0.02 * last_round
        places = [middle + shift for middle in middles]
        means = [score.scale * row["mean"] for row in rows]
        errors = [_two_errors(row, score) for row in rows]
        bars = axes.errorbar(
            places, means, errors, marker="o", capsize=3, label=findings["left"][deficit]
        )
        colour = bars.lines[0].get_color()
        lasting = [window - 1 for window in findings["lasts"][deficit]]
        axes.scatter(
            [places[at] for at in lasting],
            [means[at] for at in lasting],
            140,
            facecolors="none",
            edgecolors=colour,
            linewidths=1.5,
        )
    axes.axvspan(windows[findings["judged"]][0] - 0.5, last_round + 0.5, color="0.93", zorder=0)
    axes.set_title(
        "bars: two standard errors; grey: scored, so not judged", loc="right", fontsize=9
    )
    axes.set_ylabel(f"{lost(score)} at the end")
    axes.set_title(_verdict(findings), loc="left", fontsize=9)
    axes.legend(frameon=False, fontsize=9)


def _two_errors(row: Mapping[str, Any], score: Score) -> float:
    """Two standard errors; none where there is one seed."""
    if row["error"] is None:
        return 0.0
    return 2 * score.scale * float(row["error"])


def _verdict(findings: Mapping[str, Any]) -> str:
    if any(findings["lasts"].values()):
        return "○ harm that lasts"
    if any("undecided" in line for line in findings["verdict"]):
        return "undecided"
    return "no harm that lasts"


def _draw_marks(
    axes: Axes, windows: Sequence[Sequence[int]], marked: Mapping[str, Sequence[float]]
) -> None:
    """A row for every detector: the darker a window, the more of its rounds are marked."""
    for row, shares in enumerate(marked.values()):
        for (first, last), share in zip(windows, shares, strict=True):
            axes.barh(
                row,
                last - first + 1,
                left=first - 0.5,
                height=0.8,
                color=str(1 - 0.7 * share),
                edgecolor="white",
            )
            axes.text(
                (first + last) / 2,
                row,
                f"{100 * share:.0f} %",
                color="white" if share > 0.5 else "black",
                ha="center",
                va="center",
                fontsize=8,
            )
    last_round = windows[-1][1]
    axes.set_yticks(range(len(marked)), list(marked))
    axes.invert_yaxis()
    axes.set_xlim(0.5, last_round + 0.5)
    axes.set_xticks([*(first for first, _ in windows), last_round])
    axes.set_title("rounds that a detector marks as critical", loc="left", fontsize=9)
    axes.set_xlabel("rounds of the deficit")
