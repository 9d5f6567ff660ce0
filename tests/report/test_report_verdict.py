"""The headline says what its number is and names a runner-up that cannot be told apart; detectors
in use are drawn.
"""

from __future__ import annotations

import csv
import io
import math
import re
from pathlib import Path

import fake
import pytest
from typer.testing import CliRunner

from kairosfl.cli import app
from kairosfl.progress import describe
from kairosfl.report.export import export_tables, results_file
from kairosfl.report.figures import critical_periods, followed_periods
from kairosfl.report.page import page
from kairosfl.report.parts import detectors
from kairosfl.report.read import read_groups, read_study
from kairosfl.report.student import holm, paired_t
from kairosfl.report.tables import cells, paired_tests, results
from kairosfl.report.verdict import verdict
from kairosfl.runs.config import resolve

ENDS = {
    "fedavg": (0.50, 0.52, 0.51),
    "fedavgm": (0.60, 0.63, 0.60),
    "fedavgm + average": (0.61, 0.62, 0.62),
}


def study(folder: Path, ends=ENDS, late=("fedavgm + average",)) -> Path:
    """Runs of 40 rounds that end with these accuracies by seed; `late` ones are averaged since
    round 38.
    """
    for number, (algorithm, values) in enumerate(ends.items()):
        for seed, value in enumerate(values):
            run = fake.write_run(folder / f"{number}-{seed}", algorithm=algorithm, seed=seed)
            columns = {"accuracy": [value * 0.9] * 37 + [value] * 3}
            if algorithm in late:
                columns["plain_accuracy"] = [None] * 37 + [value * 0.8] * 3
            fake.edit(run, **columns)
    return folder


def told(folder: Path) -> str:
    groups = read_groups([folder])
    text = verdict(results(groups, 0.5), paired_tests(groups))
    return re.sub(r"</?b>", "", text)


def test_the_headline_says_of_which_rounds_its_number_is(tmp_path):
    assert "fedavgm + average reaches 61.67 ± 0.58 % after its last round, " in told(
        study(tmp_path / "late")
    )
    early = told(study(tmp_path / "early", late=()))
    assert " in the final 10 % of its rounds, " in early
    assert "after its last round" not in early


def test_the_second_best_is_named_where_the_seeds_do_not_tell_it_from_the_best(tmp_path):
    groups = read_groups([study(tmp_path)])
    pairs = paired_tests(groups)
    assert [(pair.first, pair.second) for pair in pairs if pair.runner_up] == [
        ("fedavgm", "fedavgm + average")
    ]
    assert {pair.comparisons for pair in pairs} == {3}
    assert [pair.adjusted for pair in pairs] == pytest.approx(holm([pair.p for pair in pairs]))
    between = pairs[-1]
    assert "The second best, fedavgm (59.48 ± 1.69 % " in told(tmp_path)
    assert (
        f"in the final 10 % of its rounds), cannot be told from it (p = {between.adjusted:.3f})."
        in told(tmp_path)
    )


def test_a_second_best_that_is_clearly_worse_is_not_named(tmp_path):
    ends = ENDS | {"fedavgm + average": (0.801, 0.832, 0.803)}
    assert "second best" not in told(study(tmp_path, ends))


def test_the_baseline_is_not_compared_twice_where_it_is_best_or_second(tmp_path):
    for name, ends in {
        "best": ENDS | {"fedavg": (0.9, 0.91, 0.92)},
        "second": ENDS | {"fedavgm": (0.1, 0.12, 0.11)},
    }.items():
        groups = read_groups([study(tmp_path / name, ends)])
        pairs = paired_tests(groups)
        assert len(pairs) == 2
        assert not any(pair.runner_up for pair in pairs)


def test_the_table_has_the_comparisons_with_the_baseline_alone(tmp_path):
    text = page(read_study([study(tmp_path)]))
    rows = re.findall(
        r"<tr data-group=.*?</tr>", text.split('id="results"')[1].split("</table>")[0]
    )
    assert len(rows) == 3
    assert 'data-column="vs. baseline"' in rows[0]
    assert "+11.94" in rows[2]


def test_cells_that_are_scored_otherwise_are_marked_everywhere(tmp_path):
    rows = results(read_groups([study(tmp_path)]), 0.5)
    assert [cells(row)["final 10 %"].endswith("†") for row in rows] == [False, False, True]
    (note,) = [note for note in rows[2].notes if "averaged" in note]
    assert note.startswith("† models are averaged only since one of the final 10 % of rounds")
    text = page(read_study([tmp_path]))
    assert "61.67 ± 0.58†" in text
    latex = results_file(Path("a.tex"), rows, 0.5)
    assert "61.67 $\\pm$ 0.58$^\\dagger$" in latex
    assert "$^\\dagger$: after the last round" in latex
    numbers = list(csv.DictReader(io.StringIO(results_file(Path("a.csv"), rows, 0.5))))
    assert [row["dagger"] for row in numbers] == ["False", "False", "True"]
    said = CliRunner().invoke(app, ["compare", str(tmp_path)])
    assert "61.67 ± 0.58†" in said.stdout
    assert "fedavgm + average: † models are averaged" in said.stdout.replace("\n", " ")


