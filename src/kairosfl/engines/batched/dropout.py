"""Dropout over stacked clients: masks that are a function of the client, the step, the layer and
the position.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from kairosfl.engines.batched.fast import kernels
from kairosfl.engines.batched.frame import Frame
from kairosfl.engines.batched.layers import Unstackable

SPREAD = 0x9E3779B9  # of the numbers of draws
_LOW = 0xFFFFFFFF


class StackedDropout(nn.Module):
    """Masks from counters: a function of the client's key, the layer and the position, not of the
    other clients.
    """

    def __init__(self, p: float, number: int, frame: Frame) -> None:
        super().__init__()
        self.p, self.number, self.frame = p, number, frame
        self.relu = False  # is given what a ReLU would be given

    def forward(self, x: Tensor) -> Tensor:
        if axis := samples_axis(x, self.frame):  # such as of a sequence that comes first
            return StackedDropout.forward(self, x.movedim(axis, 0)).movedim(
                0, axis
            )  # not another call of the layer
        keys = self.frame.keys
        module: Any = kernels("dropout", x)
        if keys is not None and self.p and module is not None:
            y: Tensor = _Dropout.apply(x, keys, self, module)  # type: ignore[no-untyped-call]
            return y
        x = x.relu() if self.relu else x
        if keys is None or not self.p:
            return x
        mask = keep(seeded(keys, self.number), self.p, x.numel() // len(keys)).view(x.shape)
        return x * mask if self.p == 1 else x * (mask.to(x.dtype) / (1 - self.p))


def samples_axis(x: Tensor, frame: Frame) -> int:
    """The axis of x that runs over the samples, client after client."""
    if not frame.samples or (x.ndim and len(x) % frame.samples == 0):
        return 0
    if frame.samples not in x.shape:
        raise Unstackable(
            f"a dropout is given a tensor {tuple(x.shape)} without an axis of the samples"
        )
    return x.shape.index(frame.samples)


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, keys: Tensor, layer: StackedDropout, module: Any) -> Tensor:
        y: Tensor = module.drop(x, keys, layer.number, layer.p, layer.relu)
        ctx.save_for_backward(y if layer.relu else keys)
        ctx.layer, ctx.module = layer, module
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (kept,), layer, module = ctx.saved_tensors, ctx.layer, ctx.module
        if layer.relu:
            return module.slope(dy, kept, layer.p), None, None, None
        return module.drop(dy, kept, layer.number, layer.p), None, None, None


def seeded(keys: Tensor, number: int) -> Tensor:
    """A seed for every client, `[m, 1]`, in the draw with this number."""
    return _scramble((keys ^ (keys >> 32) ^ number * SPREAD) & _LOW)


def keep(seeds: Tensor, p: float, count: int) -> Tensor:
    """Which of `count` numbers of each client are kept: `[m, count]` bool from seeds `[m, 1]`."""
    return bits(seeds, count) >= least(p)


def least(p: float) -> int:
    """The least of the random numbers that are kept, so that an element is dropped with probability
    p.
    """
    return int(p * 2**32)


def bits(seeds: Tensor, count: int) -> Tensor:
    """`count` random numbers of 32 bits for each client."""
    return _scramble(torch.arange(count, device=seeds.device) ^ seeds)


def _scramble(bits: Tensor) -> Tensor:
    """The finaliser of MurmurHash3 on 32-bit numbers held in int64."""
    bits = ((bits ^ (bits >> 16)) * 0x85EBCA6B) & _LOW
    bits = ((bits ^ (bits >> 13)) * 0xC2B2AE35) & _LOW
    return bits ^ (bits >> 16)
