"""Small models: fully connected networks, LeNet, and the CNNs of several papers."""

from __future__ import annotations

import math
from collections import OrderedDict
from itertools import pairwise

from torch import nn

from kairosfl.errors import UserError
from kairosfl.models import checks


def logistic(shape: tuple[int, ...], classes: int) -> nn.Module:
    """Multinomial logistic regression: a single linear layer."""
    return nn.Sequential(
        OrderedDict(flatten=nn.Flatten(), classifier=nn.Linear(math.prod(shape), classes))
    )


def mlp(shape: tuple[int, ...], classes: int, *, hidden: tuple[int, ...] = (64,)) -> nn.Module:
    """Fully connected network with ReLU between the layers."""
    checks.positive("mlp", **{f"hidden[{k}]": width for k, width in enumerate(hidden)})
    widths = (math.prod(shape), *hidden)
    layers: OrderedDict[str, nn.Module] = OrderedDict(flatten=nn.Flatten())
    for number, (inputs, outputs) in enumerate(pairwise(widths), start=1):
        layers[f"fc{number}"] = nn.Linear(inputs, outputs)
        layers[f"relu{number}"] = nn.ReLU()
    layers["classifier"] = nn.Linear(widths[-1], classes)
    return nn.Sequential(layers)


def cnn(shape: tuple[int, ...], classes: int, *, padding: int = 0, hidden: int = 512) -> nn.Module:
    """Two 5x5 convolutions (32, 64) and a hidden layer, after McMahan et al. (2017)."""
    checks.positive("cnn", hidden=hidden)
    if padding not in (0, 1, 2):
        raise UserError(f"model.padding of cnn must be 0, 1 or 2, got {padding}")
    shrink = 4 - 2 * padding
    hint = " or set model.padding=2" if padding < 2 else ""
    # Each convolution removes `shrink` pixels, the first pooling halves the rest, and the second
    # needs two.
    channels, height, width = checks.image("cnn", shape, least=2 * (2 + shrink) + shrink, hint=hint)
    rows, columns = (((side - shrink) // 2 - shrink) // 2 for side in (height, width))
    return nn.Sequential(
        OrderedDict(
            conv1=nn.Conv2d(channels, 32, 5, padding=padding),
            relu1=nn.ReLU(),
            pool1=nn.MaxPool2d(2),
            conv2=nn.Conv2d(32, 64, 5, padding=padding),
            relu2=nn.ReLU(),
            pool2=nn.MaxPool2d(2),
            flatten=nn.Flatten(),
            fc1=nn.Linear(64 * rows * columns, hidden),
            relu3=nn.ReLU(),
            classifier=nn.Linear(hidden, classes),
        )
    )


def lenet(shape: tuple[int, ...], classes: int) -> nn.Module:
    """LeNet-5 with ReLU, NIID-Bench's simple-cnn: two 5x5 convolutions (6, 16), 120 and 84."""
    return nn.Sequential(_lenet("lenet", shape) | OrderedDict(classifier=nn.Linear(84, classes)))


def alt_cnn(shape: tuple[int, ...], classes: int, *, projection: int = 256) -> nn.Module:
    """ALT's and MOON's CNN: two 5x5 convolutions (6, 16), 120, 84 and a projection head."""
    checks.positive("alt_cnn", projection=projection)
    layers = _lenet("alt_cnn", shape)
    head = OrderedDict(
        project1=nn.Linear(84, 84),
        relu5=nn.ReLU(),
        project2=nn.Linear(84, projection),
        classifier=nn.Linear(projection, classes),
    )
    return nn.Sequential(layers | head)


def _lenet(name: str, shape: tuple[int, ...]) -> OrderedDict[str, nn.Module]:
    channels, height, width = checks.image(name, shape, least=16)
    rows, columns = (((side - 4) // 2 - 4) // 2 for side in (height, width))
    return OrderedDict(
        conv1=nn.Conv2d(channels, 6, 5),
        relu1=nn.ReLU(),
        pool1=nn.MaxPool2d(2),
        conv2=nn.Conv2d(6, 16, 5),
        relu2=nn.ReLU(),
        pool2=nn.MaxPool2d(2),
        flatten=nn.Flatten(),
        fc1=nn.Linear(16 * rows * columns, 120),
        relu3=nn.ReLU(),
        fc2=nn.Linear(120, 84),
        relu4=nn.ReLU(),
    )


def aware_cnn(shape: tuple[int, ...], classes: int, *, hidden: int = 64) -> nn.Module:
    """FedAWARE's 5-layer CNN: three 3x3 convolutions (32, 64, 64) and a hidden layer."""
    checks.positive("aware_cnn", hidden=hidden)
    channels, height, width = checks.image("aware_cnn", shape, least=18)
    rows, columns = (((side - 2) // 2 - 2) // 2 - 2 for side in (height, width))
    model = nn.Sequential(
        OrderedDict(
            conv1=nn.Conv2d(channels, 32, 3),
            relu1=nn.ReLU(),
            pool1=nn.MaxPool2d(2),
            conv2=nn.Conv2d(32, 64, 3),
            relu2=nn.ReLU(),
            pool2=nn.MaxPool2d(2),
            conv3=nn.Conv2d(64, 64, 3),
            relu3=nn.ReLU(),
            flatten=nn.Flatten(),
            fc1=nn.Linear(64 * rows * columns, hidden),
            relu4=nn.ReLU(),
            classifier=nn.Linear(hidden, classes),
        )
    )
    for layer in model:
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
        elif isinstance(layer, nn.Linear):
            nn.init.normal_(layer.weight, std=0.01)
        if isinstance(layer, nn.Conv2d | nn.Linear) and layer.bias is not None:
            nn.init.zeros_(layer.bias)
    return model


def pfl_cnn(
    shape: tuple[int, ...],
    classes: int,
    *,
    hidden: int = 128,
    dropout: tuple[float, ...] = (0.25, 0.5),
) -> nn.Module:
    """pfl-research's simple_cnn: two 3x3 convolutions (32, 64), a hidden layer, and dropout."""
    checks.positive("pfl_cnn", hidden=hidden)
    if len(dropout) != 2:
        raise UserError(f"model.dropout of pfl_cnn must be two numbers, got {dropout!r}")
    checks.probability("pfl_cnn", **{"dropout[0]": dropout[0], "dropout[1]": dropout[1]})
    channels, height, width = checks.image("pfl_cnn", shape, least=6)
    rows, columns = ((side - 4) // 2 for side in (height, width))
    model = nn.Sequential(
        OrderedDict(
            conv1=nn.Conv2d(channels, 32, 3),
            relu1=nn.ReLU(),
            conv2=nn.Conv2d(32, 64, 3),
            relu2=nn.ReLU(),
            pool=nn.MaxPool2d(2),
            dropout1=nn.Dropout(dropout[0]),
            flatten=nn.Flatten(),
            fc1=nn.Linear(64 * rows * columns, hidden),
            relu3=nn.ReLU(),
            dropout2=nn.Dropout(dropout[1]),
            classifier=nn.Linear(hidden, classes),
        )
    )
    for layer in model:
        if isinstance(layer, nn.Conv2d | nn.Linear) and layer.bias is not None:
            nn.init.xavier_uniform_(layer.weight)
            nn.init.zeros_(layer.bias)
    return model
