"""ALT: Shenaj, Belilovsky and Zanuttigh, "Adaptive Local Training in Federated Learning", 2025.

    a client stops when    cos(f(w; batch), f(reference; batch)) < T(r)
    T(r) = a + b · r / R          "up", r = 1 … R rounds
    T(r) = (a + b) − b · r / R    "down"
    T(r) = a                      "fixed"

f are the features: what enters the model's last linear layer. Section 2 compares with the global
model as received; the listing in Appendix C with the client's own last model, `reference =
"previous"`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from kairosfl.core.fields import Briefs
from kairosfl.core.rule import Memory, Rule, State
from kairosfl.core.run import Round
from kairosfl.core.traits import Reads, Traits
from kairosfl.rules.pairs import SAID


@dataclass(frozen=True, kw_only=True)
class ALT(Rule):
    """Lets well-aligned clients train longer, up to `train.epochs`, and stops the others early.

    Args:
        a: Threshold at the beginning ("up", "fixed"), -1 to 1.
        b: How far it moves over the run.
        threshold: How it moves: "up", "down", or "fixed".
        statistic: Of the cosines in a batch: "mean", or "min" (released code).
        per: When a stop takes effect: at the end of the "epoch", or after the "batch".
        reference: "global": the model received; "previous": the client's own previous one.
    """

    a: float = 0.1
    b: float = 0.8
    threshold: str = "up"
    statistic: str = "mean"
    per: str = "epoch"
    reference: str = "global"

    def __post_init__(self) -> None:
        self.check("a", -1 <= self.a <= 1, "it is a cosine, -1 to 1")
        self.check(
            "threshold", self.threshold in ("up", "down", "fixed"), "use 'up', 'down' or 'fixed'"
        )
        self.check(
            "statistic", self.statistic in ("mean", "min"), "use 'mean' or 'min' (released code)"
        )
        self.check("per", self.per in ("epoch", "batch"), "use 'epoch' or 'batch'")
        self.check(
            "reference", self.reference in ("global", "previous"), "use 'global' or 'previous'"
        )

    def traits(self) -> Traits:
        # A client's own previous model stays on the server, so it reads single clients.
        by_global = self.reference == "global"
        reads: Reads = "direction" if by_global else "clients"
        return Traits(
            adapts=True,
            needs={"features", "similarity"},
            reads=reads,
            horizon=self.threshold != "fixed",
            sums=by_global,
            late=True,
        )

    def verdict(self, memory: Memory, now: Round) -> str | None:
        if memory.state["stopped"]:
            return None
        why = ""
        if now.recipe.epochs == 1 and self.per == "epoch":
            why = ": train.epochs = 1 leaves nothing to stop"
        return f"alt never stopped a client{why}, so this run equals one without it"

    def note_with(self, other: Rule) -> str | None:
        if self.reference != "previous":
            return None
        return SAID.get((other.name(), self.name()))

    def server(self, now: Round) -> State:
        return {"stopped": torch.tensor(0)}  # clients so far that stopped early

    def client(self, now: Round) -> State:
        if self.reference == "global":
            return {}
        return {"model": torch.zeros_like(now.x), "seen": torch.tensor(False)}

    def limit(self, now: Round) -> float:
        """T(r) of this round."""
        progress = (now.number + 1) / now.rounds
        if self.threshold == "up":
            return self.a + self.b * progress
        if self.threshold == "down":
            return self.a + self.b - self.b * progress
        return self.a

    def brief(self, briefs: Briefs, memory: Memory, now: Round) -> Briefs:
        reference = None  # the global model
        if memory.rows:
            # A client without a model of its own compares with the global one, too.
            seen = memory.rows["seen"].to(briefs.start.device)
            reference = torch.where(seen[:, None], memory.rows["model"], briefs.start)
        below = torch.full((len(briefs),), self.limit(now), dtype=torch.float64)
        return replace(
            briefs,
            stop_below=below,
            stop_statistic=self.statistic,
            stop_per=self.per,
            stop_reference=reference,
        )

    def observe(self, memory: Memory, now: Round) -> Memory:
        early = (now.reports.epochs < now.briefs.epochs).sum()
        memory = memory.replace(state={"stopped": memory.state["stopped"] + early})
        if not memory.rows:
            return memory
        seen = torch.ones_like(memory.rows["seen"])
        return memory.replace(rows={"model": now.trained(), "seen": seen})
