"""A model run for many clients at once, as traced by torch.fx or, failing that, by vmap."""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.func import functional_call, vmap

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
from kairosfl.tasks.task import last_linear
from kairosfl.tasks.vector import Layout


class Stack(Protocol):
    """Outputs `[m·b, classes]` for inputs `[m·b, ...]` with the weights of the frame, which then has the features."""

    frame: Frame
    why: str
    drops: bool  # has dropout

    def __call__(self, inputs: Tensor) -> Tensor: ...


class Traced:
    """The model's own graph with its layers replaced by stacked ones; the rest acts on `[m·b, ...]` as it is."""

    def __init__(self, model: nn.Module) -> None:
        model = copy.deepcopy(model).train()
        places = {id(parameter): number for number, parameter in enumerate(model.parameters())}
        try:
            traced = fx.symbolic_trace(model)
        except Exception as error:  # tracing runs the user's forward: anything may come out of it
            raise Unstackable(f"torch.fx cannot trace it ({line(error)})") from error
        self.frame = Frame(RowLayout.of(Layout.of(model)), _uses(traced, places))
        self._replace(traced, places)
        self.why = "stacked layer by layer"
        self.drops = any(isinstance(module, StackedDropout) and module.p > 0 for module in traced.modules())
        self._run = traced

    def _replace(self, traced: fx.GraphModule, places: dict[int, int]) -> None:
        def find(parameter: Tensor | None) -> int | None:
            return None if parameter is None else places[id(parameter)]

        linear = [module for module in traced.modules() if isinstance(module, nn.Linear)]
        new: dict[int, nn.Module] = {}
        for number, node in enumerate(traced.graph.nodes):
            if node.op == "get_attr":
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
            elif next(layer.parameters(), None) is not None:
                if type(layer) not in LAYERS:
                    raise Unstackable(f"it has a {type(layer).__name__}")
                if id(layer) not in new:
                    new[id(layer)] = stacked = LAYERS[type(layer)](layer, find, self.frame)
                    if isinstance(stacked, StackedLinear):
                        stacked.speaks = layer is linear[-1]
                node.target = _add(traced, "stacked_" + node.target.replace(".", "_"), new[id(layer)])
        _fuse(traced)
        traced.delete_all_unused_submodules()
        traced.recompile()

    def __call__(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = self._run(inputs)
        return outputs


def _add(traced: fx.GraphModule, name: str, module: nn.Module) -> str:
    traced.add_submodule(name, module)
    return name


def _fuse(traced: fx.GraphModule) -> None:
    """Let a 2×2 max-pooling, or else a GroupNorm, do the ReLU that stands between them and nobody else sees."""
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
        if any(isinstance(module, nn.modules.dropout._DropoutNd) and module.p for module in model.modules()):
            raise Unstackable(f"{reason}, and vmap has no dropout whose masks depend on the client alone")
        self.model = copy.deepcopy(model).train()
        self.names = [name for name, _ in model.named_parameters()]
        self.frame = Frame(RowLayout.of(Layout.of(model)), {})
        self.why, self.drops = f"stacked by vmap: {reason}", False
        self._heard: list[Tensor] = []
        if any(isinstance(module, nn.Linear) for module in self.model.modules()):
            last_linear(self.model).register_forward_pre_hook(lambda _, arguments: self._heard.append(arguments[0]))

    def __call__(self, inputs: Tensor) -> Tensor:
        frame = self.frame
        weights = {name: frame.leaf(index).to(frame.compute) for index, name in enumerate(self.names)}
        outputs, features = vmap(self._one)(weights, inputs.unflatten(0, (frame.clients, -1)))
        frame.features = features.flatten(0, 1) if features is not None else None
        return outputs.flatten(0, 1)

    def _one(self, weights: dict[str, Tensor], inputs: Tensor) -> tuple[Tensor, Any]:
        self._heard.clear()
        outputs = functional_call(self.model, weights, (inputs,))
        return outputs, self._heard.pop() if self._heard else outputs


def stack(model: nn.Module, samples: Tensor) -> Stack:
    """The model for many clients, tried on a few prepared samples; `Unstackable` says why it cannot be."""
    layout, still = Layout.of(model), copy.deepcopy(model).eval()
    start = torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])
    vectors = torch.stack([start, start * torch.linspace(0.5, 1.5, len(start), dtype=start.dtype)])
    samples = samples[: len(samples) // 2 * 2]
    halves = samples.chunk(2)
    with torch.no_grad():
        weights = [dict(layout.views(vector)) for vector in vectors]
        wanted = torch.cat([functional_call(still, w, (half,)) for w, half in zip(weights, halves, strict=True)])
        single = torch.cat([functional_call(still, weights[0], (one,)) for one in halves[0].split(1)])
    if not alike(single, wanted[: len(single)]):
        raise Unstackable("the samples of a batch change each other's outputs, so that batches cannot be filled up")
    try:
        traced = Traced(model)
        _try(traced, vectors, samples, wanted)
        return traced
    except Unstackable as reason:
        mapped = Mapped(model, str(reason))
        _try(mapped, vectors, samples, wanted)
        return mapped


@torch.no_grad()
def _try(stacked: Stack, vectors: Tensor, samples: Tensor, wanted: Tensor) -> None:
    """Two clients with weights of their own must get what they get alone."""
    stacked.frame.compute = vectors.dtype
    stacked.frame.open(stacked.frame.layout.pack(vectors))
    try:
        found = stacked(samples)
    except Exception as error:  # the user's forward again
        raise Unstackable(f"{_name(stacked)} fails on it ({line(error)})") from error
    if not alike(found, wanted):
        raise Unstackable(f"{_name(stacked)} gives it other outputs than one client after another")


def _name(stacked: Stack) -> str:
    return "vmap" if isinstance(stacked, Mapped) else "stacking layer by layer"


def alike(found: Tensor, wanted: Tensor) -> bool:
    """Whether two ways to compute something agree, but for the order of sums."""
    if found.shape != wanted.shape:
        return False
    return torch.allclose(found, wanted, rtol=1e-3, atol=1e-4 * float(wanted.abs().max()))


def _uses(traced: fx.GraphModule, places: dict[int, int]) -> dict[int, int]:
    """How often the forward pass uses each parameter."""
    uses: Counter[int] = Counter()
    for node in traced.graph.nodes:
        if node.op == "call_module":
            uses.update(places[id(p)] for p in traced.get_submodule(node.target).parameters() if id(p) in places)
    return dict(uses)


def line(error: Exception) -> str:
    """What went wrong, in one line."""
    return (str(error).strip() or type(error).__name__).splitlines()[0][:120]
