"""The right moment: when clients are worth most, what averaging is worth, and what the detectors
see.

    KAIROSFL_DATA=... python benchmarks/studies/moment.py --out runs/moment --minutes 9 \
        --json results/studies/moment.json
    python benchmarks/studies/moment.py --show results/studies/moment.json --draw docs/assets/moment.svg \
        --curves docs/assets/moment-curves.svg
    KAIROSFL_DATA=... python benchmarks/studies/moment.py --detectors --out runs/seen \
        --json results/studies/detectors.json

The first trains budgets of 100, 40 and 20 % of the clients, spent uniformly, by a plan and by FedCL
with the paired detector, in two settings, or in another one with `--only`, and under two schedules;
every run is scored plain and averaged. One seed of these cells is done everywhere before the
second; then come budgets that follow the detector, FedCL with its papers' detectors and with a rest
for later rounds, momentum on the server, and other windows. The runs of a setting and a seed train
side by side, so they finish together. The second shows them, and draws accuracy against megabytes,
at the end and while training. The third trains plain averaging in FedAWARE's setting under three
schedules and says how much of each sixth of the rounds the paired detector and the printed Eq. 2
mark. Training stops after so many minutes and continues where it stopped when called again; the
JSON has all that is done, and keeps the runs that were not asked for this time: `--only`,
`--schedules`, `--budgets`, `--spent`, `--seeds` and `--missing` ask for a part. `--tiny` is a small
trial.
"""

from __future__ import annotations

import argparse
import json
import re
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np

from kairosfl.report.draw import picture_kind
from kairosfl.report.draw import save as write_figure
from kairosfl.runs.config import resolve
from kairosfl.runs.files import read_lines
from kairosfl.runs.keys import updated
from kairosfl.runs.sweep import Member, sweep

