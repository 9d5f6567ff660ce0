"""What the runs of a search have used of its budget.

It is counted round by round, so that a round trained again counts once.
"""

from __future__ import annotations

from collections.abc import Collection, Generator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kairosfl.core.fields import Briefs, Reports
from kairosfl.engines.protocol import Engine
from kairosfl.runs.experiment import RecordedRun
from kairosfl.runs.files import read_lines
from kairosfl.runs.pool import Pending
from kairosfl.tune.budget import Kind
from kairosfl.tune.price import of_round

Key = tuple[int, int]  # a trial and the rounds that it was to have


@dataclass
class Ledger:
    """The rounds or bytes of every run, and of every round that is being trained."""

    kind: Kind
    total: float  # of the budget
    spent: dict[Key, dict[int, float]] = field(default_factory=dict)
    training: dict[Key, float] = field(default_factory=dict)
    used: float = 0.0  # by all runs

    def read(self, key: Key, folder: Path) -> None:
        """Count the rounds that an earlier session recorded."""
        path = folder / "metrics.jsonl"
        if path.exists():
            for row in read_lines(path):
                self.record(key, row)

    def record(self, key: Key, row: dict[str, Any]) -> None:
        """A round has been trained and recorded."""
        self.training.pop(key, None)
        sent = float(row.get("bytes_up", 0) + row.get("bytes_down", 0))
        cost = {"rounds": 1.0, "bytes": sent}.get(self.kind, 0.0)
        rounds = self.spent.setdefault(key, {})
        self.used += cost - rounds.get(row["round"], 0.0)
        rounds[row["round"]] = cost

    def of(self, keys: Collection[Key]) -> float:
        """What some of the runs have used."""
        used = 0.0
        for key in keys:
            used += sum(self.spent.get(key, {}).values())
        return used

    def pays(self, key: Key, briefs: Briefs) -> bool:
        """Whether the budget pays for one more round of a run, which then counts as begun."""
        if self.kind not in ("rounds", "bytes"):
            return True
        cost = 1.0 if self.kind == "rounds" else of_round(briefs)
        if self.used + sum(self.training.values()) + cost > self.total:
            return False
        self.training[key] = cost
        return True


@dataclass(eq=False)
class Metered(Pending):
    """A run that stops before a round that the budget does not pay for.

    Its summary then says `unpaid`.
    """

    key: Key = (0, 0)
    ledger: Ledger = field(default_factory=lambda: Ledger("trials", 0))

    def open(self, engine: Engine, command: str) -> RecordedRun:
        """Begin or continue it."""
        return self._metered(super().open(engine, command))

    def _metered(self, recorded: RecordedRun) -> Generator[Briefs, Reports, dict[str, Any]]:
        try:
            briefs = next(recorded)
            while self.ledger.pays(self.key, briefs):
                reports = yield briefs
                briefs = recorded.send(reports)
        except StopIteration as end:
            summary: dict[str, Any] = end.value
            return summary
        finally:
            self.ledger.training.pop(self.key, None)
            recorded.close()
        return {"rounds": briefs.newest, "unpaid": True}
