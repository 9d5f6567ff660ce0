"""ResNet-18 and ResNet-50 with GroupNorm, which keeps all state in parameters.

The stem is 3x3, for small images, or the original one; a projection head can be added. He et al.,
"Deep residual learning for image recognition", CVPR 2016.
"""

from __future__ import annotations

import math
from collections import OrderedDict

from torch import Tensor, nn

from kairosfl.errors import UserError
from kairosfl.models import checks


class Residual(nn.Module):
    """relu(body(x) + shortcut(x))."""

    def __init__(self, body: nn.Module, shortcut: nn.Module) -> None:
        super().__init__()
        self.body = body
        self.shortcut = shortcut
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.body(x) + self.shortcut(x))  # type: ignore[no-any-return]


def resnet18(
    shape: tuple[int, ...],
    classes: int,
    *,
    width: int = 64,
    groups: int = 32,
    projection: int = 0,
    stem: int = 3,
) -> nn.Module:
    """ResNet-18 with GroupNorm; projection=256 adds ALT's head, stem=7 has the original stem."""
    return _resnet("resnet18", shape, classes, (2, 2, 2, 2), 1, width, groups, projection, stem)


def resnet50(
    shape: tuple[int, ...],
    classes: int,
    *,
    width: int = 64,
    groups: int = 32,
    projection: int = 0,
    stem: int = 3,
) -> nn.Module:
    """ResNet-50 with 3x3 stem and GroupNorm, for 64x64 images; projection=256 adds ALT's head."""
    return _resnet("resnet50", shape, classes, (3, 4, 6, 3), 4, width, groups, projection, stem)


def _resnet(
    name: str,
    shape: tuple[int, ...],
    classes: int,
    depths: tuple[int, ...],
    expansion: int,
    width: int,
    groups: int,
    projection: int,
    stem: int,
) -> nn.Module:
    checks.positive(name, width=width, groups=groups)
    checks.not_negative(name, projection=projection)
    if width % 2:
        raise UserError(
            f"model.width of {name} must be even, so that norm groups have two channels, "
            f"got {width}"
        )
    if stem not in (3, 7):
        raise UserError(f"model.stem of {name} must be 3, or 7 for the original stem, got {stem}")
    inputs, _, _ = checks.image(name, shape)
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    if stem == 3:
        layers["stem"] = _convolve(inputs, width, 3, 1, groups)
        layers["relu"] = nn.ReLU()
    else:
        layers["stem"] = _convolve(inputs, width, 7, 2, groups)
        layers["relu"] = nn.ReLU()
        layers["stem_pool"] = nn.MaxPool2d(3, stride=2, padding=1)

    inputs = width
    for stage, depth in enumerate(depths):
        channels = width * 2**stage
        blocks = []
        for block in range(depth):
            stride = 2 if stage > 0 and block == 0 else 1
            blocks.append(_block(inputs, channels, expansion, stride, groups))
            inputs = channels * expansion
        layers[f"stage{stage + 1}"] = nn.Sequential(*blocks)

    layers["pool"] = nn.AdaptiveAvgPool2d(1)
    layers["flatten"] = nn.Flatten()
    if projection:
        layers["project1"] = nn.Linear(inputs, inputs)
        layers["relu_projection"] = nn.ReLU()
        layers["project2"] = nn.Linear(inputs, projection)
        inputs = projection
    layers["classifier"] = nn.Linear(inputs, classes)
    return nn.Sequential(layers)


def _block(inputs: int, channels: int, expansion: int, stride: int, groups: int) -> nn.Module:
    outputs = channels * expansion
    if expansion == 1:
        body = nn.Sequential(
            OrderedDict(
                first=_convolve(inputs, channels, 3, stride, groups),
                relu=nn.ReLU(),
                second=_convolve(channels, channels, 3, 1, groups),
            )
        )
    else:
        body = nn.Sequential(
            OrderedDict(
                reduce=_convolve(inputs, channels, 1, 1, groups),
                relu1=nn.ReLU(),
                middle=_convolve(channels, channels, 3, stride, groups),
                relu2=nn.ReLU(),
                expand=_convolve(channels, outputs, 1, 1, groups),
            )
        )
    if stride == 1 and inputs == outputs:
        return Residual(body, nn.Identity())
    return Residual(body, _convolve(inputs, outputs, 1, stride, groups))


def _convolve(inputs: int, outputs: int, kernel: int, stride: int, groups: int) -> nn.Module:
    """A convolution and its norm, with at most `groups` groups of at least two channels each."""
    convolution = nn.Conv2d(inputs, outputs, kernel, stride=stride, padding=kernel // 2, bias=False)
    nn.init.kaiming_normal_(convolution.weight, mode="fan_out", nonlinearity="relu")
    norm = nn.GroupNorm(math.gcd(groups, outputs // 2), outputs)
    return nn.Sequential(OrderedDict(conv=convolution, norm=norm))
