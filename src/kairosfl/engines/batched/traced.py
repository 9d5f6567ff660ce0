"""A model run for many clients at once: as traced by torch.fx, its layers replaced, or under vmap."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from operator import attrgetter
from typing import Any, Protocol

import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import Tensor, fx, nn
from torch.func import vmap

from kairosfl.engines.batched.dropout import StackedDropout
from kairosfl.engines.batched.frame import Frame
from kairosfl.engines.batched.layers import (
    StackedConv2d,
    StackedGroupNorm,
    StackedLinear,
    Unstackable,
    line,
)
from kairosfl.engines.batched.pool import ReluPool
from kairosfl.engines.batched.rehearsal import Rehearsal
from kairosfl.engines.batched.rows import RowLayout, ordered
from kairosfl.engines.batched.sequence import LAYERS
from kairosfl.tasks.forward import call
from kairosfl.tasks.task import last_linear
from kairosfl.tasks.tree import Tree, rows, tree_map
from kairosfl.tasks.vector import layout_of

ACTIVATIONS: dict[type, str] = {
    nn.ReLU: "relu",
    nn.SiLU: "silu",
    nn.GELU: "gelu",
}  # that can follow a GroupNorm


class Stack(Protocol):
    """Outputs `[m·b, classes]` for inputs `[m·b, ...]` with the weights of the frame, which then
    holds the features.
    """

    frame: Frame
    model: nn.Module  # holds the frozen tensors
    why: str
    drops: bool  # has dropout

    def __call__(self, inputs: Tree) -> Tensor: ...


class Traced:
    """The model's own graph with its layers replaced by stacked ones; the rest acts on `[m·b, ...]`
    unchanged.

    Frozen layers are part of the rest: all clients share them, as they share buffers.
    """

    def __init__(self, model: nn.Module, device: torch.device, own: Collection[str] = ()) -> None:
        layout = layout_of(model, own)
        model = copy.deepcopy(model).cpu().train()
        parameters = ordered(model, layout).values()
        places = {id(parameter): number for number, parameter in enumerate(parameters)}
        try:
            with _keeping():
                traced = fx.symbolic_trace(model)
        except Exception as error:  # tracing runs the user's forward, which may raise anything
            raise Unstackable(f"torch.fx cannot trace it ({line(error)})") from error
        self.frame = Frame(RowLayout.of(layout), _uses(traced, places))
        self.rehearsal = Rehearsal()
        self._replace(traced, places)
        self.frame.last = _convolves(traced)
        self.why = "stacked layer by layer"
        self.drops = any(
            isinstance(module, StackedDropout) and module.p > 0 for module in traced.modules()
        )
        self.model: nn.Module = traced.to(device)
        self.frame.fixed = [tensor.to(device) for tensor in self.frame.fixed]

    def _replace(self, traced: fx.GraphModule, places: dict[int, int]) -> None:
        def find(parameter: Tensor | None) -> int | None:
            if parameter is None:
                return None
            return places[id(parameter)] if id(parameter) in places else self.frame.fix(parameter)

        linear = [module for module in traced.modules() if isinstance(module, nn.Linear)]
        new: dict[int, str] = {}
        for number, node in enumerate(traced.graph.nodes):
            if node.op == "get_attr" and id(attrgetter(node.target)(traced)) in places:
                raise Unstackable(f"it uses {node.target!r} outside a layer")
            if node.op == "call_function" and node.target in (F.dropout, torch.dropout):
                raise Unstackable("it calls a dropout function instead of an nn.Dropout")
            if node.op != "call_module":
                continue
            layer = traced.get_submodule(node.target)
            if isinstance(layer, nn.Dropout):
                node.target = _add(
                    traced, f"dropout_{number}", StackedDropout(layer.p, number, self.frame)
                )
            elif isinstance(layer, nn.modules.dropout._DropoutNd):
                raise Unstackable(f"it has a {type(layer).__name__}")
            elif not _drops(layer) and not any(
                id(parameter) in places for parameter in layer.parameters()
            ):
                if linear and layer is linear[-1]:
                    layer.register_forward_pre_hook(self._hear)
            else:
                if type(layer) not in LAYERS:
                    raise Unstackable(f"it has a {type(layer).__name__}")
                if id(layer) not in new:
                    stacked = LAYERS[type(layer)](layer, find, self.frame)
                    if isinstance(stacked, StackedLinear):
                        stacked.is_head = layer is linear[-1]
                    new[id(layer)] = _add(
                        traced, "stacked_" + node.target.replace(".", "_"), stacked
                    )
                node.target = new[id(layer)]
        _fuse(traced, self.frame)
        traced.delete_all_unused_submodules()
        traced.recompile()

    def _hear(self, _: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        self.frame.features = arguments[0]

    def __call__(self, inputs: Tree) -> Tensor:
        self.frame.samples = rows(inputs)
        return call(self.model, inputs)


@contextmanager
def _keeping() -> Iterator[None]:
    """Refuse to trace through torch.utils.checkpoint, of which nothing would be left."""

    def refuse(*_: Any, **__: Any) -> None:
        raise Unstackable("it computes activations again for its backward pass")

    name = "_checkpoint_without_reentrant_generator"
    before = getattr(torch.utils.checkpoint, name)
    setattr(torch.utils.checkpoint, name, refuse)
    try:
        yield
    finally:
        setattr(torch.utils.checkpoint, name, before)


def _drops(layer: nn.Module) -> bool:
    """Whether a composite layer contains dropout, which needs masks for each client."""
    parts = [getattr(part, "dropout", 0.0) for part in layer.modules()]
    return any(isinstance(part, float) and part > 0 for part in parts) or _dropouts(layer)


def _dropouts(model: nn.Module) -> bool:
    return any(
        isinstance(module, nn.modules.dropout._DropoutNd) and module.p for module in model.modules()
    )


def _add(traced: fx.GraphModule, name: str, module: nn.Module) -> str:
    """Add a module under this name, or one like it that the model does not have."""
    while hasattr(traced, name):
        name += "_"
    traced.add_submodule(name, module)
    return name


def _fuse(traced: fx.GraphModule, frame: Frame) -> None:
    """Fuse activations that have one reader: into the GroupNorm before them, and a ReLU into the
    2×2 max-pooling after it (with the dropout that follows), the convolution before it or the
    dropout after it."""
    for node in list(traced.graph.nodes):
        layer = _pool(traced, node) or _norm(traced, node)
        if layer is not None:
            layer.before = _take_bias(traced, node, frame)
        activation = _activation(traced, node)
        if not activation or len(node.users) != 1:
            continue
        (user,), (source,) = node.users, node.all_input_nodes
        if activation == "relu" and _halves(_module(traced, user)):
            pool = ReluPool(_flat(traced, user), frame)
            user.target = _add(traced, f"{user.name}_relu", pool)
            user.replace_input_with(node, source)
            if (after := _dropout(traced, user)) is not None:
                pool.drop = after
                (reader,) = user.users
                reader.replace_all_uses_with(user)
                traced.graph.erase_node(reader)
        elif (norm := _norm(traced, source)) is not None and not norm.activation:
            norm.activation = activation
            node.replace_all_uses_with(source)
        elif (
            activation == "relu"
            and (conv := _conv(traced, source)) is not None
            and len(source.users) == 1
        ):
            conv.relu = True
            if (reader := _conv(traced, user)) is not None:
                conv.masked = reader.masks = True
            node.replace_all_uses_with(source)
        elif activation == "relu" and (after := _dropout(traced, node)) is not None:
            after.relu = True
            node.replace_all_uses_with(source)
        else:
            continue
        traced.graph.erase_node(node)


def _norm(traced: fx.GraphModule, node: fx.Node) -> StackedGroupNorm | None:
    """The GroupNorm that runs here, if only here, and whose output has one reader."""
    module = _module(traced, node)
    return module if isinstance(module, StackedGroupNorm) and _once(traced, node) else None


def _pool(traced: fx.GraphModule, node: fx.Node) -> ReluPool | None:
    """The ReLU and pooling that run here."""
    module = _module(traced, node)
    return module if isinstance(module, ReluPool) else None


def _conv(traced: fx.GraphModule, node: fx.Node) -> StackedConv2d | None:
    """The convolution that runs here, if only here, and whose weights and bias are both trained."""
    module = _module(traced, node)
    return (
        module
        if isinstance(module, StackedConv2d) and module.own and _runs(traced, node) == 1
        else None
    )


def _convolves(traced: fx.GraphModule) -> bool:
    """Whether convolutions alone read the inputs, of which they take any order, and none passes the
    order on, as frozen and grouped ones may: a `view` after it would fail."""
    inputs = [node for node in traced.graph.nodes if node.op == "placeholder"]
    readers = [_module(traced, user) for node in inputs for user in node.users]
    return all(
        isinstance(each, StackedConv2d) and each.own and each.shape.groups == 1 for each in readers
    )


def _dropout(traced: fx.GraphModule, node: fx.Node) -> StackedDropout | None:
    """The dropout that alone reads the output of a node."""
    readers = [_module(traced, user) for user in node.users]
    return readers[0] if len(readers) == 1 and isinstance(readers[0], StackedDropout) else None


def _take_bias(traced: fx.GraphModule, node: fx.Node, frame: Frame) -> int | None:
    """Make this node responsible for the bias gradient of the convolution before it, if nothing
    else reads its output.

    Returns the number of that bias, or None.
    """
    (source,) = node.all_input_nodes
    conv = _module(traced, source)
    if (
        not isinstance(conv, StackedConv2d)
        or conv.relu
        or not _once(traced, source)
        or conv.bias in frame.shared
    ):
        return None
    conv.leaves_bias = True
    return conv.bias


def _activation(traced: fx.GraphModule, node: fx.Node) -> str:
    """The name in torch.nn.functional of an activation that can be fused; empty if it is something
    else.
    """
    module = _module(traced, node)
    if isinstance(module, nn.GELU) and module.approximate != "none":
        return ""
    return "" if _hooked(module) else ACTIVATIONS.get(type(module), "")


def _hooked(module: nn.Module | None) -> bool:
    """Whether a hook of the user's runs with it."""
    hooks = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
    return any(getattr(module, name, None) for name in hooks)


