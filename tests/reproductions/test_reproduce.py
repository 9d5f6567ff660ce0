"""An item from end to end: what is missing is said, the rest runs, resumes where it was cut, and
becomes a table.
"""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest
from tiny import ITEM, SECTIONS
from tiny import cell as make
from typer.testing import CliRunner

from kairosfl.cli import app
from kairosfl.errors import UserError
from kairosfl.runs import experiment
from kairosfl.runs.files import read_lines
from kairosfl_reproductions.item import members
from kairosfl_reproductions.reproduce import estimate, reproduce, rounds_left, seconds_per_round
from kairosfl_reproductions.results import collect, read, table


class Watched:
    """What shows a sweep, for a test: keeps what it was told, and may stop the run."""

    def __init__(self, stop_after=None):
        self.rounds, self.stop_after, self.seen, self.states = {}, stop_after, [], []

    def plan(self, rounds):
        self.rounds = rounds

    def state(self, words):
        self.states.append(words)

    def begin(self, name, done):
        def listen(row):
            self.seen.append((name, row["round"]))
            if len(self.seen) == self.stop_after:
                raise KeyboardInterrupt

        self.seen.append((name, f"from {done}"))
        return listen


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    out = tmp_path_factory.mktemp("whole")
    said = []
    results = reproduce(ITEM, seeds=2, out=out, say=said.append)
    return out, said, results


def accuracies(out, name):
    return [row["accuracy"] for row in read_lines(out / name / "metrics.jsonl")]


def test_what_has_no_data_is_said_and_the_rest_runs(whole):
    out, said, results = whole
    assert said[0].startswith("Skipping 2 runs: ")
    assert "there/is/no/such/folder" in said[0]
    assert said[1] == f"tiny/table1: 4 runs in {out}, 24 rounds to go."
    assert said[2].startswith("About ")
    assert list(results["cells"]) == ["digits-fedavg", "digits-fedavgm"]


def test_a_run_that_diverges_is_named_and_the_others_are_in_the_table(tmp_path):
    wild = make("fedavg", 1.0, train=SECTIONS["train"] | {"lr": 1e30, "rounds": 12})
    item = replace(ITEM, cells={"wild": wild, "tame": ITEM.cells["digits-fedavg"]})
    said = []
    results = reproduce(item, seeds=1, out=tmp_path, say=said.append)
    assert said[-1].startswith("1 of 2 runs failed; the first, wild-seed0: 10 rounds in a row")
    assert said[-1].endswith("Its finished rounds are included.")
    assert {name: each["runs"][0]["rounds"] for name, each in results["cells"].items()} == {
        "wild": 10,
        "tame": 6,
    }
    with pytest.raises(UserError, match="cnn needs images of at least 16x16"):
        reproduce(
            replace(item, cells={"odd": make("fedavg", 1.0, model={"name": "cnn"})}),
            seeds=1,
            out=tmp_path / "b",
        )


def test_the_table_has_ours_beside_the_printed_value(whole):
    out, _, results = whole
    first, second = table(results)
    means = [
        100 * accuracies(out, f"digits-fedavg-seed{seed}")[-1] for seed in (0, 1)
    ]  # a tenth of six rounds is one
    mean = sum(means) / 2
    deviation = (((means[0] - mean) ** 2 + (means[1] - mean) ** 2) / 1) ** 0.5
    assert first["accuracy, final 10 %"] == f"{mean:.2f} ± {deviation:.2f}"
    assert first["accuracy, final 10 %: published"] == "40.00"
    assert first["accuracy, final 10 %: difference"] == f"{mean - 40:+.2f}".replace("-", "−")
    assert (first["cell"], first["reading"], first["rounds"], first["seeds"]) == (
        "digits-fedavg",
        "text",
        "6",
        "2",
    )
    assert second["reading"] == "half the momentum"
    assert first["clients per round"] == "3.0 ± 0.0"


