"""A model run for many clients at once, as traced by torch.fx or, failing that, by vmap."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from operator import attrgetter
from typing import Any, Protocol, TypeVar

import torch
import torch.nn.functional as F
import torch.utils.checkpoint
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
from kairosfl.engines.batched.lifted import Lifted, Stacked
from kairosfl.engines.batched.rows import RowLayout
from kairosfl.engines.batched.sequence import LAYERS
from kairosfl.engines.precision import Precision
from kairosfl.tasks.forward import call
from kairosfl.tasks.task import last_linear
from kairosfl.tasks.tree import Tree, cast, rows, tree_map
from kairosfl.tasks.vector import Layout, flatten, load, replicas, trained

SIZES = (2, 3, 5, 7, 11)  # batches in trials; odd ones are rarely sizes of something else
ROUGH = 0.25  # how far tf32 and bfloat16 may be off


class Stack(Protocol):
    """Outputs `[m·b, classes]` for inputs `[m·b, ...]` with the weights of the frame, which then holds the features."""

    frame: Frame
    model: nn.Module  # holds the frozen tensors
    why: str
    drops: bool  # has dropout

    def __call__(self, inputs: Tree) -> Tensor: ...


Way = TypeVar("Way", bound=Stack)


class Traced:
    """The model's own graph with its layers replaced by stacked ones; the rest acts on `[m·b, ...]` unchanged.

    Frozen layers are part of the rest: all clients share them, as they share buffers.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        model = copy.deepcopy(model).cpu().train()
        places = {id(parameter): number for number, parameter in enumerate(trained(model).values())}
        try:
            with _keeping():
                traced = fx.symbolic_trace(model)
        except Exception as error:  # tracing runs the user's forward, which may raise anything
            raise Unstackable(f"torch.fx cannot trace it ({line(error)})") from error
        self.frame = Frame(RowLayout.of(Layout.of(model)), _uses(traced, places))
        self._replace(traced, places)
        self.why = "stacked layer by layer"
        self.drops = any(isinstance(module, StackedDropout) and module.p > 0 for module in traced.modules())
        self.model: nn.Module = traced.to(device)
        self.frame.fixed = [tensor.to(device) for tensor in self.frame.fixed]

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

    def __init__(self, model: nn.Module, reason: str, device: torch.device) -> None:
        if _dropouts(model):
            raise Unstackable(f"{reason}, and vmap has no dropout whose masks depend on the client alone")
        self.model = copy.deepcopy(model).to(device).train()
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
        split = tree_map(lambda each: each.unflatten(0, (frame.clients, -1)), inputs)
        outputs, features = vmap(self._one)(weights, split)
        frame.features = features.flatten(0, 1) if features is not None else None
        return outputs.flatten(0, 1)

    def _one(self, weights: dict[str, Tensor], inputs: Tree) -> tuple[Tensor, Any]:
        self._heard.clear()
        outputs = call(self.model, inputs, weights)
        return outputs, self._heard.pop() if self._heard else outputs


def stack(model: nn.Module, samples: Tree, precision: Precision, device: torch.device) -> Stack:
    """The model for many clients, tested on a few prepared samples; raises `Unstackable` with the reason.

    Every way is tried in a training step of two clients with different weights, on the device and in the precision
    in which it will run; the first whose outputs and gradients are those of each client alone is used.
    """
    trial = _Trial(model, samples, precision, device)
    try:
        return trial.whole(Traced(model, device), SIZES[0])
    except Unstackable as reason:
        reasons = str(reason)
    try:
        return _lifted(Lifted(model, reasons, device), trial)
    except Unstackable as reason:
        reasons += f"; lifted, {reason}"
    mapped = Mapped(model, reasons, device)
    try:
        return trial.whole(mapped, SIZES[0])
    except Unstackable as reason:
        raise Unstackable(f"{reason}; {reasons}") from reason


def _lifted(lifted: Lifted, trial: _Trial) -> Lifted:
    """Ready to run, after trials at two batch sizes; a size that happens to be that of something else may fail."""
    passed, failure = 0, Unstackable()
    for size in SIZES[1:]:
        try:
            trial.exact(lifted, size)
        except Unstackable as reason:
            failure = reason
        else:
            passed += 1
        if passed == 2:
            return trial.whole(lifted.settled(), size)
    raise failure