PLAN = "[10, 10, 10, 1, 1, 1, 1, 1, 1, 1, 1, 10]"  # 10 until a quarter, 1 until eleven twelfths, 10
RELEASED = "fedcl(cap=0.75, floor=1.0, once=True, every=2"
SETTINGS: dict[str, dict[str, Any]] = {
    "cifar10-aware_cnn": {
        "data": {
            "name": "cifar10",
            "clients": 100,
            "partition": "dirichlet",
            "alpha": 0.1,
            "minimum": 10,
        },
        "model": {"name": "aware_cnn"},
        "train": {"rounds": 240, "cohort": 10, "epochs": 3, "batch_size": 64, "lr": 0.05},
    },
    "fashion_mnist-alexnet": {
        "data": {"name": "fashion_mnist", "size": 32, "clients": 128, "alpha": 0.1, "minimum": 10},
        "model": {"name": "alexnet", "width": 128},
        "train": {
            "rounds": 120,
            "cohort": 16,
            "epochs": 2,
            "batch_size": 16,
            "lr": 0.01,
            "momentum": 0.9,
        }
        | {"weight_decay": 1e-5, "clip": 10.0},
    },
}
MORE = {  # with --only
    "cifar10-alexnet": {
        "data": {"name": "cifar10", "clients": 128, "alpha": 0.1, "minimum": 10},
        "model": {"name": "alexnet", "width": 128},
        "train": SETTINGS["fashion_mnist-alexnet"]["train"] | {"rounds": 240},
    },
    "cifar100-resnet18": {
        "data": {"name": "cifar100", "clients": 100, "alpha": 0.1, "minimum": 100},
        "model": {"name": "resnet18"},
        "train": {
            "rounds": 160,
            "cohort": 10,
            "epochs": 3,
            "batch_size": 64,
            "lr": 0.1,
            "weight_decay": 5e-4,
        },
    },
}
TINY = {
    "digits-mlp": {
        "data": {"name": "digits", "clients": 20, "alpha": 0.3},
        "model": {"name": "mlp"},
        "train": {"rounds": 12, "cohort": 5, "batch_size": 16, "lr": 0.1},
    }
}
SMALL = {
    "digits-mlp": {
        "data": {"name": "digits", "clients": 40, "alpha": 0.1},
        "model": {"name": "mlp"},
        "train": {"rounds": 120, "cohort": 6, "epochs": 2, "batch_size": 16, "lr": 0.1},
        "run": {"engine": "batched", "device": "cpu"},
    }
}
SCHEDULES: dict[str, dict[str, Any]] = {
    "exponential": {"train.schedule": "exponential", "train.gamma": 0.98},
    "cosine": {"train.schedule": "cosine"},
    "constant": {"train.schedule": "constant"},
}
# Budget, how it is spent, and the algorithm. First what the study is about, then what else it may
# say.
RANKED = [
    (1.0, "uniform", "average"),
    (0.4, "uniform", "budget(share=0.4) + average"),
    (0.2, "uniform", "budget(share=0.2) + average"),
    *(
        (share, "plan", f"budget(share={share}, plan={PLAN}) + average")
        for share in (0.4, 0.2, 1.0)
    ),
    *(
        (share, "fedcl", f"fedcl(cap=0.2, budget={share}, rest=0) + average")
        for share in (0.4, 0.2, 1.0)
    ),
]
FURTHER = [
    # Without averaging, the detector's budget keeps clients for the final rounds, so plain and
    # averaged are two runs.
    *(
        (share, "detector", f"budget(share={share}, by='detector') + average")
        for share in (0.4, 0.2)
    ),
    *((share, "detector plain", f"budget(share={share}, by='detector')") for share in (0.4, 0.2)),
    *(
        (s, "fedcl printed detector", f"fedcl(cap=0.2, budget={s}, rest=0) + average")
        for s in (0.4, 0.2, 0.6, 1.0)
    ),
    *(
        (share, "fedcl printed", f"fedcl(budget={share}, rest=0) + average")
        for share in (0.4, 0.2, 0.6, 1.0)
    ),
    *(
        (share, "fedcl released", f"{RELEASED}, budget={share}, rest=0) + average")
        for share in (0.4, 0.2, 0.6, 1.0)
    ),
    (1.0, "momentum", "fedavgm(beta=0.5) + average"),
    *(
        (share, "momentum", f"fedavgm(beta=0.5) + budget(share={share}) + average")
        for share in (0.4, 0.2)
    ),
    # Shorter steps, so that momentum averages the cohorts of several rounds instead of going
    # farther.
    *(
        (s, "smoothing momentum", f"fedavgm(beta=0.8, lr=0.3) + budget(share={s}) + average")
        for s in (0.4, 0.2)
    ),
    # Fewer rounds with more clients in each; the learning rates are those of all rounds, passed
    # more quickly.
    (0.2, "half the rounds, momentum", "fedavgm(beta=0.5) + budget(share=0.4) + average"),
    (0.2, "a fifth of the rounds", "average"),
    (0.2, "a fifth of the rounds, momentum", "fedavgm(beta=0.5) + average"),
    # Rules that remember other clients than those of the round; FedCM sends its momentum to the
    # clients as well.
    (0.2, "fedcm", "fedcm(alpha=0.1) + budget(share=0.2) + average"),
    (0.2, "fedaware", "fedaware + budget(share=0.2) + average"),
    *(
        (share, "fedcl with a rest", f"fedcl(cap=0.2, budget={share}) + average")
        for share in (0.4, 0.2)
    ),
    (1.0, "window of 15 % of rounds", "average(share=0.15, of='rounds')"),
    (1.0, "window of 5 % of lr", "average(share=0.05)"),
    (0.6, "uniform", "budget(share=0.6) + average"),
    (0.6, "plan", f"budget(share=0.6, plan={PLAN}) + average"),
    (0.6, "fedcl", "fedcl(cap=0.2, budget=0.6, rest=0) + average"),
    (0.6, "detector", "budget(share=0.6, by='detector') + average"),
]
ROUNDS = {
    "half the rounds, momentum": 2,
    "a fifth of the rounds": 5,
    "a fifth of the rounds, momentum": 5,
}  # divided
# Of the papers; the others' is paired.
DETECTORS = {
    "fedcl printed": "fgn",
    "fedcl printed detector": "fgn",
    "fedcl released": "fgn.released()",
}

Cells = list[tuple[float, str, str]]
Found = dict[str, list[dict[str, Any]]]  # rows by setting


class TimeIsUp(Exception):
    """Ends a sweep between two rounds; its runs are saved."""


