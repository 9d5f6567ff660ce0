"""Layers over stacked clients: activations `[m·b, ...]`, client after client, and weights of each
client's own.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kairosfl.engines.batched import conv
from kairosfl.engines.batched.fast import kernels, slow_transposed
from kairosfl.engines.batched.frame import Frame
from kairosfl.errors import first_line

Find = Callable[[Tensor | None], int | None]
"""The number of a parameter in the rows."""


MEASURE = 8  # clients


class Unstackable(Exception):
    """Raised with the reason why a model cannot be stacked."""


def line(error: Exception) -> str:
    """What went wrong, in one line."""
    return first_line(error)[:120]


class StackedLinear(nn.Module):
    """Every client's linear layer as one batched matrix product."""

    def __init__(self, layer: nn.Linear, find: Find, frame: Frame) -> None:
        super().__init__()
        self.weight, self.frame = found(find(layer.weight)), frame
        self.bias, self.late = _biases(frame, self.weight, find(layer.bias))
        self.is_head = False  # its input is the model's features

    def forward(self, x: Tensor) -> Tensor:
        if self.is_head:
            self.frame.features = x
        rows = x.reshape(self.frame.clients, -1, x.shape[-1])
        frozen = self.frame.frozen(self.weight)
        y: Tensor
        if frozen is None:
            y = LinearFunction.apply(rows, self.frame.tape, self.frame, self.weight, self.bias)  # type: ignore[no-untyped-call]
        else:
            y = F.linear(rows, frozen.to(x.dtype))
        if self.late is not None:
            y = y + self.frame.leaf(self.late).to(x.dtype).unsqueeze(1)
        return y.view(*x.shape[:-1], y.shape[-1])


class LinearFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, tape: Tensor, frame: Frame, weight: int, bias: int | None
    ) -> Tensor:
        ctx.save_for_backward(x)
        ctx.frame, ctx.rows, ctx.weight, ctx.bias = frame, frame.rows, weight, bias

        def plain() -> Tensor:
            w = frame.weight(weight).to(x.dtype)
            b = None if bias is None else frame.weight(bias).to(x.dtype)
            if slow_transposed(x):
                right = x.mT.contiguous()
                turned = (
                    torch.bmm(w, right) if b is None else torch.baddbmm(b.unsqueeze(2), w, right)
                )
                return turned.mT.contiguous()
            return torch.bmm(x, w.mT) if b is None else torch.baddbmm(b.unsqueeze(1), x, w.mT)

        module: Any = kernels("linear", x)
        if module is None or not frame.measures:
            return plain()
        places = frame.layout.places
        at = None if bias is None else places[bias].offset
        y: Tensor = module.forward(
            x,
            frame.rows,
            places[weight].offset,
            at,
            places[weight].shape[0],
            frame.dot,
            plain,
            frame.choices,
        )
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        frame, inward, stepped = ctx.frame, ctx.needs_input_grad[0], False
        if frame.optimiser is not None and ctx.weight not in frame.shared:
            stepped, dx = frame.optimiser.linear(x, dy, ctx.weight, inward)
        if not stepped:
            dx = (
                torch.bmm(dy, frame.layout.view(ctx.rows, ctx.weight).to(x.dtype))
                if inward
                else None
            )
            with frame.writing(ctx.weight) as (dw,):
                if dw.dtype == dy.dtype:
                    torch.bmm(dy.mT, x, out=dw)
                else:
                    dw.copy_(torch.bmm(dy.mT, x))
        if ctx.bias is not None:
            with frame.writing(ctx.bias) as (db,):
                torch.sum(dy, 1, dtype=db.dtype, out=db)
        return dx, None, None, None, None


def _biases(frame: Frame, weight: int, bias: int | None) -> tuple[int | None, int | None]:
    """The bias to add with the product, and the one to add after it, because it or the weight is
    frozen.
    """
    together = frame.frozen(weight) is None and frame.frozen(bias) is None
    return (bias, None) if together else (None, bias)


