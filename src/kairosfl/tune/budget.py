"""How far a budget goes: how many rounds a trial has in each stage, and which trials go on to the
next.

A stage is a complete run of every trial in it, with its whole schedule of the learning rate; the
last one has the rounds of the file, the one before it a third of them. Much shorter runs would
choose wrongly: what regularises, such as crops and flips, pays off late. Each stage gets the same
part of the budget, so about a third of the trials go on.
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
MOST = 100_000  # trials
LEAST = 6  # times the file's rounds: three trials can finish
MARGIN = 0.8  # of the time that is left, for what estimates miss
LARGEST = {"rounds": 10**9, "bytes": 10**12, "minutes": 10**7}
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
            if value > LARGEST.get(name, math.inf):
                raise UserError(
                    f"--{name} {value} is more than a search can use; give at most {LARGEST[name]}."
                )
        if trials is not None and trials < LEAST:
            raise UserError(f"--trials {trials} is too few to search; give {LEAST} or more.")
        if trials is not None and trials > MOST:
            raise UserError(f"--trials {trials} is too many to end; give at most {MOST:,}.")
        if rounds is not None:
            return cls("rounds", rounds)
        if megabytes is not None:
            return cls("bytes", megabytes * 1e6)
        if minutes is not None:
            return cls("minutes", 60 * minutes)
        return cls("trials", trials or 30)

    def check(self, rounds: int, dearest: float = 0.0, largest: float = 0.0) -> None:
        """Refuse a budget with which no three trials could finish.

        `dearest` are the bytes of the dearest trial, and `largest` those it may send if its rules
        choose large cohorts.
        """
        sent = max(LEAST * dearest, len(stages(rounds)) * largest)
        least = {"rounds": float(LEAST * rounds), "bytes": sent}.get(self.kind, 0.0)
        if self.total < least:
            unit = 1e6 if self.kind == "bytes" else 1
            raise UserError(
                f"--{self.kind} {self.total / unit:g} is too small for trials of {rounds} rounds: give at least "
                f"{math.ceil(least / unit)}, or lower train.rounds."
            )

    def used(self, outcome: Outcome) -> float:
        """What a run used of it, but for minutes, which the clock counts."""
        return {"trials": 1.0, "rounds": outcome.rounds, "bytes": outcome.bytes, "minutes": 0.0}[
            self.kind
        ]

    def allows(self, amount: float, stages: int) -> bool:
        """Whether the first stage may use this many trials, rounds or bytes."""
        return amount <= (self.total if self.kind == "trials" else self.total / stages)

    def has_time(self, ended: Sequence[Outcome], stages: int, clock: float) -> bool:
        """Whether one more trial may begin its first stage, where the clock is the budget."""
        typical = sum(outcome.seconds for outcome in ended) / len(ended) if ended else 0.0
        return clock + typical / 2 < self.total / stages

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
        prices: Mapping[int, float] | None = None,
    ) -> list[int]:
        """The trials that go on to a stage, best first: a third of them, or fewer if the budget
        ends before.

        `ranked` are those of the stage before; `keep` are trials that are chosen before others;
        `earlier` is what other runs used; `speed` is in steps of clients per second; `prices` are
        those of the runs, by default in proportion to the stage before.
        """
        best = [outcome.trial for outcome in ranked[: math.ceil(len(ranked) / ETA)]]
        best += [trial for trial in dict.fromkeys(keep) if trial not in best]
        if self.kind == "trials":
            return best

        # What each of them would use, and what is left for all.
        growth = rounds[stage] / rounds[stage - 1]
        left = self.total * (stage + 1) / len(rounds)
        if self.kind == "minutes":
            left = MARGIN * (left - clock)
            costs = {outcome.trial: growth * outcome.steps / max(speed, 1e-9) for outcome in ranked}
        else:
            left -= sum(earlier.values())
            costs = {outcome.trial: growth * self.used(outcome) for outcome in ranked} | dict(
                prices or {}
            )

        # The best one first: the clock is an estimate, so it is tried at least.
        chosen: set[int] = set()
        for trial in dict.fromkeys([best[0], *keep, *best]):
            if costs[trial] <= left or (self.kind == "minutes" and not chosen):
                left -= costs[trial]
                chosen.add(trial)
        return [trial for trial in best if trial in chosen]
