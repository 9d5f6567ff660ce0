"""ReLU, max-pooling and the dropout that may follow, as one layer."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kairosfl.engines.batched.conv import last
from kairosfl.engines.batched.dropout import StackedDropout, samples_axis
from kairosfl.engines.batched.fast import kernels
from kairosfl.engines.batched.frame import Frame


class ReluPool(nn.Module):
    """ReLU, 2×2 max-pooling and dropout; `flat`: what follows flattens it, and would copy what is
    channels last.

    The kernel also finds the gradient of the bias of the convolution `before` it, whose output
    nothing else reads.
    """

    def __init__(self, flat: bool, frame: Frame) -> None:
        super().__init__()
        self.flat, self.frame = flat, frame
        self.drop: StackedDropout | None = None
        self.before: int | None = None  # the number of that bias

    def forward(self, x: Tensor) -> Tensor:
        module: Any = kernels("pool", x)
        if (
            module is not None
            and x.ndim == 4
            and (self.drop is None or not samples_axis(x, self.frame))
        ):
            y: Tensor = _ReluPool.apply(x, self, module)  # type: ignore[no-untyped-call]
            return y
        pooled = F.max_pool2d(x.relu(), 2)
        return pooled if self.drop is None else self.drop(pooled)


class _ReluPool(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: ReluPool, module: Any) -> Tensor:
        drop, keys = layer.drop, layer.frame.keys
        drops = None if drop is None or keys is None or not drop.p else (keys, drop.number, drop.p)
        y, wins = module.forward(last(x), layer.flat, drops)
        ctx.save_for_backward(wins)
        ctx.layer, ctx.module, ctx.size, ctx.p = layer, module, x.shape, drops[2] if drops else 0.0
        return y  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (wins,) = ctx.saved_tensors
        frame, before = ctx.layer.frame, ctx.layer.before
        dy = dy if dy.is_contiguous() else last(dy)
        with frame.writing(before) as (slope,):
            dx = ctx.module.backward(dy, wins, ctx.size, ctx.p, slope)
        frame.written.add(before)
        return dx, None, None
