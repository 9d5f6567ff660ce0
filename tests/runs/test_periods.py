"""Deficits in windows: what each leaves out, which runs are made, what is said about them, and the
command.
"""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from kairosfl.cli import app
from kairosfl.core.recipe import Recipe
from kairosfl.core.round import drive, rounds
from kairosfl.core.rule import Algorithm, Plan
from kairosfl.core.run import Run, Setup
from kairosfl.core.streams import stream
from kairosfl.detectors import FGN
from kairosfl.engines.loop import Loop
from kairosfl.errors import UserError
from kairosfl.rules import parse
from kairosfl.runs.config import resolve
from kairosfl.runs.files import read_lines
from kairosfl.runs.periods import (
    DEFICITS,
    Deficit,
    before_scoring,
    findings,
    lasting,
    members,
    verdict,
    windows,
)
from kairosfl.runs.prepare import build_task
from kairosfl.runs.sweep import sweep
from kairosfl.testing import check_rule

TABLES = {
    "data": {"clients": 10},
    "model": {"hidden": [8]},
    "train": {"rounds": 6, "cohort": 5, "epochs": 4},
}


def records(rule: Deficit) -> list[Run]:
    job = build_task(resolve(TABLES))
    setup = Setup(
        Algorithm((rule,)),
        Recipe(rounds=6, cohort=5, epochs=4, lr=0.1),
        10,
        job.layout,
        detectors=(FGN(),),
    )
    return list(drive(rounds(Run.start(job.start(), setup, seed=0), setup), Loop(job)))


def test_what_a_deficit_leaves_out() -> None:
    runs = records(Deficit(of="cohort", first=2, until=4, amount=0.4))
    assert [run.record.asked for run in runs] == [5, 5, 2, 2, 5, 5]
    runs = records(Deficit(of="epochs", first=0, until=3, amount=0.5))
    assert [run.record.reports.epochs.tolist()[0] for run in runs] == [2, 2, 2, 4, 4, 4]
    runs = records(Deficit(of="clients", first=1, until=6, amount=0.6))
    seen = {client for run in runs[1:] for client in run.record.ids.tolist()}
    assert len(seen) <= 6
    assert [run.record.asked for run in runs] == [5] * 6


def test_wrong_labels_only_in_their_window() -> None:
    """Before the window the model is that of plain averaging to the bit; within it training losses
    jump.
    """
    plain, wrong = (
        records(Deficit(of="cohort")),
        records(Deficit(of="labels", first=2, until=4, amount=0.2)),
    )
    assert [torch.equal(a.x, b.x) for a, b in zip(plain, wrong, strict=True)] == [True] * 2 + [
        False
    ] * 4
    ratio = [
        float(b.record.reports.loss.mean() / a.record.reports.loss.mean())
        for a, b in zip(plain, wrong, strict=True)
    ]
    assert min(ratio[2:4]) > 1.2
    assert ratio[:2] == [1, 1]


@pytest.mark.parametrize("of", DEFICITS)
def test_the_contract(of: str) -> None:
    check_rule(Deficit(of=of, first=1, until=3, amount=0.5))
    rule = Deficit(of=of, first=1, until=3)
    assert parse(str(rule)).rules == (rule,)


def test_windows_cover_the_rounds() -> None:
    assert windows(12, 6) == [(0, 2), (2, 4), (4, 6), (6, 8), (8, 10), (10, 12)]
    assert windows(10, 3) == [(0, 3), (3, 7), (7, 10)]
    with pytest.raises(UserError, match="--windows 7 must be at least 2"):
        windows(6, 7)


