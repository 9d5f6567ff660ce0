"""PA3Fed: "Period-Aware Adaptive Aggregation for Improved Federated Learning", AAAI 2025. No code
was released.
"""

from __future__ import annotations

from typing import Any

from kairosfl_reproductions.item import Cell, Item

BASES = {
    "fedavg": "fedavg",
    "vrlsgd": "vrlsgd",
    "fedprox": "fedprox",
    "fednova": "fednova",
    "fedmut": "fedmut",
}
# As in FedCL's released code, on which PA3Fed builds: suffix, algorithm.
LINEAGE = {"fednova": ("convex", "fednova(convex=True)"), "vrlsgd": ("rate", "vrlsgd(rate=0.005)")}
COLUMNS = ("fedavg", "fedprox", "fednova", "vrlsgd", "fedmut")
PRESETS = {
    "cifar10": "pa3fed-cifar10-alexnet",
    "fashion_mnist": "pa3fed-fashion_mnist-alexnet",
    "cifar100": "pa3fed-cifar100-resnet18",
}
DEGREES = (0.1, 0.2, 0.3)

# Table 2: (without, with) PA3Fed for each of the columns.
TABLE2: dict[tuple[str, float], tuple[tuple[float, float], ...]] = {
    ("cifar10", 0.1): (
        (38.66, 53.99),
        (40.33, 55.02),
        (39.38, 54.74),
        (42.54, 57.75),
        (41.47, 55.72),
    ),
    ("cifar10", 0.2): (
        (44.25, 58.85),
        (44.84, 58.85),
        (46.79, 58.90),
        (44.54, 58.16),
        (45.44, 59.56),
    ),
    ("cifar10", 0.3): (
        (48.14, 58.94),
        (48.17, 58.66),
        (49.30, 59.19),
        (48.61, 60.30),
        (47.56, 60.36),
    ),
    ("cifar100", 0.1): (
        (28.33, 36.97),
        (30.06, 36.59),
        (30.52, 37.01),
        (29.98, 37.12),
        (31.23, 38.27),
    ),
    ("cifar100", 0.2): (
        (31.84, 41.01),
        (33.03, 40.86),
        (32.65, 41.21),
        (32.78, 41.34),
        (34.47, 42.23),
    ),
    ("cifar100", 0.3): (
        (35.99, 42.23),
        (37.93, 43.66),
        (37.95, 42.08),
        (39.01, 43.57),
        (40.92, 44.79),
    ),
    ("fashion_mnist", 0.1): (
        (74.40, 78.88),
        (74.67, 79.02),
        (74.54, 80.11),
        (74.62, 79.41),
        (75.01, 79.90),
    ),
    ("fashion_mnist", 0.2): (
        (76.94, 81.60),
        (76.99, 81.04),
        (76.24, 81.23),
        (76.38, 80.27),
        (77.09, 82.04),
    ),
    ("fashion_mnist", 0.3): (
        (77.30, 81.86),
        (77.58, 81.99),
        (77.42, 81.42),
        (78.21, 81.04),
        (78.12, 81.98),
    ),
}

# Table 1: FedAvg and PA3Fed, for the loss curve of "a single local client".
TABLE1 = {
    "loss_std": (0.089, 0.066),
    "loss_moving": (0.019, 0.014),
    "loss_mad": (0.069, 0.058),
    "loss_range": (0.307, 0.189),
    "loss_change": (0.270, 0.170),
}

# At 0.8 per round the learning rate is negligible after 40 rounds (0.8^40 = 0.00013); nothing
# changes in the other 210.
SCHEDULES: dict[str, tuple[str, dict[str, Any]]] = {
    "printed": ("lr x 0.8 per round, stopped after 40 rounds", {"train.rounds": 40}),
    "slow": (
        "lr x 0.8 every ten rounds",
        {"train.schedule": "steps", "train.milestones": list(range(10, 250, 10))},
    ),
}
SCHEDULE_NOTE = (
    "With the published schedule (x 0.8 after each round) the learning rate is negligible after 40 of the 250 rounds, "
    "so those cells stop there. "
    "The `slow` cells run all 250 rounds with x 0.8 every ten rounds."
)

# What the text leaves open: suffix of the cell, description of the reading, the rule, and further
# settings.
Reading = tuple[str, str, str, dict[str, Any]]
READINGS: tuple[Reading, ...] = (
    ("pa3fed", "better clients count more (prose)", "pa3fed", {}),
    ("pa3fed-letter", "Eq. 8 and 10 as written", "pa3fed(score='loss')", {}),
    (
        "pa3fed-nolr",
        "prose; FGN without the learning rate",
        "pa3fed",
        {"run.detector": "fgn(include_lr=False)"},
    ),
)


