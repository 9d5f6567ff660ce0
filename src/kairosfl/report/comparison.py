"""The results of runs as `kairosfl compare` prints them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kairosfl.report.read import read_study
from kairosfl.report.tables import Row, cells, chosen_target, results, results_table

WIDE = (
    "final",
    "worst clients",
    "cohort",
    "e-LUD",
    "seconds",
)  # shown only in the page and the files


@dataclass(frozen=True)
class Comparison:
    """What `kairosfl compare` prints."""

    rows: list[Row]
    target: float
    given: bool  # the target, by the user
    damaged: list[str]

    def table(self, columns: Sequence[str] | None = None) -> list[dict[str, str]]:
        """These columns after the algorithm, or those that fit a wide terminal."""
        without = (
            WIDE
            if columns is None
            else [n for n in cells(self.rows[0]) if n not in ("algorithm", *columns)]
        )
        return results_table(self.rows, self.target, without)

    def numbers(self) -> list[dict[str, Any]]:
        """All columns: each value with mean, deviation, and over how many seeds of how many it is."""
        kept = [
            {"metric": row.score.name, "target": self.target} | asdict(row) for row in self.rows
        ]
        return [{key: value for key, value in row.items() if key != "score"} for row in kept]

    def notes(self) -> list[str]:
        """Notes on the rows."""
        return [f"{row.label}: {note}" for row in self.rows for note in row.notes]


def compare(dirs: Sequence[Path], target: float | None = None) -> Comparison:
    """The results of the runs in these folders."""
    study = read_study(dirs)
    aim = chosen_target(study.groups, target)
    return Comparison(results(study.groups, aim), aim, target is not None, study.damaged)
