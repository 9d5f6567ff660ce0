"""Norms without running statistics of their own, in place of BatchNorm."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from kairosfl.errors import UserError
from kairosfl.tasks.vector import check_shapes

_PLAIN = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
_ACTIVE = ("BatchNormAct2d", "SyncBatchNormAct")  # timm's, which go on with `drop` and `act`


def group_norm(model: nn.Module, groups: int = 32) -> nn.Module:
    """A copy of a model in which every BatchNorm is a GroupNorm with the same weights and biases.

    The running statistics of BatchNorm would stay behind on each client; GroupNorm has none. A
    pre-trained model needs fine-tuning afterwards, because its layers then see inputs of another
    scale. timm's norms keep their activation.

    Args:
        model: Any module; it is not modified.
        groups: Of each norm at most; a norm has the largest number that divides its channels and
            leaves two or more in each group, since a single number minus its mean would always be
            0.
    """
    if groups < 1:
        raise UserError(f"groups = {groups} must be 1 or more.")
    return _with(model, lambda norm, name: _grouped(norm, name, groups))


def freeze_norms(model: nn.Module) -> nn.Module:
    """A copy of a model in which the running statistics of every BatchNorm are constants.

    They are in training, too. For a pre-trained model, whose statistics are worth keeping: it
    computes what it did in evaluation mode, and its weights and biases are trained as before. The
    names in its state dict stay the same.

    Args:
        model: Any module; it is not modified.
    """
    return _with(model, FrozenNorm)


class FrozenNorm(nn.Module):
    """What a BatchNorm is in evaluation mode, whatever mode this is in."""

    running_mean: Tensor
    running_var: Tensor

    def __init__(self, norm: _BatchNorm, name: str) -> None:
        super().__init__()
        if norm.running_mean is None or norm.running_var is None:
            raise UserError(
                f"{name!r} has no running statistics to freeze; "
                "use kairosfl.models.group_norm(model)."
            )
        self.eps = norm.eps
        self.drop, self.act = _after(norm, name)
        self.weight = norm.weight
        self.bias = norm.bias
        for key, buffer in norm.named_buffers(recurse=False):
            self.register_buffer(key, buffer)
        self.train(norm.training)

    def forward(self, x: Tensor) -> Tensor:
        x = F.batch_norm(
            x, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps
        )
        return self.act(self.drop(x))  # type: ignore[no-any-return]


class ActiveGroupNorm(nn.GroupNorm):
    """A GroupNorm followed by the dropout and the activation that timm's norm had."""

    drop: nn.Module
    act: nn.Module

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.drop(super().forward(x)))  # type: ignore[no-any-return]


def _with(model: nn.Module, convert: Callable[[_BatchNorm, str], nn.Module]) -> nn.Module:
    """A copy of the model with every BatchNorm converted, given its name."""
    check_shapes(model)
    model = copy.deepcopy(model)
    if isinstance(model, _BatchNorm):
        return convert(model, "")
    converted: dict[nn.Module, nn.Module] = {}  # a norm that is used in two places stays one
    names = {module: name for name, module in model.named_modules()}
    for parent in list(model.modules()):
        # named_children would skip a second use.
        for child, module in list(parent._modules.items()):
            if isinstance(module, _BatchNorm):
                if module not in converted:
                    converted[module] = convert(module, names[module])
                setattr(parent, child, converted[module])
    return model


def _grouped(norm: _BatchNorm, name: str, groups: int) -> nn.GroupNorm:
    """A GroupNorm with the weight and the bias of this norm."""
    channels = norm.num_features
    drop, act = _after(norm, name)
    if channels == 1 and isinstance(norm, nn.BatchNorm1d):
        raise UserError(
            f"{name!r} is a BatchNorm1d of one channel, which GroupNorm would set to 0; "
            "leave it out."
        )
    few = max(1, min(groups, channels // 2))
    number = next(count for count in range(few, 0, -1) if channels % count == 0)
    kind = nn.GroupNorm if type(norm) in _PLAIN else ActiveGroupNorm
    group = kind(number, channels, eps=norm.eps, affine=norm.affine)
    if isinstance(group, ActiveGroupNorm):
        group.drop = drop
        group.act = act
    if norm.affine:
        group.weight = norm.weight
        group.bias = norm.bias
    return group.train(norm.training)


def _after(norm: _BatchNorm, name: str) -> tuple[nn.Module, nn.Module]:
    """The dropout and the activation that are part of the norm."""
    kind = type(norm)
    if kind in _PLAIN:
        return nn.Identity(), nn.Identity()
    if kind.__name__ in _ACTIVE and kind.__module__.startswith("timm."):
        return norm.get_submodule("drop"), norm.get_submodule("act")
    raise UserError(
        f"{name!r} is a {kind.__name__}, which is not torch's own; build the model with GroupNorm."
    )
