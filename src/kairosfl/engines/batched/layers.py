"""Layers over stacked clients: activations `[m·b, ...]`, client after client, and weights of each client's own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kairosfl.engines.batched import conv
from kairosfl.engines.batched.frame import Frame


class Unstackable(Exception):
    """Why a model cannot run stacked."""


class StackedLinear(nn.Module):
    """Every client's linear layer as one batched matrix product."""

    def __init__(self, layer: nn.Linear, find: Callable[[Tensor | None], int | None], frame: Frame) -> None:
        super().__init__()
        self.weight, self.bias = _found(find(layer.weight)), find(layer.bias)
        self.frame = frame
        self.speaks = False  # its input is the model's features

    def forward(self, x: Tensor) -> Tensor:
        frame = self.frame
        if self.speaks:
            frame.features = x
        rows = x.reshape(frame.clients, -1, x.shape[-1])
        y = _Linear.apply(rows, frame.tape, frame, self.weight, self.bias)
        return y.view(*x.shape[:-1], y.shape[-1])


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tape: Tensor, frame: Frame, weight: int, bias: int | None) -> Tensor:
        w = frame.weight(weight).to(x.dtype)
        ctx.save_for_backward(x)
        ctx.w, ctx.frame, ctx.weight, ctx.bias = w, frame, weight, bias
        if bias is None:
            return torch.bmm(x, w.mT)
        return torch.baddbmm(frame.weight(bias).to(x.dtype).unsqueeze(1), x, w.mT)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        dx = torch.bmm(dy, ctx.w) if ctx.needs_input_grad[0] else None
        product(dy.mT, x, ctx.frame, ctx.weight)
        if ctx.bias is not None:
            total(dy, ctx.frame, ctx.bias)
        return dx, None, None, None, None


class StackedConv2d(nn.Module):
    """Every client's convolution, by the method that was quickest for its shape."""

    def __init__(self, layer: nn.Conv2d, find: Callable[[Tensor | None], int | None], frame: Frame) -> None:
        super().__init__()
        if layer.padding_mode != "zeros" or isinstance(layer.padding, str):
            raise Unstackable(f"a convolution pads with {layer.padding_mode!r}, {layer.padding!r}")
        self.weight, self.bias = _found(find(layer.weight)), find(layer.bias)
        self.shape = conv.Shape(
            layer.in_channels,
            layer.out_channels,
            *(tuple(getattr(layer, name)) for name in ("kernel_size", "stride", "padding", "dilation")),
            layer.groups,
        )
        self.method = conv.first(self.shape)
        self.frame = frame
        self.seen: tuple[int, ...] = ()

    def forward(self, x: Tensor) -> Tensor:
        self.seen = tuple(x.shape[1:])
        y: Tensor = _Conv.apply(x, self.frame.tape, self)
        return y


class _Conv(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tape: Tensor, layer: StackedConv2d) -> Tensor:
        frame, method = layer.frame, layer.method
        w = frame.weight(layer.weight).to(x.dtype)
        b = None if layer.bias is None else frame.weight(layer.bias).to(x.dtype)
        ctx.save_for_backward(x)
        ctx.w, ctx.layer, ctx.frame = w, layer, frame
        return method.forward(layer.shape, x, w, b)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        layer, frame = ctx.layer, ctx.frame
        dx, dw = layer.method.backward(layer.shape, dy, x, ctx.w, ctx.needs_input_grad[0])
        put(dw, frame, layer.weight)
        if layer.bias is not None:
            total(dy.permute(0, 2, 3, 1).reshape(frame.clients, -1, dy.shape[1]), frame, layer.bias)
        return dx, None, None


class StackedEmbedding(nn.Module):
    """Every client's own table."""

    def __init__(self, layer: nn.Embedding, find: Callable[[Tensor | None], int | None], frame: Frame) -> None:
        super().__init__()
        if layer.padding_idx is not None or layer.max_norm is not None or layer.scale_grad_by_freq:
            raise Unstackable("an embedding uses padding_idx, max_norm or scale_grad_by_freq")
        self.weight, self.frame = _found(find(layer.weight)), frame

    def forward(self, tokens: Tensor) -> Tensor:
        m = self.frame.clients
        y = _Embedding.apply(tokens.reshape(m, -1), self.frame.tape, self.frame, self.weight)
        return y.view(*tokens.shape, y.shape[-1])


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tokens: Tensor, tape: Tensor, frame: Frame, weight: int) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.frame, ctx.weight = frame, weight
        return frame.weight(weight)[_numbers(tokens), tokens]

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (tokens,) = ctx.saved_tensors
        slope = ctx.frame.slope(ctx.weight)
        if ctx.weight not in ctx.frame.shared:
            slope.zero_()
        slope.index_put_((_numbers(tokens), tokens), dy.to(slope.dtype), accumulate=True)
        return None, None, None, None


