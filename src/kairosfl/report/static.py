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
from kairosfl.report.read import Group, read_groups

# After the main metric, which is drawn large, and what it cost: an adaptive cohort or number of
# epochs tells more than the loss.
_ORDER = ("cohort", "epochs", "loss", "fgn")


def draw_comparison(dirs: Sequence[Path], path: Path) -> Path:
    """The main metric with its band and periods, beside the two most informative other plots."""
    kind = picture_kind(path)
    groups = read_groups(dirs)
    pictures = _pictures(groups)
    if not pictures:
        raise UserError(
            f"No run in {', '.join(map(str, dirs))} has written a metric that can be drawn."
        )
    names = [short(groups[0].label)]
    if len(groups) > 1:
        names = [f"{letter(i)}  {short(group.label)}" for i, group in enumerate(groups)]

    with style(**EMBEDDED):
        figure = new_figure(10, 4.6)
        panels = figure.subplot_mosaic([["main", "top"], ["main", "low"]], width_ratios=[1.7, 1])
        bands = False
        strips = ""
        for axes, picture in zip_longest(panels.values(), pictures[: len(panels)]):
            if picture is None:
                axes.axis("off")
                continue
            bands |= draw_lines(axes, picture, names)
            spans = periods(picture, groups, followed=True)
            if spans:
                strips = shade(axes, spans)
            axes.set_title(picture.title)

        handles = [*panels["main"].get_legend_handles_labels()[0], *explained(bands, strips)]
        labels = [str(handle.get_label()) for handle in handles]
        columns = legend_columns(labels, figure.get_figwidth(), 8)
        figure.legend(handles=handles, loc="outside lower center", ncols=columns, fontsize=8)
        save(figure, path, kind)
    return path


def _pictures(groups: Sequence[Group]) -> list[Lines]:
    """The main metric, what it cost, and what else can be drawn, the most informative first."""
    lines = {picture.key: picture for picture in figures(groups)[0] if isinstance(picture, Lines)}
    main = groups[0].score.name
    order = dict.fromkeys((main, f"{main}-bytes", *_ORDER))
    return [lines[key] for key in order if key in lines]
