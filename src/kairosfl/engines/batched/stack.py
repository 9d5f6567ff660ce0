"""A model run for many clients at once, as traced by torch.fx or, failing that, by vmap."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.func import vmap

from kairosfl.engines.batched.frame import Frame
from kairosfl.engines.batched.layers import (
    ReluPool,
    StackedDropout,
    StackedGroupNorm,
    StackedLinear,
    Unstackable,
)
from kairosfl.engines.batched.rows import RowLayout
from kairosfl.engines.batched.sequence import LAYERS
from kairosfl.tasks.forward import call
from kairosfl.tasks.task import last_linear
from kairosfl.tasks.tree import Tree, cast, rows, tree_map
from kairosfl.tasks.vector import Layout, base, flatten, replicas, trained


class Stack(Protocol):
    """Outputs `[m·b, classes]` for inputs `[m·b, ...]` with the weights of the frame, which then holds the features."""

    frame: Frame
    model: nn.Module  # holds the frozen tensors
    why: str
    drops: bool  # has dropout

    def __call__(self, inputs: Tree) -> Tensor: ...


class Traced:
    """The model's own graph with its layers replaced by stacked ones; the rest acts on `[m·b, ...]` unchanged.

    Frozen layers are part of the rest: all clients share them, as they share buffers.
    """

    def __init__(self, model: nn.Module) -> None:
        model = copy.deepcopy(model).cpu().train()
        places = {id(parameter): number for number, parameter in enumerate(trained(model).values())}
        try:
            traced = fx.symbolic_trace(model)
        except Exception as error:  # tracing runs the user's forward, which may raise anything
            raise Unstackable(f"torch.fx cannot trace it ({line(error)})") from error
        self.frame = Frame(RowLayout.of(Layout.of(model)), _uses(traced, places))
        self._replace(traced, places)
        self.why = "stacked layer by layer"
        self.drops = any(isinstance(module, StackedDropout) and module.p > 0 for module in traced.modules())
        self.model: nn.Module = traced

    def _replace(self, traced: fx.GraphModule, places: dict[int, int]) -> None:
        def find(parameter: Tensor | None) -> int | None:
            if parameter is None:
                return None
            return places[id(parameter)] if id(parameter) in places else self.frame.fix(parameter)

        linear = [module for module in traced.modules() if isinstance(module, nn.Linear)]
        new: dict[int, nn.Module] = {}
        for number, node in enumerate(traced.graph.nodes):
            if node.op == "get_attr" and id(attrgetter(node.target)(traced)) in places:
                raise Unstackable(f"it uses {node.target!r} outside a layer")
            if node.op == "call_function" and node.target in (F.dropout, torch.dropout):
                raise Unstackable("it calls a dropout function instead of an nn.Dropout")
            if node.op != "call_module":
                continue
            layer = traced.get_submodule(node.target)
            if isinstance(layer, nn.Dropout):
                node.target = _add(traced, f"dropout_{number}", StackedDropout(layer.p, number, self.frame))
            elif isinstance(layer, nn.modules.dropout._DropoutNd):
                raise Unstackable(f"it has a {type(layer).__name__}")
            elif not _drops(layer) and not any(id(parameter) in places for parameter in layer.parameters()):
                if linear and layer is linear[-1]:
                    layer.register_forward_pre_hook(self._hear)
            else:
                if type(layer) not in LAYERS:
                    raise Unstackable(f"it has a {type(layer).__name__}")
                if id(layer) not in new:
                    new[id(layer)] = stacked = LAYERS[type(layer)](layer, find, self.frame)
                    if isinstance(stacked, StackedLinear):
                        stacked.is_head = layer is linear[-1]
                node.target = _add(traced, "stacked_" + node.target.replace(".", "_"), new[id(layer)])
        _fuse(traced)
        traced.delete_all_unused_submodules()
        traced.recompile()

    def _hear(self, _: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        self.frame.features = arguments[0]

    def __call__(self, inputs: Tree) -> Tensor:
        return call(self.model, inputs)


def _drops(layer: nn.Module) -> bool:
    """Whether a composite layer contains dropout, which needs masks for each client."""
    parts = [getattr(part, "dropout", 0.0) for part in layer.modules()]
    return any(isinstance(part, float) and part > 0 for part in parts) or _dropouts(layer)


def _dropouts(model: nn.Module) -> bool:
    return any(isinstance(module, nn.modules.dropout._DropoutNd) and module.p for module in model.modules())


def _add(traced: fx.GraphModule, name: str, module: nn.Module) -> str:
    traced.add_submodule(name, module)
    return name


def _fuse(traced: fx.GraphModule) -> None:
    """Fuse a ReLU between a GroupNorm and a 2×2 max-pooling into one of them, if nothing else uses its output."""
    for node in list(traced.graph.nodes):
        if not _is(traced, node, nn.ReLU) or len(node.users) != 1:
            continue
        (user,), (source,) = node.users, node.all_input_nodes
        if _is(traced, user, nn.MaxPool2d) and _halves(traced.get_submodule(user.target)):
            user.target = _add(traced, f"{user.name}_relu", ReluPool())
            user.replace_input_with(node, source)
        elif _is(traced, source, StackedGroupNorm) and _once(traced, source):
            traced.get_submodule(source.target).relu = True  # type: ignore[assignment]
            node.replace_all_uses_with(source)
        else:
            continue
        traced.graph.erase_node(node)


def _is(traced: fx.GraphModule, node: fx.Node, kind: type[nn.Module]) -> bool:
    return node.op == "call_module" and type(traced.get_submodule(str(node.target))) is kind


def _once(traced: fx.GraphModule, node: fx.Node) -> bool:
    """Whether the layer runs once and its output has one reader."""
    return len(node.users) == 1 and sum(other.target == node.target for other in traced.graph.nodes) == 1


def _halves(pool: nn.Module) -> bool:
    assert isinstance(pool, nn.MaxPool2d)
    sides = (pool.kernel_size, pool.stride, pool.padding, pool.dilation)
    plain = not pool.ceil_mode and not pool.return_indices
    return plain and all(side in (want, (want, want)) for side, want in zip(sides, (2, 2, 0, 1), strict=True))


class Mapped:
    """The model under torch.func.vmap, for what cannot be replaced layer by layer."""

    def __init__(self, model: nn.Module, reason: str) -> None:
        if _dropouts(model):
            raise Unstackable(f"{reason}, and vmap has no dropout whose masks depend on the client alone")
        self.model = copy.deepcopy(model).cpu().train()
        self.names = list(trained(model))
        self.frame = Frame(RowLayout.of(Layout.of(model)), {})
        self.why, self.drops = f"stacked by vmap: {reason}", False
        for module in self.model.modules():
            if isinstance(module, nn.GroupNorm):  # vmap does not support channels-last, which convolutions may use
                module.register_forward_pre_hook(lambda _, arguments: (arguments[0].contiguous(), *arguments[1:]))
        self._heard: list[Tensor] = []
        if any(isinstance(module, nn.Linear) for module in self.model.modules()):
            last_linear(self.model).register_forward_pre_hook(lambda _, arguments: self._heard.append(arguments[0]))

    def __call__(self, inputs: Tree) -> Tensor:
        frame = self.frame
        weights = {name: frame.leaf(index).to(frame.compute) for index, name in enumerate(self.names)}
        apart = tree_map(lambda leaf: leaf.unflatten(0, (frame.clients, -1)), inputs)
        outputs, features = vmap(self._one)(weights, apart)
        frame.features = features.flatten(0, 1) if features is not None else None
        return outputs.flatten(0, 1)

    def _one(self, weights: dict[str, Tensor], inputs: Tree) -> tuple[Tensor, Any]:
        self._heard.clear()
        outputs = call(self.model, inputs, weights)
        return outputs, self._heard.pop() if self._heard else outputs


def stack(model: nn.Module, samples: Tree, compute: torch.dtype) -> Stack:
    """The model for many clients, tested on a few prepared samples; raises `Unstackable` with the reason.

    `compute` is the type of its activations.
    """
    layout, still = Layout.of(model), replicas(model, torch.device("cpu"), 1)[0].eval()
    start = flatten(still)
    vectors = torch.stack([start, start * torch.linspace(0.5, 1.5, len(start), dtype=start.dtype)])
    even = rows(samples) // 2 * 2
    if not even:
        raise Unstackable("there is only one training sample to try it on")
    samples = tree_map(lambda leaf: leaf[:even], samples)
    trial = _Trial(layout, vectors, samples, *_alone(still, layout, vectors, samples))
    stacked: Stack
    try:
        stacked = Traced(model)
        trial(stacked, compute)
    except Unstackable as reason:
        stacked = Mapped(model, str(reason))
        trial(stacked, compute)
    return stacked


def _alone(still: nn.Module, layout: Layout, vectors: Tensor, samples: Tree) -> tuple[Tensor, Tensor]:
    """Outputs and gradients of clients with these weights, one after another."""
    outputs, slopes = [], []
    half = rows(samples) // 2
    for number, vector in enumerate(vectors.clone().requires_grad_().unbind()):
        own = _part(samples, number * half, half)
        outputs.append(call(still, own, dict(layout.views(vector))))
        slopes.append(torch.autograd.grad(_probe(outputs[-1], 1), vector)[0])
    first = dict(layout.views(vectors[0]))
    try:
        with torch.no_grad():
            ones = (_part(samples, row, 1) for row in range(half))
            single = torch.cat([call(still, one, first) for one in ones])
    except Exception as error:  # BatchNorm without running statistics rejects a single sample
        raise Unstackable(f"it fails on a single sample ({line(error)})") from error
    if not alike(single, outputs[0].detach()):
        raise Unstackable("the samples of a batch change each other's outputs, so that batches cannot be filled up")
    return torch.cat(outputs).detach(), torch.stack(slopes)


def _part(samples: Tree, begin: int, count: int) -> Any:
    return tree_map(lambda leaf: leaf[begin : begin + count], samples)


def _probe(outputs: Tensor, clients: int) -> Tensor:
    """A scalar that depends on every output in the same way for every client."""
    rows = outputs.reshape(clients, -1)
    return (rows * torch.arange(rows.shape[1], device=rows.device).sin().to(rows.dtype)).sum()


@dataclass(frozen=True)
class _Trial:
    """Two clients with different weights must get the same outputs and gradients as each alone."""

    layout: Layout
    vectors: Tensor
    samples: Tree
    outputs: Tensor
    slopes: Tensor

    def __call__(self, stacked: Stack, compute: torch.dtype) -> None:
        """Raises `Unstackable` if they do not, or if the model cannot compute in this type, in which it will run."""
        stacked.frame.compute = self.vectors.dtype
        outputs, slopes = self._run(stacked, self.samples)
        if not alike(outputs, self.outputs):
            raise Unstackable(f"{_name(stacked)} gives different outputs than one client after another")
        # By tensor, since rounding may flip a ReLU: a single number says little.
        most = float(self.slopes.norm())
        for (_, found), (_, wanted) in zip(self.layout.views(slopes), self.layout.views(self.slopes), strict=True):
            if not (found - wanted).norm() <= 0.02 * wanted.norm() + 1e-3 * most:
                raise Unstackable(f"{_name(stacked)} gives different gradients than one client after another")
        if compute == self.vectors.dtype:
            return
        _cast(stacked, self.vectors.dtype, compute)
        if base(stacked.model):  # the types of a user's own tensors may not match
            self._run(stacked, cast(self.samples, compute))

    def _run(self, stacked: Stack, samples: Tree) -> tuple[Tensor, Tensor]:
        frame = stacked.frame
        rows = frame.layout.pack(self.vectors)
        gradients = torch.zeros_like(rows)
        try:
            frame.open(rows, gradients)
            outputs = stacked(samples)
            frame.backward(_probe(outputs, len(rows)))
        except Exception as error:  # the user's forward may raise anything
            raise Unstackable(f"{_name(stacked)} fails on it ({line(error)})") from error
        finally:
            frame.close()
        slopes = torch.empty_like(self.vectors)
        frame.layout.unpack(gradients, slopes)
        return outputs.detach(), slopes


def _cast(stacked: Stack, weights: torch.dtype, compute: torch.dtype) -> None:
    """Make it compute in this type, including its frozen layers.

    Buffers keep their own type, since a table or a mask could lose its meaning; activations that they convert to
    float32 are cast back where they enter the next frozen layer.
    """
    frame = stacked.frame
    frame.compute, frame.fixed = compute, [tensor.to(compute) for tensor in frame.fixed]
    for module in stacked.model.modules():
        own = [parameter for parameter in module.parameters(recurse=False) if parameter.dtype == weights]
        for parameter in own:
            parameter.data = parameter.to(compute)
        if own:
            module.register_forward_pre_hook(_casting(compute), with_kwargs=True)


def _casting(compute: torch.dtype) -> Callable[..., tuple[Any, Any]]:
    def cast(value: Any) -> Any:
        return value.to(compute) if isinstance(value, Tensor) and value.is_floating_point() else value

    return lambda _, args, named: (tuple(map(cast, args)), {name: cast(value) for name, value in named.items()})


def _name(stacked: Stack) -> str:
    return "vmap" if isinstance(stacked, Mapped) else "stacking layer by layer"


def alike(found: Tensor, wanted: Tensor) -> bool:
    """Whether two ways to compute something agree up to the order of sums."""
    if found.shape != wanted.shape:
        return False
    return torch.allclose(found, wanted, rtol=1e-3, atol=1e-4 * float(wanted.abs().max()))


def _uses(traced: fx.GraphModule, places: dict[int, int]) -> dict[int, int]:
    """How often the forward pass uses each trained parameter."""
    uses: Counter[int] = Counter(dict.fromkeys(places.values(), 0))
    for node in traced.graph.nodes:
        if node.op == "call_module":
            uses.update(places[id(p)] for p in traced.get_submodule(node.target).parameters() if id(p) in places)
    return dict(uses)


def line(error: Exception) -> str:
    """What went wrong, in one line."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:120]