def _table2(data: str, degree: float, base: str, schedule: str) -> dict[str, Cell]:
    """One pair of table entries in every reading."""
    without, with_ = TABLE2[data, degree][COLUMNS.index(base)]
    words, settings = SCHEDULES[schedule]
    settings = {**settings, "data.alpha": degree}
    plain = f"{data}-h{degree}-{schedule}-{base}"

    def pair(
        name: str, algorithm: str, where: str, readings: tuple[Reading, ...]
    ) -> dict[str, Cell]:
        own = {**settings, "algorithm": algorithm}
        comparable = schedule == "printed"
        cells = {
            name: Cell(
                preset=PRESETS[data],
                settings=own,
                printed={"final": without},
                reading=where,
                comparable=comparable,
            )
        }
        for suffix, reading, rule, more in readings:
            cells[f"{name}-{suffix}"] = Cell(
                preset=PRESETS[data],
                settings={**settings, "algorithm": f"{algorithm} + {rule}", **more},
                printed={"final": with_},
                reading=f"{reading}; {where}",
                baseline=name,
                comparable=comparable,
            )
        return cells

    cells = pair(plain, BASES[base], words, READINGS)
    if base in LINEAGE:
        suffix, algorithm = LINEAGE[base]
        cells |= pair(
            f"{plain}-{suffix}", algorithm, f"{base} as in FedCL's code; {words}", READINGS[:1]
        )
    return cells


# The paper does not say which of a client's losses Table 1 and Figure 5 show.
LOSSES = {"before": "loss of the model as received", "after": "loss after local training"}


def _table1() -> dict[str, Cell]:
    """PA3Fed with beta = 0 is FedAvg, but scores every client."""
    cells = {}
    for at, reading in LOSSES.items():
        for column, (name, rule) in enumerate(
            {"fedavg": f"pa3fed(beta=0.0, at='{at}')", "pa3fed": f"pa3fed(at='{at}')"}.items()
        ):
            for schedule, (words, settings) in SCHEDULES.items():
                cells[f"cifar10-{at}-{schedule}-{name}"] = Cell(
                    preset=PRESETS["cifar10"],
                    settings={**settings, "algorithm": rule},
                    printed={measure: pair[column] for measure, pair in TABLE1.items()},
                    reading=f"{reading}; {words}",
                    baseline="" if name == "fedavg" else f"cifar10-{at}-{schedule}-fedavg",
                    comparable=schedule == "printed",
                )
    return cells


def _figure5() -> dict[str, Cell]:
    """PA3Fed with beta = 0 is FedAvg, as in Table 1."""
    cells = {}
    for degree in DEGREES:
        for at, reading in LOSSES.items():
            for schedule, (words, settings) in SCHEDULES.items():
                plain = f"cifar10-h{degree}-{at}-{schedule}"
                for name, rule in {
                    "fedavg": f"pa3fed(beta=0.0, at='{at}')",
                    "pa3fed": f"pa3fed(at='{at}')",
                }.items():
                    cells[f"{plain}-{name}"] = Cell(
                        preset=PRESETS["cifar10"],
                        settings={**settings, "algorithm": rule, "data.alpha": degree},
                        reading=f"{reading}; {words}",
                        baseline="" if name == "fedavg" else f"{plain}-fedavg",
                    )
    return cells


def _figure6() -> dict[str, Cell]:
    return {
        f"{data}-{schedule}-{base}-beta{beta}": Cell(
            preset=PRESETS[data],
            settings={**settings, "algorithm": f"{BASES[base]} + pa3fed(beta={beta})"},
            reading=words,
            baseline="" if beta == 0.0 else f"{data}-{schedule}-{base}-beta0.0",
        )
        for data in ("cifar10", "fashion_mnist")
        for schedule, (words, settings) in SCHEDULES.items()
        for base in COLUMNS
        for beta in (0.0, 0.1, 0.2, 0.3, 0.4, 0.5)
    }


def _figure7() -> dict[str, Cell]:
    rules = {"never": "fedavg", "always": "pa3fed(always=True)", "critical": "pa3fed"}
    return {
        f"{data}-{schedule}-{name}": Cell(
            preset=PRESETS[data],
            settings={**settings, "algorithm": rule},
            reading=words,
            baseline="" if name == "never" else f"{data}-{schedule}-never",
        )
        for data in ("cifar10", "fashion_mnist")
        for schedule, (words, settings) in SCHEDULES.items()
        for name, rule in rules.items()
    }


def _figure8() -> dict[str, Cell]:
    return {
        f"{data}-h{degree}-{schedule}-{name}": Cell(
            preset=PRESETS[data],
            settings={**settings, "algorithm": name, "data.alpha": degree},
            reading=words,
            baseline="" if name == "fedavg" else f"{data}-h{degree}-{schedule}-fedavg",
        )
        for data in ("cifar10", "fashion_mnist")
        for degree in (0.1, 0.2, 0.3, 0.5, 1.0)
        for schedule, (words, settings) in SCHEDULES.items()
        for name in ("fedavg", "pa3fed")
    }


# The most informative cells first: h = 0.1, without and with PA3Fed, on FedAvg and VRL-SGD.
TABLE2_CELLS = {
    name: cell
    for degree in DEGREES
    for data in PRESETS
    for schedule in SCHEDULES
    for base in BASES
    for name, cell in _table2(data, degree, base, schedule).items()
}


