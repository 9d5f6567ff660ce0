"""Averaging of global models: Polyak and Juditsky, "Acceleration of Stochastic Approximation by
Averaging", 1992.

    result     x̄_T = Σ_k decay^{T−k} x_k / Σ_k decay^{T−k}       x_k: the model after round k

over the models of a window at the end of the run. Dividing by the sum of the weights is the bias
correction of an exponential average. The window opens when the share `share` of the run's learning
rates, Σ_t lr_t, is left: with a constant rate that is the final 10 % of rounds, with one that
decays it is longer, because later models lie closer together. Training goes on as without the rule.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Self

import torch
from torch import Tensor

from kairosfl.core.recipe import Recipe
from kairosfl.core.rule import Memory, Rule, State
from kairosfl.core.run import Round
from kairosfl.core.traits import Traits


@dataclass(frozen=True, kw_only=True)
class Average(Rule):
    """The result is the mean of the last global models.

    Before the window opens, it is the model itself.

    Args:
        share: Length of the window, as a share of what `of` says; 1 averages all rounds.
        of: "lr": a share of the sum of the learning rates; "rounds": a share of the rounds.
        decay: How much less a model counts with each later round; 1 is the plain mean.
    """

    share: float = 0.1
    of: str = "lr"
    decay: float = 1.0

    @classmethod
    def exponential(cls) -> Self:
        """An exponential average over all rounds, mostly of the last twenty."""
        return cls(share=1.0, decay=0.95)

    def __post_init__(self) -> None:
        self.check(
            "share",
            0 < self.share <= 1,
            "use a number above 0 and at most 1; 1 averages all rounds",
        )
        self.check("of", self.of in ("lr", "rounds"), "use 'lr' or 'rounds'")
        self.check(
            "decay", 0 < self.decay <= 1, "use a number above 0 and at most 1; 1 is the plain mean"
        )

    def traits(self) -> Traits:
        return Traits(
            adapts=True,
            # A round without reports leaves the model as it was, and that model counts again.
            idle=True,
            reads="direction",
            horizon=self.share < 1,
            sums=True,
            late=True,
        )

    def server(self, now: Round) -> State:
        return {
            "sum": torch.zeros_like(now.x, dtype=torch.float64),
            "weight": torch.tensor(0.0, dtype=torch.float64),
        }

    def observe(self, memory: Memory, now: Round) -> Memory:
        """Add the model that this round started from; `result` adds the latest one."""
        if now.number < opening(now.recipe, self.share, self.of):
            return memory
        total, weight = self._with(now.x, memory)
        return memory.replace(state={"sum": total, "weight": weight})

    def result(self, x: Tensor, memory: Memory, now: Round) -> Tensor:
        if not memory.state["weight"]:  # at most one model so far: the latest
            return x
        total, weight = self._with(x, memory)
        return (total / weight.to(total.device)).to(x.dtype)

    def _with(self, x: Tensor, memory: Memory) -> tuple[Tensor, Tensor]:
        return self.decay * memory.state["sum"] + x, self.decay * memory.state["weight"] + 1

    def verdict(self, memory: Memory, now: Round) -> str | None:
        if memory.state["weight"]:
            return None
        return (
            f"{self} averaged nothing: fewer than two models fell into its window; "
            "use a larger share"
        )


@lru_cache(maxsize=64)
def opening(recipe: Recipe, share: float, of: str = "lr") -> int:
    """The first round, counted from 1, whose model belongs to the window."""
    lengths = [1.0] * recipe.rounds
    if of == "lr":
        lengths = [recipe.lr_at(t) for t in range(recipe.rounds)]
    remaining = list(accumulate(reversed(lengths)))  # of the last 1, 2, ... rounds
    window = share * remaining[-1] * (1 + 1e-9)
    within = sum(length <= window for length in remaining)
    return recipe.rounds - max(within, 1) + 1
