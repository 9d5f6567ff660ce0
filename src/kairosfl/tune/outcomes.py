"""How the runs of a search ended, and their scores on validation samples."""

from __future__ import annotations

import math
from collections.abc import Sequence
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


class Ended(dict[tuple[int, int], Outcome]):
    """The outcomes of a search, by trial and planned rounds, in the order in which runs ended."""

    def first(self, count: int, rounds: int) -> list[Outcome]:
        """How those of the first `count` trials ended that have, with so many planned rounds."""
        ended = []
        for number in range(count):
            outcome = self.get((number, rounds))
            if outcome is not None:
                ended.append(outcome)
        return ended

    def ranked(self, rounds: int) -> list[Outcome]:
        """Those that finished so many planned rounds, best first."""
        scored = []
        for outcome in self.values():
            if outcome.round == rounds and outcome.score is not None:
                scored.append((-outcome.score, outcome.trial, outcome))
        return [outcome for _, _, outcome in sorted(scored, key=lambda entry: entry[:2])]

    def shorter(self, rounds: int) -> list[Outcome]:
        """Those with fewer planned rounds."""
        return [outcome for outcome in self.values() if outcome.round < rounds]


def all_failed(ended: Sequence[Outcome]) -> bool:
    """Whether none of these has trained."""
    return all(outcome.state == "failed" for outcome in ended)


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
    with_cohort = [row for row in rows if row.get("cohort", 1)]  # Poisson may draw nobody
    with_reports = [row["round"] for row in rows if row["reported"]]
    if with_cohort and not with_cohort[-1]["reported"] and not stopped:
        stopped = "the last round had no usable report"
    if not with_reports and not stopped:
        stopped = "no round had a usable report"

    # The score is that of the last round which had reports.
    last = max(with_reports, default=0)
    scored = scored_rows([row for row in rows if row["round"] <= last], metric.name)
    is_averaged = [f"plain_{metric.name}" in row for row in scored]
    values = [row[metric.name] for row in ending(scored, is_averaged)]
    score = float("nan")
    if values and None not in values and not stopped:
        score = float(np.mean(values))

    # Higher is better; a run without a finite score has diverged, if it has not failed.
    state: State = "complete"
    reason = finished
    signed = None
    if math.isfinite(score):
        signed = score if metric.higher else -score
    else:
        state = "diverged"
        reason = f"{metric.name} is not finite"
    if stopped:
        reason = stopped
    if failed:
        state = "failed"
    return Outcome(
        trial=trial,
        round=planned,
        state=state,
        score=signed,
        reason=reason,
        rounds=len(rows),
        bytes=_total(rows, "bytes_up") + _total(rows, "bytes_down"),
        steps=_total(rows, "steps"),
        seconds=_total(rows, "seconds"),
    )


def _total(rows: Sequence[dict[str, Any]], column: str) -> Any:
    """The sum of a column over the rounds of a run."""
    return sum(row[column] for row in rows)


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


def load(path: Path) -> Ended:
    """The outcomes in a file; none where there is no file."""
    ended = Ended()
    if path.exists():
        for row in read_lines(path):
            outcome = Outcome(**row)
            ended[outcome.trial, outcome.round] = outcome
    return ended
