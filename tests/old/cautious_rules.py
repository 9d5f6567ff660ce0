"""A rule as a user of 0.2.0 or of a later commit wrote it in a module of their own."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import torch
from torch import Tensor

from kairosfl import Memory, Round, Rule


@dataclass(frozen=True, kw_only=True)
class Cautious(Rule):
    """Steps as far as the clients agree, and remembers how often each was heard.

    Args:
        share: Of the direction at least.
    """

    share: float = 0.5
    kind: ClassVar[Literal["base", "adaptive"]] = "adaptive"
    last: ClassVar[bool] = False
    server_optimizer: ClassVar[bool] = False
    needs_features: ClassVar[bool] = False
    needs_mass: ClassVar[bool] = False
    sees_idle: ClassVar[bool] = False
    private: ClassVar[bool] = False
    reads: ClassVar[str] = "clients"

    @property
    def uniform(self) -> bool:
        """Clients count by their samples."""
        return False

    @property
    def reads_rounds(self) -> bool:
        """Rounds can be added later."""
        return False

    def server(self, now: Round) -> dict[str, Tensor]:
        """The direction of the last round."""
        return {"last": torch.zeros_like(now.x)}

    def client(self, now: Round) -> dict[str, Tensor]:
        """How often the client was heard."""
        return {"heard": torch.zeros((), dtype=torch.int64)}

    def observe(self, memory: Memory, now: Round) -> Memory:
        """Count the reporters."""
        return replace(memory, rows={"heard": memory.rows["heard"] + 1})

    def step(self, direction: Tensor, memory: Memory, now: Round) -> tuple[Tensor, Memory]:
        """A part of the direction, by its cosine with the last one."""
        last = memory.state["last"]
        product = direction.norm() * last.norm()
        cosine = direction @ last / product if product > 0 else direction.new_zeros(())
        part = self.share + (1 - self.share) * cosine.clamp(0, 1)
        return part * direction, replace(memory, state={"last": direction.clone()})
