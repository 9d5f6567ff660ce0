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
        limited = self.budget > 0
        return Traits(
            adapts=True,
            idle=limited,  # clients that were asked are paid for
            reads="clients" if limited else reads,  # with a budget it counts those that were asked
            periods=not self._by_chance,
            horizon=limited,
            sums=True,
            late=not limited,
            changes={"size", "total"} if limited else {"size"},
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
                f"fedcl: the budget is {self._total(now)} clients for {now.rounds} rounds, less than one a round; use "
                f"a budget {times(self.budget * now.cohort)} times as large or more."
            )
        spent = {"spent": torch.tensor(0)} if self.budget else {}
        return {
            "size": torch.tensor(0),
            "capped": torch.tensor(False),
        } | spent  # size 0: the starting cohort

    def verdict(self, memory: Memory, now: Round) -> str | None:
        unchanged = None if memory.state["size"] else "fedcl never changed the size of the cohort"
        return "; ".join(sentence for sentence in (unchanged, self._half(now)) if sentence) or None

    def _half(self, now: Round) -> str | None:
        """That cohort and detector are not of the same schedule, neither the paper's nor the
        released code's.
        """
        printed, released = FedCL(), type(self).released()
        detector = now.detectors[0]
        if self._by_chance or not isinstance(detector, FGN):
            return None
        if self._schedule() == released._schedule() and detector != FGN.released():
            return (
                f"fedcl.released() is half of the authors' code, and run.detector = {str(detector)!r} is not its other "
                "half; use run.detector = 'fgn.released()'"
            )
        if self._schedule() == printed._schedule() and detector == FGN.released():
            return (
                "run.detector = 'fgn.released()' is half of the authors' code, and fedcl as printed is not its other "
                "half; use fedcl.released()"
            )
        return None

    def _schedule(self) -> tuple[float, float, bool, int]:
        return self.cap, self.floor, self.once, self.every

    def select(self, plan: Plan, memory: Memory, now: Round) -> Plan:
        size = int(memory.state["size"]) or plan.size
        if self.budget:
            each = max(self.rest * self._total(now) / now.rounds, 1.0)
            left, later = self._total(now) - int(memory.state["spent"]), now.rounds - now.number - 1
            size = min(
                size, max(int(left - each * later + 1e-9), 1)
            )  # 1: it was begun with a smaller rest
        return replace(plan, size=size)

    def _total(self, now: Round) -> int:
        return _part(self.budget, now.cohort * now.rounds)

    def observe(self, memory: Memory, now: Round) -> Memory:
        if not self.budget:
            return self._moved(memory, now)
        asked = len(now.reports) + len(now.reports.failed)
        memory = memory.replace(state=memory.state | {"spent": memory.state["spent"] + asked})
        return self._moved(memory, now) if len(now.reports) else memory

    def _moved(self, memory: Memory, now: Round) -> Memory:
        if now.number % self.every:
            return memory
        before = size = int(memory.state["size"]) or now.cohort
        top = max(_part(self.cap, now.population), 1)
        bottom = max(_part(self.floor, now.cohort), 1)
        grow, shrink = self._moves(now)
        if grow and not (self.once and memory.state["capped"]):
            size = min(2 * size, max(top, now.cohort))
        elif shrink:
            size = max(size - max(size // 2, 1), bottom)
        after = memory.state["size"] if size == before else torch.tensor(size)
        return memory.replace(
            state=memory.state | {"size": after, "capped": memory.state["capped"] | (size >= top)}
        )

    def _moves(self, now: Round) -> tuple[bool, bool]:
        if not self._by_chance:
            return now.signals.critical, not now.signals.critical
        draw = now.stream("fedcl").random()
        return draw < self.increase, self.increase <= draw < self.increase + self.decrease


def times(clients: float) -> str:
    """How many times a budget of so many clients a round must be as large to be one a round,
    rounded up.
    """
    return f"{math.ceil(100 / clients) / 100:.2f}"


def _part(share: float, whole: int) -> int:
    return int(share * whole + 1e-9)  # 0.29 · 100 is 28.999999999999996