class StackedConv2d(nn.Module):
    """Every client's convolution, by one of the methods in `conv`, and the ReLU that follows, if it
    is fused.

    Where the only reader of that ReLU is another convolution, the reader returns the gradient of
    the ReLU's input: it knows where the ReLU was above zero from its own input.
    """

    def __init__(self, shape: conv.Shape, weight: int, bias: int | None, frame: Frame) -> None:
        super().__init__()
        self.shape, self.weight, self.frame = shape, weight, frame
        self.bias, self.late = _biases(frame, weight, bias)
        self.relu = False  # returns relu(y)
        self.masks = (
            False  # its input is such a y, and it returns the gradient of what the ReLU saw
        )
        self.masked = False  # the only reader of its output masks
        self.leaves_bias = False  # the next layer's kernel computes the gradient of the bias

    @property
    def own(self) -> bool:
        """Whether weights and bias, if any, are both trained."""
        return self.late is None and self.frame.frozen(self.weight) is None

    @classmethod
    def of(cls, layer: nn.Conv2d, find: Find, frame: Frame) -> StackedConv2d:
        """In place of a layer."""
        if layer.padding_mode != "zeros" or isinstance(layer.padding, str):
            raise Unstackable(f"a convolution pads by {layer.padding_mode!r}, {layer.padding!r}")
        shape = conv.Shape(
            layer.in_channels,
            layer.out_channels,
            conv.pair(layer.kernel_size),
            conv.pair(layer.stride),
            conv.pair(layer.padding),
            conv.pair(layer.dilation),
            layer.groups,
        )
        return cls(shape, found(find(layer.weight)), find(layer.bias), frame)

    def method(self, x: Tensor, inward: bool) -> conv.Method:
        """The fastest on a GPU, once there are enough clients for a fair measurement; otherwise the
        first available.
        """
        frame, name = self.frame, f"conv {self.shape} {tuple(x.shape[1:])} {x.dtype}"
        ways = conv.methods(self.shape, x, frame.clients, frame.dot)
        trains = frame.gradients is not None
        chosen = frame.choices.made.get(name, "")
        if frame.measures and trains and frame.clients >= MEASURE:
            with torch.no_grad():
                setting = f"{frame.clients} clients, {len(x)} images, {'with' if inward else 'without'} their gradient"
                measure = partial(conv.quickest, ways, partial(self._trial, x, inward))
                chosen = frame.choices.choose(name, measure, ways, setting)
        return ways.get(chosen, next(iter(ways.values())))

    def _trial(self, x: Tensor, inward: bool, way: conv.Method) -> None:
        """Run this layer forward and backward as a step does; the gradients are discarded."""
        w, b = (
            self.frame.weight(self.weight),
            None if self.bias is None else self.frame.weight(self.bias),
        )
        slopes = torch.empty_like(w), None if b is None or self.leaves_bias else torch.empty_like(b)
        y = way.forward(self.shape, x, w, b, self.relu)
        way.backward(self.shape, y, x, w, slopes, inward, self.masks)

    def forward(self, x: Tensor) -> Tensor:
        frozen, shape = self.frame.frozen(self.weight), self.shape
        y: Tensor
        if frozen is None:
            y = _Conv.apply(x, self.frame.tape, self)  # type: ignore[no-untyped-call]
        else:
            y = F.conv2d(
                x,
                frozen.to(x.dtype),
                None,
                shape.stride,
                shape.padding,
                shape.dilation,
                shape.groups,
            )
        if self.late is None:
            return y
        bias = self.frame.leaf(self.late).to(x.dtype)[:, None, :, None, None]
        shifted: Tensor = y.unflatten(0, (self.frame.clients, -1)) + bias
        return shifted.flatten(0, 1)


class _Conv(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tape: Tensor, layer: StackedConv2d) -> Tensor:
        frame, method = layer.frame, layer.method(x, ctx.needs_input_grad[0])
        x = conv.last(x) if method.last else x  # once, not again in the backward pass
        ctx.layer, ctx.rows, ctx.method = layer, frame.rows, method
        bias = None if layer.bias is None else frame.weight(layer.bias)
        y = method.forward(layer.shape, x, frame.weight(layer.weight), bias, layer.relu)
        # A model may change its activations in place, which autograd does not allow for a view;
        # only `Grouped` of one client returns one.
        y = y.clone() if y._is_view() else y
        ctx.save_for_backward(x, y if layer.relu and not layer.masked else None)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, y = ctx.saved_tensors
        layer = ctx.layer
        dy = dy if y is None else conv.relu_backward(dy, y)
        w = layer.frame.layout.view(ctx.rows, layer.weight)
        bias = None if layer.bias in layer.frame.written else layer.bias
        with layer.frame.writing(layer.weight, bias) as slopes:
            dx = ctx.method.backward(
                layer.shape, dy, x, w, slopes, ctx.needs_input_grad[0], layer.masks
            )
        return dx, None, None


