"""How far a budget goes: the rounds of a trial in each stage, and which trials go on.

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
    lengths = [rounds]
    while len(lengths) < STAGES and lengths[0] // ETA >= FEWEST:
        lengths.insert(0, lengths[0] // ETA)
    return tuple(lengths)


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
        amounts = {name: amount for name, amount in options.items() if amount is not None}
        if len(amounts) > 1:
            raise UserError(f"Give one budget, not --{' and --'.join(amounts)}.")
        for name, amount in amounts.items():
            if not (math.isfinite(amount) and amount > 0):
                raise UserError(f"--{name} {amount} must be above 0 and finite.")
            if amount > LARGEST.get(name, math.inf):
                raise UserError(
                    f"--{name} {amount} is more than a search can use; "
                    f"give at most {LARGEST[name]}."
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
        if trials is not None:
            return cls("trials", trials)
        return cls("trials", 30)

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
                f"--{self.kind} {self.total / unit:g} is too small for trials of {rounds} rounds: "
                f"give at least {math.ceil(least / unit)}, or lower train.rounds."
            )

    def used(self, outcome: Outcome) -> float:
        """What a run used of it, but for minutes, which the clock counts."""
        amounts = {"trials": 1.0, "rounds": outcome.rounds, "bytes": outcome.bytes, "minutes": 0.0}
        return amounts[self.kind]

    def fixed(self, rounds: int) -> float:
        """What any run of so many rounds uses; 0 where it is not the same for all."""
        return {"trials": 1.0, "rounds": float(rounds)}.get(self.kind, 0.0)

    def allows(self, amount: float, stages: int) -> bool:
        """Whether the first stage may use this many trials, rounds or bytes."""
        if self.kind == "trials":
            return amount <= self.total
        return amount <= self.total / stages

    def has_time(self, ended: Sequence[Outcome], stages: int, clock: float) -> bool:
        """Whether one more trial may begin its first stage, where the clock is the budget."""
        typical = 0.0
        if ended:
            typical = sum(outcome.seconds for outcome in ended) / len(ended)
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
        """The trials that go on to a stage, best first: a third of them, or fewer.

        They are fewer if the budget ends before.

        Args:
            ranked: Those of the stage before, best first.
            keep: Trials that are chosen before others.
            stage: The stage, from 1.
            rounds: Those of every stage.
            earlier: What other runs used.
            clock: Seconds that the search has taken.
            speed: Steps of clients per second.
            prices: Those of the runs, by default in proportion to the stage before.
        """
        best = [outcome.trial for outcome in ranked[: math.ceil(len(ranked) / ETA)]]
        for trial in keep:
            if trial not in best:
                best.append(trial)
        if self.kind == "trials":
            return best

        # What each of them would use, and what there is for all.
        growth = rounds[stage] / rounds[stage - 1]
        available = self.total * (stage + 1) / len(rounds)
        costs: dict[int, float] = {}
        if self.kind == "minutes":
            available = MARGIN * (available - clock)
            for outcome in ranked:
                costs[outcome.trial] = growth * outcome.steps / max(speed, 1e-9)
        else:
            available -= sum(earlier.values())
            for outcome in ranked:
                costs[outcome.trial] = growth * self.used(outcome)
            if prices is not None:
                costs.update(prices)

        # The best one first: the clock is an estimate, so it is tried at least.
        chosen: set[int] = set()
        for trial in dict.fromkeys([best[0], *keep, *best]):
            if costs[trial] <= available or (self.kind == "minutes" and not chosen):
                available -= costs[trial]
                chosen.add(trial)
        return [trial for trial in best if trial in chosen]
