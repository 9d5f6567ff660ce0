"""AlexNet and VGG-11 as in Tables 2 and 1 of FedCL, with every bias as wide as its layer.

"FedCL: Critical Learning Periods-aware Adaptive Client Selection in Federated Learning" (later
CriticalFL, KDD 2023).
"""

from __future__ import annotations

from collections import OrderedDict

from torch import nn

from kairosfl.errors import UserError
from kairosfl.models import checks

# Output channels of VGG-11's convolutions, and whether pooling follows (Table 1).
_VGG11 = (
    (64, True),
    (128, True),
    (256, False),
    (256, True),
    (512, False),
    (512, True),
    (512, False),
    (512, True),
)


def alexnet(
    shape: tuple[int, ...], classes: int, *, width: int = 4096, dropout: float = 0.05
) -> nn.Module:
    """FedCL's AlexNet for 32x32 images (Table 2); width=128 as in the released code."""
    checks.positive("alexnet", width=width)
    checks.probability("alexnet", dropout=dropout)
    channels, height, columns = checks.image("alexnet", shape)
    if (height, columns) != (32, 32):
        raise UserError(
            f"alexnet needs 32x32 images, got {height}x{columns}: load the data with size=32"
        )
    return nn.Sequential(
        OrderedDict(
            conv1=nn.Conv2d(channels, 64, 3, stride=2, padding=1),
            relu1=nn.ReLU(),
            pool1=nn.MaxPool2d(2),
            conv2=nn.Conv2d(64, 192, 3, padding=1),
            relu2=nn.ReLU(),
            pool2=nn.MaxPool2d(2),
            conv3=nn.Conv2d(192, 384, 3, padding=1),
            relu3=nn.ReLU(),
            conv4=nn.Conv2d(384, 256, 3, padding=1),
            relu4=nn.ReLU(),
            conv5=nn.Conv2d(256, 256, 3, padding=1),
            relu5=nn.ReLU(),
            pool5=nn.MaxPool2d(2),
            flatten=nn.Flatten(),
            drop6=nn.Dropout(dropout),
            fc6=nn.Linear(256 * 2 * 2, width),
            relu6=nn.ReLU(),
            drop7=nn.Dropout(dropout),
            fc7=nn.Linear(width, width),
            relu7=nn.ReLU(),
            fc8=nn.Linear(width, classes),
        )
    )


def vgg11(
    shape: tuple[int, ...], classes: int, *, width: int = 512, dropout: float = 0.2
) -> nn.Module:
    """FedCL's VGG-11 for images whose sides are multiples of 32 (Table 1)."""
    checks.positive("vgg11", width=width)
    checks.probability("vgg11", dropout=dropout)
    inputs, height, columns = checks.image("vgg11", shape)
    if height % 32 or columns % 32:
        raise UserError(
            f"vgg11 needs images whose sides are multiples of 32, got {height}x{columns}: "
            "load the data with size=32"
        )
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    for number, (outputs, pool) in enumerate(_VGG11, start=1):
        convolution = nn.Conv2d(inputs, outputs, 3, padding=1)
        # With PyTorch's default initialisation the signal vanishes over eight plain convolutions.
        nn.init.kaiming_normal_(convolution.weight, mode="fan_out", nonlinearity="relu")
        if convolution.bias is not None:
            nn.init.zeros_(convolution.bias)
        layers[f"conv{number}"] = convolution
        layers[f"relu{number}"] = nn.ReLU()
        if pool:
            layers[f"pool{number}"] = nn.MaxPool2d(2)
        inputs = outputs
    layers["flatten"] = nn.Flatten()
    layers["drop9"] = nn.Dropout(dropout)
    # Table 1 gives 4096 inputs here, but 32x32 images leave 512 after five poolings
    # (docs/models.md).
    layers["fc9"] = nn.Linear(inputs * (height // 32) * (columns // 32), width)
    layers["relu9"] = nn.ReLU()
    layers["fc10"] = nn.Linear(width, width)
    layers["relu10"] = nn.ReLU()
    layers["drop11"] = nn.Dropout(dropout)
    layers["fc11"] = nn.Linear(width, classes)
    return nn.Sequential(layers)