class StackedEmbedding(nn.Module):
    """Every client's own table."""

    def __init__(self, layer: nn.Embedding, find: Find, frame: Frame) -> None:
        super().__init__()
        if layer.padding_idx is not None or layer.max_norm is not None or layer.scale_grad_by_freq:
            raise Unstackable("an embedding uses padding_idx, max_norm or scale_grad_by_freq")
        self.weight, self.frame = found(find(layer.weight)), frame

    def forward(self, tokens: Tensor) -> Tensor:
        rows = tokens.reshape(self.frame.clients, -1)
        y: Tensor = EmbeddingFunction.apply(rows, self.frame.tape, self.frame, self.weight)  # type: ignore[no-untyped-call]
        return y.view(*tokens.shape, y.shape[-1]).to(self.frame.compute)


class EmbeddingFunction(torch.autograd.Function):
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
    """One normalisation of all samples, every client's own scale and shift, and the activation that
    follows, if any.

    The kernel also finds the gradient of the bias of the convolution `before` it, whose output
    nothing else reads.
    """

    def __init__(self, layer: nn.GroupNorm, find: Find, frame: Frame) -> None:
        super().__init__()
        self.weight, self.bias, self.frame = find(layer.weight), find(layer.bias), frame
        self.groups, self.eps, self.activation = layer.num_groups, layer.eps, ""
        self.before: int | None = None  # the number of that bias

    def forward(self, x: Tensor) -> Tensor:
        module: Any = kernels("norm", x)
        frozen = any(self.frame.frozen(index) is not None for index in (self.weight, self.bias))
        own = self.weight is not None and not frozen
        if module is not None and x.ndim == 4 and own and module.fits(x.shape[1], self.groups):
            fused: Tensor = GroupNormFunction.apply(x, self.frame.tape, self, module)  # type: ignore[no-untyped-call]
            return fused
        # In channels-last order PyTorch's variance is E[x²] − E[x]², which is inaccurate.
        y = F.group_norm(x.contiguous(), self.groups, eps=self.eps)
        y = _affine(y, self.frame, self.weight, self.bias, (1, x.shape[1]) + (1,) * (x.ndim - 2))
        activated: Tensor = getattr(F, self.activation)(y) if self.activation else y
        return activated


class GroupNormFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tape: Tensor, layer: StackedGroupNorm, module: Any) -> Tensor:
        x = x.contiguous(memory_format=torch.channels_last)
        ctx.w, ctx.b = (layer.frame.weight(found(index)) for index in (layer.weight, layer.bias))
        y, stats = module.forward(x, ctx.w, ctx.b, layer.groups, layer.eps, layer.activation)
        ctx.save_for_backward(x, stats)
        ctx.layer, ctx.module = layer, module
        return y  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, stats = ctx.saved_tensors
        layer = ctx.layer
        dy = dy.contiguous(memory_format=torch.channels_last)
        dx, slopes = ctx.module.backward(x, dy, stats, ctx.w, ctx.b, layer.groups, layer.activation)
        with layer.frame.writing(layer.weight, layer.bias, layer.before) as places:
            for place, slope in zip(places, slopes.unbind(1), strict=True):
                if place is not None:
                    place.copy_(slope)
        layer.frame.written.add(layer.before)
        return dx, None, None, None


class StackedLayerNorm(nn.Module):
    """One normalisation over the last axes, then every client's own scale and shift."""

    def __init__(self, layer: nn.LayerNorm, find: Find, frame: Frame) -> None:
        super().__init__()
        self.weight, self.bias, self.frame = find(layer.weight), find(layer.bias), frame
        self.over, self.eps = list(layer.normalized_shape), layer.eps

    def forward(self, x: Tensor) -> Tensor:
        y = F.layer_norm(x, self.over, eps=self.eps)
        return _affine(
            y,
            self.frame,
            self.weight,
            self.bias,
            (1,) * (x.ndim - len(self.over)) + tuple(self.over),
        )


def _affine(
    x: Tensor, frame: Frame, weight: int | None, bias: int | None, shape: tuple[int, ...]
) -> Tensor:
    if weight is None:
        return x
    y = x.unflatten(0, (frame.clients, -1))
    y = y * frame.leaf(weight).view(frame.clients, *shape).to(x.dtype)
    if bias is not None:
        y = y + frame.leaf(bias).view(frame.clients, *shape).to(x.dtype)
    merged: Tensor = y.flatten(0, 1)
    return merged


def found(index: int | None) -> int:
    """The number of a parameter that must exist."""
    assert index is not None
    return index


LAYERS: dict[type[nn.Module], Callable[[Any, Find, Frame], nn.Module]] = {
    nn.Linear: StackedLinear,
    nn.Conv2d: StackedConv2d.of,
    nn.Embedding: StackedEmbedding,
    nn.GroupNorm: StackedGroupNorm,
    nn.LayerNorm: StackedLayerNorm,
}
