"""How the runs of a search ended, and their scores on validation samples."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from kairosfl.runs.files import append_json, read_lines
from kairosfl.runs.folder import Folder
from kairosfl.runs.history import ending
from kairosfl.runs.metrics import scored_rows
from kairosfl.wording import counted

State = Literal["complete", "diverged", "failed"]
EXPLODED = 1000.0  # times the first loss: diverged


@dataclass(frozen=True)
class Outcome:
    """How one run of a trial ended.

    `round` is the number of rounds that it was to have; of `score`, higher is better.
    """

    trial: int
    round: int
    state: State
    score: float | None
    reason: str
    rounds: int
    bytes: int
    steps: int
    seconds: float

    @property
    def length(self) -> str:
        """How many rounds it had; one whose budget of privacy was spent has fewer than planned."""
        if self.rounds < self.round:
            return f"{self.rounds} of {counted(self.round, 'round')}"
        return counted(self.round, "round")


def measure(
    trial: int,
    planned: int,
    folder: Path,
    stopped: str = "",
    failed: bool = False,
    finished: str = "",
) -> Outcome:
    """The outcome of a run that has ended.

    `stopped` is why it did not finish; `finished` is why it finished before its last round, such as
    a budget of privacy that is spent.
    """
    rows = list(read_lines(folder / "metrics.jsonl"))
    metric = Folder(folder).main()
    asked = [row for row in rows if row.get("cohort", 1)]  # Poisson sampling may draw nobody
    if asked and not asked[-1]["reported"] and not stopped:
        stopped = "the last round had no usable report"
    if not any(row["reported"] for row in rows) and not stopped:
        stopped = "no round had a usable report"

    # The score is that of the last round which had reports.
    last = max((row["round"] for row in rows if row["reported"]), default=0)
    scored = scored_rows([row for row in rows if row["round"] <= last], metric.name)
    is_averaged = [f"plain_{metric.name}" in row for row in scored]
    values = [row[metric.name] for row in ending(scored, is_averaged)]
    score = float(np.mean(values)) if values and None not in values and not stopped else None
    finite = score is not None and math.isfinite(score)

    state: State = "complete" if finite else "diverged"
    state = "failed" if failed else state
    why = stopped or (finished if finite else f"{metric.name} is not finite")
    signed = None
    if score is not None and finite:
        signed = score if metric.higher else -score
    return Outcome(
        trial=trial,
        round=planned,
        state=state,
        score=signed,
        reason=why,
        rounds=len(rows),
        bytes=sum(row["bytes_up"] + row["bytes_down"] for row in rows),
        steps=sum(row["steps"] for row in rows),
        seconds=sum(row["seconds"] for row in rows),
    )


def exploded(row: dict[str, Any], first: float | None) -> bool:
    """Whether a round's loss on validation samples says that the run has diverged."""
    loss = row.get("loss")
    if loss is None:
        return False
    if first is None or not math.isfinite(loss):
        return not math.isfinite(loss)
    return bool(loss > EXPLODED * max(first, 1e-3))


def save(path: Path, outcome: Outcome) -> None:
    """Append an outcome to a file."""
    append_json(path, asdict(outcome))


def load(path: Path) -> dict[tuple[int, int], Outcome]:
    """The outcomes in a file, by trial and planned rounds."""
    if not path.exists():
        return {}
    outcomes = [Outcome(**row) for row in read_lines(path)]
    return {(outcome.trial, outcome.round): outcome for outcome in outcomes}