def test_the_runs_and_their_numbers(tmp_path: Path) -> None:
    made = members(
        TABLES, number=2, deficits=("cohort",), seeds=2, detectors=("fgn", "fgn.paired()")
    )
    assert len(made) == 2 * (2 + 2)
    assert len({member.name for member in made}) == len(made)
    score = {member.name: {"last_tenth_accuracy": 0.9 - 0.01 * i} for i, member in enumerate(made)}
    for member in made:
        (tmp_path / member.name).mkdir()
        about = {"metrics": [{"name": "accuracy", "better": "higher", "percent": True}]}
        (tmp_path / member.name / "run.json").write_text(json.dumps(about))
        asked = 1 if "deficit" in member.settings else 5
        lines = [
            json.dumps({"round": t + 1, "critical": t < 2, "cohort": asked, "epochs": 4})
            for t in range(6)
        ]
        (tmp_path / member.name / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    found = findings(tmp_path, score, made, 2)
    # Runs 0 and 4 are without a deficit, 2 and 6 in the first window, 3 and 7 in the second.
    assert found["none"]["seeds"] == pytest.approx([0.9, 0.86])
    assert found["harm"]["cohort"][0]["mean"] == pytest.approx(0.02)
    assert found["harm"]["cohort"][1]["mean"] == pytest.approx(0.03)
    assert found["marked"] == {"fgn": [0.667, 0.0], "fgn.paired()": [0.667, 0.0]}
    # The same numbers as errors, of which a smaller one is better.
    assert found["left"] == {"cohort": "1 of 5 clients a round"}
    about = {"metrics": [{"name": "rmse", "better": "lower", "percent": False}]}
    (tmp_path / made[0].name / "run.json").write_text(json.dumps(about))
    errors = {name: {"last_tenth_rmse": row["last_tenth_accuracy"]} for name, row in score.items()}
    assert findings(tmp_path, errors, made, 2)["harm"]["cohort"][0]["mean"] == pytest.approx(-0.02)
    with pytest.raises(UserError, match=r"ended with an RMSE that is not finite; lower train\.lr"):
        findings(tmp_path, errors | {made[3].name: {"last_tenth_rmse": None}}, made, 2)


def test_verdicts() -> None:
    rng = np.random.Generator(np.random.Philox(key=0))
    sure, chance = (
        row.tolist()
        for row in (0.05 + 0.002 * rng.standard_normal(4), 0.01 * rng.standard_normal(4))
    )
    said = verdict([sure, chance], 3)
    assert said == "harm done in window 1 of 3 lasts (99 % interval above zero)"
    assert verdict([sure, sure], 3).startswith("harm done in windows 1, 2 of 3 lasts")
    assert "no critical period here" in verdict([chance, chance], 3)
    few = [[0.2, 0.25], [0.01, -0.01]]
    assert verdict(few, 3) == (
        "undecided; 2 seeds are too few to tell harm (window 1) from chance; use --seeds 4"
    )
    assert verdict([[0.01, -0.01], [0.01, -0.01]], 3) == (
        "undecided; 2 seeds are too few to tell harm from chance; use --seeds 4"
    )
    hurt = [0.05, 0.25, 0.15, 0.19]  # 0.16 with an error of 0.042: 95 % above zero, but not 99 %
    assert verdict([hurt, chance, hurt], 4) == (
        "undecided; 4 seeds are too few to tell harm (windows 1, 3) from chance; use --seeds 8"
    )
    assert "no critical period here" in verdict([[0.1, 0.2, -0.05, 0.1]], 2)  # t = 1.7
    eleven = (0.1 + 0.16 * np.array([-1.0, 1.0] * 5 + [0.0])).tolist()  # t = 2.17: not even 95 %
    assert "no critical period here" in verdict([eleven], 2)
    assert verdict([sure, hurt], 3).endswith("; window 2 undecided")
    assert "one seed does not show" in verdict([[0.1]], 2)
    assert lasting([[0.1]]) == []


def test_seeds_that_agree_by_chance_decide_nothing() -> None:
    """Of ten test samples each seed lost one: their deviation is zero, or 1e-17, and t infinite."""
    same = [0.9 - 0.8, 0.7 - 0.6, 0.5 - 0.4, 0.1]
    assert len(set(same)) > 1
    for values in (same, [0.25] * 4):
        assert lasting([values]) == []
        assert verdict([values, [0.0] * 4], 3) == (
            "undecided; 4 seeds are too few to tell harm (window 1) from chance; use --seeds 8"
        )
    assert "no critical period here" in verdict([[0.0] * 4, [-0.1] * 4], 3)
    assert lasting([[0.25] * 8]) == [1]  # by chance all of eight lose once in 256 times
    assert verdict([[0.0] * 4, [0.0] * 4], 3).startswith("undecided; it changed no score at all")


def test_cohorts_that_a_rule_chooses_are_cut_as_well() -> None:
    """FedAWARE names the clients that it explores; a budget may leave nothing to cut."""
    now = SimpleNamespace(number=1, seed=0, population=20, stream=lambda name: stream(0, name))
    plan = Plan(10, ids=np.arange(3, 13))
    cut = Deficit(of="cohort", until=5).select(plan, None, now)
    assert len(cut.ids) == 2
    assert set(cut.ids) <= set(plan.ids)
    some = Deficit(of="clients", until=5).select(plan, None, now)
    assert (some.ids, some.size, len(some.eligible)) == (None, 10, 4)


def test_a_deficit_that_leaves_nothing_out_is_no_result(tmp_path: Path) -> None:
    tables = {**TABLES, "algorithm": "budget(share=0.2)"}
    made = members(tables, number=2, deficits=("cohort",), seeds=2, detectors=("fgn",))
    found = findings(tmp_path, sweep(made, tmp_path), made, 2)
    assert found["left"] == {"cohort": "1 of 1 clients a round"}
    none = "had no fewer clients a round than without a deficit"
    assert found["verdict"] == [f"cohort: undecided; no window counts, since each {none}"]
    tables = {
        **TABLES,
        "algorithm": "budget(share=0.5, plan=(8, 1, 1))",
        "train": {"rounds": 12, "cohort": 5},
    }
    made = members(tables, number=3, deficits=("cohort",), seeds=2, detectors=("fgn",))
    found = findings(tmp_path / "b", sweep(made, tmp_path / "b"), made, 3)
    assert found["verdict"][0].endswith(f"; window 2 {none}, and is not judged")
    assert verdict([[0.1, 0.1], [0.2, 0.2], [0.1, -0.2]], 4, [1, 2], "epochs") == (
        "undecided; 2 seeds are too few to tell harm from chance; use --seeds 4; windows 1, 2 had no fewer epochs than "
        "without a deficit, and are not judged"
    )


def test_windows_within_the_rounds_that_are_scored_are_not_judged() -> None:
    assert before_scoring(windows(60, 6)) == 5
    assert before_scoring(windows(40, 20)) == 18  # rounds 37 to 40 are scored
    assert before_scoring(windows(2, 2)) == 1


def test_the_command_resumes_and_draws(tmp_path: Path) -> None:
    (tmp_path / "p.toml").write_text(
        "[data]\nclients = 10\n[model]\nhidden = [8]\n[train]\nrounds = 4\ncohort = 4\n[run]\nengine = 'batched'\n"
    )
    words = [
        "periods",
        str(tmp_path / "p.toml"),
        "--windows",
        "2",
        "--seeds",
        "1",
        "--deficit",
        "cohort",
    ]
    words += ["--out", str(tmp_path / "out"), "--detector", "fgn", "--quiet"]
    for _ in range(2):  # the second time nothing is left to train
        answer = CliRunner().invoke(app, words)
        assert answer.exit_code == 0, answer.output
    assert "points lost: cohort" in answer.output
    assert (tmp_path / "out" / "periods.svg").is_file()
    found = json.loads((tmp_path / "out" / "periods.json").read_text())
    assert found["windows"] == [[1, 2], [3, 4]]
    asked = [
        row["cohort"] for row in read_lines(tmp_path / "out" / "cohort-2-seed0" / "metrics.jsonl")
    ]
    assert asked == [4, 4, 1, 1]
    assert "without a deficit: accuracy " in answer.output
    wrong = CliRunner().invoke(app, [*words[:2], "--deficit", "sleep"])
    assert wrong.exit_code == 2
    assert "--deficit sleep is not known" in wrong.output


def test_nonsense_is_refused() -> None:
    train = {"rounds": 6, "cohort": 5}
    for options, why in (
        ({"deficits": ("epochs",)}, "leaves out nothing of train.epochs = 1; use 2 or more"),
        (
            {"deficits": ("cohort",), "amount": 0.95},
            r"leaves out nothing of train\.cohort = 5; use a smaller --amount",
        ),
        (
            {"deficits": ("clients",), "amount": 0.96},
            r"leaves out nothing of data\.clients = 10; use a smaller",
        ),
        ({"seeds": 0}, "--seeds 0"),
        ({"amount": 1.0}, "--amount 1 must be above 0 and below 1"),
    ):
        with pytest.raises(UserError, match=why):
            members({**TABLES, "train": train}, **options)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="cannot be used with privacy"):
        members({**TABLES, "algorithm": "privacy(noise=1.0)"})
    with pytest.raises(UserError, match=r"\[sweep\]"):
        members({**TABLES, "sweep": {"seed": [1]}})


def test_what_is_named_twice_is_trained_once() -> None:
    made = members(
        TABLES, number=2, deficits=("cohort", "cohort"), seeds=1, detectors=("fgn", "fgn")
    )
    assert [member.name for member in made] == ["none-0-seed0", "cohort-1-seed0", "cohort-2-seed0"]
