"""The tables of docs/moment.md are those of the study's results."""

from __future__ import annotations

import json
from pathlib import Path

from moment_tables import BEGIN, END, cell, replaced, share, table

ROOT = Path(__file__).parents[2]


def run(
    schedule: str, budget: float, spent: str, plain: float, averaged: float, **more: float
) -> dict[str, object]:
    return {
        "schedule": schedule,
        "budget": budget,
        "spent": spent,
        "plain": plain,
        "averaged": averaged,
        **more,
    }


ROWS = [
    run("exponential", 1.0, "uniform", 0.5, 0.6, megabytes=200.0),
    run("exponential", 1.0, "uniform", 0.6, 0.6, megabytes=200.0),
    run("cosine", 1.0, "fedcl", 0.7, 0.8, megabytes=120.0),
    run("constant", 0.4, "detector", 0.1, 0.3),
    run("cosine", 0.4, "detector plain", 0.2, 0.2),
]


def test_means_and_deviations_over_seeds() -> None:
    assert cell(ROWS, "exponential", 1.0, "uniform", "plain") == "55.0 ± 7.1"
    assert cell(ROWS, "cosine", 1.0, "fedcl", "averaged") == "80.0"
    assert cell(ROWS, "cosine", 0.2, "fedcl", "averaged") == "–"
    assert share(ROWS, 1.0, "fedcl") == "60 %"


def test_a_detectors_plain_model_is_a_run_of_its_own() -> None:
    assert table(ROWS).splitlines()[2:] == [
        "| 100 % | evenly | 55.0 ± 7.1 | 60.0 ± 0.0 | – | – | – | – |",
        "| 60 % | FedCL | – | – | 70.0 | 80.0 | – | – |",
        "| 40 % | detector | – | – | 20.0 | – | – | 30.0 |",
    ]


def test_the_page_has_them() -> None:
    page = (ROOT / "docs" / "moment.md").read_text(encoding="utf-8")
    found = json.loads((ROOT / "results" / "studies" / "moment.json").read_text())
    assert replaced(page, found) == page
    assert replaced(f"a\n{BEGIN}old\n{END}b\n", found).endswith(f"{END}b\n")