def test_the_tests_are_written_with_the_runner_up(tmp_path):
    export_tables([study(tmp_path / "runs")], tmp_path / "tables")
    numbers = list(csv.DictReader((tmp_path / "tables" / "tests.csv").open()))
    assert [row["runner_up"] for row in numbers] == ["False", "False", "True"]


def test_two_seeds_with_the_same_difference_say_nothing_about_chance(tmp_path):
    assert math.isnan(paired_t([1 / 360, 1 / 360]))
    assert paired_t([1 / 360] * 8) == 2**-7
    ends = {"fedavg": (0.50, 0.52), "fedprox(mu=0.1)": (0.50 + 1 / 360, 0.52 + 1 / 360)}
    groups = read_groups([study(tmp_path, ends)])
    (pair,) = paired_tests(groups)
    assert math.isnan(pair.p)
    assert math.isnan(pair.low)
    assert (
        "the difference is the same in all 2 shared seeds, which does not tell it from chance"
        in told(tmp_path)
    )
    text = page(read_study([tmp_path]))
    assert "<small>the same in all seeds</small>" in text
    assert "&lt; 0.001" not in text


@pytest.mark.parametrize(
    ("algorithm", "detector", "follows"),
    [
        ("fedavg", "fgn", False),
        ("fedavgm + average", "fgn", False),
        ("fedavg", "fgn(delta=0.05)", True),
        ("fedcl", "fgn", True),
        ("fedcl(budget=0.5)", "fgn", True),
        ("fedcl(increase=0.3, decrease=0.3)", "fgn", False),
        ("pa3fed", "fgn", True),
        ("pa3fed(always=True)", "fgn", False),
        ("budget(by='detector')", "fgn", True),
        ("budget", "fgn", False),
    ],
)
def test_what_a_detector_said_is_shown_where_a_rule_acts_on_it_or_it_was_asked_for(
    tmp_path, algorithm, detector, follows
):
    run = fake.write_run(tmp_path / "r", algorithm=algorithm)
    config = run / "config.toml"
    config.write_text(config.read_text().replace('detector = "fgn"', f'detector = "{detector}"'))
    (group,) = read_groups([tmp_path])
    assert critical_periods(group)
    assert bool(followed_periods(group)) is follows
    assert ('"critical":[[' in page(read_study([tmp_path]))) is follows
    assert (
        resolve({"algorithm": algorithm, "run": {"detector": detector}}).follows_detector is follows
    )


def test_detectors_that_flicker_are_one_sentence(tmp_path):
    for number, algorithm in enumerate(("fedavg", "fedprox", "fedcl", "pa3fed", "fedavgm + fedcl")):
        run = fake.write_run(tmp_path / f"{number}", algorithm=algorithm)
        fake.edit(run, critical=[number % 2 == 0 for number in range(40)])
    lines = re.findall(r"<li>(.*?)</li>", detectors(read_groups([tmp_path])))
    assert len(lines) == 2
    assert lines[0].count("<i ") == 3
    assert lines[0].endswith("detector fgn: flicker; it switched too often to mark a period")
    assert lines[1].count("<i ") == 2
    assert lines[1].endswith("no rule acts on the detector, so what it said is not drawn")


def test_the_progress_line_says_critical_where_a_rule_acts_on_it(tmp_path, monkeypatch):
    row = {
        "round": 1,
        "accuracy": 0.5,
        "loss": 1.0,
        "cohort": 2,
        "reported": 2,
        "rejected": 0,
        "critical": True,
    }
    assert describe(row, 0.5, critical=False) == "accuracy 0.5000  loss 1.0000  cohort 2"
    monkeypatch.chdir(tmp_path)
    Path("a.toml").write_text(
        "[data]\nclients = 4\n[model]\nhidden = [4]\n[train]\nrounds = 2\ncohort = 2\n"
    )
    for algorithm, follows in (("fedavg", False), ("fedcl", True)):
        said = CliRunner().invoke(app, ["run", "a.toml", "--set", f"algorithm={algorithm}"])
        assert said.exit_code == 0, said.output
        assert ("  critical" in said.stderr) is follows
