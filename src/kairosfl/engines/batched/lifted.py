"""A model run for many clients by its own forward: activations are plain tensors `[m·b, ...]`,
client after client, and every trained parameter is a `Stacked`, which shows the shape of one
client's and holds all clients'."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from kairosfl.engines.batched.dropout import StackedDropout, bits, least, seeded
from kairosfl.engines.batched.frame import Frame
from kairosfl.engines.batched.layers import StackedConv2d, Unstackable
from kairosfl.engines.batched.recurrent import INNER
from kairosfl.engines.batched.rows import RowLayout, ordered
from kairosfl.engines.batched.sequence import LAYERS
from kairosfl.tasks.forward import call
from kairosfl.tasks.tree import Tree, rows
from kairosfl.tasks.vector import layout_of

# Whole layers that have a stacked form, as their functions would be one call too many or keep the
# batch elsewhere.
WHOLE = (
    nn.RNN,
    nn.GRU,
    nn.LSTM,
    nn.MultiheadAttention,
    nn.TransformerEncoderLayer,
    nn.TransformerEncoder,
)
SDPA = F.scaled_dot_product_attention


class Stacked(Tensor):
    """One client's tensor to the model; `value` holds all clients', `[m, *shape]`. `lifts` says
    what operations do.
    """

    lift: Lift
    number: int | None  # of a parameter
    derived: Tensor | None  # of the result of an operation on parameters

    @staticmethod
    def __new__(
        cls,
        lift: Lift,
        shape: torch.Size | tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device,
        *,
        number: int | None = None,
        derived: Tensor | None = None,
    ) -> Stacked:
        self: Stacked = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)
        self.lift, self.number, self.derived = lift, number, derived
        return self

    @property
    def value(self) -> Tensor:
        """All clients' values, to be differentiated by autograd."""
        if self.derived is not None:
            return self.derived
        assert self.number is not None
        return self.lift.value(self.number)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Stacked({tuple(self.shape)}, number={self.number})"

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        from kairosfl.engines.batched.lifts import apply

        return apply(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise Unstackable(f"{func} reads a parameter's values")


class Lift:
    """What the stacked tensors of one model share.

    `seen` remembers, for every way in which parameters met a tensor in the trials, along which axes
    that tensor fitted a batch (None: along none): in training another size may happen to equal that
    of the batch.
    """

    def __init__(self, frame: Frame) -> None:
        self.frame = frame
        self.seen: dict[tuple[Any, ...], set[int | None]] = {}
        self.learns = True
        self.forwards = False
        self.drawn = 0  # calls of dropout functions in this pass
        self.dropped: Counter[int] = Counter()  # calls of every dropout layer in this pass
        self.uses: Counter[int] = Counter()
        self.convolutions: dict[tuple[Any, ...], StackedConv2d] = {}

    def value(self, index: int) -> Tensor:
        """A parameter of every client, one leaf per pass."""
        held = self.frame.held
        if index not in held:
            self.use(index)
            held[index] = self.frame.leaf(index).to(self.frame.compute)
        return held[index]

    def use(self, *indices: int | None) -> None:
        """Count uses that write gradients of their own."""
        if not self.forwards:  # a part is computed again for its backward pass
            return
        self.uses.update(index for index in indices if index is not None)
        again = [index for index in indices if index is not None and self.uses[index] > 1]
        if not self.learns and any(index not in self.frame.shared for index in again):
            raise Unstackable("it uses a parameter more often than in its trial")

    def batch(self, key: tuple[Any, ...], x: Tensor) -> int | None:
        """Which axis of a tensor runs over the samples, or None."""
        samples = self.frame.samples
        if not x.ndim or not len(x) or len(x) == 1 < samples:
            return None
        key = (*key, x.ndim)
        known = self.seen.get(key, set())
        if None in known:  # it did not fit once
            return None
        if len(known) == 1 and not self.learns:
            return next(iter(known))
        fits = [axis for axis, size in enumerate(x.shape) if size == samples]
        found = 0 if len(x) % samples == 0 else next(iter(fits), None)
        if self.learns:
            self.seen.setdefault(key, set()).add(found)
        elif known and found not in known:
            raise Unstackable("its batch cannot be told from another axis")
        return found


class Dropout(StackedDropout):
    """A dropout layer that may be called several times in a pass; every call has masks of its own."""

    def __init__(self, p: float, number: int, lift: Lift) -> None:
        super().__init__(p, number, lift.frame)
        self.lift = lift

    def forward(self, x: Tensor) -> Tensor:
        calls = self.lift.dropped
        if not self.lift.forwards and calls[self.number] > 1:
            raise Unstackable(
                "it calls a dropout several times, and computes it again for its backward pass"
            )
        before = calls[self.number] if self.lift.forwards else 0
        calls[self.number] += self.lift.forwards
        if not before:
            return super().forward(x)
        again: Tensor = StackedDropout(self.p, self.number + 8 * INNER * before, self.frame)(x)
        return again


class Lifted:
    """The model's own forward with stacked parameters. Frozen ones stay as they are, so that all
    clients share them.
    """

    def __init__(
        self, model: nn.Module, reason: str, device: torch.device, own: Collection[str] = ()
    ) -> None:
        self.model = copy.deepcopy(model).to(device).train()
        layout = layout_of(model, own)
        parameters = ordered(self.model, layout).values()
        self.frame = Frame(RowLayout.of(layout), dict.fromkeys(range(len(parameters)), 2))
        self.frame.compute = next(iter(parameters)).dtype
        self.lift = Lift(self.frame)
        self.why, self.drops = f"stacked by lifting its parameters: {reason}", False
        self._mode = _Mode(self.lift)
        self._places = {id(parameter): number for number, parameter in enumerate(parameters)}
        linear = [module for module in self.model.modules() if isinstance(module, nn.Linear)]
        if linear:
            linear[-1].register_forward_pre_hook(self._hear, with_kwargs=True)
        self._whole()
        self._spots = [
            (module, name, self._places[id(parameter)], tuple(parameter.shape))
            for module in self.model.modules()
            for name, parameter in module._parameters.items()
            if parameter is not None and id(parameter) in self._places
        ]
        self.frame.around = lambda: self._mode
        self.place(device)

    def place(self, device: torch.device) -> None:
        """Put stacked tensors of the type of the activations where the parameters were."""
        made: dict[int, Stacked] = {}
        for module, name, index, shape in self._spots:
            if index not in made:
                made[index] = Stacked(self.lift, shape, self.frame.compute, device, number=index)
            module._parameters[name] = made[index]  # type: ignore[assignment]

    def _whole(self) -> None:
        """Replace dropouts, and the layers that have a stacked form as a whole."""

        def find(parameter: Tensor | None) -> int | None:
            if parameter is None:
                return None
            own = self._places.get(id(parameter))
            return self.frame.fix(parameter) if own is None else own

        new: dict[int, nn.Module] = {}
        for parent in list(self.model.modules()):
            for name, layer in list(parent._modules.items()):
                if layer is None:
                    continue
                mine = [
                    self._places[id(each)]
                    for each in layer.parameters()
                    if id(each) in self._places
                ]
                if id(layer) not in new and type(layer) is nn.Dropout:
                    new[id(layer)] = Dropout(layer.p, 2 * INNER + len(new), self.lift)
                    self.drops |= layer.p > 0
                elif id(layer) not in new and type(layer) in WHOLE and (mine or _drops(layer)):
                    try:
                        new[id(layer)] = LAYERS[type(layer)](layer, find, self.frame)
                    except Unstackable:  # its functions may do
                        continue
                    new[id(layer)].register_forward_pre_hook(
                        lambda _, __, mine=mine: self.lift.use(*mine)
                    )
                    self.drops |= _drops(layer)
                if id(layer) in new:
                    parent._modules[name] = new[id(layer)]

    def _hear(self, _: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        self.frame.features = (*arguments, *named.values())[0]

    def settled(self) -> Lifted:
        """After trials: what they showed holds, and gradients of parameters used once are written,
        not added up.
        """
        places, uses = range(len(self.frame.layout.places)), self.lift.uses
        self.frame.shared = frozenset(index for index in places if uses[index] != 1)
        self.lift.learns = False
        return self

    def __call__(self, inputs: Tree) -> Tensor:
        lift = self.lift
        self.frame.samples = rows(inputs)
        lift.drawn = 0
        lift.dropped.clear()
        lift.uses.clear()
        # With dropout off, a model that draws random numbers itself has to know.
        quiet = self._mode.random and self.frame.keys is None
        if self.model.training == quiet:
            self.model.train(not quiet)
        try:
            with lift_forward(lift), self._mode:
                outputs = call(self.model, inputs)
        except _Random:
            return self(inputs)
        self.drops |= self._mode.draws
        if type(outputs) is not Tensor:
            raise Unstackable("its outputs do not depend on its inputs")
        return outputs


def _told(value: Any) -> bool:
    """Whether a tensor depends on activations, or on other numbers that are not whole."""
    return isinstance(value, Tensor) and (value.dtype.is_floating_point or hasattr(value, "told"))


@contextmanager
def lift_forward(lift: Lift) -> Iterator[None]:
    lift.forwards = True
    try:
        yield
    finally:
        lift.forwards = False


def _drops(layer: nn.Module) -> bool:
    parts = [getattr(part, "dropout", 0.0) for part in layer.modules()]
    inner = any(
        isinstance(part, nn.modules.dropout._DropoutNd) and part.p for part in layer.modules()
    )
    return inner or any(isinstance(part, float) and part > 0 for part in parts)


# Python code that reads numbers of the activations may decide by those of other clients.
READS = (
    "item",
    "tolist",
    "numpy",
    "__bool__",
    "__float__",
    "__int__",
    "__index__",
    "__array__",
    "__contains__",
)


DRAWS = {
    "rand",
    "rand_like",
    "randn",
    "randn_like",
    "randint",
    "randint_like",
    "randperm",
    "normal",
    "multinomial",
}
DRAWS |= {
    "bernoulli",
    "bernoulli_",
    "normal_",
    "uniform_",
    "random_",
    "exponential_",
    "rrelu",
    "alpha_dropout",
}
DRAWS |= {"feature_alpha_dropout", "gumbel_softmax"}


PRODUCTS = (
    "matmul",
    "bmm",
    "mm",
    "__matmul__",
    "einsum",
    "baddbmm",
    "addmm",
    "linear",
    "conv1d",
    "conv2d",
    "conv3d",
)


class _Random(Exception):
    """The model draws random numbers in training."""


class _Mode(TorchFunctionMode):
    """Dropout functions with masks of each client's own, attention in one type, and no decisions by
    activations.

    What depends on token numbers or masks alone may be read: it says what to skip.
    """

    def __init__(self, lift: Lift) -> None:
        self.lift, self.draws, self.random = lift, False, False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (F.dropout, torch.dropout, torch.dropout_):
            return self._drop(*args, **kwargs)
        if func in (F.dropout1d, F.dropout2d, F.dropout3d, torch.feature_dropout):
            return self._drop_channels(*args, **kwargs)
        if func is SDPA:
            return self._attend(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if name in DRAWS:
            return self._random(func, name, args, kwargs)
        if name in READS and any(_told(each) for each in args):
            raise Unstackable(f"it reads its activations ({name.strip('_')})")
        if name in PRODUCTS:
            args = self._alike(args)
        result = func(*args, **kwargs)
        if (
            type(result) is Tensor
            and not result.is_floating_point()
            and any(map(_told, tree_leaves((args, kwargs))))
        ):
            result.told = True  # type: ignore[attr-defined]
        return result

    def _drop(
        self,
        x: Tensor,
        p: float = 0.5,
        training: bool = True,
        inplace: bool = False,
        train: bool = True,
    ) -> Any:
        if not (training and train and p):
            return x
        y = self._mask(p)(x)
        return x.copy_(y) if inplace else y

    def _drop_channels(
        self, x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> Any:
        if not (training and p):
            return x
        return x * self._mask(p)(x.new_ones(x.shape[:2])).view(*x.shape[:2], *(1,) * (x.ndim - 2))

    def _alike(self, args: Any) -> Any:
        """Factors of one type: a constant in float32 may have turned one of them into that."""
        kinds = {
            each.dtype for each in args if isinstance(each, Tensor) and each.is_floating_point()
        }
        compute = self.lift.frame.compute
        if len(kinds) < 2 or compute not in kinds:
            return args
        return tuple(each.to(compute) if isinstance(each, Tensor) else each for each in args)

    def _random(self, func: Any, name: str, args: Any, kwargs: dict[str, Any]) -> Any:
        """Random numbers of each sample, as in stochastic depth."""
        lift, keys = self.lift, self.lift.frame.keys
        if keys is None and not self.random:
            self.random = self.draws = True
            raise _Random
        values = func(*args, **kwargs)
        if keys is None or name not in ("rand", "rand_like", "bernoulli_") or not lift.forwards:
            raise Unstackable(f"it draws random numbers ({name})")
        if not values.ndim or len(values) % lift.frame.samples:
            raise Unstackable(f"it draws random numbers {tuple(values.shape)} for a whole batch")
        lift.drawn += 1
        drawn = bits(seeded(keys, 4 * INNER + lift.drawn), values.numel() // len(keys)).view(
            values.shape
        )
        if name != "bernoulli_":
            return (drawn >> 8).to(values.dtype) / 2**24
        p = args[1] if len(args) > 1 else kwargs.get("p", 0.5)
        return values.copy_(drawn < least(p))

    def _mask(self, p: float) -> StackedDropout:
        lift = self.lift
        if not lift.forwards:  # calls are numbered, and this would be one more
            raise Unstackable(
                "it calls a dropout function in a part that is computed again for its backward pass"
            )
        self.draws, lift.drawn = True, lift.drawn + 1
        return StackedDropout(p, 4 * INNER + lift.drawn, lift.frame)

    def _attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        compute = self.lift.frame.compute
        if not q.dtype == k.dtype == v.dtype:
            q, k, v = q.to(compute), k.to(compute), v.to(compute)
        if attn_mask is not None and attn_mask.is_floating_point():
            attn_mask = attn_mask.to(q.dtype)
        if not dropout_p:
            return SDPA(q, k, v, attn_mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa)
        drop = self._mask(dropout_p)
        if self.lift.frame.keys is None:
            return SDPA(q, k, v, attn_mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa)
        if enable_gqa:
            k, v = (each.repeat_interleave(q.shape[-3] // each.shape[-3], -3) for each in (k, v))
        scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
        if is_causal:
            places = [torch.arange(size, device=q.device) for size in scores.shape[-2:]]
            scores = scores.masked_fill(places[1] > places[0][:, None], float("-inf"))
        if attn_mask is not None:
            bare = attn_mask.dtype == torch.bool
            scores = scores.masked_fill(~attn_mask, float("-inf")) if bare else scores + attn_mask
        shares: Tensor = drop(scores.softmax(-1).to(v.dtype))
        return shares @ v
