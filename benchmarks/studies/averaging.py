"""How long a window of averaged models should be, and whether it is a share of the rounds or of the
learning rates.

    python benchmarks/studies/averaging.py --out benchmarks/studies/averaging.json --draw docs/assets/averaging.svg

FedAvg over 100 rounds under three schedules, on digits (40 clients by Dir(0.1), 2 local epochs) and
Fashion-MNIST (200 clients, one epoch), both with a small MLP. Every run's models are kept, so that
all windows are compared on the same training: test accuracy of the plain model, mean over the final
10 % of rounds, and of the average at the end. A window is chosen by the first half of the seeds and
judged by the second. Started again, it continues.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kairosfl import Batched
from kairosfl.rules.average import Average, opening

sys.path.insert(0, str(Path(__file__).parents[1]))
from setting import AVERAGING, begin

SEEDS = 4
COHORTS = (3, 8)
SCHEDULES: dict[str, dict[str, Any]] = {
    "constant": {},
    "× 0.97 a round": {"schedule": "exponential", "gamma": 0.97},
    "cosine": {"schedule": "cosine"},
}
KINDS = {"rounds": "of the rounds", "lr": "of the learning rates"}
TABLE = (0.05, 0.1, 0.2, 0.3)  # of these, the ones in the table
SHARES = (0.05, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5)
Scores = dict[str, dict[str, float]]  # of every seed, by window


def windows() -> list[tuple[str, float]]:
    """Every window: a share of what."""
    return list(product(KINDS, SHARES))


def scores(problem: str, schedule: str, cohort: int, seed: int) -> dict[str, float]:
    """The accuracy of every window after one run."""
    setting = AVERAGING[problem]
    engine = Batched(setting.task(seed))
    recipe = setting.recipe(cohort=cohort, **SCHEDULES[schedule])
    _, course = begin(engine, "fedavg", recipe, seed)
    xs = torch.stack([run.x.double() for run in course])

    def accuracy(x: torch.Tensor) -> float:
        return round(100 * engine.evaluate(x.float()).accuracy, 3)

    found = {"plain": float(np.mean([accuracy(x) for x in xs[-recipe.rounds // 10 :]]))}
    for of, share in windows():
        found[f"{of} {share}"] = accuracy(xs[opening(recipe, share, of) - 1 :].mean(0))
    return found


def gains(whole: Mapping[str, Scores], seeds: Sequence[int]) -> dict[str, float]:
    """Points that each window gains over the plain model, in the mean over all cells and these
    seeds.
    """
    return {
        name: float(
            np.mean(
                [
                    cell[str(seed)][name] - cell[str(seed)]["plain"]
                    for cell in whole.values()
                    for seed in seeds
                ]
            )
        )
        for name in (f"{of} {share}" for of, share in windows())
    }


def say(whole: Mapping[str, Scores], seeds: int) -> None:
    """A table in Markdown; what the first half of the seeds chooses and how the second judges it;
    lr against rounds.
    """
    names = ["plain", *(f"{of} {share}" for of, share in windows() if share in TABLE)]
    print(f"| | {' | '.join(names)} |\n{'|---' * (1 + len(names))}|")
    for key, cell in whole.items():
        means = [float(np.mean([each[name] for each in cell.values()])) for name in names]
        print(f"| {key} | {' | '.join(f'{mean:.1f}' for mean in means)} |")
    if seeds < 2:
        return
    first, second = range(seeds // 2), range(seeds // 2, seeds)
    chosen, judged = gains(whole, first), gains(whole, second)
    for of in KINDS:
        best = max(SHARES, key=lambda share: chosen[f"{of} {share}"])
        name = f"{of} {best}"
        words = f"{100 * best:g} % {KINDS[of]}, {chosen[name]:+.2f} points"
        print(f"seeds 0 to {seeds // 2 - 1} choose {words}; the others say {judged[name]:+.2f}")
    share = Average().share
    for problem in ("", *AVERAGING):
        decaying = {
            key: cell for key, cell in whole.items() if problem in key and "constant" not in key
        }
        found = [gains(decaying, [seed]) for seed in range(seeds)]
        apart = [each[f"lr {share}"] - each[f"rounds {share}"] for each in found]
        error = np.std(apart, ddof=1) / seeds**0.5
        words = f"{100 * share:g} % of lr against rounds, decaying schedules, {problem or 'both problems'}"
        print(f"{words}: {np.mean(apart):+.2f} ± {error:.2f}")


def draw(whole: Mapping[str, Scores], path: Path) -> None:
    """Points gained against the length of the window, with two standard errors over the seeds."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 5), layout="constrained")
    axes = figure.subplots(len(AVERAGING), len(SCHEDULES), sharex=True, sharey="row", squeeze=False)
    for (row, problem), (column, schedule) in product(enumerate(AVERAGING), enumerate(SCHEDULES)):
        ax = axes[row, column]
        ax.axhline(0, color="0.6", linewidth=0.8)
        for (of, words), colour in zip(KINDS.items(), ("tab:orange", "tab:blue"), strict=True):
            for cohort, style in zip(COHORTS, ("-", "--"), strict=True):
                cell = whole[f"{problem}, {schedule}, cohort {cohort}"].values()
                points = np.array(
                    [[each[f"{of} {share}"] - each["plain"] for share in SHARES] for each in cell]
                )
                error = 2 * points.std(0, ddof=1) / len(points) ** 0.5 if len(points) > 1 else None
                label = f"share {words}, cohort {cohort}"
                shares = [100 * share for share in SHARES]
                ax.errorbar(
                    shares,
                    points.mean(0),
                    error,
                    color=colour,
                    linestyle=style,
                    capsize=2,
                    label=label,
                )
        ax.set_title(f"{problem}, {schedule}", fontsize=9)
    for ax in axes[:, 0]:
        ax.set_ylabel("points gained")
    for ax in axes[-1]:
        ax.set_xlabel("length of the window, %")
    figure.legend(
        *axes[0, 0].get_legend_handles_labels(),
        loc="outside lower center",
        ncols=2,
        frameon=False,
        fontsize=8,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--out", type=Path, required=True, help="all numbers; those that are there are kept"
    )
    parser.add_argument("--draw", type=Path, help="write the picture here")
    parser.add_argument("--problem", choices=list(AVERAGING), action="append", help="default: all")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    chosen = parser.parse_args()
    torch.set_num_threads(1)
    whole: dict[str, Scores] = json.loads(chosen.out.read_text()) if chosen.out.is_file() else {}
    for seed in range(chosen.seeds):  # one seed everywhere before the second
        for problem, schedule, cohort in product(chosen.problem or AVERAGING, SCHEDULES, COHORTS):
            cell = whole.setdefault(f"{problem}, {schedule}, cohort {cohort}", {})
            if str(seed) not in cell:
                cell[str(seed)] = scores(problem, schedule, cohort, seed)
                chosen.out.write_text(json.dumps(whole, indent=1) + "\n")
    say(whole, chosen.seeds)
    if chosen.draw:
        draw(whole, chosen.draw)


if __name__ == "__main__":
    main()
