"""A model as one flat vector of its trained tensors, and the base, which is not trained."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from kairosfl.core.layout import Layout
from kairosfl.errors import UserError, first_line
from kairosfl.tasks.forward import call
from kairosfl.tasks.tree import Tree, rows, tree_map

TYPES = {torch.float16, torch.float32, torch.float64}
# These cannot be called with other weights.
WRAPPERS = (torch.jit.ScriptModule, nn.DataParallel, nn.parallel.DistributedDataParallel)


def layout_of(
    model: nn.Module,
    own: Collection[str] = (),
    pairs: Iterable[tuple[str, str, str, float]] = (),
) -> Layout:
    """Where the model's tensors lie; those of which the name is in `own` stay with each client."""
    check_state(model)
    shared: dict[str, Tensor] = {}
    local: dict[str, Tensor] = {}
    for name, tensor in trained(model).items():
        if name in own:
            local[name] = tensor
        else:
            shared[name] = tensor
    frozen = {name: tensor for name, tensor in base(model).items() if tensor.is_floating_point()}
    return Layout.of(shared, local, frozen, pairs)


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    """What the vector holds: parameters with `requires_grad`, in their order, tied ones once."""
    parameters = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            parameters[name] = parameter
    return parameters


def base(model: nn.Module) -> dict[str, Tensor]:
    """What it does not: frozen parameters and buffers, which are shared by all clients."""
    tensors: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            tensors[name] = parameter
    tensors.update(model.named_buffers())
    return tensors


def base_hash(model: nn.Module) -> str | None:
    """A digest of the names, types, shapes and bytes of the base; None if there is none."""
    tensors = base(model)
    if not tensors:
        return None
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)}\n".encode())
        digest.update(_bytes(tensor).cpu().numpy().data)
    return digest.hexdigest()


def replicas(model: nn.Module, device: torch.device, count: int) -> list[nn.Module]:
    """Copies of the model on a device, with trained parameters of their own and one base."""
    shared = {id(tensor): _moved(tensor, device) for tensor in base(model).values()}
    return [copy.deepcopy(model, dict(shared)).to(device) for _ in range(count)]


def _moved(tensor: Tensor, device: torch.device) -> Tensor:
    """A frozen tensor on a device; a parameter is still one."""
    moved = tensor.detach().to(device)
    if isinstance(tensor, nn.Parameter):
        return nn.Parameter(moved, requires_grad=False)
    return moved


def check_state(model: nn.Module) -> None:
    """Refuse a model that cannot be trained as a vector.

    It has nothing to train, is of a wrong kind, or is known to keep running statistics, which
    averaging would lose.
    """
    if not trained(model):
        state = "has only frozen parameters (requires_grad=False)"
        if next(model.parameters(), None) is None:
            state = "has no parameters"
        raise UserError(f"The model {type(model).__name__} {state}: leave at least one to train.")
    if isinstance(model, WRAPPERS):
        raise UserError(
            f"The model is a {type(model).__name__}; give the module that it was made from."
        )
    dtypes = {parameter.dtype for parameter in trained(model).values()}
    if len(dtypes) > 1:
        listed = ", ".join(sorted(map(str, dtypes)))
        raise UserError(
            f"The trained parameters are of several types ({listed}): convert them to one."
        )
    if not dtypes <= TYPES:
        raise UserError(
            f"The trained parameters are {dtypes.pop()}, in which small steps are lost: use "
            "model.float(); frozen ones may stay, and run.precision = 'bfloat16' computes in it."
        )
    check_shapes(model)
    for name, module in model.named_modules():
        if getattr(module, "sparse", False) and isinstance(module, nn.Embedding | nn.EmbeddingBag):
            raise UserError(
                f"{name!r} of the model has sparse gradients; set its `sparse` to False."
            )
        if isinstance(module, nn.modules.batchnorm._NormBase) and module.running_mean is not None:
            raise _changing(model, f"{name}.running_mean".lstrip("."))


def check_shapes(model: nn.Module) -> None:
    """Refuse a model with parameters or buffers whose shapes only its first batch will decide."""
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor):
            raise UserError(
                f"{name!r} of the model has no shape yet; run the model on a batch first."
            )


def check_base(
    model: nn.Module, inputs: Tree, targets: Tree, loss: Callable[[Any, Any], Tensor]
) -> None:
    """Refuse a model if a trial step, of a copy with a few samples, changes what is not trained."""
    some = next(iter(trained(model).values()))
    has_buffers = any(module._buffers for module in model.modules())  # even if still None
    if not has_buffers and not base(model):
        return
    if some.is_meta:  # it was checked when it had values
        return

    trial = copy.deepcopy(model).train()
    before = {name: _bytes(tensor).clone() for name, tensor in base(trial).items()}
    try:
        with torch.random.fork_rng(devices=[some.device] if some.is_cuda else []):
            moved_inputs = tree_map(lambda leaf: leaf.to(some.device), inputs)
            moved_targets = tree_map(lambda leaf: leaf.to(some.device), targets)
            losses = loss(call(trial, moved_inputs), moved_targets)
            if losses.requires_grad:
                torch.autograd.backward(losses.mean())
    except UserError:
        raise
    except Exception as error:  # the user's forward may raise anything
        reason = first_line(error)
        raise UserError(
            f"The model {type(model).__name__} fails on a trial batch of {rows(inputs)} training "
            f"samples: {reason}"
        ) from error
    if not losses.requires_grad:
        raise UserError(
            "The loss does not depend on any trained parameter: check which ones are frozen."
        )

    for name, tensor in base(trial).items():
        if name not in before or not torch.equal(_bytes(tensor), before[name]):
            raise _changing(model, name)


def _changing(model: nn.Module, name: str) -> UserError:
    """The refusal of a model in which a training step changes the buffer of this name."""
    kind = type(model.get_submodule(name.rpartition(".")[0])).__name__
    fix = "make it a constant, or a parameter that is trained"
    if "BatchNorm" in kind:
        fix = (
            "use kairosfl.models.group_norm(model), or freeze_norms(model) to keep pre-trained "
            "statistics"
        )
    return UserError(
        "The model keeps state outside its trained parameters: a training step changes "
        f"{name!r} of a {kind}; {fix}."
    )


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def flatten(model: nn.Module) -> Tensor:
    """The model's trained parameters as one new vector."""
    return torch.cat([parameter.detach().reshape(-1) for parameter in trained(model).values()])


def load(model: nn.Module, x: Tensor, layout: Layout | None = None) -> nn.Module:
    """The model with its trained parameters copied from the vector.

    Args:
        model: It is changed in place.
        x: The parameters.
        layout: Where they lie in x; parameters that it leaves out stay as they are. By default all
            that are trained, in the model's order.
    """
    parameters = trained(model)
    layout = layout_of(model) if layout is None else layout
    with torch.no_grad():
        for name, tensor in layout.views(x):
            parameters[name].copy_(tensor.reshape(parameters[name].shape))
    return model