def _averaged() -> dict[str, Cell]:
    words, settings = SCHEDULES["slow"]
    plain = "cifar10-h0.1-slow-fedavg"

    def cell(algorithm: str, reading: str = "", baseline: str = "") -> Cell:
        own = {**settings, "data.alpha": 0.1, "algorithm": f"{algorithm} + average"}
        return Cell(
            preset=PRESETS["cifar10"], settings=own, reading=f"{words}{reading}", baseline=baseline
        )

    readings = {
        "": ("pa3fed", ""),
        "-accuracy": ("pa3fed(score='accuracy')", "; Eq. 9: accuracy as the score"),
        "-small": ("pa3fed(change='small')", "; a small change counts more"),
    }
    return {f"{plain}-averaged": cell("fedavg")} | {
        f"{plain}-pa3fed{name}-averaged": cell(algorithm, reading, f"{plain}-averaged")
        for name, (algorithm, reading) in readings.items()
    }


ITEMS = (
    Item(
        paper="pa3fed",
        name="table2",
        title="Table 2: final test accuracy without and with PA3Fed",
        cells=TABLE2_CELLS,
        measures=("final", "last_tenth", "critical"),
        claim="PA3Fed raises accuracy by up to 15 points, most at h = 0.1.",
        note=f"{SCHEDULE_NOTE} ResNet-18 uses GroupNorm instead of BatchNorm and starts with a 3 × 3 convolution.",
    ),
    Item(
        paper="pa3fed",
        name="table1",
        title="Table 1 and Figure 1: stability of a client's loss",
        cells=_table1(),
        measures=tuple(TABLE1),
        note="The paper shows one client and says neither which one nor how the loss is measured; ours is the mean "
        "over the "
        "clients that took part more than five times, with a moving average over five participations. "
        + SCHEDULE_NOTE,
    ),
    Item(
        paper="pa3fed",
        name="figure3",
        title="Figure 3: the federated gradient norm and the critical period",
        cells={
            f"cifar10-{schedule}-fedavg-{name}": Cell(
                preset=PRESETS["cifar10"],
                settings={**settings, "algorithm": "fedavg", "run.detector": detector},
                reading=f"{reading}; {words}",
            )
            for schedule, (words, settings) in SCHEDULES.items()
            for name, reading, detector in (
                ("lr", "FGN with the learning rate (Eq. 4)", "fgn"),
                ("nolr", "FGN without the learning rate", "fgn(include_lr=False)"),
            )
        },
        measures=("critical", "critical_until", "final"),
        traces=("fgn", "critical"),
        claim="FGN first rises and then falls; the critical period is the rise.",
        note=SCHEDULE_NOTE,
    ),
    Item(
        paper="pa3fed",
        name="figure4",
        title="Figure 4: accuracy curves on CIFAR-10",
        cells={
            name: cell
            for name, cell in TABLE2_CELLS.items()
            if name.startswith("cifar10-")
            and not {"letter", "nolr", "convex", "rate"} & set(name.split("-"))
        },
        measures=("final", "rounds_to"),
        claim="With PA3Fed every method converges faster.",
        note=SCHEDULE_NOTE,
    ),
    Item(
        paper="pa3fed",
        name="figure5",
        title="Figure 5: standard deviation of the clients' losses inside and outside the critical period",
        cells=_figure5(),
        measures=("loss_critical", "loss_rest", "final"),
        claim="The deviation is lower with PA3Fed in both periods, and higher inside the critical one.",
        note="The paper shows all 50 clients; ours is the mean over those that took part at least twice in the period. "
        + SCHEDULE_NOTE,
    ),
    Item(
        paper="pa3fed",
        name="figure6",
        title="Figure 6: the impact of beta",
        cells=_figure6(),
        measures=("final", "last_tenth"),
        claim="The best beta is 0.3, and every beta above 0 beats the original method.",
        note=SCHEDULE_NOTE,
    ),
    Item(
        paper="pa3fed",
        name="figure7",
        title="Figure 7: no adaptation, adaptation always, adaptation in critical periods",
        cells=_figure7(),
        measures=("final", "last_tenth", "critical"),
        claim="Adaptation in critical periods alone is best.",
        note=SCHEDULE_NOTE,
    ),
    Item(
        paper="pa3fed",
        name="figure8",
        title="Figure 8: the impact of the non-IID degree",
        cells=_figure8(),
        measures=("final", "last_tenth"),
        claim="The gain grows as h decreases, and never vanishes.",
        note=f"The paper does not give the values of h; 0.5 and 1.0 are ours. {SCHEDULE_NOTE}",
    ),
    Item(
        paper="pa3fed",
        name="averaged",
        title="FedAvg with and without PA3Fed at the same bytes and epochs, with averaging of models as a control",
        cells=_averaged(),
        measures=("final", "plain_tenth", "epochs", "megabytes"),
        note="A comparison of our own, which the paper does not have.",
    ),
)
