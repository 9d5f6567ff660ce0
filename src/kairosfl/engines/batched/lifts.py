"""What operations do with stacked parameters: a rule for each in which one meets activations.

Operations on parameters and constants alone give stacked tensors again, by vmap over the clients. Any other operation
is mapped over the clients as well.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import vmap
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from kairosfl.engines.batched import conv
from kairosfl.engines.batched.fast import kernels
from kairosfl.engines.batched.layers import (
    StackedConv2d,
    Unstackable,
    _Embedding,
    _GroupNorm,
    _Linear,
)
from kairosfl.engines.batched.lifted import Lift, Stacked

Rule = Callable[..., Any]
RULES: dict[str, Rule] = {}
READS = {"item", "tolist", "__bool__", "__float__", "__int__", "__index__", "numpy", "__array__", "equal", "allclose"}
FACTS = {"size", "dim", "numel", "__len__", "stride", "is_contiguous", "is_floating_point", "is_complex", "nelement"}
FACTS |= {"element_size", "ndimension", "get_device", "storage_offset", "__hash__", "__repr__", "requires_grad_"}
FACTS |= {"is_same_size", "is_signed", "data_ptr", "untyped_storage", "is_pinned", "has_names", "type"}
VIEWS = {"T", "mT", "H", "mH", "real", "imag", "data"}
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
POINTWISE |= {"rtruediv", "truediv", "pow", "rpow", "maximum", "minimum", "fmax", "fmin", "where", "lerp", "addcmul"}
POINTWISE |= {"addcdiv", "atan2", "xlogy", "hypot", "remainder", "fmod", "floor_divide", "eq", "ne", "lt", "le", "gt"}
POINTWISE |= {"ge", "iadd", "isub", "imul", "itruediv", "idiv", "clamp", "masked_fill", "copysign", "logaddexp"}
BELOW = {"add_", "sub_", "mul_", "div_", "pow_", "addcmul_", "lerp_", "masked_fill_", "clamp_"}


def rule(*names: str) -> Callable[[Rule], Rule]:
    """Register what functions of these names do; `NotImplemented` leaves it to the general ways."""

    def register(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, function))
        return function

    return register


def apply(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """The operation with a stacked tensor among its arguments."""
    name: str = getattr(func, "__name__", str(func))
    with torch._C.DisableTorchFunctionSubclass():
        if name == "__get__":
            wanted = func.__self__.__name__
            if wanted not in VIEWS:
                return func(*args)
            return _alone(args[0].lift, lambda x: getattr(x.detach() if wanted == "data" else x, wanted), args, {})
        if name in FACTS:
            return func(*args, **kwargs)
        if name in READS:
            raise Unstackable(f"it reads a parameter's values ({name.strip('_')})")
        if name.startswith("new_") or name.endswith("_like"):  # constants of its type
            return func(torch.empty(args[0].shape, dtype=args[0].dtype, device=args[0].device), *args[1:], **kwargs)
        plain = name.strip("_") if name.startswith("__") else name
        leaves, _ = tree_flatten((args, kwargs))
        lift = next(leaf for leaf in leaves if isinstance(leaf, Stacked)).lift
        given = RULES.get(plain)
        if given is not None:
            result = given(lift, *args, **kwargs)
            if result is not NotImplemented:
                return result
        return _general(lift, plain, func, args, kwargs)


def _general(lift: Lift, name: str, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    leaves, spec = tree_flatten((args, kwargs))
    key = (name, *(tuple(leaf.shape) for leaf in leaves if isinstance(leaf, Stacked)))
    rank = max((leaf.ndim for leaf in leaves if isinstance(leaf, Tensor)), default=0)
    pointwise = name in POINTWISE or name in BELOW
    axes: list[int | None] = []
    for place, leaf in enumerate(leaves):
        plain = isinstance(leaf, Tensor) and not isinstance(leaf, Stacked)
        # A parameter has no axis for the samples: what it lines up with along the first axis is not a batch.
        alike = pointwise and plain and (leaf.ndim < rank or _begins(leaves, rank))
        axes.append(lift.batch((*key, place), leaf) if plain and not alike else None)
    if all(axis is None for axis in axes):
        return _alone(lift, func, args, kwargs)
    m = lift.frame.clients
    if pointwise and all(axis in (0, None) for axis in axes):
        result = func_of(
            func, tree_unflatten([_lined(leaf, axis, rank, m) for leaf, axis in zip(leaves, axes, strict=True)], spec)
        )
        return leaves[0] if name in BELOW else result.flatten(0, 1)
    return _mapped(lift, func, leaves, axes, spec)


def _begins(leaves: list[Any], rank: int) -> bool:
    """Whether a parameter fills the first axis."""
    return any(isinstance(leaf, Stacked) and leaf.ndim == rank and rank and leaf.shape[0] > 1 for leaf in leaves)


def func_of(func: Any, given: Any) -> Any:
    args, kwargs = given
    return func(*args, **kwargs)


def _lined(leaf: Any, axis: int | None, rank: int, m: int) -> Any:
    """An argument of a pointwise operation as `[m, b, ...]`, lined up from the right."""
    if isinstance(leaf, Stacked):
        return leaf.value.reshape(m, *(1,) * (rank - leaf.ndim), *leaf.shape)
    return leaf if axis is None else leaf.unflatten(0, (m, -1))


def _alone(lift: Lift, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
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
    """The operation mapped over the clients; the samples of its results are where those of its arguments are."""
    m, axis = lift.frame.clients, next(axis for axis in axes if axis is not None)
    values, at = [], []
    for leaf, own in zip(leaves, axes, strict=True):
        if isinstance(leaf, Stacked):
            values.append(leaf.value)
            at.append(0)
        elif own is not None:
            values.append(leaf.unflatten(own, (m, -1)))
            at.append(own)
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Stacked) or axes[place] is not None]

    def one(*values: Tensor) -> Any:
        here = list(leaves)
        for place, value in zip(places, values, strict=True):
            here[place] = value
        return func_of(func, tree_unflatten(here, spec))

    results = vmap(one, tuple(at), axis)(*values)
    return tree_map(lambda each: each.flatten(axis, axis + 1) if isinstance(each, Tensor) else each, results)


def spread(lift: Lift, stacked: Stacked, rows: int) -> Tensor:
    """A parameter `[1, ...]` as the same for all of a client's `rows / m` samples."""
    value = stacked.value
    if stacked.ndim == 0 or stacked.shape[0] != 1:
        raise Unstackable(f"it combines a parameter {tuple(stacked.shape)} with a batch")
    return value.expand(-1, rows // len(value), *(-1,) * (stacked.ndim - 1)).flatten(0, 1)


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
        z: Tensor = _Linear.apply(rows, frame.tape, frame, weight.number, together)  # type: ignore[no-untyped-call]
        y = z.view(*x.shape[:-1], z.shape[-1])
        bias = bias if together is None else None
    else:
        y = torch.bmm(x.reshape(m, -1, x.shape[-1]), weight.value.to(x.dtype).mT)
        y = y.view(*x.shape[:-1], y.shape[-1])
    return y if bias is None else _affine(y, m, None, bias, (*(1,) * (y.ndim - 1), y.shape[-1]))


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
    return _affine(y, m, None, bias, (1, y.shape[-1]))


@rule("einsum")
def _einsum(lift: Lift, equation: Any, *operands: Any) -> Any:
    operands = tuple(operands[0]) if len(operands) == 1 and isinstance(operands[0], (list, tuple)) else operands
    if not isinstance(equation, str) or "->" not in equation or "." in equation:
        return NotImplemented
    inward, outward = equation.replace(" ", "").split("->")
    key = ("einsum", equation, *(tuple(each.shape) for each in operands if isinstance(each, Stacked)))
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


def _affine(y: Tensor, m: int, weight: Any, bias: Any, shape: tuple[int, ...]) -> Tensor:
    """Scale and shift, of each client's own or of all; `shape` is theirs, lined up with one sample's."""
    if weight is None and bias is None:
        return y
    rows = y.unflatten(0, (m, -1)) if isinstance(weight, Stacked) or isinstance(bias, Stacked) else y
    w, b = (
        each.value.reshape(m, *shape).to(y.dtype)
        if isinstance(each, Stacked)
        else None
        if each is None
        else each.view(shape).to(y.dtype)
        for each in (weight, bias)
    )
    if w is not None:
        rows = rows * w if b is None else torch.addcmul(b, rows, w)
    elif b is not None:
        rows = rows + b
    return rows if rows.ndim == y.ndim else rows.flatten(0, 1)


@rule("layer_norm")
def _layer_norm(
    lift: Lift, x: Any, over: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5, *_: Any, **__: Any
) -> Any:
    return _normed(lift, x, weight, bias, lambda x: F.layer_norm(x, over, eps=eps), tuple(over))


@rule("rms_norm")
def _rms_norm(lift: Lift, x: Any, over: Any, weight: Any = None, eps: float | None = None) -> Any:
    return _normed(lift, x, weight, None, lambda x: F.rms_norm(x, over, eps=eps), tuple(over))


def _normed(lift: Lift, x: Any, weight: Any, bias: Any, norm: Callable[[Tensor], Tensor], over: tuple[int, ...]) -> Any:
    key = ("norm", *(tuple(each.shape) for each in (weight, bias) if isinstance(each, Stacked)))
    axis = None if isinstance(x, Stacked) else lift.batch(key, x)
    if axis is None:
        return NotImplemented
    y = norm(x).movedim(axis, 0)
    return _affine(y, lift.frame.clients, weight, bias, (1,) * (y.ndim - len(over)) + over).movedim(0, axis)


@rule("group_norm")
def _group_norm(
    lift: Lift, x: Any, groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5, *_: Any
) -> Any:
    if isinstance(x, Stacked) or lift.batch(("group_norm",), x) != 0:
        return NotImplemented
    frame = lift.frame
    module: Any = kernels("norm", x)
    own = [each.number if isinstance(each, Stacked) else None for each in (weight, bias)]
    if module is not None and x.ndim == 4 and None not in own and module.fits(x.shape[1], groups):
        lift.use(*own)
        fused: Tensor = _GroupNorm.apply(x, frame.tape, _Norm(frame, own[0], own[1], groups, eps), module)  # type: ignore[no-untyped-call]
        return fused
    # In channels-last order PyTorch's variance is E[x²] − E[x]², which is inaccurate.
    y = F.group_norm(x.contiguous(), groups, eps=eps)
    return _affine(y, frame.clients, weight, bias, (1, x.shape[1]) + (1,) * (x.ndim - 2))


class _Norm:
    """What the kernel of a group norm reads of its layer."""

    relu = False

    def __init__(self, frame: Any, weight: int | None, bias: int | None, groups: int, eps: float) -> None:
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
        y = _Embedding.apply(flat, frame.tape, frame, weight.number)  # type: ignore[no-untyped-call]
    else:
        y = weight.value[torch.arange(frame.clients, device=flat.device)[:, None], flat]
    y = y.view(*rows.shape, y.shape[-1]).to(frame.compute)
    if padding_idx is not None:
        y = torch.where((rows == padding_idx % weight.shape[0]).unsqueeze(-1), y.detach(), y)
    return y.movedim(0, axis)


@rule("getitem")
def _getitem(lift: Lift, table: Any, index: Any) -> Any:
    looked = isinstance(index, Tensor) and not isinstance(index, Stacked) and index.dtype in (torch.int64, torch.int32)
    if not isinstance(table, Stacked) or not looked or not index.ndim:
        return NotImplemented
    return _embedding(lift, index, table) if table.ndim == 2 else NotImplemented


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
            shape = conv.Shape(x.shape[1], weight.shape[0], conv.pair(weight.shape[2:]), *key[2:5], groups)
            lift.convolutions[key] = StackedConv2d(shape, weight.number, own, frame)
        lift.use(weight.number, own)
        y = lift.convolutions[key](x)
    else:
        y = _grouped(frame.clients, function, x, weight.value, groups, stride, padding, dilation=dilation)
    return y if late is None else _affine(y, frame.clients, None, late, (1, y.shape[1]) + (1,) * n)


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


def _grouped(m: int, function: Any, x: Tensor, value: Tensor, groups: int, *options: Any, **named: Any) -> Tensor:
    """All clients as the groups of one convolution."""
    beside = x.unflatten(0, (m, -1)).transpose(0, 1).flatten(1, 2)
    y = function(beside, value.to(x.dtype).flatten(0, 1), None, *options, groups=m * groups, **named)
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
        y = _grouped(m, function, x, weight.value, groups, stride, padding, output_padding, dilation=dilation)
    else:
        y = function(x, weight, None, stride, padding, output_padding, groups, dilation)
    return _affine(y, m, None, bias, (1, y.shape[1]) + (1,) * n)


@rule("prelu")
def _prelu(lift: Lift, x: Any, weight: Any) -> Any:
    if isinstance(x, Stacked) or lift.batch(("prelu", tuple(weight.shape)), x) != 0:
        return NotImplemented
    shape = (1, weight.numel(), *(1,) * (x.ndim - 2)) if x.ndim > 1 else (1,)
    return torch.where(x > 0, x, _affine(x, lift.frame.clients, weight, None, shape))


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
    if not grows or lift.batch(("expand", tuple(stacked.shape), len(sizes)), torch.empty(sizes[0], 0)) is None:
        return NotImplemented
    m = lift.frame.clients
    return stacked.value.reshape(m, *front).expand(m, sizes[0] // m, *sizes[1:]).flatten(0, 1)


@rule("repeat", "tile")
def _repeat(lift: Lift, stacked: Any, *sizes: Any) -> Any:
    sizes = tuple(sizes[0]) if not isinstance(sizes[0], int) else sizes
    front = (1,) * (len(sizes) - stacked.ndim) + tuple(stacked.shape)
    fits = len(sizes) == len(front) and front[0] == 1
    if not fits or lift.batch(("repeat", tuple(stacked.shape), len(sizes)), torch.empty(sizes[0], 0)) is None:
        return NotImplemented
    m = lift.frame.clients
    value = stacked.value.reshape(m, *front).repeat(1, 1, *sizes[1:])
    return value.expand(m, sizes[0] // m, *value.shape[2:]).flatten(0, 1)


@rule("cat", "concat", "concatenate")
def _cat(lift: Lift, tensors: Any, dim: int = 0, **_: Any) -> Any:
    shapes = tuple(tuple(each.shape) if isinstance(each, Stacked) else None for each in tensors)
    axes = {
        lift.batch(("cat", dim, shapes, place), each) for place, each in enumerate(tensors) if shapes[place] is None
    }
    if axes <= {None}:
        return NotImplemented
    if axes != {0}:
        raise Unstackable("it joins a parameter and a batch that is not along the first axis")
    rows = next(len(each) for each in tensors if not isinstance(each, Stacked))
    return torch.cat([spread(lift, each, rows) if isinstance(each, Stacked) else each for each in tensors], dim)


@rule("scaled_dot_product_attention")
def _attention(lift: Lift, q: Any, k: Any, v: Any, mask: Any = None, *rest: Any, **named: Any) -> Any:
    mask = named.pop("attn_mask", mask)
    plain = next((each for each in (q, k, v) if not isinstance(each, Stacked)), None)
    if plain is None or lift.batch(("attention",), plain) != 0:
        return NotImplemented

    def whole(each: Any) -> Any:
        if not isinstance(each, Stacked):
            return each
        front = (
            each if each.ndim == plain.ndim else _alone(lift, lambda x: x[(None,) * (plain.ndim - x.ndim)], (each,), {})
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
