"""One picture as an overview: the main metric, what it cost, and the cohort."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path

from kairosfl.errors import UserError
from kairosfl.report.draw import (
    EMBEDDED,
    draw_lines,
    explained,
    legend_columns,
    new_figure,
    periods,
    picture_kind,
    save,
    shade,
    short,
    style,
)
from kairosfl.report.figures import figures
from kairosfl.report.pictures import Lines, letter
from kairosfl.report.read import read_groups

# After the main metric, which is drawn large, and what it cost: an adaptive cohort or number of
# epochs tells more than the loss.
_ORDER = ("cohort", "epochs", "loss", "fgn")


def draw_comparison(dirs: Sequence[Path], path: Path) -> Path:
    """The main metric with its band and the critical periods, and next to it the two most
    informative plots.
    """
    kind = picture_kind(path)
    groups = read_groups(dirs)
    drawn = {each.key: each for each in figures(groups)[0] if isinstance(each, Lines)}
    main = groups[0].score.name
    order = [key for key in dict.fromkeys((main, f"{main}-bytes", *_ORDER)) if key in drawn]
    if not order:
        raise UserError(
            f"No run in {', '.join(map(str, dirs))} has written a metric that can be drawn."
        )
    names = [f"{letter(i)}  {short(group.label)}" for i, group in enumerate(groups)]
    names = names if len(groups) > 1 else [short(groups[0].label)]
    with style(**EMBEDDED):
        figure = new_figure(10, 4.6)
        places = figure.subplot_mosaic([["main", "top"], ["main", "low"]], width_ratios=[1.7, 1])
        bands, strips = False, ""
        for place, key in zip_longest(places, order[: len(places)]):
            if key is None:
                places[place].axis("off")
                continue
            bands |= draw_lines(places[place], drawn[key], names)
            strips = shade(places[place], periods(drawn[key], groups, followed=True)) or strips
            places[place].set_title(drawn[key].title)
        handles = [*places["main"].get_legend_handles_labels()[0], *explained(bands, strips)]
        columns = legend_columns(
            [str(each.get_label()) for each in handles], figure.get_figwidth(), 8
        )
        figure.legend(handles=handles, loc="outside lower center", ncols=columns, fontsize=8)
        save(figure, path, kind)
    return path
