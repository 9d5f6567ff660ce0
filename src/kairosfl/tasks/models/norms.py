"""Norms whose state is all in parameters, in place of BatchNorm."""

from __future__ import annotations

import copy

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy

from kairosfl.errors import UserError

_PLAIN = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def group_norm(model: nn.Module, groups: int = 32) -> nn.Module:
    """A copy of a model in which every BatchNorm is a GroupNorm with the same weights and biases.

    The running statistics of BatchNorm would stay behind on each client; GroupNorm has none. A pre-trained model needs
    fine-tuning afterwards, because its layers then see inputs of another scale.

    Args:
        model: Any module; it is not modified.
        groups: Of each norm at most; a norm has the largest number that divides its channels and leaves two or more in
            each group, since a single number minus its mean would always be 0.
    """
    if groups < 1:
        raise UserError(f"groups = {groups} must be 1 or more.")
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor):
            raise UserError(f"{name!r} of the model has no shape yet; run the model on a batch first.")
    model = copy.deepcopy(model)
    made: dict[nn.Module, nn.Module] = {}  # a norm that is used in two places stays one
    names = {module: name for name, module in model.named_modules()}
    for parent in list(model.modules()):
        for child, module in list(parent._modules.items()):  # named_children would skip a second use
            if isinstance(module, _BatchNorm):
                if module not in made:
                    made[module] = _converted(module, names[module], groups)
                setattr(parent, child, made[module])
    return _converted(model, "", groups) if isinstance(model, _BatchNorm) else model


def _converted(norm: _BatchNorm, name: str, groups: int) -> nn.GroupNorm:
    channels = norm.num_features
    kind = type(norm)
    if kind not in _PLAIN:  # it may do more than normalise, such as timm's, which contain the activation
        raise UserError(f"{name!r} is a {kind.__name__}, which is not torch's own; build the model with GroupNorm.")
    if channels == 1 and isinstance(norm, nn.BatchNorm1d):
        raise UserError(f"{name!r} is a BatchNorm1d of one channel, which GroupNorm would set to 0; leave it out.")
    few = max(1, min(groups, channels // 2))
    number = next(count for count in range(few, 0, -1) if channels % count == 0)
    group = nn.GroupNorm(number, channels, eps=norm.eps, affine=norm.affine)
    if norm.affine:
        group.weight, group.bias = norm.weight, norm.bias
    return group.train(norm.training)
