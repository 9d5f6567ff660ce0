"""At its end a run says that rules followed a detector whose answers made no period."""

from __future__ import annotations

from typing import Any

import pytest

from kairosfl.core.layout import Layout
from kairosfl.core.recipe import Recipe
from kairosfl.core.run import Setup
from kairosfl.detectors import parse_detectors
from kairosfl.rules import parse
from kairosfl.runs.experiment import _flicker

FLICKERING, PERIOD = (1, 0, 1, 0, 1, 1, 0, 1), (1, 1, 1, 0, 0, 0, 0, 0)


def _said(
    algorithm: str, detector: str = "fgn", answers: tuple[int, ...] = FLICKERING
) -> list[str]:
    recipe = Recipe(rounds=8, cohort=2, epochs=1, batch_size=4, lr=0.1)
    setup = Setup(parse(algorithm), recipe, 4, Layout(()), parse_detectors(detector))
    rows: list[dict[str, Any]] = [
        {"round": i, "critical": answer} for i, answer in enumerate(answers, 1)
    ]
    return _flicker(setup, rows)


@pytest.mark.parametrize(
    "algorithm", ["fedcl", "pa3fed", "budget(by='detector')", "fedcl(budget=0.8)"]
)
def test_a_rule_that_follows_a_flickering_detector_is_told_of_the_paired_one(
    algorithm: str,
) -> None:
    name = parse(algorithm).rules[0].name()
    assert _said(algorithm) == [
        f"the detector fgn switched 6 times in 8 rounds, so {name} followed no period; "
        "run.detector = 'fgn.paired()' compares each client with its own last report"
    ]
    assert _said(algorithm, answers=PERIOD) == []


def test_the_first_detector_is_meant_and_a_paired_one_has_no_better_one() -> None:
    assert "run.detector = 'fedfim.paired()'" in _said("fedcl + pa3fed", "fedfim + fgn")[0]
    assert "fedcl and pa3fed followed no period" in _said("fedcl + pa3fed")[0]
    assert _said("fedcl", "fgn.paired()")[0].endswith("fedcl followed no period")


@pytest.mark.parametrize(
    "algorithm", ["fedavg", "fedcl.random()", "pa3fed(always=True)", "budget", "alt"]
)
def test_nothing_is_said_where_no_rule_follows_the_detector(algorithm: str) -> None:
    assert _said(algorithm) == []
