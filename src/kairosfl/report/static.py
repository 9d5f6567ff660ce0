"""One PNG as an overview: the main metric, what it cost, and the cohort."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING

from kairosfl.errors import UserError
from kairosfl.report.draw import draw_lines, new_figure, save, style
from kairosfl.report.figures import figures
from kairosfl.report.pictures import Lines
from kairosfl.report.read import read_groups

if TYPE_CHECKING:
    from matplotlib.artist import Artist

# After the main metric, which is drawn large, and what it cost: an adaptive cohort or number of epochs tells more than
# the loss.
_ORDER = ("cohort", "epochs", "loss", "fgn")


def checked_png(path: Path) -> None:
    """Refuse a file name with another extension."""
    if path.suffix != ".png":
        raise UserError(f"{path} does not end in .png; rename it, or export others with `kairosfl report --figures`.")


def draw_comparison(dirs: Sequence[Path], out_png: Path) -> Path:
    """The main metric with its band and the critical periods, and next to it the two most informative plots."""
    checked_png(out_png)
    groups = read_groups(dirs)
    drawn = {each.key: each for each in figures(groups)[0] if isinstance(each, Lines)}
    main = groups[0].score.name
    order = [key for key in dict.fromkeys((main, f"{main}-bytes", *_ORDER)) if key in drawn]
    if not order:
        raise UserError(f"No run in {', '.join(map(str, dirs))} has written a metric that can be drawn.")
    with style():
        figure = new_figure(10, 4.6)
        places = figure.subplot_mosaic([["main", "top"], ["main", "low"]], width_ratios=[1.7, 1])
        shading: dict[str, Artist] = {}
        for place, key in zip_longest(places, order[: len(places)]):
            if key is None:
                places[place].axis("off")
            else:
                shading |= {str(each.get_label()): each for each in draw_lines(places[place], drawn[key], groups)}
        handles = [*places["main"].get_legend_handles_labels()[0], *shading.values()]
        figure.legend(handles=handles, loc="outside lower center", ncols=min(3, len(handles)), fontsize=8)
        save(figure, out_png, "png")
    return out_png
