"""Settings without effect are named, once, and only if they are without effect in every run."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from kairosfl.cli import app
from kairosfl.presets import names, path
from kairosfl.runs.config import read, resolve
from kairosfl.runs.sensible import NEEDS, unused

WITHOUT_EFFECT = {
    "train.gamma=0.5": "train.gamma = 0.5 has no effect with train.schedule = 'constant'.",
    "train.milestones=[3]": "train.milestones = (3,) has no effect with train.schedule = 'constant'.",
    "train.lr_min=0.01": "train.lr_min = 0.01 has no effect with train.schedule = 'constant'.",
    "train.beta1=0.5": "train.beta1 = 0.5 has no effect with train.optimizer = 'sgd'.",
    "train.beta2=0.5": "train.beta2 = 0.5 has no effect with train.optimizer = 'sgd'.",
    "train.eps=0.5": "train.eps = 0.5 has no effect with train.optimizer = 'sgd'.",
    "train.clip_after=true": "train.clip_after = True has no effect with train.clip = 0.0.",
    "data.balance=true": "data.balance = True has no effect with data.partition = 'iid'.",
    "data.nearest=true": "data.nearest = True has no effect with data.partition = 'iid'.",
    "data.alpha=0.1": "data.alpha = 0.1 has no effect with data.partition = 'iid'.",
    "data.minimum=3": "data.minimum = 3 has no effect with data.partition = 'iid'.",
    "data.shards=3": "data.shards = 3 has no effect with data.partition = 'iid'.",
    "data.labels_per_client=3": "data.labels_per_client = 3 has no effect with data.partition = 'iid'.",
    "data.class_counts=[[3]]": "data.class_counts = ((3,),) has no effect with data.partition = 'iid'.",
    "data.crops=0.5": "data.crops = 0.5 has no effect without data.augment = true.",
    "data.padding='mean'": "data.padding = 'mean' has no effect without data.augment = true.",
    "run.actors=3": "run.actors = 3 has no effect with run.engine = 'auto'.",
}
WITH_EFFECT = (
    ["train.gamma=0.5", "train.schedule='exponential'"],
    ["train.gamma=0.5", "train.schedule='steps'", "train.milestones=[3]"],
    ["train.lr_min=0.01", "train.schedule='cosine'"],
    ["train.beta1=0.5", "train.beta2=0.5", "train.eps=0.5", "train.optimizer='adamw'"],
    ["train.clip_after=true", "train.clip=1.0"],
    ["data.alpha=0.1", "data.balance=true"],
    ["data.nearest=true", "data.partition='mixed'"],
    ["data.alpha=0.1", "data.partition='quantity'"],
    ["data.shards=3", "data.partition='shards'"],
    ["data.labels_per_client=3", "data.partition='labels'"],
    ["data.class_counts=[[3]]", "data.partition='counts'"],
    ["run.actors=3", "run.engine='ray'"],
    ["data.crops=0.5", "data.padding='mean'", "data.augment=true"],
)


def test_every_setting_without_effect_is_named() -> None:
    assert {change.partition("=")[0] for change in WITHOUT_EFFECT} == set(NEEDS)
    for change, said in WITHOUT_EFFECT.items():
        assert unused([resolve({}, [change, "data.partition='iid'"])]) == [said]


@pytest.mark.parametrize("changes", WITH_EFFECT)
def test_settings_with_an_effect_are_not(changes: list[str]) -> None:
    assert unused([resolve({}, changes)]) == []


def test_steps_without_milestones() -> None:
    said = ["train.schedule = 'steps' has no train.milestones: the learning rate stays the same."]
    assert unused([resolve({}, ["train.schedule='steps'"])]) == said


def test_one_run_of_a_sweep_that_uses_it_is_enough() -> None:
    runs = [
        resolve({}, ["train.gamma=0.5", f"train.schedule='{each}'"])
        for each in ("constant", "exponential")
    ]
    assert unused(runs) == []


def test_a_task_file_may_use_data_as_it_likes() -> None:
    assert unused([resolve({}, ["task.file='mine.py'", "data.shards=3"])]) == []


@pytest.mark.parametrize("name", names())
def test_presets_have_none(name: str) -> None:
    assert unused([resolve(read(path(name)))]) == []


@pytest.mark.parametrize("command", [["run"], ["sweep", "--seeds", "2"]])
def test_run_and_sweep_say_so(command: list[str], tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("[train]\nrounds = 1\ngamma = 0.5\n[data]\nclients = 10\n")
    said = "kairosfl: train.gamma = 0.5 has no effect with train.schedule = 'constant'.\n"
    for options, times in (([], 1), (["--quiet"], 0)):
        result = CliRunner().invoke(
            app, [*command, str(file), "--out", str(tmp_path / f"out{times}"), *options]
        )
        assert result.exit_code == 0, result.output
        assert result.stderr.count(said) == times
