"""What a reader is told before believing a number: unfinished, stopped, diverged, and rules that
never acted.
"""

import json

import fake
import pytest
from typer.testing import CliRunner

from kairosfl.cli import app
from kairosfl.report.comparison import compare
from kairosfl.report.figures import figures
from kairosfl.report.page import verdict, write_report
from kairosfl.report.pictures import counted
from kairosfl.report.read import read_groups
from kairosfl.report.tables import default_target, paired_tests, results

ALT = "alt never stopped a client: train.epochs = 1, this run equals fedavg"


def summarise(run, **values):
    (run / "summary.json").write_text(json.dumps({"rounds": 10} | values))


def judge(folder):
    groups = read_groups([folder])
    return verdict(results(groups, 0.3), paired_tests(groups))


def test_an_unfinished_run_is_marked_and_not_compared_with_finished_ones(tmp_path):
    for seed in (0, 1, 2):
        fake.write_run(tmp_path / f"a{seed}", algorithm="fedavg", seed=seed, rounds=20, top=0.5)
        fake.write_run(
            tmp_path / f"b{seed}",
            algorithm="alt",
            seed=seed,
            rounds=12,
            planned=20,
            top=0.9,
            done=False,
        )
    groups = read_groups([tmp_path])
    assert paired_tests(groups) == []
    assert default_target(groups) < 0.56  # of fedavg
    said = judge(tmp_path)
    assert said.startswith("<b>fedavg</b> reaches")
    assert said.endswith("Not compared: 1 unfinished algorithm.")
    found = compare([tmp_path])
    assert found.notes() == [
        "alt: unfinished, not compared: seed 0: 12 of 20 rounds, seed 1: 12 of 20 rounds, seed 2: 12 of 20 rounds"
    ]
    assert [row["rounds"] for row in found.table()] == ["20", "12 of 20"]
    page = write_report([tmp_path], tmp_path / "report.html").read_text()
    assert "unfinished, not compared: seed 0: 12 of 20 rounds" in page
    assert 'class="best"' not in page
    assert "Compared with" not in page


def test_runs_of_one_seed_with_different_results_are_named(tmp_path):
    for name, seed, accuracy in (("a", 0, 0.5), ("again", 0, 0.9), ("b", 1, 0.6), ("same", 1, 0.6)):
        fake.edit(fake.write_run(tmp_path / name, seed=seed, rounds=20), accuracy=accuracy)
    (row,) = results(read_groups([tmp_path]), 0.3)
    assert row.seeds == (0, 1)
    assert row.notes == ("runs of one seed that differ count as their mean: seed 0: 2 runs",)


def test_the_numbers_of_a_group_are_about_its_finished_runs(tmp_path):
    for seed, rounds in ((0, 20), (1, 20), (2, 10)):
        run = fake.write_run(
            tmp_path / str(seed), seed=seed, rounds=rounds, planned=20, done=rounds == 20
        )
        fake.edit(run, accuracy=0.5 if rounds == 20 else 0.9)
    (row,) = results(read_groups([tmp_path]), 0.3)
    assert (row.last_tenth.mean, row.last_tenth.count, row.last_tenth.asked) == (0.5, 2, 3)
    assert (row.finished, row.going) == (2, 1)
    assert row.notes == ("unfinished, left out of the numbers: seed 2: 10 of 20 rounds",)
    assert default_target(read_groups([tmp_path])) == 0.5


def test_runs_of_which_none_has_finished_are_not_ranked(tmp_path):
    for algorithm in ("fedavg", "alt"):
        fake.write_run(tmp_path / algorithm, algorithm=algorithm, rounds=5, planned=20, done=False)
    assert judge(tmp_path) == (
        "None of 2 algorithms has finished, so they are not compared; the table shows their progress."
    )


def test_a_run_that_stopped_or_diverged_is_called_that(tmp_path):
    stopped = fake.write_run(tmp_path / "0", rounds=10, planned=20, done=False)
    (stopped / "log.txt").write_text("stopped: 10 rounds in a row had no good report.\n")
    lost = fake.write_run(tmp_path / "1", seed=1, rounds=20)
    fake.edit(lost, loss=[2.0] * 12 + [None] * 8)
    large = fake.write_run(tmp_path / "2", seed=2, rounds=20)
    fake.edit(large, loss=[2.0] * 4 + [1e30] * 3 + [2.0] * 12 + [1e30])
    (row,) = results(read_groups([tmp_path]), 0.3)
    end = "from there on its test loss is not finite, or has exploded"
    assert row.notes == (
        "seed 0: stopped after round 10: 10 rounds in a row had no good report. (not compared)",
        f"seed 1: diverged in round 13 (not compared): {end}",
        f"seed 2: diverged in round 20 (not compared): {end}",
    )


