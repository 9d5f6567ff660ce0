"""ReLU and max-pooling as one layer."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kairosfl.engines.batched.conv import last
from kairosfl.engines.batched.fast import kernels


class ReluPool(nn.Module):
    """ReLU and 2×2 max-pooling; `flat`: what follows flattens it, and would copy what is channels last."""

    def __init__(self, flat: bool) -> None:
        super().__init__()
        self.flat = flat

    def forward(self, x: Tensor) -> Tensor:
        module: Any = kernels("pool", x)
        if module is None:
            return F.max_pool2d(x.relu(), 2)
        y: Tensor = _ReluPool.apply(x, self.flat, module)  # type: ignore[no-untyped-call]
        return y


class _ReluPool(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, flat: bool, module: Any) -> Tensor:
        y, wins = module.forward(last(x), flat)
        ctx.save_for_backward(wins)
        ctx.module, ctx.size = module, x.shape
        return y  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (wins,) = ctx.saved_tensors
        return ctx.module.backward(dy if dy.is_contiguous() else last(dy), wins, ctx.size), None, None
