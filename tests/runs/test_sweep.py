"""Sweeps: every combination once, on one engine or on many, and on again where it was stopped."""

from __future__ import annotations

import json
import re

import pytest
import torch

from kairosfl import UserError
from kairosfl.engines.batched import Batched
from kairosfl.rules.scaffold import SCAFFOLD
from kairosfl.runs import experiment
from kairosfl.runs.engines import build_engine
from kairosfl.runs.files import read_lines
from kairosfl.runs.sweep import expand, sweep

TABLES = {
    "data": {"clients": 12},
    "model": {"hidden": [8]},
    "train": {"rounds": 4, "cohort": 3},
    "run": {"engine": "loop", "checkpoint_every": 2},
    "sweep": {
        "algorithm": ["fedavg", "scaffold + fedcl"],
        "seed": [0, 1],
        "data": {"alpha": [0.5]},
    },
}


def rows(folder):
    return [
        {k: v for k, v in row.items() if k != "seconds"}
        for row in read_lines(folder / "metrics.jsonl")
    ]


def test_every_combination_once_and_in_order():
    members = expand(TABLES)
    assert [member.name for member in members] == [
        "fedavg-seed0-alpha0.5",
        "fedavg-seed1-alpha0.5",
        "scaffold+fedcl-seed0-alpha0.5",
        "scaffold+fedcl-seed1-alpha0.5",
    ]
    assert members[3].settings == {"algorithm": "scaffold + fedcl", "seed": 1, "data.alpha": 0.5}
    assert members[3].config.seed == 1
    assert members[3].config.data.alpha == 0.5


def test_a_folder_has_a_name_that_a_file_system_takes():
    lists = {
        f"train.{key}": [0.123456789012345]
        for key in ("lr", "momentum", "weight_decay", "clip", "gamma")
    }
    lists |= {
        "algorithm": [f"fedprox(mu={mu}) + scaffold + fedcl + pa3fed" for mu in (1, 2)],
        "data.path": ["x" * 99],
    }
    members = expand(TABLES | {"data": {"name": "folder"}, "sweep": lists})
    assert len({member.name for member in members}) == 2
    assert all(len(member.name) < 255 for member in members)


@pytest.mark.parametrize(
    ("lists", "sentence"),
    [
        ({"seed": 3}, "sweep.seed = 3 must be a list"),
        ({"seed": []}, "must be a list"),
        ({"trian": {"lr": [1]}}, "did you mean 'train'"),
        ({"train": {"lr": [0.1, "a"]}}, "train.lr = 'a' must be a number"),
        ({"algorithm": ["fedprox", "fedprox(mu=0.01)"]}, "asks twice for the same run"),
    ],
)
def test_wrong_lists(lists, sentence):
    with pytest.raises(UserError, match=sentence):
        expand(TABLES | {"sweep": lists})


def test_a_sweep_does_not_go_into_the_folder_of_a_run(tmp_path):
    experiment.start(expand(TABLES | {"sweep": {"seed": [0]}})[0].config, tmp_path / "run")
    with pytest.raises(UserError, match="contains a run, and a sweep needs its own folder"):
        sweep(expand(TABLES | {"sweep": {"seed": [0, 1]}}), tmp_path / "run")


def test_a_model_to_start_from_is_checked_before_the_first_run(tmp_path):
    experiment.start(expand(TABLES | {"sweep": {"seed": [0]}})[0].config, tmp_path / "run")
    folders = [str(tmp_path / name) for name in ("run", "nowhere")]
    with pytest.raises(UserError, match="nowhere' is not a run folder with a checkpoint"):
        sweep(expand(TABLES | {"sweep": {"model.start": folders}}), tmp_path / "sweep")
    assert not (tmp_path / "sweep").exists()


@pytest.mark.parametrize(
    ("section", "key", "value", "sentence"),
    [
        (
            "train",
            "rounds",
            5,
            "train.rounds = 4, but the sweep now has 5; give another --out, or restore the old value",
        ),
        ("train", "lr", 0.2, "train.lr = 0.1, but the sweep now has 0.2"),
        (
            "run",
            "detector",
            "fgn(delta=0.5)",
            "run.detector = 'fgn', but the sweep now has 'fgn(delta=0.5)'",
        ),
    ],
)
def test_runs_that_were_begun_otherwise_are_not_taken_for_these(
    tmp_path, section, key, value, sentence
):
    small = TABLES | {"train": {"rounds": 4, "cohort": 3, "lr": 0.1}, "sweep": {"seed": [0]}}
    sweep(expand(small), tmp_path)
    other = small | {section: {**small[section], key: value}}
    with pytest.raises(UserError, match=re.escape(sentence)):
        sweep(expand(other), tmp_path)
    sweep(expand(small | {"run": {"engine": "batched", "eval_every": 2}}), tmp_path)


