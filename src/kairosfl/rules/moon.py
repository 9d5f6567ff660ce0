"""MOON: Li, He and Song, "Model-Contrastive Federated Learning", CVPR 2021.

    loss = CE + mu · CE([cos(z, z_global), cos(z, z_previous)] / temperature, 0)

z are the features: what enters the model's last linear layer. A client that never took part has no
previous model and trains without the term.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from kairosfl.core.fields import Briefs
from kairosfl.core.rule import Memory, Rule, State
from kairosfl.core.run import Round
from kairosfl.core.traits import Traits


@dataclass(frozen=True, kw_only=True)
class MOON(Rule):
    """Keeps a client's features near the global model's and away from its own last ones.

    `mu = 0` is FedAvg.

    Args:
        mu: Weight of the term, 0 or more; the paper uses 5 on CIFAR-10 and 1 elsewhere.
        temperature: Of the softmax over the two cosines, above 0.
    """

    mu: float = 1.0
    temperature: float = 0.5

    def __post_init__(self) -> None:
        self.check("mu", self.mu >= 0, "use 0 or more; the paper uses 5 on CIFAR-10")
        self.check("temperature", self.temperature > 0, "use a number above 0")

    def traits(self) -> Traits:
        return Traits(needs={"features"}, late=True)

    def verdict(self, memory: Memory, now: Round) -> str | None:
        if not self.mu:
            return "moon(mu=0) has no effect"
        if not memory.state["compared"]:
            return "moon compared no client with its previous model, because none took part twice"
        return None

    def server(self, now: Round) -> State:
        return {"compared": torch.tensor(0)}  # clients so far that had a previous model

    def client(self, now: Round) -> State:
        return {"model": torch.zeros_like(now.x), "seen": torch.tensor(False)}

    def brief(self, briefs: Briefs, memory: Memory, now: Round) -> Briefs:
        mu = self.mu * memory.rows["seen"].double()
        if not mu.any():
            return briefs
        return replace(
            briefs, contrast=mu, temperature=self.temperature, previous=memory.rows["model"]
        )

    def observe(self, memory: Memory, now: Round) -> Memory:
        seen = torch.ones_like(memory.rows["seen"])
        state = {"compared": memory.state["compared"] + memory.rows["seen"].sum()}
        return memory.replace(state=state, rows={"model": now.trained(), "seen": seen})