def members(
    setting: dict[str, Any],
    seed: int,
    cells: Cells,
    schedules: list[str],
    precision: str,
    *,
    detectors: bool,
) -> list[Member]:
    """The runs of one setting and seed."""
    found = []
    for budget, spent, algorithm in cells:
        divisor = ROUNDS.get(spent, 1)
        rounds = setting["train"]["rounds"] // divisor
        for schedule in schedules:
            changes = {
                "seed": seed,
                "algorithm": algorithm,
                "train.rounds": rounds,
                **SCHEDULES[schedule],
            }
            if schedule == "exponential":
                changes["train.gamma"] **= divisor
            changes |= {
                "run.detector": DETECTORS.get(spent, "fgn.paired() + fgn"),
                "run.checkpoint_every": 60,
            }
            changes |= {"run.precision": precision} if precision else {}
            changes |= {"run.eval_every": rounds if detectors else max(1, rounds // 60)}
            if schedule == "constant":  # at a rate that the model can end with
                changes |= {"train.lr": setting["train"]["lr"] / 5}
            settings = {"budget": budget, "spent": spent, "schedule": schedule, "seed": seed}
            name = f"{schedule}-{budget}-{re.sub('[ %,]', '', spent)}"
            found.append(Member(name, settings, resolve(updated(setting, changes))))
    return found


def run(made: list[Member], out: Path, deadline: float) -> None:
    """Train them, or as much of them as there is time for."""

    def watch(name: str, done: int) -> Any:
        def listen(row: dict[str, Any]) -> None:
            if time.monotonic() > deadline:
                raise TimeIsUp

        return listen

    sweep(made, out, watch=watch, say=print)


def sixths(marks: list[bool]) -> list[float]:
    """The share of each sixth of the rounds that is marked."""
    return [
        round(float(np.mean(part)), 3) for part in np.array_split(np.array(marks, dtype=float), 6)
    ]


def row(member: Member, folder: Path) -> dict[str, Any] | None:
    """What a finished run says; None: it has not finished."""
    if not (folder / "summary.json").is_file():
        return None
    summary, lines = (
        json.loads((folder / "summary.json").read_text()),
        list(read_lines(folder / "metrics.jsonl")),
    )
    norms = np.array([line["fgn"] for line in lines], dtype=float)
    printed = [True, *(norms[1:] - norms[:-1] >= 0.01 * norms[:-1]).tolist()]
    sent = np.cumsum([line["bytes_down"] + line["bytes_up"] for line in lines]) / 1e6
    curve = [
        [
            line["round"],
            round(float(mb), 2),
            line["accuracy"],
            line.get("plain_accuracy", line["accuracy"]),
        ]
        for line, mb in zip(lines, sent, strict=True)
        if line["accuracy"] is not None
    ]
    return {
        **member.settings,
        "commit": json.loads((folder / "run.json").read_text())["git"],
        "averaged": curve[-1][
            2
        ],  # not a mean over rounds, of which some may lie before the window opens
        "plain": summary.get("plain_last_tenth_accuracy", summary["last_tenth_accuracy"]),
        "clients": sum(line["cohort"] for line in lines),
        "megabytes": round(float(sent[-1]), 2),
        "paired": sixths([line["critical"] for line in lines]),
        "printed": sixths(printed),
        "detector": summary["detector"],
        "curve": curve,
    }


def show(found: Found, *, detectors: bool) -> None:
    """Means over the seeds that are done."""
    for setting, rows in found.items():
        keys = dict.fromkeys((each["schedule"], each["budget"], each["spent"]) for each in rows)
        for schedule, budget, spent in keys:
            same = [
                r
                for r in rows
                if (r["schedule"], r["budget"], r["spent"]) == (schedule, budget, spent)
            ]
            head = f"{setting}, {schedule}, {100 * budget:g} % {spent} ({len(same)} seeds)"
            if detectors:
                for kind in ("paired", "printed"):
                    shares = np.mean([each[kind] for each in same], 0)
                    print(
                        f"{head}: {kind} marks "
                        + " ".join(f"{100 * share:.0f}" for share in shares)
                        + " %"
                    )
                print(f"{head}: " + "; ".join(each["detector"] for each in same))
                continue
            plain, averaged = (
                _spread([100 * each[name] for each in same]) for name in ("plain", "averaged")
            )
            megabytes = np.mean([each["megabytes"] for each in same])
            print(f"{head}: plain {plain}, averaged {averaged}, {megabytes:.0f} MB")


def _spread(values: list[float]) -> str:
    """Mean ± deviation."""
    deviation = f" ± {np.std(values, ddof=1):.2f}" if len(values) > 1 else ""
    return f"{np.mean(values):.2f}{deviation}"


COLOURS = {
    "uniform": "C0",
    "plan": "C1",
    "fedcl": "C2",
    "detector": "C3",
    "momentum": "C4",
    "smoothing momentum": "C5",
}
LABELS = {"uniform": "evenly", "fedcl": "FedCL", "smoothing momentum": "short-step momentum"}


def panels(found: Found) -> tuple[Any, Iterator[tuple[Any, str, str]]]:
    """A figure with axes for every setting and schedule."""
    from matplotlib.figure import Figure

    schedules = list(dict.fromkeys(each["schedule"] for rows in found.values() for each in rows))
    figure = Figure(figsize=(3.1 * len(schedules), 2.5 * len(found)), layout="constrained")
    axes = figure.subplots(len(found), len(schedules), squeeze=False)

    def each() -> Iterator[tuple[Any, str, str]]:
        for ax, (name, schedule) in zip(axes.flat, product(found, schedules), strict=True):
            ax.set_title(f"{name.replace('-', ', ')}, {schedule}", fontsize=9)
            ax.set_ylabel("test accuracy, %")
            yield ax, name, schedule

    return figure, each()


def save(figure: Any, path: Path, **legend: Any) -> None:
    """With one legend above all."""
    drawn = {
        label: line
        for ax in figure.axes
        for line, label in zip(*ax.get_legend_handles_labels(), strict=True)
    }
    figure.legend(
        drawn.values(),
        drawn,
        loc="outside upper center",
        ncols=6,
        frameon=False,
        fontsize=8,
        **legend,
    )
    write_figure(figure, path, picture_kind(path))


def draw(found: Found, path: Path) -> None:
    """Final accuracy against megabytes, mean over the seeds: filled with averaged models, hollow
    without.
    """
    figure, all_axes = panels(found)
    for ax, name, schedule in all_axes:
        for spent, colour in COLOURS.items():
            mine = [
                each
                for each in found[name]
                if (each["spent"], each["schedule"]) == (spent, schedule)
            ]
            for score, face in (("averaged", colour), ("plain", "none")):
                points = []
                for budget in sorted({each["budget"] for each in mine}):
                    same = [each for each in mine if each["budget"] == budget]
                    points.append(
                        [np.mean([each[key] for each in same]) for key in ("megabytes", score)]
                    )
                if not points or (
                    spent == "detector" and score == "plain"
                ):  # it saves nothing for the end
                    continue
                x, y = np.array(points).T
                label = LABELS.get(spent, spent) if score == "averaged" else None
                style = "-" if score == "averaged" else ":"
                ax.plot(
                    x, 100 * y, style, marker="o", color=colour, markerfacecolor=face, label=label
                )
        even = {
            each["megabytes"]: each["budget"] for each in found[name] if each["spent"] == "uniform"
        }
        ax.set_xlabel("bytes, as a share of FedAvg's")
        ax.set_xscale("log")
        ax.minorticks_off()
        ticks = [
            f"{100 * share:.0f} %\n{size / 1000:.{int(size < 1e4)}f} GB"
            for size, share in even.items()
        ]
        ax.set_xticks(list(even), ticks)
    save(figure, path, title="filled: models averaged", title_fontsize=8)


CURVES = (  # budget, how it is spent, column of the curve, label
    (1.0, "uniform", 3, "FedAvg"),
    (1.0, "uniform", 2, "FedAvg, averaged"),
    (0.4, "momentum", 2, "40 %, momentum, averaged"),
    (0.2, "smoothing momentum", 2, "20 %, short-step momentum, averaged"),
)


def draw_curves(found: Found, path: Path) -> None:
    """Accuracy against bytes while training, mean over the seeds."""
    figure, all_axes = panels(found)
    for ax, name, schedule in all_axes:
        for budget, spent, column, label in CURVES:
            keys = schedule, budget, spent
            same = [
                each["curve"]
                for each in found[name]
                if (each["schedule"], each["budget"], each["spent"]) == keys
            ]
            if same:
                mean, style = np.mean(same, 0), ":" if column == 3 else "-"
                ax.plot(
                    mean[:, 1] / 1000,
                    100 * mean[:, column],
                    style,
                    label=label,
                    color=COLOURS[spent],
                    linewidth=1.2,
                )
        ax.set_xlabel("GB sent and received")
    save(figure, path)


def lines_of(found: Found) -> str:
    """As JSON, a line for each run; curves only of those that `draw_curves` shows, as they are most
    of the file.
    """
    drawn = {(budget, spent) for budget, spent, *_ in CURVES}

    def line(run: dict[str, Any]) -> str:
        shown = (run["budget"], run["spent"]) in drawn
        return json.dumps({name: value for name, value in run.items() if shown or name != "curve"})

    settings = (
        f" {json.dumps(name)}: [\n  " + ",\n  ".join(map(line, rows)) + "\n ]"
        for name, rows in found.items()
    )
    return "{\n" + ",\n".join(settings) + "\n}\n"


def key(settings: dict[str, Any]) -> tuple[Any, ...]:
    """What tells the runs of a setting apart."""
    return tuple(settings[name] for name in ("seed", "schedule", "budget", "spent"))


def read(path: Path | None) -> Found:
    """The runs in this file, if there is one."""
    found: Found = json.loads(path.read_text()) if path and path.is_file() else {}
    return found


def merged(kept: Found, new: Found) -> Found:
    """All runs, the new ones in place of kept ones with the same setting and `key`."""
    both = {}
    for name in {**kept, **new}:
        rows = {key(each): each for each in (*kept.get(name, ()), *new.get(name, ()))}
        if rows:
            both[name] = list(rows.values())
    return both


def trained(chosen: argparse.Namespace) -> Found:
    """Train what there is time for; the finished runs of all settings asked for."""
    deadline = time.monotonic() + 60 * chosen.minutes
    settings = (SMALL if chosen.detectors else TINY) if chosen.tiny else SETTINGS
    if chosen.detectors and not chosen.tiny:
        settings = {"cifar10-aware_cnn": SETTINGS["cifar10-aware_cnn"]}
    if chosen.only:
        settings = {chosen.only: (settings | MORE)[chosen.only]}
    stages = (
        {"": [(1.0, "uniform", "fedavg")]}
        if chosen.detectors
        else {"": RANKED, "-further": FURTHER}
    )
    schedules = chosen.schedules or (
        list(SCHEDULES) if chosen.detectors else ["exponential", "cosine"]
    )
    kept = read(chosen.json) if chosen.missing else {}
    groups = []
    for suffix, cells in stages.items():
        asked = [cell for cell in cells if not chosen.budgets or cell[0] in chosen.budgets]
        asked = [cell for cell in asked if not chosen.spent or cell[1] in chosen.spent]
        for seed in range(*chosen.seeds):
            for name, setting in settings.items():
                made = members(
                    setting, seed, asked, schedules, chosen.precision, detectors=chosen.detectors
                )
                done = {key(each) for each in kept.get(name, ())}
                made = [member for member in made if key(member.settings) not in done]
                if made:
                    groups.append((name, made, chosen.out / name / f"seed{seed}{suffix}"))
    try:
        for _, made, folder in groups:
            run(made, folder, deadline)
    except TimeIsUp:
        print("time is up; call again to continue")
    found: Found = {}
    for name, made, folder in groups:
        rows = [row(member, folder / member.name) for member in made]
        found.setdefault(name, []).extend(each for each in rows if each)
    print(
        f"{sum(map(len, found.values()))} of {sum(len(made) for _, made, _ in groups)} runs are done"
    )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=Path("runs/moment"))
    parser.add_argument("--json", type=Path, help="write the results of all finished runs here")
    parser.add_argument("--draw", type=Path, help="draw accuracy against megabytes here")
    parser.add_argument("--curves", type=Path, help="draw accuracy while training here")
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument(
        "--seeds",
        type=int,
        nargs="+",
        default=[3],
        help="how many, or the first and the one after the last",
    )
    parser.add_argument("--schedules", nargs="+", choices=SCHEDULES)
    parser.add_argument(
        "--budgets", type=float, nargs="+", help="shares of the clients, such as 0.6"
    )
    parser.add_argument(
        "--spent", nargs="+", choices=[cell[1] for cell in (*RANKED, *FURTHER)], metavar="HOW"
    )
    parser.add_argument(
        "--missing", action="store_true", help="leave out the runs that are in the JSON file"
    )
    parser.add_argument("--precision", default="", help="tf32 by default on a GPU")
    parser.add_argument(
        "--detectors", action="store_true", help="plain averaging: what the detectors mark"
    )
    parser.add_argument("--only", choices=[*SETTINGS, *MORE], help="one setting")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument(
        "--show", type=Path, help="train nothing; print and draw what is in this JSON file"
    )
    chosen = parser.parse_args()
    found = json.loads(chosen.show.read_text()) if chosen.show else trained(chosen)
    show(found, detectors=chosen.detectors)
    if chosen.json:
        found = merged(read(chosen.json), found)
        chosen.json.parent.mkdir(parents=True, exist_ok=True)
        chosen.json.write_text(lines_of(found))
    if any(found.values()):
        for path, drawing in ((chosen.draw, draw), (chosen.curves, draw_curves)):
            if path:
                drawing(found, path)


if __name__ == "__main__":
    main()
