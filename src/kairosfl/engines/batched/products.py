"""Products of activations with stacked parameters: linear layers, matrix products, convolutions."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from kairosfl.engines.batched import conv
from kairosfl.engines.batched.layers import LinearFunction, StackedConv2d, Unstackable
from kairosfl.engines.batched.lifted import Lift, Stacked
from kairosfl.engines.batched.mapping import affine, rule


@rule("linear")
def _linear(lift: Lift, x: Any, weight: Any, bias: Any = None) -> Any:
    key = ("linear", *(tuple(each.shape) for each in (weight, bias) if isinstance(each, Stacked)))
    axis = None if isinstance(x, Stacked) else lift.batch(key, x)
    if axis is None:
        return NotImplemented
    y = _product(lift, x.movedim(axis, 0), weight, bias)
    return y.movedim(0, axis)


def _product(lift: Lift, x: Tensor, weight: Any, bias: Any) -> Tensor:
    frame, m = lift.frame, lift.frame.clients
    x = x.to(frame.compute)
    if not isinstance(weight, Stacked):
        y = F.linear(x, weight)
    elif weight.number is not None:
        together = bias.number if isinstance(bias, Stacked) else None
        lift.use(weight.number, together)
        rows = x.reshape(m, -1, x.shape[-1])
        z: Tensor = LinearFunction.apply(rows, frame.tape, frame, weight.number, together)  # type: ignore[no-untyped-call]
        y = z.view(*x.shape[:-1], z.shape[-1])
        bias = bias if together is None else None
    else:
        y = torch.bmm(x.reshape(m, -1, x.shape[-1]), weight.value.to(x.dtype).mT)
        y = y.view(*x.shape[:-1], y.shape[-1])
    return y if bias is None else affine(y, m, None, bias, (*(1,) * (y.ndim - 1), y.shape[-1]))


@rule("matmul", "bmm", "mm", "__matmul__", "rmatmul")
def _matmul(lift: Lift, a: Any, b: Any) -> Any:
    both = isinstance(a, Stacked) and isinstance(b, Stacked)
    stacked, x = (a, b) if isinstance(a, Stacked) else (b, a)
    axis = None if both else lift.batch(("matmul", tuple(stacked.shape), stacked is a), x)
    if axis is None:
        return NotImplemented
    m = lift.frame.clients
    if axis or x.ndim < 2 or (x.ndim == 2 and stacked is a) or stacked.ndim == 1:
        return NotImplemented
    x = x.to(lift.frame.compute)
    value = stacked.value.to(x.dtype)
    if stacked is b and stacked.ndim == 2:
        return torch.bmm(x.reshape(m, -1, x.shape[-1]), value).view(*x.shape[:-1], value.shape[-1])
    if stacked.ndim == x.ndim and stacked.shape[0] != 1:
        raise Unstackable(f"it multiplies a batch by a parameter {tuple(stacked.shape)}")
    value = value.view(m, *(1,) * (x.ndim - stacked.ndim), *stacked.shape)
    rows = x.unflatten(0, (m, -1))
    return (torch.matmul(value, rows) if stacked is a else torch.matmul(rows, value)).flatten(0, 1)


@rule("addmm")
def _addmm(lift: Lift, bias: Any, x: Any, weight: Any, *, beta: float = 1, alpha: float = 1) -> Any:
    if isinstance(x, Stacked) or beta != 1 or alpha != 1:
        return NotImplemented
    key = ("addmm", *(tuple(each.shape) for each in (bias, weight) if isinstance(each, Stacked)))
    if lift.batch(key, x) != 0:
        return NotImplemented
    m, x = lift.frame.clients, x.to(lift.frame.compute)
    if isinstance(weight, Stacked):
        y = torch.bmm(x.view(m, -1, x.shape[-1]), weight.value.to(x.dtype)).flatten(0, 1)
    else:
        y = x @ weight
    return affine(y, m, None, bias, (1, y.shape[-1]))


@rule("einsum")
def _einsum(lift: Lift, equation: Any, *operands: Any) -> Any:
    operands = (
        tuple(operands[0])
        if len(operands) == 1 and isinstance(operands[0], (list, tuple))
        else operands
    )
    if not isinstance(equation, str) or "->" not in equation or "." in equation:
        return NotImplemented
    inward, outward = equation.replace(" ", "").split("->")
    key = (
        "einsum",
        equation,
        *(tuple(each.shape) for each in operands if isinstance(each, Stacked)),
    )
    letters = set()
    for place, (term, each) in enumerate(zip(inward.split(","), operands, strict=True)):
        axis = None if isinstance(each, Stacked) else lift.batch((*key, place), each)
        letters |= set() if axis is None else {term[axis]}
    if not letters:
        return NotImplemented
    (letter,) = letters
    client = next(each for each in "zyxwvutsrqponmlkjihgfedcbaABC" if each not in equation)
    m, terms, given = lift.frame.clients, [], []
    for term, each in zip(inward.split(","), operands, strict=True):
        if isinstance(each, Stacked):
            terms.append(client + term)
            given.append(each.value)
        elif letter in term:
            terms.append(term.replace(letter, client + letter))
            given.append(each.unflatten(term.index(letter), (m, -1)))
        else:
            terms.append(term)
            given.append(each)
    y = torch.einsum(",".join(terms) + "->" + outward.replace(letter, client + letter), *given)
    return y.flatten(outward.index(letter), outward.index(letter) + 1)


@rule("conv1d", "conv2d", "conv3d")
def _conv(
    lift: Lift,
    x: Any,
    weight: Any,
    bias: Any = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Any:
    if isinstance(x, Stacked) or lift.batch(("conv",), x) != 0:
        return NotImplemented
    n, frame, x = weight.ndim - 2, lift.frame, x.to(lift.frame.compute)
    stride, dilation = _each(stride, n), _each(dilation, n)
    if isinstance(padding, str):
        x, padding = _padded(x, padding, weight.shape[2:], dilation)
    padding = _each(padding, n)
    function = (F.conv1d, F.conv2d, F.conv3d)[n - 1]
    late = bias
    if not isinstance(weight, Stacked):
        y = function(x, weight, None, stride, padding, dilation, groups)
    elif n == 2 and weight.number is not None:
        own = bias.number if isinstance(bias, Stacked) else None
        late = None if own is not None else bias
        key = (weight.number, own, stride, padding, dilation, groups)
        if key not in lift.convolutions:
            shape = conv.Shape(
                x.shape[1], weight.shape[0], conv.pair(weight.shape[2:]), *key[2:5], groups
            )
            lift.convolutions[key] = StackedConv2d(shape, weight.number, own, frame)
        lift.use(weight.number, own)
        y = lift.convolutions[key](x)
    else:
        y = _grouped(
            frame.clients, function, x, weight.value, groups, stride, padding, dilation=dilation
        )
    return y if late is None else affine(y, frame.clients, None, late, (1, y.shape[1]) + (1,) * n)


def _each(sides: Any, n: int) -> tuple[int, ...]:
    given = (sides,) if isinstance(sides, int) else tuple(sides)
    return given * n if len(given) == 1 else given


def _padded(x: Tensor, padding: str, kernel: Any, dilation: tuple[int, ...]) -> tuple[Tensor, int]:
    if padding == "valid":
        return x, 0
    sides: list[int] = []
    for size, apart in zip(reversed(kernel), reversed(dilation), strict=True):
        total = apart * (size - 1)
        sides += [total // 2, total - total // 2]
    return F.pad(x, sides), 0


def _grouped(
    m: int, function: Any, x: Tensor, value: Tensor, groups: int, *options: Any, **named: Any
) -> Tensor:
    """All clients as the groups of one convolution."""
    beside = x.unflatten(0, (m, -1)).transpose(0, 1).flatten(1, 2)
    y = function(
        beside, value.to(x.dtype).flatten(0, 1), None, *options, groups=m * groups, **named
    )
    merged: Tensor = y.unflatten(1, (m, -1)).transpose(0, 1).flatten(0, 1)
    return merged


@rule("conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
def _conv_transpose(
    lift: Lift,
    x: Any,
    weight: Any,
    bias: Any = None,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: int = 1,
    dilation: Any = 1,
) -> Any:
    if isinstance(x, Stacked) or lift.batch(("conv",), x) != 0:
        return NotImplemented
    n, m, x = weight.ndim - 2, lift.frame.clients, x.to(lift.frame.compute)
    function = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[n - 1]
    if isinstance(weight, Stacked):
        y = _grouped(
            m, function, x, weight.value, groups, stride, padding, output_padding, dilation=dilation
        )
    else:
        y = function(x, weight, None, stride, padding, output_padding, groups, dilation)
    return affine(y, m, None, bias, (1, y.shape[1]) + (1,) * n)
