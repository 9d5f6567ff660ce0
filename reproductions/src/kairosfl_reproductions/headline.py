"""What the public comparison shows, in one sentence with numbers from the results."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from kairosfl_reproductions.results import Results, complete, values
from kairosfl_reproductions.verdicts import published, tally

Cells = Mapping[str, Mapping[str, Any]]
MASS = "[mass correction](rules/scaffold.md#what-the-mass-does)"


def headline(public: Sequence[Results]) -> str:
    """SCAFFOLD where it is published to fail, the time of FL-Simulator's run, and the values that
    we meet.
    """
    cells: dict[str, Cells] = {}
    hardware = {}
    for results in public:
        source = results["item"].removeprefix("public/")
        cells[source] = results["cells"]
        hardware[source] = results.get("hardware", "")
    clauses = [
        _scaffold(cells.get("niid-bench-100", {}), cells.get("niid-bench-100-readings", {})),
        _clock(cells.get("fl-simulator", {}), hardware.get("fl-simulator", "")),
        _met(public),
    ]
    clauses = list(filter(None, clauses))
    if not clauses:
        return ""
    *first, text = clauses
    if first:
        text = f"{', '.join(first)}, and {text}"
    return f"{text[0].upper()}{text[1:]}."


def _scaffold(cells: Cells, readings: Cells) -> str:
    ours, base = (_finished(cells, f"dir0.5-{name}") for name in ("scaffold", "fedavg"))
    if ours is None or base is None:
        return ""
    bar = base["printed"]["final"]
    clipped = _finished(readings, "dir0.5-scaffold-clipped")
    more = ""
    if clipped:
        more = f"; {_above(clipped, bar)} if gradients are clipped"
    return (
        f"with {MASS} SCAFFOLD trains where NIID-Bench prints {ours['printed']['final']:.1f} "
        f"({_above(ours, bar)} seeds end above the published FedAvg, {bar:.1f}{more})"
    )


def _above(cell: Mapping[str, Any], bar: float) -> str:
    ends = np.array(values(cell, "final"))
    return f"{np.count_nonzero(ends > bar)} of {len(ends)}"


def _clock(cells: Cells, hardware: str) -> str:
    cell = _finished(cells, "dir0.1-fedavg")
    if cell is None:
        return ""
    ours = statistics.fmean(values(cell, "total_seconds"))
    theirs = cell["printed"]["total_seconds"]
    device = cell["runs"][0]["device"]
    return (
        f"FL-Simulator's FedAvg takes {ours / 60:.0f} minutes on one {device} where its authors report "
        f"{theirs / 3600:.1f} hours on {hardware}"
    )


def _met(public: Sequence[Results]) -> str:
    total = tally(public)
    if not total.values:
        return ""
    text = f"{total.met} of {total.values} published values are met within 2 points"
    text += " by at least one reading"
    not_run = published(public) - total.values
    if not_run > 0:
        text += f" (another {not_run} were not run)"
    return text


def _finished(cells: Cells, name: str) -> Mapping[str, Any] | None:
    if name in cells and complete(cells[name]):
        return cells[name]
    return None