def _module(traced: fx.GraphModule, node: fx.Node) -> nn.Module | None:
    """The module that a node calls."""
    return traced.get_submodule(str(node.target)) if node.op == "call_module" else None


def _once(traced: fx.GraphModule, node: fx.Node) -> bool:
    """Whether the layer runs once and its output has one reader."""
    return len(node.users) == 1 and _runs(traced, node) == 1


def _runs(traced: fx.GraphModule, node: fx.Node) -> int:
    return sum(other.target == node.target for other in traced.graph.nodes)


def _flat(traced: fx.GraphModule, node: fx.Node) -> bool:
    """Whether the output of a node is flattened, by what reads it or after dropout."""
    if len(node.users) != 1:
        return False
    (user,) = node.users
    module = _module(traced, user)
    if isinstance(module, StackedDropout):
        return _flat(traced, user)
    return isinstance(module, nn.Flatten) or user.target in (
        torch.flatten,
        torch.reshape,
        "flatten",
        "reshape",
        "view",
    )


def _halves(pool: nn.Module | None) -> bool:
    """Whether it is 2×2 max-pooling and nothing else."""
    if type(pool) is not nn.MaxPool2d or _hooked(pool):
        return False
    sides = (pool.kernel_size, pool.stride, pool.padding, pool.dilation)
    plain = not pool.ceil_mode and not pool.return_indices
    return plain and all(
        side in (want, (want, want)) for side, want in zip(sides, (2, 2, 0, 1), strict=True)
    )


