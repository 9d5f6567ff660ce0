"""FedAWARE: Zeng et al., "On the Power of Adaptive Weighted Aggregation in Heterogeneous FL",
AISTATS 2025.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kairosfl_reproductions.item import TEXT, Cell, Item

PRESETS = {
    "cifar10": "fedaware-cifar10-cnn",
    "cifar100": "fedaware-cifar100-resnet18",
    "agnews": "fedaware-agnews-pythia",
}

# Appendix B.1 gives grids, not choices: beta, mu, alpha and lr are from the released scripts,
# FedCM's from its authors. FedAWARE's own alpha is 0.5, also in the paper, but 0.99 in the scripts
# for AG News ×AWARE.
BASES = {
    "fedavg": "fedavg",
    "fedavgm": "fedavgm(beta=0.7)",
    "fedcm": "fedcm(alpha=0.1)",
    "feddyn": "feddyn(alpha=0.01)",
    "fedprox": "fedprox(mu=0.01)",
    "fedyogi": "fedyogi(lr={lr}, tau=1e-4)",
    "fedams": "fedams(lr={lr}, eps=1e-8)",
}
SERVER_LR = {"cifar10": 0.01, "cifar100": 0.01, "agnews": 0.001}
PROJECTED_ALPHA = {"agnews": ("alpha=0.99",)}

# Table 2: accuracy and e-LUDD, raw and ×AWARE; None where the paper gives no value.
Pair = tuple[float, float | None]
TABLE2: dict[str, dict[str, tuple[Pair, Pair | None]]] = {
    "cifar10": {
        "fedavg": ((42.78, 2.58), (49.25, 3.08)),
        "fedavgm": ((50.07, 2.17), (59.58, 2.92)),
        "fedcm": ((47.84, 2.99), (49.13, 3.09)),
        "feddyn": ((54.87, None), None),
        "fedprox": ((46.33, 2.81), (49.40, 2.87)),
        "fedyogi": ((54.62, 2.47), (54.92, 2.66)),
        "fedams": ((57.09, 2.46), (58.45, 2.67)),
        "fedaware": ((59.78, 2.90), None),
    },
    "cifar100": {
        "fedavg": ((28.69, 2.94), (32.72, 3.61)),
        "fedavgm": ((31.04, 2.72), (40.66, 3.37)),
        "fedcm": ((30.62, 2.94), (33.09, 3.63)),
        "feddyn": ((39.04, None), None),
        "fedprox": ((27.20, 2.95), (32.68, 3.62)),
        "fedyogi": ((37.12, 2.61), (44.02, 3.27)),
        "fedams": ((38.19, 2.42), (45.20, 3.13)),
        "fedaware": ((38.77, 2.75), None),
    },
    "agnews": {
        "fedavg": ((79.27, 1.25), (80.21, 1.98)),
        "fedavgm": ((81.85, 1.38), (83.15, 1.85)),
        "fedcm": ((80.79, 1.26), (80.24, 1.76)),
        "feddyn": ((84.47, None), None),
        "fedprox": ((76.81, 1.15), (80.13, 1.83)),
        "fedyogi": ((83.15, 1.43), (85.89, 2.01)),
        "fedams": ((83.33, 1.34), (86.08, 1.92)),
        "fedaware": ((87.70, 1.73), None),
    },
}

UNIT, RAW = "unit vectors (released code)", "raw vectors (Eq. 2 as written)"
RIDGES = (0.01, 0.1, 1.0)
RELEASED = "explore=True, solver='frank_wolfe'"
RELEASED_BASES = ("fedavg", "fedavgm", "fedyogi", "fedams")  # those that the released code projects
EMPTY: Mapping[str, Any] = {}
RELEASED_DATA: Mapping[str, Any] = {"data.balance": True, "data.partition_seed": 2023}
STORED_DATA: Mapping[str, Any] = {**RELEASED_DATA, "data.fedlab": True}
REDRAWN_DATA: Mapping[str, Any] = {
    "data.balance": True
}  # and a partition of its own for every seed
SOLVER_READING = "released code: visits every client first, its solver"
PARTITION_READING = "released code: its partition"
EQUAL_READING = f"{PARTITION_READING}, equal weights"
RELEASED_READING = f"{SOLVER_READING}, its partition"
SWAPPED = "attack(lie='swapped', share=1.0)"


def _printed(pair: Pair | None) -> dict[str, float]:
    return {
        name: value
        for name, value in zip(("last_tenth", "elud"), pair or (), strict=False)
        if value is not None
    }


def _projected(base: str, *options: str) -> str:
    """A base method ×AWARE."""
    return f"{BASES[base]} + fedaware({', '.join(('project=True', *options))})"


def _table2(data: str) -> dict[str, Cell]:
    cells: dict[str, Cell] = {}

    def cell(
        name: str,
        algorithm: str,
        pair: Pair | None,
        reading: str,
        baseline: str = "",
        settings: Mapping[str, Any] = EMPTY,
    ) -> None:
        cells[f"{data}-{name}"] = Cell(
            preset=PRESETS[data],
            settings={"algorithm": algorithm.format(lr=SERVER_LR[data]), **settings},
            printed=_printed(pair),
            reading=reading,
            baseline=baseline and f"{data}-{baseline}",
            comparable=data != "agnews",
        )

    own = PROJECTED_ALPHA.get(data, ())
    average, alone = TABLE2[data]["fedavg"][0], TABLE2[data]["fedaware"][0]
    cell("fedavg", "fedavg", average, TEXT)
    cell("fedaware", "fedaware", alone, UNIT, "fedavg")
    cell("fedaware-raw", "fedaware(normalise=False)", alone, RAW, "fedavg")
    for base, algorithm in BASES.items():
        raw, aware = TABLE2[data][base]
        if base != "fedavg":
            cell(base, algorithm, raw, TEXT)
        if aware is not None:
            cell(f"{base}-aware", _projected(base, *own), aware, UNIT, base)
    for base in BASES:
        aware = TABLE2[data][base][1]
        if aware is not None:
            cell(f"{base}-aware-raw", _projected(base, "normalise=False", *own), aware, RAW, base)
    cell("fedaware-solver", f"fedaware({RELEASED})", alone, SOLVER_READING, "fedavg")
    for base in RELEASED_BASES:
        aware = TABLE2[data][base][1]
        if aware is not None:
            cell(
                f"{base}-aware-solver",
                _projected(base, RELEASED, *own),
                aware,
                SOLVER_READING,
                base,
            )
    # Where clients are mixed up, FedAWARE's first steps are 2.7 times as long.
    longer = f"fedaware({RELEASED}, lr=2.5)"
    cell(
        "fedaware-longer",
        longer,
        alone,
        f"{RELEASED_READING}, lr = 2.5",
        "fedavg-released",
        RELEASED_DATA,
    )
    equal = f"{BASES['fedprox']} + uniform"  # so that mixing clients up makes no difference
    cell(
        "fedprox-released", equal, TABLE2[data]["fedprox"][0], EQUAL_READING, settings=RELEASED_DATA
    )
    ways = [
        ("released", "", "", RELEASED_DATA),
        ("swapped", f"{SWAPPED} + ", ", mixes up clients", RELEASED_DATA),
    ]
    if (
        data == "cifar10"
    ):  # whose images alone the released code crops, and whose partition it draws without a seed
        ways.append(
            ("stored", f"{SWAPPED} + ", ", mixes up clients, crops each image once", STORED_DATA)
        )
        ways.append(
            (
                "redrawn",
                f"{SWAPPED} + ",
                ", mixes up clients, a partition for each seed",
                REDRAWN_DATA,
            )
        )
        # as its script has it
        shorter = f"{SWAPPED} + fedams(lr=0.005, eps=1e-8) + fedaware(project=True, {RELEASED})"
        reading = f"{RELEASED_READING}, mixes up clients, lr = 0.005"
        cell(
            "fedams-aware-shorter",
            shorter,
            TABLE2[data]["fedams"][1],
            reading,
            "fedams-swapped",
            RELEASED_DATA,
        )
        reading = f"{EQUAL_READING}, crops each image once"
        cell("fedprox-stored", equal, TABLE2[data]["fedprox"][0], reading, settings=STORED_DATA)
    for suffix, before, more, settings in ways:
        plain, whole = f"{PARTITION_READING}{more}", f"{RELEASED_READING}{more}"
        cell(f"fedavg-{suffix}", f"{before}fedavg", average, plain, settings=settings)
        cell(
            f"fedaware-{suffix}",
            f"{before}fedaware({RELEASED})",
            alone,
            whole,
            f"fedavg-{suffix}",
            settings,
        )
        for base in RELEASED_BASES:
            raw, aware = TABLE2[data][base]
            if base != "fedavg":
                cell(f"{base}-{suffix}", f"{before}{BASES[base]}", raw, plain, settings=settings)
            if aware is not None:
                algorithm = f"{before}{_projected(base, RELEASED, *own)}"
                cell(
                    f"{base}-aware-{suffix}", algorithm, aware, whole, f"{base}-{suffix}", settings
                )
    return cells


def _solver() -> dict[str, Cell]:
    """FedAvgM×AWARE with each deviation of the released code, one at a time, and with λ drawn
    towards uniform.
    """
    visit, solver = RELEASED.split(", ")
    readings = {
        "exact": ("exact solver", []),
        "visit": ("exact solver, visits every client first", [visit]),
        "wolfe": ("released solver", [solver]),
        "both": ("released solver, visits every client first", [visit, solver]),
        **{
            f"ridge{ridge}": (f"exact solver, ridge {ridge} towards uniform", [f"ridge={ridge}"])
            for ridge in RIDGES
        },
    }
    return {
        f"cifar10-fedavgm-aware-{name}": Cell(
            preset=PRESETS["cifar10"],
            settings={"algorithm": _projected("fedavgm", *options)},
            reading=reading,
            baseline="" if name == "exact" else "cifar10-fedavgm-aware-exact",
        )
        for name, (reading, options) in readings.items()
    }


def _scratch() -> dict[str, Cell]:
    """FedAvg with and without AWARE on AG News, at the learning rate for published weights and at a
    larger one.
    """
    (option,) = PROJECTED_ALPHA["agnews"]
    return {
        f"agnews-lr{lr:g}-{name}": Cell(
            preset=PRESETS["agnews"],
            settings={"algorithm": algorithm, "train.lr": lr, "train.rounds": 60},
            reading="the paper's learning rate" if lr == 1e-4 else "a larger learning rate",
            baseline="" if name == "fedavg" else f"agnews-lr{lr:g}-fedavg",
        )
        for lr in (1e-4, 3e-2)
        for name, algorithm in (
            ("fedavg", "fedavg"),
            ("fedavg-aware", _projected("fedavg", option)),
        )
    }


def _grid() -> dict[str, Cell]:
    """The grids of Appendix B.1 on CIFAR-10."""
    rules = {
        "fedavgm": [f"fedavgm(beta={value})" for value in (0.7, 0.9, 0.97, 0.997)],
        "fedcm": [f"fedcm(alpha={value})" for value in (0.1, 0.3, 0.5, 0.7, 0.9)],
        "fedprox": [f"fedprox(mu={value})" for value in (0.01, 0.1, 1.0, 10.0)],
        "feddyn": [f"feddyn(alpha={value})" for value in (0.1, 0.01, 0.001)],
        "fedyogi": [
            f"fedyogi(lr={10**power:.4g}, tau=1e-4)"
            for power in (-3, -2.5, -2, -1.5, -1, -0.5, 0, 0.5, 1)
        ],
        "fedams": [
            f"fedams(lr={lr}, eps={eps})"
            for lr in (1.0, 0.1, 0.01, 0.001, 0.0001)
            for eps in (1e-8, 1e-4, 1e-3, 1e-2, 1e-1)
        ],
    }
    return {
        f"cifar10-{base}-{number}": Cell(
            preset=PRESETS["cifar10"], settings={"algorithm": rule}, reading=rule
        )
        for base, grid in rules.items()
        for number, rule in enumerate(grid, 1)
    }


def _figure4(data: str) -> dict[str, Cell]:
    preset = PRESETS[data]
    cells = {
        f"{data}-fedavg-full": Cell(
            preset=preset, settings={"algorithm": "fedavg", "train.cohort": 100}
        ),
        f"{data}-fedavg": Cell(preset=preset, settings={"algorithm": "fedavg"}),
    }
    for alpha in (0.1, 0.3, 0.5, 0.7, 0.9):
        cells[f"{data}-na-alpha{alpha}"] = Cell(
            preset=preset,
            settings={"algorithm": f"fedaware(alpha={alpha}, adaptive=False, normalise=False)"},
        )
        for suffix, reading, option in (("", UNIT, ""), ("-raw", RAW, ", normalise=False")):
            cells[f"{data}-alpha{alpha}{suffix}"] = Cell(
                preset=preset,
                settings={"algorithm": f"fedaware(alpha={alpha}{option})"},
                reading=reading,
                baseline=f"{data}-na-alpha{alpha}",
            )
    return cells


def _fedavg(degrees: tuple[float, ...], **more: Any) -> dict[str, Cell]:
    return {
        f"cifar10-dir{degree:g}": Cell(
            preset=PRESETS["cifar10"],
            settings={"algorithm": "fedavg", "data.alpha": degree, **more},
        )
        for degree in degrees
    }


TABLE2_CELLS = {name: cell for data in PRESETS for name, cell in _table2(data).items()}
PYTHIA = (
    "AG News: the paper fine-tunes published Pythia-70M weights. Here the model is trained from scratch unless "
    "`--set model.checkpoint=...` names them, so the values are not compared."
)

ITEMS = (
    Item(
        paper="fedaware",
        name="table2",
        title="Table 2: accuracy over the final 10 % of rounds and e-LUDD, raw and ×AWARE",
        cells=TABLE2_CELLS,
        measures=("last_tenth", "elud", "final"),
        claim="×AWARE raises e-LUDD for every method and accuracy for nearly every one.",
        note="Hyper-parameters are those of the released scripts, and FedCM's those of its authors, because the paper "
        "gives only grids (item `grid`). The released FedDyn adds no gradient on the clients, which is not copied "
        "here. The released server trains clients in the order of their ids, but takes their updates in the order in "
        "which they were drawn, so that weights and averages belong to other clients of the round (`swapped`). It also "
        "crops and mirrors each image of CIFAR-10 once, when it stores the clients' data (`stored`, `data.fedlab`), "
        "and draws the partition without a seed, so that it cannot be drawn again (`redrawn`: another for each seed). "
        "One of its scripts of FedAMS ×AWARE has half the step (`shorter`), and random epochs and batch sizes, which "
        "are not copied. "
        f"{PYTHIA}",
    ),
    Item(
        paper="fedaware",
        name="solver",
        title="Not in the paper: the deviations of the released code from the text, one at a time",
        cells=_solver(),
        measures=("last_tenth", "elud"),
        note="FedAvgM×AWARE, for which Table 2 reports 59.58 and 2.92. The released Frank-Wolfe solver stops when its "
        "weights hardly move; the exact solver continues to the optimum. `ridge` adds a multiple of ‖λ − uniform‖² to "
        "its objective, to see whether that is what stopping early does.",
    ),
    Item(
        paper="fedaware",
        name="agnews",
        title="AG News from scratch, with the paper's learning rate and a larger one, 60 rounds",
        cells=_scratch(),
        measures=("last_tenth", "elud", "train_loss"),
        seeds=1,
        note="The paper fine-tunes published Pythia-70M weights with lr = 0.0001; here the same model starts from "
        "scratch, with words hashed to 8,192 ids, so nothing is compared with Table 2.",
    ),
    Item(
        paper="fedaware",
        name="grid",
        title="Appendix B.1: hyper-parameter grids on CIFAR-10",
        cells=_grid(),
        measures=("last_tenth", "elud"),
        seeds=1,
        note="The paper does not say which grid points its table shows.",
    ),
    Item(
        paper="fedaware",
        name="figure1",
        title="Figure 1: training dynamics of FedAvg at different heterogeneity",
        cells=_fedavg((0.1, 0.3, 0.5)),
        measures=("last_tenth", "elud", "consensus", "train_loss"),
        traces=("elud", "consensus", "train_loss"),
        claim="e-LUD grows during training, higher when heterogeneity is low; the norm of the mean update decays.",
        note="Of the concentrations, the paper only gives 0.1.",
    ),
    Item(
        paper="fedaware",
        name="figure2",
        title="Figure 2: training dynamics of the raw algorithms",
        cells={
            f"{data}-{name}": TABLE2_CELLS[f"{data}-{name}"]
            for data in PRESETS
            for name in (*TABLE2[data], "fedaware-raw", "fedaware-solver")
        },
        measures=("last_tenth", "elud", "consensus", "train_loss", "rounds_to"),
        traces=("train_loss", "elud"),
        claim="On CIFAR-10 and AG News FedAWARE converges faster than most methods, even FedYogi and FedAMS.",
        note=PYTHIA,
    ),
    Item(
        paper="fedaware",
        name="figure3",
        title="Figure 3 (and 8): training dynamics with ×AWARE",
        cells={
            name: TABLE2_CELLS[name]
            for data in ("cifar100", "cifar10", "agnews")
            for base in ("fedavgm", "fedyogi", "fedams")
            for name in (
                f"{data}-{base}",
                *(f"{data}-{base}-aware{way}" for way in ("", "-raw", "-solver")),
            )
        },
        measures=("last_tenth", "elud", "rounds_to", "train_loss"),
        traces=("train_loss", "elud"),
        claim="×AWARE may slow convergence slightly, but ends higher and more stable.",
        note=PYTHIA,
    ),
    Item(
        paper="fedaware",
        name="figure4",
        title="Figure 4: alpha, without adaptive aggregation (NA), and full participation",
        cells={name: cell for data in PRESETS for name, cell in _figure4(data).items()},
        measures=("last_tenth", "elud"),
        claim="FedAWARE is better than FedAWARE-NA at every alpha, with a higher e-LUDD.",
        note="A mean of unit vectors would be a different method, so NA uses raw vectors, and `raw` differs from it "
        f"only in the weights. {PYTHIA}",
    ),
    Item(
        paper="fedaware",
        name="figure6",
        title="Figure 6: client coherence, diversity and cosines with 20 clients",
        cells={
            f"{name}-20": Cell(
                preset=PRESETS["cifar10"],
                settings={
                    "algorithm": "fedavg",
                    "data.clients": 20,
                    "train.cohort": 20,
                    "train.rounds": 150,
                    "run.cosines": [3, 60, 150],
                    **settings,
                },
                reading=words,
            )
            for name, words, settings in (
                (
                    "cifar10-mixed",
                    "the first ten clients balanced, the others not",
                    {"data.partition": "mixed"},
                ),
                ("cifar10-dir0.1", "all 20 clients unbalanced", {}),
                ("cifar10-iid", "all 20 clients balanced", {"data.partition": "iid"}),
            )
        },
        measures=("coherence", "elud", "last_tenth"),
        traces=("coherence", "elud"),
        claim="Local updates become less similar in later rounds.",
        note="The cosine matrices of rounds 3, 60 and 150 are shown by `kairosfl report`. The paper does not say how "
        "unbalanced the second ten clients are; here alpha = 0.1. `dir0.1` and `iid` have clients of one kind, for "
        "comparison.",
    ),
    Item(
        paper="fedaware",
        name="figure7",
        title="Figure 7: IID and non-IID settings",
        cells=_fedavg((0.1, 0.5, 1.0, 10.0)),
        measures=("elud", "consensus", "coherence", "last_tenth"),
        traces=("elud", "consensus"),
        claim="In the IID settings, Dir(1) and Dir(10), the norm of the mean update is lower and e-LUD higher.",
    ),
)
