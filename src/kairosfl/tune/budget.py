"""How far a budget goes: how many rounds a trial has in each stage, and which trials go on to the next.

A stage is a complete run of every trial in it, with its whole schedule of the learning rate; the last one has the
rounds of the file, the one before it a third of them. Much shorter runs would choose wrongly: what regularises, such as
crops and flips, pays off late. Each stage gets the same part of the budget, so about a third of the trials go on.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from kairosfl.errors import UserError
from kairosfl.tune.outcomes import Outcome

ETA = 3
STAGES = 2  # at most
FEWEST = 10  # rounds of a stage
LEAST = 6  # times the file's rounds: three trials can finish
MARGIN = 0.8  # of the time that is left, for what estimates miss
Kind = Literal["trials", "rounds", "bytes", "minutes"]


def stages(rounds: int) -> tuple[int, ...]:
    """The rounds of a trial in each stage."""
    found = [rounds]
    while len(found) < STAGES and found[0] // ETA >= FEWEST:
        found.insert(0, found[0] // ETA)
    return tuple(found)


@dataclass(frozen=True)
class Budget:
    """What all runs of a search may use together: trials, rounds, bytes or seconds."""

    kind: Kind
    total: float

    @classmethod
    def of(
        cls,
        *,
        trials: int | None = None,
        rounds: int | None = None,
        megabytes: float | None = None,
        minutes: float | None = None,
    ) -> Budget:
        """The one that is given, or 30 trials."""
        options = {"trials": trials, "rounds": rounds, "bytes": megabytes, "minutes": minutes}
        given = {name: value for name, value in options.items() if value is not None}
        if len(given) > 1:
            raise UserError(f"Give one budget, not {' and '.join(f'--{name}' for name in given)}.")
        for name, value in given.items():
            if not (math.isfinite(value) and value > 0):
                raise UserError(f"--{name} {value} must be above 0 and finite.")
        if trials is not None and trials < LEAST:
            raise UserError(f"--trials {trials} is too few to search; give {LEAST} or more.")
        if rounds is not None:
            return cls("rounds", rounds)
        if megabytes is not None:
            return cls("bytes", megabytes * 1e6)
        if minutes is not None:
            return cls("minutes", 60 * minutes)
        return cls("trials", trials or 30)

    def check(self, rounds: int, bytes_per_round: int) -> None:
        """Refuse a budget with which no three trials could finish."""
        least = {"rounds": LEAST * rounds, "bytes": LEAST * rounds * bytes_per_round}.get(self.kind, 0)
        if self.total < least:
            unit = 1e6 if self.kind == "bytes" else 1
            raise UserError(
                f"--{self.kind} {self.total / unit:g} is too small for trials of {rounds} rounds: give at least "
                f"{math.ceil(least / unit)}, or lower train.rounds."
            )

    def used(self, outcome: Outcome) -> float:
        """What a run used of it, but for minutes, which the clock counts."""
        return {"trials": 1.0, "rounds": outcome.rounds, "bytes": outcome.bytes, "minutes": 0.0}[self.kind]

    def allows_new(
        self, ended: Sequence[Outcome], waiting: int, cost: float, stages: int, clock: float, reserve: int
    ) -> bool:
        """Whether one more trial may begin its first stage, with `waiting` ones in it and `reserve` kept for others.

        `cost` is that of one run where none has ended yet.
        """
        if self.kind == "trials":
            return len(ended) + waiting + reserve < self.total
        share = self.total / stages
        if self.kind == "minutes":
            typical = sum(each.seconds for each in ended) / len(ended) if ended else 0.0
            return clock + typical / 2 < share
        cost = max([cost, *map(self.used, ended)])
        return sum(map(self.used, ended)) + (waiting + 1 + reserve) * cost <= share

    def going_on(
        self,
        ranked: Sequence[Outcome],
        keep: Sequence[int],
        *,
        stage: int,
        rounds: Sequence[int],
        earlier: Mapping[int, float],
        clock: float,
        speed: float,
    ) -> list[int]:
        """The trials that go on to a stage, best first: a third of them, or fewer if the budget ends before.

        `ranked` are those of the stage before; `keep` are trials that go on in any case; `earlier` is what the
        earlier stages used; `speed` is in steps of clients per second.
        """
        wanted = [each.trial for each in ranked[: math.ceil(len(ranked) / ETA)]]
        wanted += [trial for trial in dict.fromkeys(keep) if trial not in wanted]
        if self.kind == "trials":
            return wanted
        growth = rounds[stage] / rounds[stage - 1]
        left = self.total * (stage + 1) / len(rounds)
        left = MARGIN * (left - clock) if self.kind == "minutes" else left - sum(earlier.values())
        chosen: list[int] = []
        must = {wanted[0], *keep}
        costs = {
            each.trial: growth * (each.steps / max(speed, 1e-9) if self.kind == "minutes" else self.used(each))
            for each in ranked
        }
        left -= sum(costs[trial] for trial in must)
        for trial in wanted:
            if trial in must:
                chosen.append(trial)
            elif costs[trial] <= left:
                left -= costs[trial]
                chosen.append(trial)
        return chosen