def _numbers(tokens: Tensor) -> Tensor:
    """For every token the number of its client."""
    return torch.arange(len(tokens), device=tokens.device)[:, None].expand_as(tokens)


class StackedGroupNorm(nn.Module):
    """One normalisation of all samples, then every client's own scale and shift."""

    def __init__(self, layer: nn.GroupNorm, find: Callable[[Tensor | None], int | None], frame: Frame) -> None:
        super().__init__()
        self.weight, self.bias, self.frame = find(layer.weight), find(layer.bias), frame
        self.groups, self.eps = layer.num_groups, layer.eps

    def forward(self, x: Tensor) -> Tensor:
        # In channels-last order PyTorch's variance is E[x²] − E[x]², which loses digits.
        y = F.group_norm(x.contiguous(), self.groups, eps=self.eps)
        return _affine(y, self.frame, self.weight, self.bias, (1, x.shape[1]) + (1,) * (x.ndim - 2))


class StackedLayerNorm(nn.Module):
    """The same over the last axes."""

    def __init__(self, layer: nn.LayerNorm, find: Callable[[Tensor | None], int | None], frame: Frame) -> None:
        super().__init__()
        self.weight, self.bias, self.frame = find(layer.weight), find(layer.bias), frame
        self.over, self.eps = list(layer.normalized_shape), layer.eps

    def forward(self, x: Tensor) -> Tensor:
        y = F.layer_norm(x, self.over, eps=self.eps)
        return _affine(y, self.frame, self.weight, self.bias, (1,) * (x.ndim - len(self.over)) + tuple(self.over))


def _affine(x: Tensor, frame: Frame, weight: int | None, bias: int | None, shape: tuple[int, ...]) -> Tensor:
    if weight is None:
        return x
    y = x.unflatten(0, (frame.clients, -1))
    y = y * frame.leaf(weight).view(frame.clients, *shape).to(x.dtype)
    if bias is not None:
        y = y + frame.leaf(bias).view(frame.clients, *shape).to(x.dtype)
    return y.flatten(0, 1)


class StackedDropout(nn.Module):
    """Masks from counters: a function of the client's key, the layer and the place, whoever else is stacked."""

    def __init__(self, p: float, number: int, frame: Frame) -> None:
        super().__init__()
        self.p, self.number, self.frame = p, number, frame

    def forward(self, x: Tensor) -> Tensor:
        keys = self.frame.keys
        if keys is None or not self.p:
            return x
        mask = keep(keys, self.number, self.p, x.numel() // len(keys)).view(x.shape)
        return x * (mask.to(x.dtype) / (1 - self.p))


def keep(keys: Tensor, layer: int, p: float, count: int) -> Tensor:
    """Which of `count` numbers of each client stay: `[m, count]` bool from keys `[m, 1]`."""
    low = 0xFFFFFFFF
    bits = (keys + layer * 0x9E3779B9) & low
    bits = _scramble(torch.arange(count, device=keys.device) ^ _scramble(bits))
    return bits >= int(p * 2**32)


def _scramble(bits: Tensor) -> Tensor:
    """The finaliser of MurmurHash3 on 32-bit numbers held in int64."""
    low = 0xFFFFFFFF
    bits = ((bits ^ (bits >> 16)) * 0x85EBCA6B) & low
    bits = ((bits ^ (bits >> 13)) * 0xC2B2AE35) & low
    return bits ^ (bits >> 16)


def product(a: Tensor, b: Tensor, frame: Frame, index: int) -> None:
    """Write or add a batched product into the gradients."""
    slope = frame.slope(index)
    assert slope is not None
    slope = slope.view(a.shape[0], a.shape[1], b.shape[2])
    if index in frame.shared:
        slope.baddbmm_(a, b) if slope.dtype == a.dtype else slope.add_(torch.bmm(a, b))
    elif slope.dtype == a.dtype:
        torch.bmm(a, b, out=slope)
    else:
        slope.copy_(torch.bmm(a, b))


def total(dy: Tensor, frame: Frame, index: int) -> None:
    """Write or add the sum over samples into the gradients of a bias."""
    put(dy.sum(1, dtype=frame.rows.dtype), frame, index)


def put(value: Tensor, frame: Frame, index: int) -> None:
    """Write or add a tensor into the gradients."""
    slope = frame.slope(index)
    assert slope is not None
    if index in frame.shared:
        slope.add_(value)
    else:
        slope.copy_(value)


def _found(index: int | None) -> int:
    assert index is not None
    return index


LAYERS: dict[type[nn.Module], Callable[[Any, Callable[[Tensor | None], int | None], Frame], nn.Module]] = {
    nn.Linear: StackedLinear,
    nn.Conv2d: StackedConv2d,
    nn.Embedding: StackedEmbedding,
    nn.GroupNorm: StackedGroupNorm,
    nn.LayerNorm: StackedLayerNorm,
}
