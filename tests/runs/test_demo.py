"""The demonstration: its configuration has what its story reads, and the story's numbers are those
of the runs.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import kairosfl
from kairosfl.cli.demo import SCHEDULES, WAYS, ended, story
from kairosfl.report.demo import draw
from kairosfl.runs.config import read
from kairosfl.runs.sweep import Member, expand


def words(line: str) -> str:
    return " ".join(line.split())


@pytest.fixture(scope="module")
def members() -> list[Member]:
    return expand(read(Path(kairosfl.__file__).with_name("demo.toml")))


def test_every_run_is_read_and_every_number_is_from_a_run(members: list[Member]) -> None:
    assert {member.settings["algorithm"] for member in members} == {
        name for names in WAYS.values() for name in names
    }
    assert {member.settings["train.schedule"] for member in members} == set(SCHEDULES)
    seeds = {member.settings["seed"] for member in members}
    assert len(seeds) == 4
    summaries: dict[str, dict[str, Any]] = {}
    for member in members:
        seed, algorithm = member.settings["seed"], member.settings["algorithm"]
        whole = "budget" not in algorithm
        bytes_ = 10_000_000 if whole else 4_000_000
        run = {
            "accuracy": 0.8 + 0.002 * seed,
            "last_tenth_accuracy": 0.5,
            "bytes_down": bytes_,
            "bytes_up": bytes_,
        }
        if "average" in algorithm:
            run["plain_last_tenth_accuracy"] = 0.7 + 0.002 * seed
        if "detector" in algorithm:
            run["accuracy"] -= 0.01 * seed
        summaries[member.name] = run
    told = story(*ended(members, summaries))
    # Seeds 0 to 3: plain 70, 70.2, 70.4, 70.6 and averaged 80, 80.2, 80.4, 80.6; by the detector 50
    # and 80, 79.2, ...
    assert words(told[1]) == "all clients constant rate 20.0 70.3 ± 0.1 80.3 ± 0.1"
    assert words(told[3]) == "40 % of them, evenly constant rate 8.0 70.3 ± 0.1 80.3 ± 0.1"
    assert (
        words(told[5])
        == "40 % of them, most while critical constant rate 8.0 50.0 ± 0.0 78.8 ± 0.5"
    )
    assert all(len(line) <= 80 for line in told)
    text = "\n".join(told)
    assert "averaging the last models           +10.0 ± 0.0 points\n" in text
    assert "while critical, plain       -20.3 ± 0.1 points\n" in text
    assert (
        "while critical, averaged    -1.5 ± 0.6 points, which may be chance\n" in text
    )  # 0, -1, -2, -3
    assert "against all clients plain +10.0 ± 0.0 points\n" in text
    assert "It does not pay here to spend clients early." in told
    for member in members:
        if "detector" in member.settings["algorithm"]:
            summaries[member.name] |= {"accuracy": 0.9, "last_tenth_accuracy": 0.9}
    assert "It pays here to spend clients early." in story(*ended(members, summaries))
    for number, member in enumerate(members):  # by chance better or worse
        summaries[member.name] |= {
            "accuracy": 0.7 + 0.01 * (number % 7),
            "last_tenth_accuracy": 0.7,
        }
    assert "These seeds do not show that it pays to spend clients early." in story(
        *ended(members, summaries)
    )


def test_the_picture_has_a_panel_for_each_schedule(tmp_path: Path) -> None:
    scores = {
        (way, schedule, averaged): [80.0, 81.0, 82.0 + averaged]
        for way in WAYS
        for schedule in SCHEDULES
        for averaged in (False, True)
    }
    text = draw(scores, dict.fromkeys(WAYS, 7.74), SCHEDULES, tmp_path / "demo.svg").read_text()
    for words in (
        *SCHEDULES.values(),
        "most while critical",
        "7.7 MB",
        "averaged model, after the last round",
    ):
        assert f"<!-- {words} -->" in text
