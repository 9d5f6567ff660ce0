"""The tables of docs/moment.md, from the results of the study.

python benchmarks/studies/moment_tables.py results/studies/moment.json docs/moment.md
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np

SETTINGS = {
    "cifar10-aware_cnn": "CIFAR-10, small CNN",
    "fashion_mnist-alexnet": "Fashion-MNIST, AlexNet",
    "cifar10-alexnet": "CIFAR-10, AlexNet",
    "cifar100-resnet18": "CIFAR-100, ResNet-18",
}
SCHEDULES = ("exponential", "cosine", "constant")
SPENT = {  # in the order of the rows of a budget
    "uniform": "evenly",
    "plan": "plan",
    "fedcl": "FedCL",
    "detector": "detector",
    "fedcl with a rest": "FedCL with a rest",
    "fedcl printed": "FedCL, printed",
    "fedcl printed detector": "FedCL, printed detector",
    "fedcl released": "FedCL, released",
    "momentum": "evenly, momentum",
    "smoothing momentum": "evenly, short-step momentum",
    "half the rounds, momentum": "half of the rounds, momentum",
    "a fifth of the rounds": "a fifth of the rounds",
    "a fifth of the rounds, momentum": "a fifth of the rounds, momentum",
    "fedcm": "evenly, FedCM",
    "fedaware": "evenly, FedAWARE",
}
BEGIN, END = (
    "<!-- tables: python benchmarks/studies/moment_tables.py -->\n",
    "<!-- end of the tables -->\n",
)


def cell(rows: list[dict[str, Any]], schedule: str, budget: float, spent: str, score: str) -> str:
    """Mean ± deviation over the seeds, in per cent; a dash if there is none."""
    keys = schedule, budget, spent
    values = [
        100 * each[score]
        for each in rows
        if (each["schedule"], each["budget"], each["spent"]) == keys
    ]
    deviation = f" ± {np.std(values, ddof=1):.1f}" if len(values) > 1 else ""
    return f"{np.mean(values):.1f}{deviation}" if values else "–"


def share(rows: list[dict[str, Any]], budget: float, spent: str) -> str:
    """The clients that were asked: FedCL with all of them does not spend all."""
    if budget < 1 or not spent.startswith("fedcl"):
        return f"{100 * budget:.0f} %"
    asked, whole = (
        np.mean(
            [each["megabytes"] for each in rows if (each["budget"], each["spent"]) == (1.0, how)]
        )
        for how in (spent, "uniform")
    )
    return f"{100 * asked / whole:.0f} %"


def table(rows: list[dict[str, Any]]) -> str:
    """One setting; a detector's plain model is a run of its own, which keeps clients for the end."""
    head = " | ".join(f"{schedule}, plain | averaged" for schedule in SCHEDULES)
    lines = [f"| clients | spent | {head} |", "|---|---|" + "---|---|" * len(SCHEDULES)]
    for budget in sorted({each["budget"] for each in rows}, reverse=True):
        for spent, words in SPENT.items():
            plain = "detector plain" if spent == "detector" else spent
            found = [
                cell(rows, schedule, budget, how, score)
                for schedule in SCHEDULES
                for how, score in ((plain, "plain"), (spent, "averaged"))
            ]
            if {*found} != {"–"}:
                lines.append(f"| {share(rows, budget, spent)} | {words} | {' | '.join(found)} |")
    return "\n".join(lines)


def tables(found: dict[str, list[dict[str, Any]]]) -> str:
    """All settings, with how many seeds they have."""
    parts = []
    for name, words in SETTINGS.items():
        several = any(each["seed"] for each in found[name])
        seeds = "three seeds where a deviation is given, otherwise one" if several else "one seed"
        parts.append(f"**{words}**, {seeds}\n\n{table(found[name])}\n")
    return "\n".join(parts)


def replaced(page: str, found: dict[str, list[dict[str, Any]]]) -> str:
    """The page with these tables."""
    before, rest = page.split(BEGIN)
    return f"{before}{BEGIN}\n{tables(found)}\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("results", type=Path)
    parser.add_argument("page", type=Path)
    chosen = parser.parse_args()
    page = chosen.page.read_text(encoding="utf-8")
    chosen.page.write_text(replaced(page, json.loads(chosen.results.read_text())), encoding="utf-8")
