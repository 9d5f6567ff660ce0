"""ALT: Shenaj, Belilovsky and Zanuttigh, "Adaptive Local Training in Federated Learning", 2025.

    a client stops when    cos(f(w; batch), f(reference; batch)) < T(r)
    T(r) = a + b · r / R          "up", r = 1 … R rounds
    T(r) = (a + b) − b · r / R    "down"
    T(r) = a                      "fixed"

f are the features: what enters the model's last linear layer. Section 2 compares with the global model as received;
the listing in Appendix C with the client's own last model, `reference = "previous"`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from kairosfl.core.briefs import Briefs, Reports, Stop, column
from kairosfl.core.round import Round
from kairosfl.core.rule import Rule, State


@dataclass(frozen=True, kw_only=True)
class ALT(Rule):
    """Lets well-aligned clients train long and stops the others early; `train.epochs` is the most that is trained."""

    kind = "adaptive"

    a: float = 0.1
    b: float = 0.8
    threshold: str = "up"
    statistic: str = "mean"
    per: str = "epoch"
    reference: str = "global"

    def __post_init__(self) -> None:
        self.demand("a", -1 <= self.a <= 1, "it is a cosine, -1 to 1")
        self.demand("threshold", self.threshold in ("up", "down", "fixed"), "use 'up', 'down' or 'fixed'")
        self.demand("statistic", self.statistic in ("mean", "min"), "use 'mean' or 'min' (released code)")
        self.demand("per", self.per in ("epoch", "batch"), "use 'epoch' or 'batch'")
        self.demand("reference", self.reference in ("global", "previous"), "use 'global' or 'previous'")

    def client(self, x: Tensor) -> State:
        if self.reference == "global":
            return {}
        return {"model": torch.zeros_like(x), "seen": torch.tensor(False)}

    def limit(self, round: Round) -> float:
        """T(r) of this round."""
        progress = (round.number + 1) / round.rounds
        return {
            "up": self.a + self.b * progress,
            "down": self.a + self.b - self.b * progress,
            "fixed": self.a,
        }[self.threshold]

    def brief(self, briefs: Briefs, state: State, rows: State, round: Round) -> Briefs:
        reference = None
        if rows:
            seen = rows["seen"].to(briefs.start.device)
            reference = torch.where(seen[:, None], rows["model"], briefs.start)
        stop = Stop(column(self.limit(round), len(briefs)), self.statistic, self.per, reference)
        return replace(briefs, stop=stop)

    def observe(
        self, state: State, rows: State, weights: Tensor, briefs: Briefs, reports: Reports, round: Round
    ) -> tuple[State, State]:
        if not rows:
            return state, {}
        return state, {"model": round.x + reports.delta, "seen": torch.ones_like(rows["seen"])}