def test_rounds_to_the_final_accuracy_of_the_baseline(whole):
    out, _, results = whole
    for seed, run in enumerate(results["cells"]["digits-fedavgm"]["runs"]):
        target = accuracies(out, f"digits-fedavg-seed{seed}")[-1]
        there = [
            i
            for i, value in enumerate(accuracies(out, f"digits-fedavgm-seed{seed}"), 1)
            if value >= target
        ]
        assert run["values"]["rounds_to"] == (there[0] if there else None)


def test_cut_and_started_again_it_goes_on_and_ends_with_the_same_numbers(whole, tmp_path):
    said, kept = [], tmp_path / "kept"
    with pytest.raises(KeyboardInterrupt):
        reproduce(
            ITEM,
            cells=["digits"],
            out=tmp_path,
            results=kept,
            say=said.append,
            progress=Watched(13),
        )
    assert said[-1] == f"The finished rounds are in {kept / 'tiny-table1.json'}."
    cells = read(kept / "tiny-table1.json")["cells"]
    assert {name: [run["rounds"] for run in each["runs"]] for name, each in cells.items()} == {
        "digits-fedavg": [6],
        "digits-fedavgm": [3],  # recorded, but not saved
    }
    # Told of the four runs, of six rounds of the first and three of the second: three done, the
    # last one not saved.
    runs = members(ITEM, ["digits"])
    assert [rounds_left(run, tmp_path) for run in runs] == [0, 4, 6, 6]
    said, watched = [], Watched()
    results = reproduce(
        ITEM, cells=["digits"], out=tmp_path, results=kept, say=said.append, progress=watched
    )
    assert read(kept / "tiny-table1.json")["cells"] == results["cells"]
    assert said[0] == f"tiny/table1: 4 runs in {tmp_path}, 16 rounds to go."
    assert watched.states == ["loading the data", "timing a round", ""]
    assert watched.rounds == {run.name: 6 for run in runs}
    assert watched.seen[:5] == [
        ("digits-fedavg-seed0", "from 6"),
        ("digits-fedavgm-seed0", "from 2"),
        ("digits-fedavg-seed1", "from 0"),
        ("digits-fedavgm-seed1", "from 0"),
        ("digits-fedavgm-seed0", 3),
    ]
    timeless = [json.loads(json.dumps(each)) for each in (results, whole[2])]
    for each in timeless:
        for run in (run for cell in each["cells"].values() for run in cell["runs"]):
            del run["seconds"]
    assert timeless[0] == timeless[1]


def test_fewer_rounds_are_other_runs_and_the_table_says_so(whole):
    out, _, _ = whole
    results = reproduce(
        ITEM, cells=["digits-fedavg"], seeds=1, rounds=2, out=out, say=lambda line: None
    )
    assert [row["rounds"] for row in table(results)] == ["2 of 6"]
    assert [row["seeds"] for row in table(results)] == ["1"]
    everything = collect([out], ITEM)
    assert [run["rounds"] for run in everything["cells"]["digits-fedavg"]["runs"]] == [6, 6]


def test_what_was_run_into_the_folder_before_is_a_baseline(whole):
    out, _, results = whole
    again = reproduce(ITEM, cells=["digits-fedavgm"], out=out, say=str)
    assert list(again["cells"]) == ["digits-fedavgm"]
    assert again["cells"]["digits-fedavgm"] == results["cells"]["digits-fedavgm"]


def test_a_file_in_the_place_of_the_folder_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(
        UserError, match=r"Cannot write into .*file: File exists; choose another place"
    ):
        reproduce(ITEM, cells=["digits-fedavg"], out=tmp_path / "file", say=str)


def test_changes_hold_for_every_run_and_the_table_has_them(tmp_path):
    changes = ["train.epochs=2", "run.threads=1"]
    results = reproduce(
        ITEM, cells=["digits-fedavg"], seeds=1, rounds=1, changes=changes, out=tmp_path, say=str
    )
    assert results["cells"]["digits-fedavg"]["config"]["train"]["epochs"] == 2
    assert table(results)[0]["rounds"] == "1 of 6"


def test_nothing_is_measured_when_everything_is_done(whole, monkeypatch):
    out, _, before = whole
    monkeypatch.setattr(experiment, "build_task", None)
    said = []
    assert reproduce(ITEM, cells=["digits"], out=out, say=said.append) == before
    assert said == [f"tiny/table1: 4 runs in {out}, 0 rounds to go."]


