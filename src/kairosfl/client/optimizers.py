"""The optimizers that a brief may name, one step at a time on the model's tensors.

    g = scale · clip(∇L) + pull · (w − start) + push
        with clip_after: g = clip(scale · ∇L + pull · (w − start) + push)
    sgd      g ← g + weight_decay · w,    v ← momentum · v + g,    w ← w − lr · v
             with push_after: w ← w − lr · (v + push) instead of push in g
    adamw    w ← w − lr · weight_decay · w
             m ← beta1 · m + (1 − beta1) g,    v ← beta2 · v + (1 − beta2) g²
             w ← w − lr · m / (1 − beta1^t) / (√(v / (1 − beta2^t)) + eps)

AdamW: Loshchilov and Hutter, "Decoupled Weight Decay Regularization", ICLR 2019, as in
torch.optim.AdamW.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from kairosfl.core.fields import Brief


def norms(tensors: Sequence[Tensor]) -> Tensor:
    """The norm of every tensor."""
    return torch.stack(torch._foreach_norm(list(tensors)))


@dataclass
class Moments:
    """Memory for an optimizer, made when first needed and used by one client after another."""

    like: list[Tensor]
    first: list[Tensor] = field(default_factory=list)
    second: list[Tensor] = field(default_factory=list)

    def clear(self, *names: str) -> None:
        """Set these to zero."""
        for name in names:
            if not getattr(self, name):
                setattr(self, name, [torch.empty_like(tensor) for tensor in self.like])
            torch._foreach_zero_(getattr(self, name))


class Step:
    """One client's optimizer: corrects gradients of the loss as the brief says, and steps."""

    def __init__(
        self,
        brief: Brief,
        w: list[Tensor],
        moments: Moments,
        start: list[Tensor],
        push: list[Tensor],
    ) -> None:
        self.brief = brief
        self.w = w
        self.moments = moments
        self.start = start
        self.push = push
        self.steps = 0
        if brief.optimizer == "adamw":
            moments.clear("first", "second")
        elif brief.momentum:
            moments.clear("first")

    @torch.no_grad()
    def __call__(self, g: list[Tensor]) -> Tensor:
        """Take a step with these gradients, which are overwritten.

        Returns:
            Their squared norm after clipping.
        """
        brief = self.brief
        square = norms(g).square_().sum()
        if not brief.clip_after:
            square = square * self._clip(g, square)
        if brief.scale != 1:
            torch._foreach_mul_(g, brief.scale)
        if brief.pull:
            torch._foreach_add_(g, torch._foreach_sub(self.w, self.start), alpha=brief.pull)
        if self.push and not brief.push_after:
            torch._foreach_add_(g, self.push)
        if brief.clip_after:
            square = square * self._clip(g, norms(g).square_().sum())
        self.steps += 1
        if brief.optimizer == "adamw":
            self._adamw(g)
        else:
            self._sgd(g)
        return square

    def _clip(self, g: list[Tensor], square: Tensor) -> Tensor | float:
        """Clip gradients of this squared norm; returns the factor by which that has changed."""
        if self.brief.clip == float("inf"):
            return 1.0
        factor: Tensor = (self.brief.clip / (square.sqrt() + 1e-6)).clamp(max=1.0)
        torch._foreach_mul_(g, factor)
        return factor.square()

    def _sgd(self, g: list[Tensor]) -> None:
        brief = self.brief
        if brief.weight_decay:
            torch._foreach_add_(g, self.w, alpha=brief.weight_decay)
        if brief.momentum:
            torch._foreach_mul_(self.moments.first, brief.momentum)
            torch._foreach_add_(self.moments.first, g)
            g = self.moments.first
        torch._foreach_add_(self.w, g, alpha=-brief.lr)
        if self.push and brief.push_after:
            torch._foreach_add_(self.w, self.push, alpha=-brief.lr)

    def _adamw(self, g: list[Tensor]) -> None:
        brief = self.brief
        first = self.moments.first
        second = self.moments.second
        if brief.weight_decay:
            torch._foreach_mul_(self.w, 1 - brief.lr * brief.weight_decay)
        torch._foreach_lerp_(first, g, 1 - brief.beta1)
        torch._foreach_mul_(second, brief.beta2)
        torch._foreach_addcmul_(second, g, g, 1 - brief.beta2)
        root = torch._foreach_sqrt(second)
        torch._foreach_div_(root, (1 - brief.beta2**self.steps) ** 0.5)
        torch._foreach_add_(root, brief.eps)
        torch._foreach_addcdiv_(self.w, first, root, -brief.lr / (1 - brief.beta1**self.steps))
