"""The results of runs as `kairosfl compare` prints them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from kairosfl.report.read import read_study
from kairosfl.report.tables import Row, cells, chosen_target, results, results_table

# Columns that are shown only in the page and the files.
WIDE = ("final", "worst clients", "passes", "cohort", "e-LUD", "seconds")


@dataclass(frozen=True)
class Comparison:
    """What `kairosfl compare` prints."""

    rows: list[Row]
    target: float
    given: bool  # the target, by the user
    damaged: list[str]

    def table(self, columns: Sequence[str] | None = None) -> list[dict[str, str]]:
        """These columns after the algorithm, or those that fit a wide terminal."""
        if columns is None:
            return results_table(self.rows, self.target, WIDE)
        without = set(cells(self.rows[0])) - {"algorithm", *columns}
        return results_table(self.rows, self.target, without)

    def numbers(self) -> list[dict[str, Any]]:
        """All columns; each value with its mean, its deviation, and the seeds that have it."""
        rows = []
        for row in self.rows:
            numbers = {"metric": row.score.name, "target": self.target} | asdict(row)
            del numbers["score"]
            rows.append(numbers)
        return rows

    def notes(self) -> list[str]:
        """Notes on the rows."""
        lines = []
        for row in self.rows:
            lines += [f"{row.label}: {note}" for note in row.notes]
        return lines


def compare(dirs: Sequence[Path], target: float | None = None) -> Comparison:
    """The results of the runs in these folders."""
    study = read_study(dirs)
    aim = chosen_target(study.groups, target)
    return Comparison(results(study.groups, aim), aim, target is not None, study.damaged)
