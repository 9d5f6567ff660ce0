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

State = Literal["complete", "diverged", "failed"]
EXPLODED = 1000.0  # times the first loss: diverged


@dataclass(frozen=True)
class Outcome:
    """How one run of a trial ended: `round` is the number of rounds it was to have, `score` higher is better."""

    trial: int
    round: int
    state: State
    score: float | None
    reason: str
    rounds: int
    bytes: int
    steps: int
    seconds: float


def measure(trial: int, planned: int, folder: Path, stopped: str = "", failed: bool = False) -> Outcome:
    """The outcome of a run that has ended; `stopped` is why it did not finish."""
    rows = list(read_lines(folder / "metrics.jsonl"))
    metric = Folder(folder).main()
    scored = scored_rows(rows, metric.name)
    values = [row[metric.name] for row in ending(scored, [f"plain_{metric.name}" in row for row in scored])]
    if rows and not rows[-1]["reported"] and not stopped:
        stopped = "the last round had no usable report"
    score = float(np.mean(values)) if values and None not in values and not stopped else None
    finite = score is not None and math.isfinite(score)
    state: State = "failed" if failed else "complete" if finite else "diverged"
    return Outcome(
        trial=trial,
        round=planned,
        state=state,
        score=None if score is None or not finite else score if metric.higher else -score,
        reason=stopped or ("" if finite else f"{metric.name} is not finite"),
        rounds=len(rows),
        bytes=sum(row["bytes_up"] + row["bytes_down"] for row in rows),
        steps=sum(row["steps"] for row in rows),
        seconds=sum(row["seconds"] for row in rows),
    )


def exploded(row: dict[str, Any], first: float | None) -> bool:
    """Whether a round's loss on validation samples says that the run has diverged."""
    loss = row.get("loss")
    return loss is not None and (not math.isfinite(loss) or (first is not None and loss > EXPLODED * max(first, 1e-3)))


def save(path: Path, outcome: Outcome) -> None:
    """Append an outcome to a file."""
    append_json(path, asdict(outcome))


def load(path: Path) -> dict[tuple[int, int], Outcome]:
    """The outcomes in a file, by trial and planned rounds."""
    found = [Outcome(**row) for row in read_lines(path)] if path.exists() else []
    return {(each.trial, each.round): each for each in found}
