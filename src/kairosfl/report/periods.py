"""The picture of `kairosfl periods`: harm against the window, and below it what the detectors
marked.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kairosfl.errors import UserError
from kairosfl.report.draw import picture_kind, save
from kairosfl.runs.score import Score, scores


def lost(score: Score) -> str:
    """What harm is called: it takes from what should be high, and adds to what should be low."""
    return f"{'points' if score.percent else score.words} {'lost' if score.higher else 'added'}"


def draw(found: Mapping[str, Any], path: Path) -> Path:
    """Harm, with two standard errors, for every deficit; the share of each window that detectors
    mark.
    """
    try:
        from matplotlib.figure import Figure
    except ModuleNotFoundError:
        raise UserError(
            "Drawing needs matplotlib; install it with: pip install 'kairosfl[cli]'."
        ) from None
    (score,) = scores({"metrics": [found["metric"]]})
    spans, marked = found["windows"], found["marked"]
    places = [(first + last) / 2 for first, last in spans]
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[3, 0.45 * len(marked) + 0.2])
    above.axhline(0, color="0.6", linewidth=0.8)
    for i, (name, rows) in enumerate(found["harm"].items()):
        errors = [2 * score.scale * (row["error"] or 0.0) for row in rows]
        shifted = [
            place + (i - (len(found["harm"]) - 1) / 2) * 0.02 * spans[-1][1] for place in places
        ]
        means = [score.scale * row["mean"] for row in rows]
        drawn = above.errorbar(
            shifted, means, errors, marker="o", capsize=3, label=found["left"][name]
        )
        sure = [window - 1 for window in found["lasts"][name]]
        ring: dict[str, Any] = {
            "facecolors": "none",
            "edgecolors": drawn.lines[0].get_color(),
            "linewidths": 1.5,
        }
        above.scatter([shifted[at] for at in sure], [means[at] for at in sure], 140, **ring)
    above.axvspan(spans[found["judged"]][0] - 0.5, spans[-1][1] + 0.5, color="0.93", zorder=0)
    above.set_title(
        "bars: two standard errors; grey: scored, so not judged", loc="right", fontsize=9
    )
    above.set_ylabel(f"{lost(score)} at the end")
    open_yet = any("undecided" in line for line in found["verdict"])
    title = (
        "○ harm that lasts"
        if any(found["lasts"].values())
        else "undecided"
        if open_yet
        else "no harm that lasts"
    )
    above.set_title(title, loc="left", fontsize=9)
    above.legend(frameon=False, fontsize=9)
    middle: dict[str, Any] = {"ha": "center", "va": "center", "fontsize": 8}
    for row, (_, shares) in enumerate(marked.items()):
        for (first, last), share in zip(spans, shares, strict=True):
            below.barh(
                row,
                last - first + 1,
                left=first - 0.5,
                height=0.8,
                color=str(1 - 0.7 * share),
                edgecolor="white",
            )
            ink = "white" if share > 0.5 else "black"
            below.text((first + last) / 2, row, f"{100 * share:.0f} %", color=ink, **middle)
    below.set_yticks(range(len(marked)), list(marked))
    below.invert_yaxis()
    below.set_xlim(0.5, spans[-1][1] + 0.5)
    below.set_xticks([first for first, _ in spans] + [spans[-1][1]])
    below.set_title("rounds that a detector marks as critical", loc="left", fontsize=9)
    below.set_xlabel("rounds of the deficit")
    save(figure, path, picture_kind(path))
    return path