class _Trial:
    """Two clients with different weights must get the same outputs and gradients as each alone."""

    def __init__(self, model: nn.Module, samples: Tree, precision: Precision, device: torch.device) -> None:
        self.layout, self.samples, self.precision, self.device = Layout.of(model), samples, precision, device
        self.still = replicas(model, device, 1)[0].eval()
        start = flatten(self.still)
        scales = torch.linspace(0.5, 1.5, len(start), dtype=start.dtype, device=device)
        self.vectors = torch.stack([start, start * scales])
        self._known: dict[int, tuple[Any, Tensor, Tensor]] = {}

    def whole(self, stacked: Way, size: int) -> Way:
        """The stacked model, ready to run; raises `Unstackable` if it differs, or cannot compute in the precision."""
        self.exact(stacked, size)
        if isinstance(stacked, Lifted) and stacked.drops:
            self._run(stacked, self._known[size][0], keys=torch.arange(2, device=self.device)[:, None])
        compute = self.precision.compute(self.vectors.dtype)
        if self.precision.name == "float32" or (self.precision.name == "tf32" and self.device.type != "cuda"):
            return stacked
        if compute != self.vectors.dtype:
            _cast(stacked, self.vectors.dtype, compute, self.device)
        stacked.frame.dot = self.precision.dot
        samples, wanted, slopes = self._known[size]
        with self.precision():
            outputs, found = self._run(stacked, cast(samples, compute))
        if not _near(outputs.to(wanted.dtype), wanted) or not _near(found, slopes):
            raise Unstackable(f"{_name(stacked)} loses its accuracy in {self.precision.name}")
        return stacked

    def exact(self, stacked: Stack, size: int) -> None:
        """Compare at this batch size, in float32."""
        stacked.frame.compute = self.vectors.dtype
        with Precision("float32")():
            if size not in self._known:
                self._known[size] = self._alone(size)
            samples, wanted, slopes = self._known[size]
            outputs, found = self._run(stacked, samples)
        if not alike(outputs, wanted):
            raise Unstackable(f"{_name(stacked)} gives different outputs than one client after another")
        # By tensor, since rounding may flip a ReLU: a single number says little.
        most = float(slopes.norm())
        for (_, mine), (_, theirs) in zip(self.layout.views(found), self.layout.views(slopes), strict=True):
            if not (mine - theirs).norm() <= 0.02 * theirs.norm() + 1e-3 * most:
                raise Unstackable(f"{_name(stacked)} gives different gradients than one client after another")

    def _alone(self, size: int) -> tuple[Any, Tensor, Tensor]:
        """Samples of two clients, and the outputs and gradients of one client after another."""
        taken = torch.arange(2 * size) % rows(self.samples)
        samples = tree_map(lambda each: each[taken].to(self.device), self.samples)
        outputs, slopes = [], []
        parameters = list(trained(self.still).values())
        # The weights are loaded, not given for a call: a part that is computed again for its backward needs them, too.
        for client, vector in enumerate(self.vectors):
            load(self.still, vector)
            outputs.append(call(self.still, _part(samples, client * size, size)))
            found = torch.autograd.grad(_probe(outputs[-1], 1), parameters, allow_unused=True, materialize_grads=True)
            slopes.append(torch.cat([each.reshape(-1) for each in found]))
        if not self._known:
            self._separate(samples, outputs[0].detach())
        return samples, torch.cat(outputs).detach(), torch.stack(slopes)

    def _separate(self, samples: Tree, wanted: Tensor) -> None:
        """Refuse a model in which the samples of a batch change each other's outputs."""
        load(self.still, self.vectors[0])
        try:
            with torch.no_grad():
                single = torch.cat([call(self.still, _part(samples, row, 1)) for row in range(len(wanted))])
        except Exception as error:  # BatchNorm without running statistics rejects a single sample
            raise Unstackable(f"it fails on a single sample ({line(error)})") from error
        if not alike(single, wanted):
            raise Unstackable("the samples of a batch change each other's outputs, so that batches cannot be filled up")

    def _run(self, stacked: Stack, samples: Tree, keys: Tensor | None = None) -> tuple[Tensor, Tensor]:
        frame = stacked.frame
        weights = frame.layout.pack(self.vectors)
        gradients = torch.zeros_like(weights)
        try:
            frame.open(weights, gradients, keys)
            outputs = stacked(samples)
            frame.backward(_probe(outputs, len(weights)))
        except Exception as error:  # the user's forward may raise anything
            raise Unstackable(f"{_name(stacked)} fails on it ({line(error)})") from error
        finally:
            frame.close()
        slopes = torch.empty_like(self.vectors)
        frame.layout.unpack(gradients, slopes)
        return outputs.detach(), slopes


def _part(samples: Tree, begin: int, count: int) -> Any:
    return tree_map(lambda each: each[begin : begin + count], samples)


def _probe(outputs: Tensor, clients: int) -> Tensor:
    """A scalar that depends on every output in the same way for every client."""
    each = outputs.reshape(clients, -1)
    return (each * torch.arange(each.shape[1], device=each.device).sin().to(each.dtype)).sum()


def _near(found: Tensor, wanted: Tensor) -> bool:
    """Whether they agree as far as a lower precision allows."""
    return bool((found - wanted).norm() <= ROUGH * wanted.norm())


def _cast(stacked: Stack, weights: torch.dtype, compute: torch.dtype, device: torch.device) -> None:
    """Make it compute in this type, including its frozen layers.

    Buffers keep their own type, since a table or a mask could lose its meaning; activations that they convert to
    float32 are cast back where they enter the next frozen layer.
    """
    frame = stacked.frame
    frame.compute, frame.fixed = compute, [tensor.to(compute) for tensor in frame.fixed]
    if isinstance(stacked, Lifted):
        stacked.place(device)
    for module in stacked.model.modules():
        frozen = [each for each in module.parameters(recurse=False) if not isinstance(each, Stacked)]
        own = [parameter for parameter in frozen if parameter.dtype == weights]
        for parameter in own:
            parameter.data = parameter.to(compute)
        if own:
            module.register_forward_pre_hook(_casting(compute), with_kwargs=True)


def _casting(compute: torch.dtype) -> Callable[..., tuple[Any, Any]]:
    def cast(value: Any) -> Any:
        return value.to(compute) if isinstance(value, Tensor) and value.is_floating_point() else value

    return lambda _, args, named: (tuple(map(cast, args)), {name: cast(value) for name, value in named.items()})


def _name(stacked: Stack) -> str:
    names = {Mapped: "vmap", Lifted: "stacking"}
    return next((name for kind, name in names.items() if isinstance(stacked, kind)), "stacking layer by layer")


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