def test_each_run_is_what_it_is_alone(tmp_path):
    members = expand(TABLES)
    summaries = sweep(members, tmp_path / "sweep")
    assert list(summaries) == [member.name for member in members]
    experiment.start(members[2].config, tmp_path / "alone")
    assert rows(tmp_path / "sweep" / members[2].name) == rows(tmp_path / "alone")
    listed = json.loads((tmp_path / "sweep" / "sweep.json").read_text())["runs"]
    assert [run["settings"]["seed"] for run in listed] == [0, 1, 0, 1]


def test_runs_that_share_a_batched_engine_are_to_the_bit_what_they_are_alone(tmp_path):
    tables = TABLES | {"run": {"engine": "batched", "deterministic": True, "checkpoint_every": 2}}
    members = expand(tables)
    sweep(members, tmp_path / "sweep")
    for member in members[1:3]:
        experiment.start(member.config, tmp_path / member.name)
        assert rows(tmp_path / "sweep" / member.name) == rows(tmp_path / member.name)


def test_runs_that_share_a_batched_engine_otherwise_are_what_they_are_alone_but_for_rounding(
    tmp_path,
):
    members = expand(TABLES | {"run": {"engine": "batched"}})
    sweep(members, tmp_path / "sweep")
    for number, member in enumerate(members):
        experiment.start(member.config, tmp_path / str(number))
        for found, wanted in zip(
            rows(tmp_path / "sweep" / member.name), rows(tmp_path / str(number)), strict=True
        ):
            for name in ("loss", "train_loss", "accuracy", "fgn"):
                assert found[name] == pytest.approx(wanted[name], rel=1e-4), (member.name, name)


def test_runs_with_different_detectors_share_an_engine_and_keep_them(tmp_path, monkeypatch):
    built = []
    monkeypatch.setattr(
        "kairosfl.runs.prepare.build_engine",
        lambda *a, **k: built.append(a[2]) or build_engine(*a, **k),
    )
    tables = TABLES | {
        "run": {"engine": "batched"},
        "sweep": {"run": {"detector": ["fgn", "fgn(include_lr=False)"]}},
    }
    members = expand(tables)
    sweep(members, tmp_path)
    assert built == [[3, 3]]
    values = [[row["fgn"] for row in rows(tmp_path / member.name)] for member in members]
    assert values[0] == pytest.approx([0.1 * value for value in values[1]])


def test_runs_that_find_no_room_wait_for_others_to_end(tmp_path, monkeypatch):
    tables = TABLES | {
        "run": {"engine": "batched", "deterministic": True},
        "sweep": {"seed": [0, 1, 2, 3]},
    }
    members = expand(tables)
    sweep(members, tmp_path / "together")
    begun, ended = [], []

    class Crowded(Batched):
        def __init__(self, *arguments, cohorts, **options):
            super().__init__(*arguments, cohorts=cohorts, **options)
            self.room = 2 * max(cohorts) + 1

    def watch(name, done):
        def listen(row):
            if row["round"] == 1:
                begun.append(name)
            if row["round"] == 4:
                ended.append(len(begun))

        return listen

    monkeypatch.setattr("kairosfl.engines.batched.Batched", Crowded)
    sweep(members, tmp_path / "in turn", watch=watch)
    assert begun == [member.name for member in members]
    assert max(count - number for number, count in enumerate(ended)) == 2  # runs at once
    for member in members:
        assert rows(tmp_path / "in turn" / member.name) == rows(tmp_path / "together" / member.name)


def test_a_run_of_a_sweep_has_the_engine_that_it_has_alone(tmp_path):
    members = expand(TABLES | {"run": {"engine": "auto"}, "sweep": {"train": {"cohort": [3, 8]}}})
    sweep(members, tmp_path)
    about = [json.loads((tmp_path / member.name / "run.json").read_text()) for member in members]
    assert [each["engine"] for each in about] == ["loop", "batched"]
    assert all("chosen because" in each["why"] for each in about)