def _uses(traced: fx.GraphModule, places: dict[int, int]) -> dict[int, int]:
    """How often the forward pass uses each trained parameter."""
    uses: Counter[int] = Counter(dict.fromkeys(places.values(), 0))
    for node in traced.graph.nodes:
        if node.op == "call_module":
            uses.update(
                places[id(p)]
                for p in traced.get_submodule(node.target).parameters()
                if id(p) in places
            )
    return dict(uses)


class Mapped:
    """The model under torch.func.vmap, for what cannot be replaced layer by layer."""

    def __init__(
        self, model: nn.Module, reason: str, device: torch.device, own: Collection[str] = ()
    ) -> None:
        if _dropouts(model):
            raise Unstackable(
                f"{reason}, and vmap has no dropout whose masks depend on the client alone"
            )
        self.model = copy.deepcopy(model).to(device).train()
        layout = layout_of(model, own)
        self.names = list(ordered(model, layout))
        self.frame = Frame(RowLayout.of(layout), {})
        self.why, self.drops = f"stacked by vmap: {reason}", False
        for module in self.model.modules():
            if isinstance(
                module, nn.GroupNorm
            ):  # vmap does not support channels-last, which convolutions may use
                module.register_forward_pre_hook(
                    lambda _, arguments: (arguments[0].contiguous(), *arguments[1:])
                )
        self._heard: list[Tensor] = []
        if any(isinstance(module, nn.Linear) for module in self.model.modules()):
            last_linear(self.model).register_forward_pre_hook(
                lambda _, arguments: self._heard.append(arguments[0])
            )

    def __call__(self, inputs: Tree) -> Tensor:
        frame = self.frame
        weights = {
            name: frame.leaf(index).to(frame.compute) for index, name in enumerate(self.names)
        }
        split = tree_map(lambda each: each.unflatten(0, (frame.clients, -1)), inputs)
        outputs, features = vmap(self._one)(weights, split)
        frame.features = features.flatten(0, 1) if features is not None else None
        return outputs.flatten(0, 1)

    def _one(self, weights: dict[str, Tensor], inputs: Tree) -> tuple[Tensor, Any]:
        self._heard.clear()
        outputs = call(self.model, inputs, weights)
        return outputs, self._heard.pop() if self._heard else outputs
