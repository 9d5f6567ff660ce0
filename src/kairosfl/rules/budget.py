"""A budget of clients or of bytes, spent over time and never exceeded; our own rule.

FedCL (KDD 2023) compares algorithms at 0.95 to 1.1 times the clients. Here the total is given, and
what is left to choose is when to spend it.

    total        share · cohort · rounds clients, or `megabytes`
    by plan      |M^t| ∝ plan_t, relative cohort sizes over equal parts of the run
    by detector  |M^t| = cohort                    while the period is critical, and at the end
                       = what is left, evenly      in the rounds in between

Without a plan all rounds are alike. By detector the final rounds have the whole cohort unless the
models are averaged, and a critical period keeps `rest` of an even cohort for every later round.
Every round has at least one client, and what a round did not spend is left to the next ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch

from kairosfl.core.fields import NUMBER_BYTES, Briefs, Reports, fields
from kairosfl.core.rule import Memory, Plan, Rule, State, acts
from kairosfl.core.run import Round
from kairosfl.core.traits import Traits
from kairosfl.errors import UserError
from kairosfl.rules.average import Average
from kairosfl.rules.fedcl import times
from kairosfl.wording import counted


@dataclass(frozen=True, kw_only=True)
class Budget(Rule):
    """Spends a total of clients or bytes by a plan, or while the period is critical.

    Args:
        share: The total, as a share of `train.cohort` × `train.rounds`.
        megabytes: The total in megabytes (10⁶ bytes), down and up; 0: `share` counts.
        by: What cohorts follow: a "plan", or the "detector".
        plan: Relative cohort sizes over equal parts of the run, such as `[10, 1, 1, 10]`; empty:
            evenly.
        final: By detector: share of rounds at the end with the whole cohort, unless models are
            averaged.
        rest: By detector: share of an even cohort that a critical period leaves to every later
            round; 0: one client.
    """

    share: float = 0.4
    megabytes: float = 0.0
    by: str = "plan"
    plan: tuple[float, ...] = ()
    final: float = 0.1
    rest: float = 0.5

    def __post_init__(self) -> None:
        self.check("plan", _has_heights(self.plan), "list numbers above 0")
        object.__setattr__(self, "plan", tuple(map(float, self.plan)))
        self.check("share", self.share > 0, "use a number above 0")
        self.check(
            "megabytes",
            self.megabytes >= 0,
            "use a number above 0, or 0 for a share of the clients",
        )
        self.check("by", self.by in ("plan", "detector"), "use 'plan' or 'detector'")
        self.check(
            "plan", not (self.plan and self.by == "detector"), "leave it out, or use by = 'plan'"
        )
        self.check("final", 0 <= self.final < 1, "use at least 0 and below 1")
        self.check(
            "rest",
            0 <= self.rest < 1,
            "use at least 0 and below 1; 0 leaves one client to every later round",
        )

    def traits(self) -> Traits:
        return Traits(
            when="last",
            adapts=True,
            constraint=True,
            idle=True,  # clients that were asked are paid for
            reads="clients",  # by plan, too: what is left depends on how many were asked
            periods=self.by == "detector",
            horizon=True,
            sums=True,
            changes={"size", "total"},
        )

    def largest_cohort(self, cohort: int, population: int) -> int:
        peak = 1.0  # the largest round, in even ones
        if self.plan:
            peak = max(self.plan) * len(self.plan) / sum(self.plan)
        share = 1.0 if self.megabytes else self.share
        most = peak * cohort * share
        return min(max(math.ceil(most), cohort), population)

    def widened(self, factor: float) -> Self:
        return replace(self, share=self.share / factor)  # the total stays

    def server(self, now: Round) -> State:
        if not self.megabytes and self._total(now) < now.rounds:
            clients = counted(self._total(now), "client")
            rounds = counted(now.rounds, "round")
            raise UserError(
                f"budget: the share is {clients} for {rounds}, less than one a round; use a "
                f"share {times(self.share * now.cohort)} times as large or more, or a larger "
                "train.cohort."
            )
        if self.megabytes:
            needed = now.rounds * _most(now)
            if round(self.megabytes * 1e6) < needed:
                raise UserError(
                    f"budget: megabytes = {self.megabytes:g} may be less than one client a round "
                    f"costs; use {math.ceil(needed / 1e4) / 100:.2f} or more, or fewer "
                    "train.rounds."
                )
        return {"clients": torch.tensor(0), "bytes": torch.tensor(0)}

    def select(self, plan: Plan, memory: Memory, now: Round) -> Plan:
        size = self.size(memory, now)
        if plan.ids is not None and len(plan.ids) > size:
            return replace(plan, ids=now.stream("budget").choice(plan.ids, size, replace=False))
        return replace(plan, size=size)

    def size(self, memory: Memory, now: Round) -> int:
        """The cohort of this round: as chosen, but leaving a client for each later round."""
        done = int(memory.state["clients"])
        remaining = self._remaining(memory, now)
        if self.by == "plan":
            chosen = self._planned(done, remaining, now)
        else:
            chosen = self._detected(done, remaining, now)

        later = now.rounds - now.number - 1
        limit = remaining - later
        if self.megabytes:  # however much a client can cost at most
            unspent = round(self.megabytes * 1e6) - int(memory.state["bytes"])
            limit = min(limit, unspent // _most(now) - later)
        return max(1, min(chosen, limit, self.largest_cohort(now.cohort, now.population)))

    def _total(self, now: Round) -> int:
        return int(self.share * now.cohort * now.rounds + 1e-9)

    def _remaining(self, memory: Memory, now: Round) -> int:
        """How many clients can still be paid for; in bytes, at what a client cost so far."""
        clients = int(memory.state["clients"])
        if not self.megabytes:
            return self._total(now) - clients
        spent = int(memory.state["bytes"])
        if clients:
            price = spent / clients
        else:  # the model down and up
            price = 2 * now.layout.size * now.x.element_size()
        return int((self.megabytes * 1e6 - spent) / price)

    def _planned(self, done: int, remaining: int, now: Round) -> int:
        """What the plan has spent after this round, rounded down, minus what was spent."""
        parts = self.plan or (1.0,)
        heights = [parts[t * len(parts) // now.rounds] for t in range(now.rounds)]
        cohorts = scaled(heights, done + remaining)
        return int(sum(cohorts[: now.number + 1]) + 1e-9) - done

    def _detected(self, done: int, remaining: int, now: Round) -> int:
        """Critical rounds take the cohort, final ones their reserve, the others an even share."""
        averaged = any(isinstance(rule, Average) for rule in now.rules)
        final = 0 if averaged else int(self.final * now.rounds + 1e-9)
        end = now.rounds - final
        if now.number >= end:
            return int(remaining / (now.rounds - now.number) + now.stream("budget").random())

        reserve = final * now.cohort
        if now.signals.critical:  # as many as leave enough to each round before the end
            rest = max(self.rest * (done + remaining - reserve) / end, 1.0)
            spendable = remaining - reserve - rest * (end - now.number - 1)
            return min(now.cohort, int(spendable + 1e-9))
        even = (remaining - reserve) / (end - now.number)
        return int(even + now.stream("budget").random())  # 1.8 is 2 in four rounds of five

    def observe(self, memory: Memory, now: Round) -> Memory:
        reports = len(now.reports)
        briefed = reports + len(now.reports.failed)
        size = now.x.element_size()
        down = now.briefs.bytes(now.layout, size)
        up = now.reports.bytes(now.layout, size)
        state = {
            "clients": memory.state["clients"] + briefed,
            "bytes": memory.state["bytes"] + briefed * down + reports * up,
        }
        return memory.replace(state=state)

    def verdict(self, memory: Memory, now: Round) -> str | None:
        if self.megabytes:
            used = int(memory.state["bytes"]) / 1e6
            total = self.megabytes
            unit = "MB"
        else:
            used = float(int(memory.state["clients"]))
            total = float(self._total(now))
            unit = "clients"
        if used < 0.95 * total:
            return (
                f"budget spent {used:.4g} of {total:.4g} {unit}; "
                "a cohort is never larger than its plan allows"
            )
        return None


def _has_heights(plan: object) -> bool:
    """Whether a plan, which may come from a file, is a list of finite numbers above 0."""
    if not isinstance(plan, list | tuple):
        return False
    for height in plan:
        if not isinstance(height, int | float) or not height > 0:
            return False
    return sum(plan) < math.inf


def scaled(heights: Sequence[float], total: int) -> list[float]:
    """Cohorts proportional to the heights, but none below one client, that sum to the total."""
    low = 0  # how many of the lowest rounds have one client each
    ranked = sorted(heights)
    while low < len(ranked) - 1 and ranked[low] * (total - low) < sum(ranked[low:]):
        low += 1
    scale = max(total - low, 0) / sum(ranked[low:])
    return [max(scale * height, 1.0) for height in heights]


def _most(now: Round) -> int:
    """What one client can cost at most, whatever the rules send."""
    vectors = 0
    numbers = 0
    for entry in (*fields(Briefs), *fields(Reports)):
        if entry.travels and not entry.alone:
            vectors += entry.shape == "vector"
            numbers += entry.number
    if not any(acts(rule, "brief") for rule in now.rules):
        vectors = 2  # the model down and the update up
    return vectors * now.layout.size * now.x.element_size() + numbers * NUMBER_BYTES
