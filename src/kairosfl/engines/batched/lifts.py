"""What operations do with stacked parameters: a rule for each in which one meets activations."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_flatten

from kairosfl.engines.batched import products  # noqa: F401  # registers its rules
from kairosfl.engines.batched.fast import kernels
from kairosfl.engines.batched.layers import EmbeddingFunction, GroupNormFunction, Unstackable
from kairosfl.engines.batched.lifted import Lift, Stacked
from kairosfl.engines.batched.mapping import RULES, affine, alone, general, rule, spread, wrap

READS = {
    "item",
    "tolist",
    "__bool__",
    "__float__",
    "__int__",
    "__index__",
    "numpy",
    "__array__",
    "equal",
    "allclose",
}
FACTS = {
    "size",
    "dim",
    "numel",
    "__len__",
    "stride",
    "is_contiguous",
    "is_floating_point",
    "is_complex",
    "nelement",
}
FACTS |= {
    "element_size",
    "ndimension",
    "get_device",
    "storage_offset",
    "__hash__",
    "__repr__",
    "requires_grad_",
}
FACTS |= {
    "is_same_size",
    "is_signed",
    "data_ptr",
    "untyped_storage",
    "is_pinned",
    "has_names",
    "type",
}
VIEWS = {"T", "mT", "H", "mH", "real", "imag", "data"}


def apply(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """The operation with a stacked tensor among its arguments."""
    name: str = getattr(func, "__name__", str(func))
    with torch._C.DisableTorchFunctionSubclass():
        if name == "__get__":
            wanted = func.__self__.__name__
            if wanted not in VIEWS:
                return func(*args)
            return alone(
                args[0].lift,
                lambda x: getattr(x.detach() if wanted == "data" else x, wanted),
                args,
                {},
            )
        if name in FACTS:
            return func(*args, **kwargs)
        if name in READS:
            raise Unstackable(f"it reads a parameter's values ({name.strip('_')})")
        if name.startswith("new_") or name.endswith("_like"):  # constants of its type
            return func(
                torch.empty(args[0].shape, dtype=args[0].dtype, device=args[0].device),
                *args[1:],
                **kwargs,
            )
        plain = name.strip("_") if name.startswith("__") else name
        leaves, _ = tree_flatten((args, kwargs))
        lift = next(leaf for leaf in leaves if isinstance(leaf, Stacked)).lift
        given = RULES.get(plain)
        if given is not None:
            result = given(lift, *args, **kwargs)
            if result is not NotImplemented:
                return result
        return general(lift, plain, func, args, kwargs)


@rule("layer_norm")
def _layer_norm(
    lift: Lift,
    x: Any,
    over: Any,
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
    *_: Any,
    **__: Any,
) -> Any:
    return _normed(lift, x, weight, bias, lambda x: F.layer_norm(x, over, eps=eps), tuple(over))


@rule("rms_norm")
def _rms_norm(lift: Lift, x: Any, over: Any, weight: Any = None, eps: float | None = None) -> Any:
    return _normed(lift, x, weight, None, lambda x: F.rms_norm(x, over, eps=eps), tuple(over))


def _normed(
    lift: Lift,
    x: Any,
    weight: Any,
    bias: Any,
    norm: Callable[[Tensor], Tensor],
    over: tuple[int, ...],
) -> Any:
    key = ("norm", *(tuple(each.shape) for each in (weight, bias) if isinstance(each, Stacked)))
    axis = None if isinstance(x, Stacked) else lift.batch(key, x)
    if axis is None:
        return NotImplemented
    y = norm(x).movedim(axis, 0)
    return affine(y, lift.frame.clients, weight, bias, (1,) * (y.ndim - len(over)) + over).movedim(
        0, axis
    )


@rule("group_norm")
def _group_norm(
    lift: Lift,
    x: Any,
    groups: int,
    weight: Any = None,
    bias: Any = None,
    eps: float = 1e-5,
    *_: Any,
) -> Any:
    if isinstance(x, Stacked) or lift.batch(("group_norm",), x) != 0:
        return NotImplemented
    frame = lift.frame
    module: Any = kernels("norm", x)
    own = [each.number if isinstance(each, Stacked) else None for each in (weight, bias)]
    if module is not None and x.ndim == 4 and None not in own and module.fits(x.shape[1], groups):
        lift.use(*own)
        fused: Tensor = GroupNormFunction.apply(
            x, frame.tape, _Norm(frame, own[0], own[1], groups, eps), module
        )  # type: ignore[no-untyped-call]
        return fused
    # In channels-last order PyTorch's variance is E[x²] − E[x]², which is inaccurate.
    y = F.group_norm(x.contiguous(), groups, eps=eps)
    return affine(y, frame.clients, weight, bias, (1, x.shape[1]) + (1,) * (x.ndim - 2))


class _Norm:
    """What the kernel of a group norm reads of its layer."""

    activation, before = "", None

    def __init__(
        self, frame: Any, weight: int | None, bias: int | None, groups: int, eps: float
    ) -> None:
        self.frame, self.weight, self.bias, self.groups, self.eps = frame, weight, bias, groups, eps


@rule("instance_norm")
def _instance_norm(
    lift: Lift,
    x: Any,
    running_mean: Any = None,
    running_var: Any = None,
    weight: Any = None,
    bias: Any = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
    *_: Any,
) -> Any:
    if running_mean is not None or not use_input_stats or x.ndim < 3:
        return NotImplemented
    return _group_norm(lift, x, x.shape[1], weight, bias, eps)


@rule("embedding")
def _embedding(
    lift: Lift,
    tokens: Any,
    weight: Any,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    if max_norm is not None or scale_grad_by_freq:
        raise Unstackable("an embedding uses max_norm or scale_grad_by_freq")
    axis = lift.batch(("embedding", tuple(weight.shape)), tokens)
    if axis is None:
        value: Tensor = weight.value[:, tokens]
        if padding_idx is not None:
            value = torch.where((tokens == padding_idx).unsqueeze(-1), value.detach(), value)
        return wrap(lift, value)
    frame = lift.frame
    rows = tokens.movedim(axis, 0)
    flat = rows.reshape(frame.clients, -1)
    y: Tensor
    if weight.number is not None:
        lift.use(weight.number)
        y = EmbeddingFunction.apply(flat, frame.tape, frame, weight.number)  # type: ignore[no-untyped-call]
    else:
        y = weight.value[torch.arange(frame.clients, device=flat.device)[:, None], flat]
    y = y.view(*rows.shape, y.shape[-1]).to(frame.compute)
    if padding_idx is not None:
        y = torch.where((rows == padding_idx % weight.shape[0]).unsqueeze(-1), y.detach(), y)
    return y.movedim(0, axis)


@rule("getitem")
def _getitem(lift: Lift, table: Any, index: Any) -> Any:
    looked = (
        isinstance(index, Tensor)
        and not isinstance(index, Stacked)
        and index.dtype in (torch.int64, torch.int32)
    )
    if not isinstance(table, Stacked) or not looked or not index.ndim:
        return NotImplemented
    return _embedding(lift, index, table) if table.ndim == 2 else NotImplemented


@rule("prelu")
def _prelu(lift: Lift, x: Any, weight: Any) -> Any:
    if isinstance(x, Stacked) or lift.batch(("prelu", tuple(weight.shape)), x) != 0:
        return NotImplemented
    shape = (1, weight.numel(), *(1,) * (x.ndim - 2)) if x.ndim > 1 else (1,)
    return torch.where(x > 0, x, affine(x, lift.frame.clients, weight, None, shape))


@rule("expand", "broadcast_to", "expand_as")
def _expand(lift: Lift, stacked: Any, *sizes: Any, **_: Any) -> Any:
    if isinstance(sizes[0], Tensor):
        sizes = tuple(sizes[0].shape)
    elif not isinstance(sizes[0], int):
        sizes = tuple(sizes[0])
    if not isinstance(stacked, Stacked):
        return NotImplemented
    front = (1,) * (len(sizes) - stacked.ndim) + tuple(stacked.shape)
    grows = front[0] == 1 and sizes[0] > 0
    if (
        not grows
        or lift.batch(("expand", tuple(stacked.shape), len(sizes)), torch.empty(sizes[0], 0))
        is None
    ):
        return NotImplemented
    m = lift.frame.clients
    return stacked.value.reshape(m, *front).expand(m, sizes[0] // m, *sizes[1:]).flatten(0, 1)


@rule("repeat", "tile")
def _repeat(lift: Lift, stacked: Any, *sizes: Any) -> Any:
    sizes = tuple(sizes[0]) if not isinstance(sizes[0], int) else sizes
    front = (1,) * (len(sizes) - stacked.ndim) + tuple(stacked.shape)
    fits = len(sizes) == len(front) and front[0] == 1
    if (
        not fits
        or lift.batch(("repeat", tuple(stacked.shape), len(sizes)), torch.empty(sizes[0], 0))
        is None
    ):
        return NotImplemented
    m = lift.frame.clients
    value = stacked.value.reshape(m, *front).repeat(1, 1, *sizes[1:])
    return value.expand(m, sizes[0] // m, *value.shape[2:]).flatten(0, 1)


@rule("cat", "concat", "concatenate")
def _cat(lift: Lift, tensors: Any, dim: int = 0, **_: Any) -> Any:
    shapes = tuple(tuple(each.shape) if isinstance(each, Stacked) else None for each in tensors)
    axes = {
        lift.batch(("cat", dim, shapes, place), each)
        for place, each in enumerate(tensors)
        if shapes[place] is None
    }
    if axes <= {None}:
        return NotImplemented
    if axes != {0}:
        raise Unstackable("it joins a parameter and a batch that is not along the first axis")
    rows = next(len(each) for each in tensors if not isinstance(each, Stacked))
    return torch.cat(
        [spread(lift, each, rows) if isinstance(each, Stacked) else each for each in tensors], dim
    )


@rule("scaled_dot_product_attention")
def _attention(
    lift: Lift, q: Any, k: Any, v: Any, mask: Any = None, *rest: Any, **named: Any
) -> Any:
    mask = named.pop("attn_mask", mask)
    plain = next((each for each in (q, k, v) if not isinstance(each, Stacked)), None)
    if plain is None or lift.batch(("attention",), plain) != 0:
        return NotImplemented

    def whole(each: Any) -> Any:
        if not isinstance(each, Stacked):
            return each
        front = (
            each
            if each.ndim == plain.ndim
            else alone(lift, lambda x: x[(None,) * (plain.ndim - x.ndim)], (each,), {})
        )
        return spread(lift, front, len(plain)).to(plain.dtype)

    return F.scaled_dot_product_attention(whole(q), whole(k), whole(v), whole(mask), *rest, **named)


@rule("to", "type_as")
def _to(lift: Lift, x: Any, *args: Any, **kwargs: Any) -> Any:
    if not isinstance(x, Stacked):  # x.to(parameter): its type
        return x.to(args[0].dtype)
    args = tuple(each.dtype if isinstance(each, Tensor) else each for each in args)
    kept = [each for each in (*args, *kwargs.values()) if isinstance(each, torch.dtype)]
    if not kept or kept[0] == x.dtype:
        return x
    return wrap(lift, x.value.to(kept[0]))


@rule("multi_head_attention_forward")
def _heads(lift: Lift, *_: Any, **__: Any) -> Any:
    raise Unstackable("an attention has keys of another width, bias_k or add_zero_attn")
