"""What the public comparison shows, in one sentence with numbers from the results."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from kairosfl_reproductions.results import Results, complete, values
from kairosfl_reproductions.verdicts import published, tally

Cells = Mapping[str, Mapping[str, Any]]
MASS = "[mass correction](rules/scaffold.md#what-the-mass-does)"


def headline(public: Sequence[Results]) -> str:
    """SCAFFOLD where it is published to fail, the time of FL-Simulator's run, and the values that
    we meet.
    """
    found = {each["item"].removeprefix("public/"): each for each in public}
    cells: dict[str, Cells] = {name: each["cells"] for name, each in found.items()}
    clauses = [
        _scaffold(cells.get("niid-bench-100", {}), cells.get("niid-bench-100-readings", {})),
        _clock(cells.get("fl-simulator", {}), found.get("fl-simulator", {}).get("hardware", "")),
        _met(public),
    ]
    said = [clause for clause in clauses if clause]
    text = ", and ".join([", ".join(said[:-1]), said[-1]] if len(said) > 1 else said)
    return f"{text[0].upper()}{text[1:]}." if text else ""


def _scaffold(cells: Cells, readings: Cells) -> str:
    ours, base = (_finished(cells, f"dir0.5-{name}") for name in ("scaffold", "fedavg"))
    if ours is None or base is None:
        return ""
    bar = base["printed"]["final"]
    clipped = _finished(readings, "dir0.5-scaffold-clipped")
    more = f"; {_above(clipped, bar)} if gradients are clipped" if clipped else ""
    return (
        f"with {MASS} SCAFFOLD trains where NIID-Bench prints {ours['printed']['final']:.1f} "
        f"({_above(ours, bar)} seeds end above the published FedAvg, {bar:.1f}{more})"
    )


def _above(cell: Mapping[str, Any], bar: float) -> str:
    found = values(cell, "final")
    return f"{sum(value > bar for value in found)} of {len(found)}"


def _clock(cells: Cells, hardware: str) -> str:
    cell = _finished(cells, "dir0.1-fedavg")
    if cell is None:
        return ""
    ours, theirs = statistics.fmean(values(cell, "total_seconds")), cell["printed"]["total_seconds"]
    device = cell["runs"][0]["device"]
    return (
        f"FL-Simulator's FedAvg takes {ours / 60:.0f} minutes on one {device} where its authors report "
        f"{theirs / 3600:.1f} hours on {hardware}"
    )


def _met(public: Sequence[Results]) -> str:
    found = tally(public)
    if not found.values:
        return ""
    left = published(public) - found.values
    more = f" (another {left} were not run)" if left > 0 else ""
    return f"{found.met} of {found.values} published values are met within 2 points by at least one reading{more}"


def _finished(cells: Cells, name: str) -> Mapping[str, Any] | None:
    return cells[name] if name in cells and complete(cells[name]) else None
