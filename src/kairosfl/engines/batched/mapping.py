"""What any operation does with stacked parameters, and a registry of those that do something else.

Operations on parameters and constants alone give stacked tensors again, by vmap over the clients.
Any other operation is mapped over the clients as well.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from kairosfl.engines.batched.layers import Unstackable
from kairosfl.engines.batched.lifted import Lift, Stacked

Rule = Callable[..., Any]
RULES: dict[str, Rule] = {}
POINTWISE = {
    "add",
    "sub",
    "subtract",
    "mul",
    "multiply",
    "div",
    "divide",
    "true_divide",
    "rsub",
    "radd",
    "rmul",
    "rdiv",
}
POINTWISE |= {
    "rtruediv",
    "truediv",
    "pow",
    "rpow",
    "maximum",
    "minimum",
    "fmax",
    "fmin",
    "where",
    "lerp",
    "addcmul",
}
POINTWISE |= {
    "addcdiv",
    "atan2",
    "xlogy",
    "hypot",
    "remainder",
    "fmod",
    "floor_divide",
    "eq",
    "ne",
    "lt",
    "le",
    "gt",
}
POINTWISE |= {
    "ge",
    "iadd",
    "isub",
    "imul",
    "itruediv",
    "idiv",
    "clamp",
    "masked_fill",
    "copysign",
    "logaddexp",
}
BELOW = {"add_", "sub_", "mul_", "div_", "pow_", "addcmul_", "lerp_", "masked_fill_", "clamp_"}


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Register what functions of these names do; `NotImplemented` leaves it to the general ways."""

    def register(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, function))
        return function

    return register


def general(lift: Lift, name: str, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    leaves, spec = tree_flatten((args, kwargs))
    key = (name, *(tuple(leaf.shape) for leaf in leaves if isinstance(leaf, Stacked)))
    rank = max((leaf.ndim for leaf in leaves if isinstance(leaf, Tensor)), default=0)
    pointwise = name in POINTWISE or name in BELOW
    axes: list[int | None] = []
    for place, leaf in enumerate(leaves):
        plain = isinstance(leaf, Tensor) and not isinstance(leaf, Stacked)
        # A parameter has no axis for the samples: what it lines up with along the first axis is not
        # a batch.
        alike = pointwise and plain and (leaf.ndim < rank or _begins(leaves, rank))
        axes.append(lift.batch((*key, place), leaf) if plain and not alike else None)
    if all(axis is None for axis in axes):
        return alone(lift, func, args, kwargs)
    m = lift.frame.clients
    if pointwise and all(axis in (0, None) for axis in axes):
        result = func_of(
            func,
            tree_unflatten(
                [_lined(leaf, axis, rank, m) for leaf, axis in zip(leaves, axes, strict=True)], spec
            ),
        )
        return leaves[0] if name in BELOW else result.flatten(0, 1)
    return _mapped(lift, func, leaves, axes, spec)


def _begins(leaves: list[Any], rank: int) -> bool:
    """Whether a parameter fills the first axis."""
    return any(
        isinstance(leaf, Stacked) and leaf.ndim == rank and rank and leaf.shape[0] > 1
        for leaf in leaves
    )


def func_of(func: Any, given: Any) -> Any:
    args, kwargs = given
    return func(*args, **kwargs)


def _lined(leaf: Any, axis: int | None, rank: int, m: int) -> Any:
    """An argument of a pointwise operation as `[m, b, ...]`, lined up from the right."""
    if isinstance(leaf, Stacked):
        return leaf.value.reshape(m, *(1,) * (rank - leaf.ndim), *leaf.shape)
    return leaf if axis is None else leaf.unflatten(0, (m, -1))


def alone(lift: Lift, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Parameters and constants: the operation for every client."""
    leaves, spec = tree_flatten((args, kwargs))
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Stacked)]

    def one(*values: Tensor) -> Any:
        here = list(leaves)
        for place, value in zip(places, values, strict=True):
            here[place] = value
        return func_of(func, tree_unflatten(here, spec))

    results = vmap(one)(*(leaves[place].value for place in places))
    return tree_map(lambda each: wrap(lift, each) if isinstance(each, Tensor) else each, results)


def wrap(lift: Lift, value: Tensor) -> Stacked:
    """All clients' results of an operation on parameters as one."""
    return Stacked(lift, value.shape[1:], value.dtype, value.device, derived=value)


def _mapped(lift: Lift, func: Any, leaves: list[Any], axes: list[int | None], spec: Any) -> Any:
    """The operation mapped over the clients; the samples of its results are where those of its
    arguments are.
    """
    m, axis = lift.frame.clients, next(axis for axis in axes if axis is not None)
    values, at = [], []
    for leaf, own in zip(leaves, axes, strict=True):
        if isinstance(leaf, Stacked):
            values.append(leaf.value)
            at.append(0)
        elif own is not None:
            values.append(leaf.unflatten(own, (m, -1)))
            at.append(own)
    places = [
        place
        for place, leaf in enumerate(leaves)
        if isinstance(leaf, Stacked) or axes[place] is not None
    ]

    def one(*values: Tensor) -> Any:
        here = list(leaves)
        for place, value in zip(places, values, strict=True):
            here[place] = value
        return func_of(func, tree_unflatten(here, spec))

    results = vmap(one, tuple(at), axis)(*values)
    return tree_map(
        lambda each: each.flatten(axis, axis + 1) if isinstance(each, Tensor) else each, results
    )


def spread(lift: Lift, stacked: Stacked, rows: int) -> Tensor:
    """A parameter `[1, ...]` as the same for all of a client's `rows / m` samples."""
    value = stacked.value
    if stacked.ndim == 0 or stacked.shape[0] != 1:
        raise Unstackable(f"it combines a parameter {tuple(stacked.shape)} with a batch")
    return value.expand(-1, rows // len(value), *(-1,) * (stacked.ndim - 1)).flatten(0, 1)


def _lined_up(factor: Any, m: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor | None:
    """A scale or shift in this shape, with a row for each client if it is stacked."""
    if factor is None:
        return None
    if isinstance(factor, Stacked):
        return factor.value.reshape(m, *shape).to(dtype)
    view: Tensor = factor.view(shape).to(dtype)
    return view


def affine(y: Tensor, m: int, weight: Any, bias: Any, shape: tuple[int, ...]) -> Tensor:
    """Scale and shift, of each client's own or of all; `shape` is theirs, lined up with one
    sample's.
    """
    if weight is None and bias is None:
        return y
    rows = (
        y.unflatten(0, (m, -1)) if isinstance(weight, Stacked) or isinstance(bias, Stacked) else y
    )
    w = _lined_up(weight, m, shape, y.dtype)
    b = _lined_up(bias, m, shape, y.dtype)
    if w is not None:
        rows = rows * w if b is None else torch.addcmul(b, rows, w)
    elif b is not None:
        rows = rows + b
    return rows if rows.ndim == y.ndim else rows.flatten(0, 1)
