"""Plot the curves of an item: a panel for every baseline and the cells compared with it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import takewhile
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from kairosfl.report.draw import new_figure, plot, save, style, whole
from kairosfl.report.pictures import colour
from kairosfl_reproductions.measures import TRACES
from kairosfl_reproductions.results import Results, longest
from kairosfl_reproductions.words import words

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Cells = Mapping[str, Mapping[str, Any]]
COLUMNS = 3
STEPS = ("critical", "cohort")  # integers that jump from round to round
ACCURACIES = (
    "final",
    "last_tenth",
    "best",
)  # measures whose published value is marked at the end of a curve


def draw_curves(results: Results, path: Path) -> Path | None:
    """Save the figure as SVG; the same results give the same file. None if no run reached its first
    evaluation.
    """
    cells = _with(results["cells"], "accuracy")
    if not cells:
        return None
    traces = [what for what in TRACES if _with(cells, what)]
    bases = panels(cells)
    several = len(traces) > 1  # each baseline starts a new row; otherwise fill the rows
    columns = min(COLUMNS, len(traces) if several else len(bases))
    # Empty panels, so that the next baseline starts a new row.
    traces += [""] * (-len(traces) % columns if several else 0)
    shown = [(base, compared, what) for base, compared in bases.items() for what in traces]
    lines = math.ceil(len(shown) / columns)
    common = _shared(cells)
    with style():
        figure = new_figure(3.4 * columns, 2.5 * lines)
        figure.set_layout_engine("constrained", h_pad=0.08, w_pad=0.08)
        places = figure.subplots(lines, columns, squeeze=False).flatten()
        for place, (base, compared, what) in zip(places, shown, strict=False):
            _panel(place, base, compared, common, what)
            place.set_ylabel(_title(what) if several and what else "", fontsize=7)
        for place in places[len(shown) :]:
            place.axis("off")
        if not several:
            figure.supylabel(_title("accuracy"), fontsize=8)
        save(figure, path, "svg")
    return path


def _title(what: str) -> str:
    return f"{TRACES[what].title} (%)" if TRACES[what].percent else TRACES[what].title


def _with(cells: Cells, what: str) -> Cells:
    """The cells whose runs all have this curve; for example, FGN has no Fisher trace."""
    return {
        name: cell
        for name, cell in cells.items()
        if all(run["curves"].get(what, {"round": []})["round"] for run in longest(cell))
    }


def panels(cells: Cells) -> dict[str, dict[str, Mapping[str, Any]]]:
    """The baselines, each with the cells that are compared with it."""
    found: dict[str, dict[str, Mapping[str, Any]]] = {}
    for name, cell in cells.items():
        base = cell["baseline"] if cell["baseline"] in cells else name
        found.setdefault(base, {base: cells[base]})[name] = cell
    return found


def curves(
    cells: Cells, what: str = "accuracy"
) -> dict[str, tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Rounds, mean and standard deviation of every cell over the common seeds, or over its own if
    there are none.

    With one seed the deviation is NaN. A seed evaluated in other rounds is linearly interpolated.
    """
    seeds = set.intersection(*({run["seed"] for run in longest(cell)} for cell in cells.values()))
    return {
        name: _curve(
            [run["curves"][what] for run in longest(cell) if run["seed"] in seeds or not seeds],
            what,
        )
        for name, cell in cells.items()
    }


def _curve(
    seeds: Sequence[Mapping[str, Any]], what: str
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rounds = np.array(seeds[0]["round"], dtype=np.float64)
    values = np.stack([np.interp(rounds, seed["round"], seed["value"]) for seed in seeds])
    values *= 100 if TRACES[what].percent else 1
    deviation = values.std(0, ddof=1) if len(values) > 1 else np.full(len(rounds), np.nan)
    return rounds, values.mean(0), deviation


def _panel(axes: Axes, base: str, compared: Cells, common: int, what: str) -> None:
    cells = _with(compared, what)
    if not cells:
        axes.axis("off")
        return
    colours = {name: colour(number) for number, name in enumerate(compared)}
    skip = max(
        common, min(_shared(cells), base.count("-") - 1)
    )  # leading words that the labels omit
    marked = set()
    for name, (rounds, mean, deviation) in curves(cells, what).items():
        own = colours[name]
        look = {"color": own, "linewidth": 1.1, "label": _label(name, skip)}
        look |= {"drawstyle": "steps-mid"} if what in STEPS else {}
        plot(axes, rounds, mean, mean - deviation, mean + deviation, **look)
        known = [cells[name]["printed"].get(key) for key in ACCURACIES if what == "accuracy"]
        printed = next((value for value in known if value is not None), None)
        if printed is not None and printed not in marked:
            marked.add(printed)
            across = axes.get_yaxis_transform()  # x as a fraction of the panel width
            axes.plot(
                [1.02], [printed], "<", color=own, markersize=5, clip_on=False, transform=across
            )
    axes.set_title(fill(words(base), 36), fontsize=8)
    whole(axes.xaxis)
    axes.set_xlabel("round (◂ published)" if marked else "round", fontsize=7)
    axes.tick_params(labelsize=7)
    place: Literal["lower right", "best"] = "lower right" if what == "accuracy" else "best"
    axes.legend(
        fontsize=5.5, handlelength=1.2, labelspacing=0.3, loc=place, frameon=True, edgecolor="none"
    )


def _label(name: str, skip: int) -> str:
    return words("-".join(name.split("-")[min(skip, name.count("-")) :]))


def _shared(cells: Cells) -> int:
    """How many leading words all names have in common."""
    columns = zip(*(name.split("-") for name in cells), strict=False)
    return sum(1 for _ in takewhile(lambda column: len(set(column)) == 1, columns))
