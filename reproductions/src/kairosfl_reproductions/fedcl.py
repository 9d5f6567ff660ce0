"""FedCL: "Critical Learning Periods-Aware Adaptive Client Selection in Federated Learning"
(CriticalFL, KDD 2023).

The paper shows curves and bars but no numbers, so its claims are given in words.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from kairosfl_reproductions.item import TEXT, Cell, Item

DATA = ("cifar10", "fashion_mnist")
MODELS = ("alexnet", "vgg11")
ALPHAS = (0.1, 0.2, 0.3)
BASES = {
    "fedavg": "fedavg",
    "fedprox": "fedprox(mu={mu})",
    "vrlsgd": "vrlsgd",
    "fednova": "fednova",
}
# As in the released code.
RELEASED_BASES = {"vrlsgd-rate": "vrlsgd(rate=0.005)", "fednova-convex": "fednova(convex=True)"}
# Section 5.3, which does not mention the last two.
MU = {"alexnet": 0.01, "vgg11": 0.001, "resnet18": 0.01, "lstm": 0.01}

# Neither the text nor the released code gives settings for these; the released optimisers are not
# Reddi et al.'s.
FEDOPT = {
    "fedadagrad": "fedadagrad(lr=0.1)",
    "fedyogi": "fedyogi(lr=0.01)",
    "fedadam": "fedadam(lr=0.01)",
}

# Suffix of the cell, description of the reading, the rule, and further settings.
Reading = tuple[str, str, str, dict[str, Any]]
ALGORITHM2: Reading = ("cl", "Algorithm 2", "fedcl", {})
RELEASED: Reading = (
    "cl-released",
    "released rule and detector",
    "fedcl.released()",
    {"run.detector": "fgn.released()"},
)
BOTH = (ALGORITHM2, RELEASED)

MODEL: dict[str, dict[str, Any]] = {  # models without a preset of their own
    "resnet18": {"model": {"name": "resnet18"}},
}


def pair(
    name: str,
    preset: str,
    base: str,
    algorithm: str,
    settings: Mapping[str, Any],
    readings: Sequence[Reading] = BOTH,
) -> dict[str, Cell]:
    """A method without and with FedCL."""
    plain = f"{name}-{base}"
    cells = {
        plain: Cell(preset=preset, settings={**settings, "algorithm": algorithm}, reading=TEXT)
    }
    for suffix, reading, rule, more in readings:
        cells[f"{plain}-{suffix}"] = Cell(
            preset=preset,
            settings={**settings, "algorithm": f"{algorithm} + {rule}", **more},
            reading=reading,
            baseline=plain,
        )
    return cells


def grid(
    *,
    data: Sequence[str] = DATA,
    models: Sequence[str] = ("alexnet",),
    alphas: Sequence[float] = (0.1,),
    bases: Mapping[str, str] = BASES,
    readings: Sequence[Reading] = BOTH,
    vary: Mapping[str, Mapping[str, Any]] | None = None,
) -> dict[str, Cell]:
    """Every combination; `vary` maps suffixes to further settings. The most heterogeneous data come
    first.
    """
    cells: dict[str, Cell] = {}
    for alpha in alphas:
        for model in models:
            for dataset in data:
                preset = f"fedcl-{dataset}-{'alexnet' if model in MODEL else model}"
                for suffix, more in (vary or {"": {}}).items():
                    settings = {**MODEL.get(model, {}), "data.alpha": alpha, **more}
                    name = "-".join(filter(None, (dataset, model, f"a{alpha}", suffix)))
                    for base, algorithm in bases.items():
                        cells |= pair(
                            name, preset, base, algorithm.format(mu=MU[model]), settings, readings
                        )
    return cells


def _cifar100() -> dict[str, Cell]:
    cells: dict[str, Cell] = {}
    for alpha in ALPHAS:
        for model in MODELS:
            settings = {"data.name": "cifar100", "data.alpha": alpha, "data.minimum": 100}
            for base, algorithm in BASES.items():
                name, preset = f"cifar100-{model}-a{alpha}", f"fedcl-cifar10-{model}"
                cells |= pair(name, preset, base, algorithm.format(mu=MU[model]), settings)
    return cells


def _delta() -> dict[str, Cell]:
    return {
        f"{dataset}-a{alpha}-{base}-{suffix}-delta{delta}": Cell(
            preset=f"fedcl-{dataset}-alexnet",
            settings={
                "data.alpha": alpha,
                "algorithm": f"{algorithm.format(mu=MU['alexnet'])} + {rule}",
                "run.detector": f"{more.get('run.detector', 'fgn').removesuffix('()')}(delta={delta})",
            },
            reading=reading,
        )
        for dataset in DATA
        for alpha in ALPHAS
        for base, algorithm in BASES.items()
        for delta in (0.0, 0.01, 0.03, 0.05, 0.2, 0.35, 0.5)
        for suffix, reading, rule, more in BOTH
    }


# Figure 16: models and data sets.
SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "cifar10": ("fedcl-cifar10-alexnet", {}),
    "fashion_mnist": ("fedcl-fashion_mnist-alexnet", {}),
    "cifar10-vgg11": ("fedcl-cifar10-vgg11", {}),
    "mnist-mlp": ("fedcl-fashion_mnist-alexnet", {"data.name": "mnist", "model": {"name": "mlp"}}),
}


def _detection() -> dict[str, Cell]:
    """The first of two detectors decides; with FedFIM both are recorded, as FGN costs nothing
    extra.
    """
    readings = {
        "fgn": ("FGN", "fgn"),
        "fedfim": ("FedFIM, one label drawn per sample", "fedfim(exact=False) + fgn"),
        "fedfim-exact": ("FedFIM, summed over all classes", "fedfim + fgn"),
    }
    cells = {}
    for where, (preset, own) in SETTINGS.items():
        for alpha in ALPHAS if where in DATA else ALPHAS[:1]:
            plain = f"{where}-a{alpha}-fedavg"
            for name, (reading, detector) in readings.items():
                if name == "fedfim-exact" and alpha != ALPHAS[0]:
                    continue  # ten backward passes per sample: once is enough
                settings = {**own, "data.alpha": alpha, "run.detector": detector}
                cells[f"{plain}-{name}"] = Cell(
                    preset=preset, settings={**settings, "algorithm": "fedavg"}, reading=reading
                )
                cells[f"{plain}-cl-{name}"] = Cell(
                    preset=preset,
                    settings={**settings, "algorithm": "fedcl"},
                    reading=reading,
                    baseline=f"{plain}-{name}",
                )
    return cells


def _random() -> dict[str, Cell]:
    cells: dict[str, Cell] = {}
    for dataset in DATA:
        preset, plain = f"fedcl-{dataset}-alexnet", f"{dataset}-fedavg"
        cells |= pair(dataset, preset, "fedavg", "fedavg", {})
        rules = {}
        for chance in (0.1, 0.2, 0.3, 0.4, 0.5):
            rules[f"increase{chance}"] = f"fedcl(increase={chance}, decrease=0.3)"
            rules[f"decrease{chance}"] = f"fedcl(increase=0.3, decrease={chance})"
        del rules["decrease0.3"]  # the same as increase0.3
        for name, rule in rules.items():
            cells[f"{plain}-{name}"] = Cell(
                preset=preset, settings={"algorithm": rule}, baseline=plain
            )
    return cells


ROUNDS = (
    "Only the released code gives the rounds, batch size, momentum, learning rate decay, gradient clipping at 10, and "
    "the minimum of as many samples per client as there are classes."
)
ACCURACY = grid(models=MODELS, alphas=ALPHAS) | {
    name: replace(
        cell, reading="released base" if cell.reading == TEXT else f"released base; {cell.reading}"
    )
    for name, cell in grid(models=MODELS, alphas=ALPHAS, bases=RELEASED_BASES).items()
}
RESNET18 = grid(models=("resnet18",), alphas=ALPHAS, bases=BASES | FEDOPT)
FEDOPT_CELLS = grid(models=MODELS, alphas=ALPHAS, bases=FEDOPT)


def _item(
    name: str, title: str, cells: Mapping[str, Cell], *measures: str, claim: str, **more: Any
) -> Item:
    shown = measures or ("final", "last_tenth", "cohort", "rounds_to")
    return Item(
        paper="fedcl",
        name=name,
        title=title,
        cells=cells,
        measures=shown,
        claim=claim,
        **({"note": ROUNDS} | more),
    )


ITEMS = (
    _item(
        "accuracy",
        "Figures 2, 3, 6, 7: accuracy with and without FedCL",
        ACCURACY,
        claim="With FedCL the final accuracy is higher in every case, by up to 11 (FedAvg), 11 (FedProx), 13 (VRL-SGD) "
        "and 10 (FedNova) points, most at alpha = 0.1, with 0.95 to 1.1 times the clients per round.",
    ),
    _item(
        "communication",
        "Figures 4, 5, 8, 9, 20 to 25: rounds to reach accuracies of the method without FedCL",
        ACCURACY,
        "rounds_to",
        "rounds_to_most",
        "rounds_to_half",
        "cohort",
        "final",
        claim="FedCL needs fewer rounds, most clearly at alpha = 0.1, with 0.95 to 1.1 times the clients per round.",
        note="The paper does not give the common targets of Figures 20 and 21; ours are 50 % and 90 % of the final "
        f"accuracy of the method without FedCL. {ROUNDS}",
    ),
    _item(
        "delta",
        "Figures 10, 26 to 28: the detection threshold",
        _delta(),
        "final",
        "critical",
        "cohort",
        claim="At alpha = 0.1 a larger threshold costs accuracy; otherwise the threshold hardly matters.",
    ),
    _item(
        "alpha",
        "Figure 11: the non-IID degree",
        grid(alphas=(0.1, 0.2, 0.3, 0.4, 0.5)),
        claim="With FedCL accuracy is higher at every alpha, most at low values.",
        note=f"The values of alpha above 0.3 are ours. {ROUNDS}",
    ),
    _item(
        "epochs",
        "Figure 12: local epochs",
        grid(vary={f"e{epochs}": {"train.epochs": epochs} for epochs in (1, 2, 3, 4, 5)}),
        claim="More epochs help, with diminishing returns; FedCL helps for every number of epochs.",
    ),
    _item(
        "weight_decay",
        "Figure 13: weight decay",
        grid(
            vary={
                f"wd{decay:g}": {"train.weight_decay": decay}
                for decay in (0.0, 1e-5, 1e-4, 1e-3, 1e-2)
            }
        ),
        claim="FedCL helps for every weight decay, less for a large one.",
        note=f"The values of weight decay are ours. {ROUNDS}",
    ),
    _item(
        "clients",
        "Figure 14: the number of clients",
        grid(
            vary={
                f"n{clients}": {"data.clients": clients, "train.cohort": clients // 8}
                for clients in (32, 64, 128, 256)
            }
        ),
        claim="FedCL helps for every number of clients.",
        note=f"The numbers of clients are ours; an eighth of them train per round. {ROUNDS}",
    ),
    _item(
        "participation",
        "Figure 15: the participation rate",
        grid(vary={f"m{cohort}": {"train.cohort": cohort} for cohort in (4, 8, 16, 32, 64)}),
        claim="FedCL helps at every participation rate, most at low rates.",
        note=f"The rates other than 16 of 128 are ours. {ROUNDS}",
    ),
    _item(
        "detection",
        "Figures 1, 16, 17, 49: FGN against FedFIM, their critical periods, accuracy, time and memory",
        _detection(),
        "critical",
        "critical_until",
        "final",
        "fisher_seconds",
        "fisher_megabytes",
        "seconds",
        "cohort",
        traces=("fgn", "fedfim", "critical", "cohort"),
        claim="Both find almost the same periods, so accuracy is the same; FedFIM takes up to 9 times the computation "
        "and 40 times the memory.",
        note="FGN uses gradients that training computes anyway: it costs one sum per batch. The paper does not "
        f"describe its FC network for MNIST; ours is `mlp`. {ROUNDS}",
    ),
    _item(
        "seeds",
        "Figures 18, 19: five random seeds",
        grid(alphas=ALPHAS, bases={"fedavg": "fedavg"}),
        "critical",
        "critical_until",
        "final",
        "cohort",
        seeds=5,
        traces=("fgn", "critical"),
        claim="The critical periods are almost the same for every seed.",
    ),
    _item(
        "random",
        "Figures 47, 48: random increase and decrease of the cohort",
        _random(),
        "final",
        "cohort",
        claim="A random schedule does not necessarily improve on FedAvg; FedCL does.",
        note=f"Of the probabilities, the paper only gives 30 %. {ROUNDS}",
    ),
    _item(
        "resnet18",
        "Figures 50 to 59: ResNet-18",
        RESNET18,
        claim="With FedCL the final accuracy is higher in every case.",
        note=f"GroupNorm instead of BatchNorm. The settings of FedAdagrad, FedYogi and FedAdam are ours. {ROUNDS}",
    ),
    _item(
        "fedopt",
        "Figures 39 to 46: FedAdagrad, FedYogi, FedAdam",
        FEDOPT_CELLS,
        claim="With FedCL the final accuracy is higher in every case.",
        note="The paper does not give the server's settings; these are ours. The released optimisers act only in the "
        f"first ten rounds and rescale each tensor, which is not Reddi et al.'s FedOpt. {ROUNDS}",
    ),
    _item(
        "cifar100",
        "Figures 29, 30, 33 to 36: CIFAR-100",
        _cifar100(),
        claim="With FedCL the final accuracy is higher in every case.",
    ),
    _item(
        "shakespeare",
        "Figures 31, 32, 37, 38: Shakespeare",
        {
            name: cell
            for base, algorithm in BASES.items()
            for name, cell in pair(
                "shakespeare-lstm",
                "fedcl-shakespeare-lstm",
                base,
                algorithm.format(mu=MU["lstm"]),
                {},
            ).items()
        },
        claim="With FedCL the final accuracy is higher in every case.",
        note="The roles are our choice; batch size, momentum and decay are those of the image tasks.",
    ),
)