@pytest.mark.parametrize(("seeds", "what"), [(1, "1 run"), (2, "2 runs")])
def test_an_item_whose_data_is_missing_altogether_is_refused(tmp_path, seeds, what):
    with pytest.raises(
        UserError, match=f"No cell of tiny/table1 can be run: the data of {what} is missing"
    ):
        reproduce(ITEM, cells=["folder"], seeds=seeds, out=tmp_path, say=lambda line: None)


def test_the_estimate_is_the_rounds_left_times_a_measured_round(tmp_path, monkeypatch):
    monkeypatch.setattr("kairosfl_reproductions.reproduce.seconds_per_round", lambda config: 2.0)
    runs = members(ITEM, ["digits"], seeds=1, rounds=50)
    assert estimate(runs, tmp_path) == pytest.approx(2 * 50 * 2.0)
    longer = members(ITEM, ["digits"], seeds=1, rounds=50, changes=["train.epochs=4"])
    assert estimate([runs[0], longer[1]], tmp_path) == pytest.approx(50 * 2.0 + 50 * 8.0)


def test_more_seeds_follow_those_that_were_run(tmp_path):
    found = reproduce(
        ITEM, cells=["digits-fedavg"], seeds=2, first_seed=1, rounds=1, out=tmp_path, say=str
    )
    assert [run["seed"] for run in found["cells"]["digits-fedavg"]["runs"]] == [1, 2]


def test_a_timed_round_ends_when_the_device_has_finished(monkeypatch):
    member = members(ITEM, ["digits"], seeds=1)[0]
    monkeypatch.setattr("kairosfl_reproductions.reproduce.wait", lambda device: time.sleep(0.7))
    assert seconds_per_round(member.config) >= 0.7


def test_the_command_prints_the_table_draws_the_curves_and_keeps_the_results(tmp_path, monkeypatch):
    monkeypatch.setattr("kairosfl_reproductions.catalogue.find", lambda name: ITEM)
    monkeypatch.chdir(tmp_path)
    words = [
        "reproduce",
        "tiny/table1",
        "--cells",
        "digits-fedavg",
        "--seeds",
        "1",
        "--rounds",
        "2",
    ]
    first = CliRunner().invoke(app, [*words, "--results", "kept", "--quiet"])
    assert first.exit_code == 0, first.output
    assert "2 of 6" in first.stdout
    folder = Path("runs", "reproduce", "tiny-table1")
    assert (
        first.stderr.splitlines()[-1]
        == f"curves: {folder / 'curves.svg'}; for more, run: kairosfl report {folder}"
    )
    assert (folder / "curves.svg").read_text().startswith("<?xml")
    assert Path("kept", "tiny-table1.json").is_file()
    again = CliRunner().invoke(app, [*words, "--json"])
    assert json.loads(again.stdout)["cells"]["digits-fedavg"]["runs"][0]["rounds"] == 2
    assert again.stderr == ""


def test_another_experiment_is_not_added_to_the_results(tmp_path, monkeypatch):
    monkeypatch.setattr("kairosfl_reproductions.catalogue.find", lambda name: ITEM)
    words = [
        "reproduce",
        "tiny/table1",
        "--cells",
        "digits-fedavg",
        "--seeds",
        "1",
        "--rounds",
        "1",
        "--quiet",
    ]
    words += ["--out", str(tmp_path / "out"), "--set", "run.eval_every=1", "--set", "train.lr=0.3"]
    refused = CliRunner().invoke(app, [*words, "--results", str(tmp_path / "kept")])
    assert refused.exit_code == 2
    assert (
        "--set run.eval_every=1 --set train.lr=0.3 makes another experiment of tiny/table1"
        in refused.stderr
    )
    assert not (tmp_path / "out").exists()
    shown = CliRunner().invoke(app, [*words, "--json"])  # but it can be run
    assert json.loads(shown.stdout)["cells"]["digits-fedavg"]["comparable"] is False
