"""Run folders into records, and runs into groups."""

import json
import math
import tomllib

import fake
import numpy as np
import pytest

from kairosfl.errors import UserError
from kairosfl.report.read import differing, find_runs, group_runs, read_groups, read_run
from kairosfl.runs.config import dump


def test_columns_hold_a_value_a_round_with_nan_for_null(tmp_path):
    fake.write_run(tmp_path / "a", rounds=4)
    fake.edit(
        tmp_path / "a",
        accuracy=[0.1, None, 0.3, 0.4],
        bytes_down=[1, 2, 3, 4],
        bytes_up=[10, 10, None, 10],
    )
    run = read_run(tmp_path / "a")
    assert run.rounds == run.planned == 4
    np.testing.assert_array_equal(run.column("accuracy"), [0.1, math.nan, 0.3, 0.4])
    np.testing.assert_array_equal(run.total("bytes_down", "bytes_up"), [11, 23, 26, 40])
    assert np.isnan(run.column("fisher")).all()
    assert np.isnan(run.total("fisher")).all()
    assert np.isnan(run.column("unheard of")).tolist() == [True] * 4
    assert run.settings["train.lr"] == 0.05
    assert run.done


def test_a_line_that_is_still_being_written_is_left_for_later_and_a_round_written_twice_counts_once(
    tmp_path,
):
    folder = fake.write_run(tmp_path / "a", rounds=3)
    path = folder / "metrics.jsonl"
    path.write_text(
        path.read_text() + json.dumps({"round": 3, "accuracy": 0.75}) + '\n{"round": 4, "acc'
    )
    run = read_run(folder)
    assert run.column("round").tolist() == [1, 2, 3]
    assert run.column("accuracy")[2] == 0.75


def test_runs_are_found_in_the_order_of_the_sweep_and_others_by_number(tmp_path):
    for name in ("run-10", "run-2", "zz", "deep/er"):
        fake.write_run(tmp_path / name, rounds=1)
    (tmp_path / "sweep.json").write_text(json.dumps({"runs": [{"path": "zz"}, {"path": "gone"}]}))
    found = [path.relative_to(tmp_path.resolve()).as_posix() for path in find_runs([tmp_path])]
    assert found == ["zz", "deep/er", "run-2", "run-10"]
    assert len(find_runs([tmp_path, tmp_path / "zz"])) == 4


def test_runs_that_differ_only_in_seed_are_one_group(tmp_path):
    for seed in (2, 0):
        fake.write_run(tmp_path / f"a{seed}", algorithm="fedavg", seed=seed, rounds=1)
    fake.write_run(tmp_path / "b", algorithm="fedprox(mu=0.01)", rounds=1)
    groups = read_groups([tmp_path])
    assert [(group.label, [run.seed for run in group.runs]) for group in groups] == [
        ("fedavg", [0, 2]),
        ("fedprox(mu=0.01)", [0]),
    ]


@pytest.mark.parametrize(
    ("settings", "labels"),
    [
        ([("fedavg", 0.1), ("fedavg", 0.3)], ["lr=0.1", "lr=0.3"]),
        (
            [("fedavg", 0.1), ("fedavg", 0.3), ("alt", 0.1)],
            ["fedavg · lr=0.1", "fedavg · lr=0.3", "alt"],
        ),
    ],
)
def test_groups_of_one_algorithm_are_named_by_what_sets_them_apart(tmp_path, settings, labels):
    for i, (algorithm, lr) in enumerate(settings):
        fake.write_run(tmp_path / str(i), algorithm=algorithm, lr=lr, rounds=1)
    groups = read_groups([tmp_path])
    assert [group.label for group in groups] == labels
    assert differing([group.runs[0] for group in groups]) == ["train.lr"]


def test_the_data_is_named_once_and_the_engine_only_where_it_is_compared(tmp_path):
    for i, (alpha, engine) in enumerate(((0.1, "loop"), (0.5, "batched"))):
        run = fake.write_run(tmp_path / str(i), alpha=alpha, rounds=1)
        text = (run / "config.toml").read_text()
        (run / "config.toml").write_text(text.replace('engine = "auto"', f'engine = "{engine}"'))
    assert [group.label for group in read_groups([tmp_path])] == ["alpha=0.1", "alpha=0.5"]
    fake.write_run(tmp_path / "2", algorithm="alt", alpha=0.1, rounds=1)
    assert [group.label for group in read_groups([tmp_path])] == [
        "fedavg · alpha=0.1",
        "fedavg · alpha=0.5",
        "alt · alpha=0.1",
    ]


def test_runs_without_a_configuration_stay_apart(tmp_path):
    for name in ("a", "b"):
        fake.write_run(tmp_path / name, rounds=2)
        (tmp_path / name / "config.toml").unlink()
        (tmp_path / name / "run.json").unlink()
    assert [group.label for group in group_runs(map(read_run, find_runs([tmp_path])))] == ["a", "b"]


def test_a_wrong_folder_is_named_in_one_sentence(tmp_path):
    with pytest.raises(UserError, match=r"nowhere does not exist; give a run folder"):
        read_groups([tmp_path / "nowhere"])
    with pytest.raises(UserError, match="contains no run"):
        read_groups([tmp_path])
    (tmp_path / "metrics.jsonl").touch()
    with pytest.raises(UserError, match="has finished a round yet"):
        read_groups([tmp_path])


@pytest.mark.parametrize(
    ("name", "text"), [("run.json", "{"), ("summary.json", "[1]"), ("config.toml", "a = ")]
)
def test_a_broken_file_is_named(tmp_path, name, text):
    folder = fake.write_run(tmp_path / "a", rounds=1)
    (folder / name).write_text(text)
    run = read_run(folder)
    (sentence,) = run.damaged
    assert str(folder / name) in sentence
    assert sentence.endswith("left out.")
    assert (run.rounds, run.done) == (1, True)
    assert run.algorithm == "fedavg"


def test_engines_are_one_curve_unless_they_are_compared(tmp_path):
    def write(name, seed, engine):
        config = fake.write_run(tmp_path / name, seed=seed) / "config.toml"
        tables = tomllib.loads(config.read_text())
        tables.setdefault("run", {})["engine"] = engine
        config.write_text(dump(tables))

    def seeds():
        return [[run.seed for run in group.runs] for group in read_groups([tmp_path])]

    write("a", 0, "loop")
    write("b", 1, "batched")
    assert seeds() == [[0, 1]]
    write("c", 0, "batched")
    assert seeds() == [[0], [0, 1]]


def test_a_stopped_run_does_not_count_beside_the_finished_one_of_its_seed(tmp_path):
    fake.write_run(tmp_path / "stopped", rounds=10, planned=40, done=False)
    fake.write_run(tmp_path / "whole", rounds=40)
    fake.write_run(tmp_path / "other", rounds=20, planned=40, seed=1, done=False)
    (group,) = read_groups([tmp_path])
    assert [(run.seed, run.rounds) for run in group.runs] == [(0, 40), (1, 20)]


def test_what_was_exported_into_a_sweep_is_passed_over(tmp_path):
    study = fake.write_sweep(tmp_path / "study", seeds=1, rounds=3)
    (study / "figures").mkdir()
    (study / "figures" / "accuracy.svg").touch()
    assert len(find_runs(sorted(study.iterdir()))) == len(fake.ALGORITHMS)
