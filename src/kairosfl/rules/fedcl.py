"""FedCL: "Critical Learning Periods-Aware Adaptive Client Selection in Federated Learning"
(CriticalFL, KDD 2023).

|M^{t+1}| = min(2 |M^t|, M)        inside a critical period      (Algorithm 2)
|M^{t+1}| = max(|M^t| / 2, m / 2)  outside it
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Self

import torch

from kairosfl.core.rule import Memory, Plan, Rule, State
from kairosfl.core.run import Round
from kairosfl.core.traits import Reads, Traits
from kairosfl.detectors import FGN
from kairosfl.errors import UserError


@dataclass(frozen=True, kw_only=True)
class FedCL(Rule):
    """Doubles the cohort inside a critical period and halves it outside.

    Args:
        cap: Largest cohort, as a fraction of all clients.
        floor: Smallest cohort, as a fraction of the initial one.
        once: Whether doubling stops once the cap has been reached.
        every: Rounds between two decisions.
        increase: Probability of doubling, whatever the detector says.
        decrease: Probability of halving, whatever the detector says.
        budget: At most this share of `train.cohort` × `train.rounds` clients is asked; 0: no limit.
        rest: With a budget, the share of an even cohort that is left to every later round; 0: one
            client.
    """

    cap: float = 1.0
    floor: float = 0.5
    once: bool = False
    every: int = 1
    increase: float = 0.0
    decrease: float = 0.0
    budget: float = 0.0
    rest: float = 0.5

    @classmethod
    def released(cls) -> Self:
        """The authors' schedule; use it with `detector = "fgn.released()"`."""
        return cls(cap=0.75, floor=1.0, once=True, every=2)

    @classmethod
    def random(cls) -> Self:
        """Appendix A.4 with both probabilities at 30 %."""
        return cls(increase=0.3, decrease=0.3)

    def __post_init__(self) -> None:
        self.check(
            "cap", 0 < self.cap <= 1, "it is a fraction of all clients, above 0 and at most 1"
        )
        self.check(
            "floor",
            0 < self.floor <= 1,
            "it is a fraction of the starting cohort, above 0 and at most 1",
        )
        self.check("every", self.every >= 1, "use 1 for every round")
        self.check("increase", 0 <= self.increase <= 1, "it is a probability")
        self.check(
            "budget", self.budget >= 0, "use a share of all clients asked, or 0 for no limit"
        )
        self.check(
            "rest", 0 <= self.rest <= 1, "use 0 to 1; 0 leaves one client to every later round"
        )
        self.check(
            "rest",
            self.budget > 0 or self.rest == FedCL.rest,
            "it needs a budget; set one, or leave it out",
        )
        self.check(
            "decrease",
            0 <= self.decrease <= 1 - self.increase,
            "increase and decrease must sum to at most 1",
        )

    def traits(self) -> Traits:
        reads: Reads = "direction" if self._by_chance else "signals"
        changes = {"size"}
        limited = self.budget > 0
        if limited:
            reads = "clients"  # it counts those that were asked
            changes.add("total")
        return Traits(
            adapts=True,
            idle=limited,  # clients that were asked are paid for
            reads=reads,
            periods=not self._by_chance,
            horizon=limited,
            sums=True,
            late=not limited,
            changes=changes,
            instead={"size": "use fedcl(budget=...)", "visits": "no budget"},
        )

    @property
    def _by_chance(self) -> bool:
        return bool(self.increase or self.decrease)

    def largest_cohort(self, cohort: int, population: int) -> int:
        return max(_part(self.cap, population), cohort)

    def widened(self, factor: float) -> Self:
        return replace(self, budget=self.budget / factor)  # the total stays

    def server(self, now: Round) -> State:
        if self.budget and self._total(now) < now.rounds:
            raise UserError(
                f"fedcl: the budget is {self._total(now)} clients for {now.rounds} rounds, less "
                f"than one a round; use a budget {times(self.budget * now.cohort)} times as large "
                "or more."
            )
        state = {
            "size": torch.tensor(0),  # 0: the starting cohort
            "capped": torch.tensor(False),
        }
        if self.budget:
            state["spent"] = torch.tensor(0)
        return state

    def verdict(self, memory: Memory, now: Round) -> str | None:
        sentences = []
        if not memory.state["size"]:
            sentences.append("fedcl never changed the size of the cohort")
        mismatch = self._mismatch(now)
        if mismatch:
            sentences.append(mismatch)
        return "; ".join(sentences) or None

    def _mismatch(self, now: Round) -> str | None:
        """That of schedule and detector one is the paper's and the other the released code's."""
        detector = now.detectors[0]
        if self._by_chance or not isinstance(detector, FGN):
            return None
        schedule = self._schedule()
        if schedule == type(self).released()._schedule() and detector != FGN.released():
            return (
                "fedcl.released() is half of the authors' code, and run.detector = "
                f"{str(detector)!r} is not its other half; use run.detector = 'fgn.released()'"
            )
        if schedule == FedCL()._schedule() and detector == FGN.released():
            return (
                "run.detector = 'fgn.released()' is half of the authors' code, and fedcl as "
                "printed is not its other half; use fedcl.released()"
            )
        return None

    def _schedule(self) -> tuple[float, float, bool, int]:
        return self.cap, self.floor, self.once, self.every

    def select(self, plan: Plan, memory: Memory, now: Round) -> Plan:
        size = int(memory.state["size"]) or plan.size
        if self.budget:
            remaining = self._total(now) - int(memory.state["spent"])
            later = now.rounds - now.number - 1
            rest = max(self.rest * self._total(now) / now.rounds, 1.0)
            affordable = int(remaining - rest * later + 1e-9)
            size = min(size, max(affordable, 1))  # 1: it was begun with a smaller rest
        return replace(plan, size=size)

    def _total(self, now: Round) -> int:
        return _part(self.budget, now.cohort * now.rounds)

    def observe(self, memory: Memory, now: Round) -> Memory:
        if not self.budget:
            return self._moved(memory, now)
        briefed = len(now.reports) + len(now.reports.failed)
        memory = memory.replace(state=memory.state | {"spent": memory.state["spent"] + briefed})
        if not len(now.reports):  # a round that says nothing moves nothing
            return memory
        return self._moved(memory, now)

    def _moved(self, memory: Memory, now: Round) -> Memory:
        """After the size of the next cohort was decided."""
        if now.number % self.every:
            return memory
        top = max(_part(self.cap, now.population), 1)
        bottom = max(_part(self.floor, now.cohort), 1)
        before = int(memory.state["size"]) or now.cohort
        size = before
        grow, shrink = self._moves(now)
        if grow and not (self.once and memory.state["capped"]):
            size = min(2 * before, max(top, now.cohort))
        elif shrink:
            size = max(before - max(before // 2, 1), bottom)

        state = dict(memory.state)
        if size != before:
            state["size"] = torch.tensor(size)
        state["capped"] = state["capped"] | (size >= top)
        return memory.replace(state=state)

    def _moves(self, now: Round) -> tuple[bool, bool]:
        """Whether the cohort grows, and whether it shrinks."""
        if not self._by_chance:
            return now.signals.critical, not now.signals.critical
        draw = now.stream("fedcl").random()
        return draw < self.increase, self.increase <= draw < self.increase + self.decrease


def times(clients: float) -> str:
    """By what a budget of this many clients a round grows to one a round, rounded up."""
    return f"{math.ceil(100 / clients) / 100:.2f}"


def _part(share: float, total: int) -> int:
    return int(share * total + 1e-9)  # 0.29 · 100 is 28.999999999999996
