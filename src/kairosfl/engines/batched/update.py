"""The optimiser over `[m, width]`: correction, weight decay, momentum and step.

    g = scale · clip(∇L) + pull · (w − start) + push + decay · w,    v ← momentum · v + g,    w ← w − lr · v

for the clients that are live; the others keep what they have.
"""

from __future__ import annotations

import torch
from torch import Tensor

from kairosfl.engines.batched.state import Kind, Real, State


def update(state: State, kind: Kind, live: Tensor) -> Tensor:
    """One step; returns ‖∇L‖² of every client, clipped as trained."""
    a = kind.width
    w, v, g = state.w[:a], state.v[:a], state.g[:a]
    reals = state.reals[:, :a]
    on = live.to(w.dtype)
    squares = torch.linalg.vector_norm(g, dim=1).square()
    factor = reals[Real.SCALE]
    if kind.clip:
        shrink = (reals[Real.CLIP] / (squares.sqrt() + 1e-6)).clamp(max=1.0)
        squares, factor = squares * shrink * shrink, factor * shrink
    g.mul_((factor * on)[:, None])
    g.addcmul_(w, (reals[Real.DECAY] * on)[:, None])
    if kind.pull:
        g.addcmul_(w - state.extra["anchor"][:a], (reals[Real.PULL] * on)[:, None])
    if kind.push:
        g.addcmul_(state.extra["push"][:a], on[:, None])
    if kind.momentum:
        g = v.mul_(torch.where(live, reals[Real.MOMENTUM], 1.0)[:, None]).add_(g)
    w.addcmul_(g, (reals[Real.LR] * -on)[:, None])
    return squares
