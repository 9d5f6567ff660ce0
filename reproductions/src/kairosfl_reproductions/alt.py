"""ALT: Shenaj, Belilovsky and Zanuttigh, "Adaptive Local Training in Federated Learning", 2025."""

from __future__ import annotations

from kairosfl_reproductions.item import TEXT, Cell, Item

CIFAR10, TINY = "alt-cifar10-cnn", "alt-tinyimagenet-resnet50"
MOON = "moon(mu=5.0)"  # mu and temperature as in the released code; the paper gives neither

# Suffix of the cell, description of the reading, and the rule.
READINGS = (
    ("alt", "Section 2: mean cosine to the global model", "alt"),
    ("alt-min", "released code: smallest cosine of a batch", "alt(statistic='min')"),
    (
        "alt-previous",
        "Appendix C: compared with the client's own previous model",
        "alt(reference='previous')",
    ),
)
THRESHOLDS = {
    "up": "alt",
    "down": "alt(threshold='down')",
    "fixed0.1": "alt(threshold='fixed')",
    "fixed0.5": "alt(threshold='fixed', a=0.5)",
    "fixed0.9": "alt(threshold='fixed', a=0.9)",
}


def _figure2(data: str, preset: str) -> dict[str, Cell]:
    cells = {}
    for base, algorithm in (("fedavg", "fedavg"), ("moon", MOON)):
        plain = f"{data}-{base}"
        cells[plain] = Cell(preset=preset, settings={"algorithm": algorithm}, reading=TEXT)
        for suffix, reading, rule in READINGS:
            cells[f"{plain}-{suffix}"] = Cell(
                preset=preset,
                settings={"algorithm": f"{algorithm} + {rule}"},
                reading=reading,
                baseline=plain,
            )
    return cells


def _equal() -> dict[str, Cell]:
    """FedAvg with 10, 9 and 3 epochs, and the two readings of ALT that trained about 9 and 3 in
    Figure 2.
    """

    def cell(algorithm: str, epochs: int, reading: str, baseline: int) -> Cell:
        settings = {"algorithm": f"{algorithm} + average", "train.epochs": epochs}
        name = f"cifar10-epochs{baseline}-fedavg-averaged" if baseline else ""
        return Cell(preset=CIFAR10, settings=settings, reading=reading, baseline=name)

    few = {"alt": 9, "alt-min": 3}
    readings = {
        10: TEXT,
        9: "about the epochs of ALT by the text",
        3: "about the epochs of the released ALT",
    }
    plain = {
        f"cifar10-epochs{n}-fedavg-averaged": cell("fedavg", n, reading, 0 if n == 10 else 10)
        for n, reading in readings.items()
    }
    return plain | {
        f"cifar10-fedavg-{suffix}-averaged": cell(rule, 10, reading, few[suffix])
        for suffix, reading, rule in READINGS
        if suffix in few
    }


ITEMS = (
    Item(
        paper="alt",
        name="figure2",
        title="Figure 2: accuracy, epochs per round and cumulative epochs, FedAvg and MOON with and without ALT",
        cells=_figure2("cifar10", CIFAR10) | _figure2("tinyimagenet", TINY),
        measures=("last_tenth", "epochs_round", "epochs"),
        traces=("epochs", "epochs_so_far"),
        claim="ALT trains far fewer epochs and is at least as accurate; FedAvg with ALT is similar to or better than "
        "MOON, and much cheaper.",
        note="ResNet-50 uses GroupNorm here and BatchNorm in the released code.",
    ),
    Item(
        paper="alt",
        name="thresholds",
        title="Appendix B: threshold functions",
        cells={"cifar10-none": Cell(preset=CIFAR10, settings={"algorithm": "fedavg"})}
        | {
            f"cifar10-{name}": Cell(
                preset=CIFAR10, settings={"algorithm": rule}, baseline="cifar10-none"
            )
            for name, rule in THRESHOLDS.items()
        },
        measures=("last_tenth", "epochs_round", "epochs"),
        claim="The linearly increasing threshold is best; any threshold saves epochs.",
        note="The paper does not give the constants of the fixed threshold; these are ours.",
    ),
    Item(
        paper="alt",
        name="equal-epochs",
        title="ALT and FedAvg at equal epochs, with averaging of models as a control",
        cells=_equal(),
        measures=("final", "plain_tenth", "epochs_round", "epochs"),
        note="A comparison of our own, which the paper does not have: in Figure 2 ALT trains 8.8 epochs per client by "
        "the text and 3.2 by the released code.",
    ),
)