@pytest.mark.parametrize("engine", ["loop", "batched"])
def test_a_stopped_sweep_goes_on_and_finished_runs_are_left_alone(tmp_path, engine):
    tables = TABLES | {"run": {"engine": engine, "deterministic": True, "checkpoint_every": 1}}
    members = expand(tables)
    sweep(members, tmp_path / "whole")
    seen = []

    def watch(name, done):
        seen.append((name, done))

        def listen(row):
            if name == members[1].name and row["round"] == 3:
                raise KeyboardInterrupt

        return listen

    with pytest.raises(KeyboardInterrupt):
        sweep(members, tmp_path / "cut", watch=watch)
    times = {path: path.stat().st_mtime_ns for path in (tmp_path / "cut").glob("*/summary.json")}
    sweep(members, tmp_path / "cut")
    assert all(path.stat().st_mtime_ns == when for path, when in times.items())
    for member in members:
        assert rows(tmp_path / "cut" / member.name) == rows(tmp_path / "whole" / member.name)


@pytest.mark.parametrize("engine", ["loop", "batched"])
def test_a_run_that_comes_to_nothing_is_named_and_the_others_end(tmp_path, engine):
    tables = TABLES | {"train": {"rounds": 12, "cohort": 3}, "run": {"engine": engine}}
    members = expand(tables | {"sweep": {"train": {"lr": [1e30, 0.1]}}})
    with pytest.raises(
        UserError, match=r"1 of 2 runs failed; the first, lr1e\+30: 10 rounds in a row"
    ):
        sweep(members, tmp_path / "sweep")
    assert len(rows(tmp_path / "sweep" / "lr0.1")) == 12


@pytest.mark.parametrize("engine", ["loop", "batched"])
@pytest.mark.parametrize(("hook", "when"), [("observe", 4), ("brief", 1)])
def test_a_run_without_memory_is_told_so_and_goes_on_later(
    tmp_path, engine, hook, when, monkeypatch
):
    tables = TABLES | {"run": {"engine": engine, "checkpoint_every": 2}}
    members = expand(tables | {"sweep": {"algorithm": ["scaffold", "fedavg"]}})
    sweep(members, tmp_path / "whole")
    whole, seen = getattr(SCAFFOLD, hook), []

    def short(*everything):
        seen.append(None)
        if len(seen) == when:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return whole(*everything)

    monkeypatch.setattr(SCAFFOLD, hook, short)
    with pytest.raises(
        UserError, match=r"1 of 2 runs .* scaffold: The GPU ran out of memory: .* `kairosfl resume`"
    ):
        sweep(members, tmp_path / "cut")
    assert len(rows(tmp_path / "cut" / "fedavg")) == 4
    assert (
        (tmp_path / "cut" / "scaffold" / "log.txt")
        .read_text()
        .startswith("stopped: The GPU ran out of memory")
    )
    sweep(members, tmp_path / "cut")
    assert rows(tmp_path / "cut" / "scaffold") == rows(tmp_path / "whole" / "scaffold")


@pytest.mark.parametrize("engine", ["loop", "batched"])
def test_runs_that_have_nothing_left_to_do_do_not_keep_the_others_from_their_end(tmp_path, engine):
    tables = TABLES | {"train": {"rounds": 10, "cohort": 3}, "run": {"engine": engine}}
    members = expand(tables | {"sweep": {"train": {"lr": [1e30, 0.1, 0.2]}}})
    with pytest.raises(UserError, match="1 of 3 runs failed"):
        sweep(members, tmp_path / "sweep")
    (
        tmp_path / "sweep" / "lr0.1" / "summary.json"
    ).unlink()  # killed between the last checkpoint and the summary
    (tmp_path / "sweep" / "lr0.2").rename(tmp_path / "elsewhere")
    with pytest.raises(UserError, match="1 of 3 runs failed"):
        sweep(members, tmp_path / "sweep")
    assert all(
        (tmp_path / "sweep" / name / "summary.json").is_file() for name in ("lr0.1", "lr0.2")
    )


def test_an_engine_without_memory_ends_its_runs_in_one_sentence(tmp_path, monkeypatch):
    def none(*everything, **more):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    members = expand(TABLES | {"run": {"engine": "batched"}, "sweep": {"seed": [0, 1]}})
    with monkeypatch.context() as patch:
        patch.setattr(Batched, "collect", none)
        with pytest.raises(
            UserError, match=r"2 of 2 runs failed; the first, seed0: The GPU ran out of memory"
        ):
            sweep(members, tmp_path / "a")
    monkeypatch.setattr("kairosfl.runs.prepare.build_engine", none)
    with pytest.raises(UserError, match="The GPU ran out of memory"):
        sweep(members, tmp_path / "b")
