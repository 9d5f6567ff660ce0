"""One picture of all results: ours against the published accuracy, a point for every comparison."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

from kairosfl.report.draw import new_figure, save, style
from kairosfl.report.pictures import colour
from kairosfl_reproductions.results import Results, values
from kairosfl_reproductions.verdicts import agreement, compared_measures

ACCURACIES = ("final", "last_tenth", "best")
BAND = 2.0  # points
NAMES = {"fedaware": "FedAWARE", "pa3fed": "PA3Fed", "fedcl": "FedCL", "alt": "ALT"}
NAMES |= {
    "niid-bench-10": "NIID-Bench, 10 parties",
    "niid-bench-100": "NIID-Bench, 100 parties",
    "fl-simulator": "FL-Simulator",
}


def points(everything: Sequence[Results]) -> dict[str, list[tuple[float, float]]]:
    """(published, ours) of every compared cell, by paper or, for public benchmarks, by source."""
    found: dict[str, list[tuple[float, float]]] = {}
    for results in everything:
        paper, _, name = results["item"].partition("/")
        if name.endswith("-readings"):  # of values that another item has
            continue
        for cell in results["cells"].values():
            for measure in compared_measures(results):
                if measure in ACCURACIES and not results.get("beat") and agreement(cell, measure):
                    pair = cell["printed"][measure], statistics.fmean(values(cell, measure))
                    found.setdefault(name if paper == "public" else paper, []).append(pair)
    return found


def draw_overview(everything: Sequence[Results], path: Path) -> Path | None:
    """Save the picture as SVG; None if nothing was compared."""
    found = points(everything)
    if not found:
        return None
    with style():
        figure = new_figure(5.6, 3.6)
        axes = figure.subplots()
        every = [value for pairs in found.values() for pair in pairs for value in pair]
        low, high = min(every) - 3, max(every) + 3
        axes.fill_between(
            [low, high],
            [low - BAND, high - BAND],
            [low + BAND, high + BAND],
            color="#e8e8e8",
            linewidth=0,
        )
        axes.plot([low, high], [low, high], color="#999999", linewidth=0.8)
        for number, (name, pairs) in enumerate(found.items()):
            axes.plot(
                *zip(*pairs, strict=True),
                "o",
                color=colour(number),
                markersize=4,
                alpha=0.8,
                label=NAMES.get(name, name),
            )
        axes.set(
            xlim=(low, high), ylim=(low, high), xlabel="published accuracy (%)", ylabel="ours (%)"
        )
        axes.set_aspect("equal")
        axes.legend(
            fontsize=7, loc="upper left", bbox_to_anchor=(1.0, 1.0)
        )  # no corner is free of points
        save(figure, path, "svg")
    return path
