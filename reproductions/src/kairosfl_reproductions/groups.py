"""The curves in a file of results as groups of runs, which are drawn like run folders."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kairosfl.errors import UserError
from kairosfl.report.read import Group, RunData, chosen_groups
from kairosfl.runs.score import usual
from kairosfl_reproductions.measures import TRACES
from kairosfl_reproductions.results import longest, read
from kairosfl_reproductions.words import setting, words


def read_curves(path: Path, only: list[str]) -> tuple[list[Group], list[str]]:
    """What `kairosfl figure` draws of a file of results: the chosen cells, and their names in a
    legend.

    Args:
        path: Of the file.
        only: Names of cells, or patterns; empty for all.
    """
    groups = chosen_groups(read_cells(path), only)
    return groups, cell_words([group.label for group in groups])


def read_cells(path: Path) -> list[Group]:
    """A group for every cell, labelled by its name: the seeds with the most rounds."""
    if not path.is_file():
        raise UserError(
            f"{path} does not exist; give a file that `kairosfl reproduce --results` wrote."
        )
    cells = read(path)["cells"]
    if not cells:
        raise UserError(f"{path} has no cells; run `kairosfl reproduce` with --results first.")
    return [
        Group(name, tuple(_run(path, name, cell, run) for run in longest(cell)))
        for name, cell in cells.items()
    ]


def cell_words(names: Sequence[str]) -> list[str]:
    """Cells as a legend calls them: in words, without the data and the model that all of them have."""
    parts = [name.split("-") for name in names]
    common = {part for part in parts[0] if setting(part) and all(part in each for each in parts)}
    return [words("-".join(part for part in each if part not in common)) for each in parts]


def _run(path: Path, name: str, cell: dict[str, Any], run: dict[str, Any]) -> RunData:
    curves = {
        TRACES[what].column: curve
        for what, curve in run["curves"].items()
        if not TRACES[what].total
    }
    rounds = np.unique(
        np.concatenate([np.asarray(curve["round"], dtype=np.float64) for curve in curves.values()])
    )
    columns = {"round": rounds}
    for column, curve in curves.items():
        columns[column] = np.full(len(rounds), np.nan)
        columns[column][np.searchsorted(rounds, curve["round"])] = curve["value"]
    return RunData(
        path=path,
        algorithm=name,
        seed=run["seed"],
        settings={"train.rounds": cell["rounds"]},
        config="",
        about={},
        summary={"rounds": run["rounds"]},
        partition={},
        columns=columns,
        scores=(usual("accuracy"),),
    )
