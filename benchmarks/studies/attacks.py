"""Accuracy by rule and attack with 10, 20 and 30 % liars, on IID and on non-IID digits.

    python benchmarks/studies/attacks.py --out benchmarks/studies/attacks.json --picture docs/assets/attacks.svg

The runs of `lies.py`: digits over ten clients, all of them in every round, 25 rounds of one epoch;
mean test accuracy over the final three. Runs that the file already has are not repeated. `--seeds 3
--rules fedavg median --shares 0.3` trains more seeds of some: the tables and the picture are of the
seeds that all rules have.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from lies import CLIENTS, ROUNDS, Case, accuracy

from kairosfl.rules.attack import liars

RULES = {
    "fedavg": "fedavg",
    "limits": "limits",
    "normclipping": "normclipping",
    "centeredclipping": "centeredclipping",
    "geometricmedian": "geometricmedian",
    "median": "median",
    "trimmedmean": "trimmedmean(share=0.3)",
    "krum.multi": "krum(share=0.3, keep=0)",
    "bucketing + median": "bucketing + median",
    "nnm + median": "nnm(share=0.3) + median",
    "bucketing + geometricmedian": "bucketing + geometricmedian",
    "nnm + geometricmedian": "nnm(share=0.3) + geometricmedian",
}
LIES = ("none", "sign", "scaled", "random", "little", "inner", "labels")
SHARES = (0.1, 0.2, 0.3)
DATA = ("iid", "dirichlet")
Found = dict[str, float]


def train(rule: str, lie: str, share: float, data: str, seed: int, length: int) -> float:
    """One run."""
    if lie == "labels":
        lying = tuple(map(int, liars(seed, CLIENTS, share)))
        return accuracy(Case(rule, seed=seed, data=data, length=length, flipped=lying))
    text = rule if lie == "none" else f"attack(lie='{lie}', share={share}) + {rule}"
    return accuracy(Case(text, seed=seed, data=data, length=length))


def key(rule: str, lie: str, share: float, data: str, seed: int) -> str:
    return f"{data} {0.0 if lie == 'none' else share} {lie} {rule} {seed}"


def measure(found: Found, out: Path | None, chosen: argparse.Namespace) -> None:
    """What is missing, and FedAvg without a liar to compare with."""
    runs = [("none", "fedavg"), *itertools.product(LIES, chosen.rules)]
    cells = itertools.product(range(chosen.seeds), chosen.shares, chosen.data, runs)
    for seed, share, data, (lie, rule) in cells:
        name = key(rule, lie, share, data, seed)
        if name not in found:
            found[name] = train(RULES[rule], lie, share, data, seed, chosen.rounds)
            if out:
                out.write_text(json.dumps(found, indent=1) + "\n")


def seeds_of(
    found: Found, share: float, data: Iterable[str] = DATA, rules: Iterable[str] = RULES
) -> list[int]:
    """The seeds with every one of these runs."""
    known = [int(name.rpartition(" ")[2]) for name in found]
    cells = [*itertools.product(rules, LIES, data), *(("fedavg", "none", each) for each in data)]
    return [
        seed
        for seed in range(max(known, default=-1) + 1)
        if all(key(rule, lie, share, each, seed) in found for rule, lie, each in cells)
    ]


def mean(found: Found, rule: str, lie: str, share: float, data: str) -> float:
    seeds = seeds_of(found, share)
    return 100 * float(np.mean([found[key(rule, lie, share, data, seed)] for seed in seeds]))


def show(found: Found) -> None:
    """A table in Markdown for each partition and share, and what every rule loses at most."""
    complete = [share for share in SHARES if seeds_of(found, share)]
    for data, share in itertools.product(DATA, complete):
        count = len(seeds_of(found, share))
        print(
            f"\n{data}, {share:.0%} liars, seeds: {count}\n\n| rule | {' | '.join(LIES)} |\n|---|{'---|' * len(LIES)}"
        )
        for rule in RULES:
            values = (f"{mean(found, rule, lie, share, data):.1f}" for lie in LIES)
            print(f"| `{RULES[rule]}` | {' | '.join(values)} |")
    columns = [
        (data, share)
        for data in DATA
        for share in SHARES
        if any(seeds_of(found, share, [data], [r]) for r in RULES)
    ]
    print("\nMost points lost against FedAvg without a liar: the lie, and of how many seeds\n")
    print(
        f"| rule | {' | '.join(f'{data}, {share:.0%}' for data, share in columns)} |\n|---|{'---|' * len(columns)}"
    )
    for rule in (
        rule
        for rule in RULES
        if any(seeds_of(found, share, [data], [rule]) for data, share in columns)
    ):
        print(
            f"| `{RULES[rule]}` | {' | '.join(_worst(found, rule, data, share) for data, share in columns)} |"
        )


def _worst(found: Found, rule: str, data: str, share: float) -> str:
    seeds = seeds_of(found, share, [data], [rule])
    losses = [
        (
            found[key("fedavg", "none", share, data, seed)]
            - found[key(rule, lie, share, data, seed)],
            lie,
        )
        for seed in seeds
        for lie in LIES
    ]
    most, lie = max(losses, default=(np.nan, "–"))
    return f"{100 * most:.1f} ({lie}, {len(seeds)})"


def draw(found: Found, path: Path) -> None:
    """A matrix for each partition and share."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "attacks"  # the same numbers give the same file
    import matplotlib.pyplot as plt

    columns = [share for share in SHARES if seeds_of(found, share)]
    size = (3 + 3.5 * len(columns), 8)
    figure, grid = plt.subplots(
        2, len(columns), figsize=size, layout="constrained", sharex=True, sharey=True, squeeze=False
    )
    for axes, data in zip(grid, DATA, strict=True):
        for ax, share in zip(axes, columns, strict=True):
            matrix = np.array(
                [[mean(found, rule, lie, share, data) for lie in LIES] for rule in RULES]
            )
            image = ax.imshow(matrix, cmap="RdYlBu", vmin=0, vmax=100, aspect="auto")
            ax.set_title(
                f"{'IID' if data == 'iid' else 'Dir(0.1)'}, {share:.0%} liars", fontsize=10
            )
            ax.set_xticks(range(len(LIES)), LIES, rotation=40, ha="right", rotation_mode="anchor")
            ax.set_yticks(range(len(RULES)), RULES)
            for i, j in np.ndindex(matrix.shape):
                colour = (
                    "white" if abs(matrix[i, j] - 50) > 32 else "black"
                )  # both ends of the scale are dark
                ax.text(
                    j, i, f"{matrix[i, j]:.0f}", ha="center", va="center", fontsize=8, color=colour
                )
    figure.colorbar(image, ax=grid, shrink=0.6, label="test accuracy, %")
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="numbers are kept here after every run")
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument(
        "--rounds", type=int, default=ROUNDS, help="a file holds runs of one length"
    )
    parser.add_argument("--rules", nargs="*", choices=RULES, default=list(RULES))
    parser.add_argument("--shares", nargs="*", type=float, default=SHARES)
    parser.add_argument("--data", nargs="*", choices=DATA, default=DATA)
    parser.add_argument("--only-draw", action="store_true", help="measure nothing")
    chosen = parser.parse_args()
    found: Found = json.loads(chosen.out.read_text()) if chosen.out and chosen.out.exists() else {}
    if not chosen.only_draw:
        measure(found, chosen.out, chosen)
    show(found)
    if chosen.picture:
        draw(found, chosen.picture)


if __name__ == "__main__":
    main()
