"""Names of cells in words that a reader of the papers knows: `cifar10-fedavgm-aware` is CIFAR-10,
FedAvgM ×AWARE.
"""

from __future__ import annotations

import re

DATA = {
    "cifar10": "CIFAR-10",
    "cifar100": "CIFAR-100",
    "fashion_mnist": "Fashion-MNIST",
    "mnist": "MNIST",
    "agnews": "AG News",
    "shakespeare": "Shakespeare",
    "tinyimagenet": "Tiny-ImageNet",
    "digits": "digits",
    "alexnet": "AlexNet",
    "vgg11": "VGG-11",
    "resnet18": "ResNet-18",
    "lstm": "LSTM",
    "mlp": "fully connected",
    "iid": "IID",
    "printed": "published schedule",
    "slow": "slow schedule",
    "shards": "two shards per client",
    "labels2": "two labels per party",
    "labels3": "three labels per party",
    "mixed": "half IID, half skewed",
}
METHODS = {
    "fedavg": "FedAvg",
    "fedavgm": "FedAvgM",
    "fedprox": "FedProx",
    "fednova": "FedNova",
    "vrlsgd": "VRL-SGD",
    "scaffold": "SCAFFOLD",
    "feddyn": "FedDyn",
    "fedcm": "FedCM",
    "fedsam": "FedSAM",
    "fedmut": "FedMut",
    "moon": "MOON",
    "fedyogi": "FedYogi",
    "fedadam": "FedAdam",
    "fedadagrad": "FedAdagrad",
    "fedams": "FedAMS",
    "fedaware": "FedAWARE",
    "mofedsam": "MoFedSAM",
    "kairos": "Kairos",
    "thrifty": "Kairos, thrifty",
    "average": "FedAvg, averaged",
    "averaged": "(models averaged)",
    "aware": "×AWARE",
    "cl": "+ FedCL",
    "pa3fed": "+ PA3Fed",
    "alt": "+ ALT",
    "raw": "(raw vectors)",
    "released": "(released code)",
    "swapped": "(clients mixed up)",
    "stored": "(clients mixed up, images cropped once)",
    "redrawn": "(clients mixed up, each seed its partition)",
    "shorter": "(clients mixed up, lr = 0.005)",
    "longer": "(lr = 2.5)",
    "private": "with privacy",
    "crops": "(crops as released)",
    "reflect": "(reflected borders)",
    "flower": "(Flower's parties)",
    "first": "(NIID-Bench's first parties)",
    "steps": "(divisor K · lr)",
    "after": "(correction after momentum)",
    "clipped": "(gradients clipped at 10)",
    "alpha0.05": "with alpha = 0.05",
    "solver": "(released solver)",
    "letter": "(Eq. 8 and 10 as written)",
    "nolr": "(FGN without lr)",
    "rate": "(as in FedCL's code)",
    "convex": "(as in FedCL's code)",
    "min": "(smallest cosine)",
    "accuracy": "(accuracy as score)",
    "small": "(small change)",
    "same": "(same recipe)",
    "previous": "(own previous model)",
    "exact": "(exact solver)",
    "visit": "(visits every client first)",
    "wolfe": "(released solver)",
    "both": "(released solver, visits every client first)",
    "full": "(all clients)",
    "na": "not adaptive",
    "never": "FedAvg",
    "always": "weights in every round",
    "critical": "weights while critical",
    "none": "FedAvg",
    "up": "ALT, rising threshold",
    "down": "ALT, falling threshold",
    "fgn": "with FGN",
    "fedfim": "with FedFIM",
}
NUMBERS = (
    (r"dir([\d.]+)", "Dir({})"),
    (r"h([\d.]+)", "h = {}"),
    (r"epochs(\d+)", "{} epochs"),
    (r"a([\d.]+)", "α = {}"),
    (r"beta([\d.]+)", "β = {}"),
    (r"noise([\d.]+)", "noise {}"),
    (r"mu([\d.]+)", "mu = {}"),
    (r"lr([\d.]+)", "lr = {}"),
    (r"ridge([\d.]+)", "ridge {}"),
    (r"fixed([\d.]+)", "ALT, threshold {}"),
    (r"delta([\d.]+)", "δ = {}"),
    (r"e(\d+)", "{} epochs"),
    (r"n(\d+)", "{} clients"),
    (r"m(\d+)", "{} clients a round"),
    (r"wd([\d.]+)", "weight decay {}"),
    (r"quantity([\d.]+)", "quantity Dir({})"),
)


def words(name: str) -> str:
    """A cell's name for a reader; what has no translation stays as it is."""
    settings, method = [], []
    for part in name.split("-"):
        if known := setting(part):
            settings.append(known)
        else:
            method.append(METHODS.get(part, part))
    if method and method[0].startswith("+ "):  # the adaptive rule alone, on FedAvg
        method[0] = method[0][2:]
    return ", ".join([*settings, " ".join(method)] if method else settings)


def setting(part: str) -> str:
    """What a part of a cell's name says about its data or model; empty if it is part of the method."""
    numbers = (
        text.format(found[1]) for pattern, text in NUMBERS if (found := re.fullmatch(pattern, part))
    )
    return DATA.get(part) or next(numbers, "")


def method(name: str) -> str:
    """The first method in a cell's name: that of `cifar10-fedavg-aware` is `fedavg`."""
    return next((part for part in name.split("-") if part in METHODS), "")
