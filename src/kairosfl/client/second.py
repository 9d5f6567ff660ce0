"""A second model that a client keeps and trains beside the weights w.

    v ← v − second_lr · (∇L(v) + second_pull · (v − centre))

The centre is the start of w, or w as it moves. Mixed, ∇L is taken at v̄ = mix · v + (1 − mix) · w,
its part for v is mix · ∇L(v̄), and the mixture learns, kept within 0 and 1:

    mix ← mix − second_lr · ⟨∇L(v̄), v − w⟩

`second_draw` adds second_draw · (w − v) to every gradient of w. Three papers are settings of it:
Ditto: Li et al., ICML 2021. APFL: Deng et al., 2020. pFedMe: T. Dinh et al., NeurIPS 2020.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kairosfl.core.fields import Brief

Gradient = Callable[[Tensor], Tensor]  # of the loss on one batch, at these weights


class Second:
    """The second model of one client during one visit."""

    def __init__(self, brief: Brief, start: Tensor) -> None:
        self.brief = brief
        self.start = start
        self.vector: Tensor = brief.second.to(start).clone()
        self.mix = float(brief.mix) if brief.mixed else 0.0
        self.lr = brief.second_lr
        self.pull = brief.second_pull or 0.0
        self.inner = brief.second_inner or 1  # steps on every batch

    def train(self, w: Tensor, gradient: Gradient) -> None:
        """Its steps on one batch, while the other weights are at w."""
        for _ in range(self.inner):
            self._step(w, gradient)

    def _step(self, w: Tensor, gradient: Gradient) -> None:
        centre = w if self.brief.second_centre == "w" else self.start
        pulled = self.pull * (self.vector - centre)
        if not self.brief.mixed:
            self.vector -= self.lr * (gradient(self.vector) + pulled)
            return
        slope = gradient(self.mixture(w))
        along = float(slope @ (self.vector - w))
        self.vector -= self.lr * (self.mix * slope + pulled)
        self.mix = min(max(self.mix - self.lr * along, 0.0), 1.0)

    def mixture(self, w: Tensor) -> Tensor:
        """The model with which the client is evaluated: mixed with w, or the second one itself."""
        if not self.brief.mixed:
            return self.vector
        return self.mix * self.vector + (1 - self.mix) * w

    def draw(self, w: Tensor, push: Tensor) -> Tensor:
        """What is added to the gradients of w: `push`, and what draws w to the second model."""
        if not self.brief.second_draw:
            return push
        draw: float = self.brief.second_draw
        return push + draw * (w - self.vector)


def flat(gradients: Sequence[Tensor]) -> Tensor:
    """Gradients of the model's tensors as one vector."""
    return torch.cat([gradient.detach().reshape(-1) for gradient in gradients])