def test_a_run_that_diverged_in_its_first_round_is_called_that(tmp_path):
    run = fake.write_run(tmp_path / "a", rounds=20)
    fake.edit(run, loss=[1e5] * 20)  # guessing among ten classes has 2.3
    end = "from there on its test loss is not finite, or has exploded"
    assert compare([run]).notes() == [f"fedavg: diverged in round 1 (not compared): {end}"]
    fake.edit(run, loss=[1e3] * 20)
    assert compare([run]).notes() == []


def test_a_loss_that_was_never_evaluated_is_no_divergence(tmp_path):
    run = fake.write_run(tmp_path / "a", rounds=20, eval_every=5)
    assert compare([run]).notes() == []
    fake.edit(run, loss=None)
    assert compare([run]).notes() == [
        "fedavg: diverged in round 5 (not compared): from there on its test loss is not finite, or has exploded"
    ]
    left = {each.title: each.why for each in figures(read_groups([run]))[1]}
    assert left["Test loss"] == "training diverged: it was never finite"


def test_rules_that_never_acted_are_named_on_the_page_and_by_compare(tmp_path):
    for seed in (0, 1):
        summarise(
            fake.write_run(tmp_path / str(seed), algorithm="alt", seed=seed, rounds=10),
            verdicts=[ALT, "<b>"],
        )
    assert compare([tmp_path]).notes() == [f"alt: {ALT}", "alt: <b>"]
    page = write_report([tmp_path], tmp_path / "report.html").read_text()
    assert f"{ALT}</li>" in page
    assert "&lt;b&gt;</li>" in page
    printed = CliRunner().invoke(app, ["compare", str(tmp_path)])
    assert printed.exit_code == 0
    assert f"alt: {ALT}" in printed.stdout


@pytest.mark.parametrize(
    ("said", "title"),
    [
        (["test", "test"], "Accuracy per client, on its own test samples"),
        (["train", "train"], "Accuracy per client, on its training samples"),
        (["test", "train"], "Accuracy per client, on its own test samples or its training samples"),
        ([None, None], "Accuracy per client"),
    ],
)
def test_the_samples_that_clients_are_scored_on_are_named(tmp_path, said, title):
    for seed, on in enumerate(said):
        summarise(fake.write_run(tmp_path / str(seed), seed=seed, rounds=10), client_accuracy_on=on)
    titles = {each.key: each.title for each in figures(read_groups([tmp_path]))[0]}
    assert titles["client-accuracy"] == title
    assert titles["client-quantiles"] == title.replace(
        "Accuracy per client", "Final accuracy of every client"
    )


def test_the_command_names_what_is_damaged_and_goes_on(tmp_path):
    run = fake.write_run(tmp_path / "a", rounds=3)
    (run / "partition.json").write_text("[]")
    sentence = f"kairosfl: {run / 'partition.json'} does not hold a JSON object and is left out."
    for command in (
        ["compare", run],
        ["compare", run, "--json"],
        ["report", run, "-o", tmp_path / "report.html"],
    ):
        done = CliRunner().invoke(app, list(map(str, command)))
        assert done.exit_code == 0
        assert sentence in done.stderr
        assert sentence not in done.stdout


def test_plurals():
    assert [counted(n, "run") for n in (0, 1, 2, 12000)] == [
        "0 runs",
        "1 run",
        "2 runs",
        "12,000 runs",
    ]
    assert counted(2, "class") == "2 classes"


def test_privacy_spent_and_an_early_end_are_named(tmp_path):
    run = fake.write_run(tmp_path / "a", algorithm="privacy", rounds=10)
    fake.edit(run, epsilon=1.98765)
    summarise(run, finished="the budget is spent")
    assert compare([run]).notes() == [
        "privacy: finished after round 10: the budget is spent",
        "privacy: privacy spent: epsilon 1.988",
    ]
    summarise(run, finished=None)
    assert compare([run]).notes() == ["privacy: privacy spent: epsilon 1.988"]


def test_a_detector_is_judged(tmp_path):
    for seed, critical in enumerate(
        ([True] * 3 + [False] * 7, [True] * 3 + [False] * 7, [True, False] * 5)
    ):
        fake.edit(
            fake.write_run(tmp_path / f"a{seed}", algorithm="pa3fed", seed=seed, rounds=10),
            critical=critical,
        )
    fake.write_run(tmp_path / "b", algorithm="fedcl", rounds=10, critical_until=4)
    page = write_report([tmp_path], tmp_path / "report.html").read_text()
    section = page.partition('<section id="signals">')[2].partition("</section>")[0]
    assert (
        "detector fgn: critical in rounds 1 to 3: one period (seeds 0, 1); "
        "switched 9 times in 10 rounds: flicker (seed 2)</li>"
    ) in section
    assert "detector fgn: critical in rounds 1 to 4: one period</li>" in section
