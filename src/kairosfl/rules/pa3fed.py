"""PA3Fed: "Period-Aware Adaptive Aggregation for Improved Federated Learning", AAAI 2025.

    score       s_i^t, on all local data: log-likelihood or loss (Eq. 8), or accuracy  (Eq. 9)
    factor      α_i = exp(−beta · (s_i^{t−σ} − s_i^t))                                 (Eq. 10)
                α_i = exp(−beta · |s_i^{t−σ} − s_i^t|)  with `change = "small"`
    weights     n_i · α_i, divided by their sum

σ is how many rounds ago the client last took part. A client without a history has α = 1, and all
clients have it outside a critical period.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from kairosfl.core.fields import Briefs, Reports
from kairosfl.core.rule import Memory, Rule, State
from kairosfl.core.run import Round
from kairosfl.core.traits import Traits
from kairosfl.errors import UserError

SCORES = ("log_likelihood", "loss", "accuracy")
SMALLEST = -300.0  # of a factor's logarithm
NOTICEABLE = 0.01  # a smaller relative change of a weight counts as none


@dataclass(frozen=True, kw_only=True)
class PA3Fed(Rule):
    """Clients that improved since their last turn count more, while the period is critical.

    Args:
        beta: Sharpness, 0 (plain weights) or more.
        score: What changes: "log_likelihood" (better counts more, as in the prose), "loss" (Eq. 8
            and 10 to the letter, its inverse) or "accuracy" (Eq. 9).
        at: Which model is scored: "after" local training, or the global one "before" it.
        always: Whether it acts outside critical periods too.
        change: Which clients count more: those whose score got "better", or those whose score
            changed little, "small".
    """

    beta: float = 0.3
    score: str = "log_likelihood"
    at: str = "after"
    always: bool = False
    change: str = "better"

    def __post_init__(self) -> None:
        self.check("beta", self.beta >= 0, "use 0 (plain weights) or more; the paper uses 0.3")
        self.check("score", self.score in SCORES, "use 'log_likelihood', 'loss' or 'accuracy'")
        self.check("change", self.change in ("better", "small"), "use 'better' or 'small'")
        self.check("at", self.at in ("after", "before"), "use 'after' or 'before'")

    def traits(self) -> Traits:
        return Traits(
            adapts=True,
            needs={self._measurement},
            periods=not self.always,
            sums=True,
            late=True,
            changes={"weights"},
        )

    def verdict(self, memory: Memory, now: Round) -> str | None:
        most = float(memory.state["change"])
        if most >= NOTICEABLE:
            return None
        return (
            f"pa3fed changed no client's weight by more than {100 * most:.2g} %, so this run is "
            "nearly the same as without it"
        )

    def server(self, now: Round) -> State:
        # The largest relative change of a weight so far.
        return {"change": torch.tensor(0.0, dtype=torch.float64)}

    def client(self, now: Round) -> State:
        return {"score": torch.tensor(float("nan"), dtype=torch.float64)}

    def brief(self, briefs: Briefs, memory: Memory, now: Round) -> Briefs:
        return briefs.measured(self._measurement)

    def weigh(self, factors: Tensor, memory: Memory, now: Round) -> Tensor:
        if not self._acts(now):
            return factors
        return factors * self._factors(memory, now)

    def _acts(self, now: Round) -> bool:
        return self.always or now.signals.critical

    def _factors(self, memory: Memory, now: Round) -> Tensor:
        """α_i, `[m]`, up to a common factor."""
        worse = memory.rows["score"] - self._score(now.reports)
        if self.change == "small":
            worse = worse.abs()
        exponent = (-self.beta * worse).nan_to_num(nan=0.0)  # without a history

        # Only ratios matter: with the largest factor at 1, a score that exploded does not overflow.
        # The smallest stays above 0, so that a client with an absurd score cannot silence all
        # others before limits caps its weight.
        return torch.exp((exponent - exponent.max()).clamp(min=SMALLEST))

    def observe(self, memory: Memory, now: Round) -> Memory:
        change = memory.state["change"]
        if self._acts(now):
            factors = self._factors(memory, now)
            counts = now.counts()
            relative = factors * counts.sum() / (factors @ counts) - 1
            change = torch.maximum(change, relative.abs().max())
        return memory.replace(state={"change": change}, rows={"score": self._score(now.reports)})

    def _score(self, reports: Reports) -> Tensor:
        score: Tensor | None = getattr(reports, self._measurement)
        if score is None:
            raise UserError(f"pa3fed needs {self._measurement}, and the engine did not report it.")
        return -score if self.score == "log_likelihood" else score

    @property
    def _measurement(self) -> str:
        """The field of the reports that has the scores."""
        if self.score == "accuracy":
            return f"accuracy_{self.at}"
        return f"score_{self.at}"
