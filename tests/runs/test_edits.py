"""A run goes on as it began: edits of its folder are harmless and logged, or refused in one
sentence.
"""

from __future__ import annotations

import json
import re

import pytest
import torch
from typer.testing import CliRunner

from kairosfl import UserError
from kairosfl.cli import app
from kairosfl.runs import experiment
from kairosfl.runs.checkpoint import model
from kairosfl.runs.config import load, resolve
from kairosfl.runs.folder import Folder
from kairosfl.runs.sensible import HARMLESS, edits, flat, harmful
from kairosfl.runs.sweep import expand, sweep

TABLES = {
    "algorithm": "fedavgm",
    "data": {"clients": 12},
    "model": {"hidden": [8]},
    "train": {"rounds": 3, "cohort": 3, "lr": 0.1},
    "run": {"engine": "loop", "checkpoint_every": 1},
}


@pytest.fixture
def folder(tmp_path):
    """A run that was stopped in the second of three rounds."""

    def stop(row):
        if row["round"] == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        experiment.start(resolve(TABLES), tmp_path / "run", notify=stop)
    return tmp_path / "run"


def edit(folder, old, new):
    text = (folder / "config.toml").read_text()
    assert old in text
    (folder / "config.toml").write_text(text.replace(old, new))


def call(*words):
    return CliRunner().invoke(app, [str(word) for word in words])


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ("seed = 0", "seed = 1", "seed = 1 (it began with 0)"),
        ("lr = 0.1", "lr = 0.2", "train.lr = 0.2 (it began with 0.1)"),
        ("alpha = 0.3", "alpha = 0.5", "data.alpha = 0.5 (it began with 0.3)"),
        ("clients = 12", "clients = 13", "data.clients = 13 (it began with 12)"),
        ("hidden = [8]", "hidden = [9]", "model.hidden = [9] (it began with [8])"),
        ("hidden = [8]\n", "", "model.hidden = None (it began with [8])"),
        ('"fedavgm"', '"fedavg"', "algorithm = 'fedavg' (it began with 'fedavgm')"),
        ('engine = "loop"', 'engine = "batched"', "run.engine = 'batched' (it began with 'loop')"),
        (
            'precision = "float32"',
            'precision = "tf32"',
            "run.precision = 'tf32' (it began with 'float32')",
        ),
        (
            'detector = "fgn"',
            'detector = "fedfim"',
            "run.detector = 'fedfim' (it began with 'fgn')",
        ),
        ("threads = 1", "threads = 2", "run.threads = 2 (it began with 1)"),
        (
            "deterministic = false",
            "deterministic = true",
            "run.deterministic = True (it began with False)",
        ),
        (
            'schedule = "constant"',
            'schedule = "cosine"',
            "train.schedule = 'cosine' (it began with 'constant')",
        ),
    ],
)
def test_an_edit_that_changes_the_numbers_is_refused(folder, old, new, named):
    before = (folder / "metrics.jsonl").read_bytes()
    edit(folder, old, new)
    result = call("resume", folder, "-q")
    assert result.exit_code == 2, result.output
    (line,) = result.stderr.splitlines()
    assert named in line
    assert "undo the edit" in line
    assert f"kairosfl run {folder}/config.toml --from {folder}" in line
    assert (folder / "metrics.jsonl").read_bytes() == before
    edit(folder, new or "[model]\n", old if new else f"[model]\n{old}")
    assert call("resume", folder, "-q").exit_code == 0


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ("rounds = 3", "rounds = 4", "train.rounds = 4 (it began with 3)"),
        ("eval_every = 1", "eval_every = 2", "run.eval_every = 2 (it began with 1)"),
        (
            'client_accuracy = "auto"',
            "client_accuracy = true",
            "run.client_accuracy = True (it began with 'auto')",
        ),
        ("slots = 0", "slots = 2", "run.slots = 2 (it began with 0)"),
        ('engine = "loop"', 'engine = "auto"', ""),  # as it was decided
        ('device = "cpu"', 'device = "auto"', ""),
        ("threads = 1", "threads = 0", ""),
        ('algorithm = "fedavgm"', 'algorithm = " fedavgm( ) "  # a remark', ""),
    ],
)
def test_an_edit_that_changes_no_number_is_accepted_and_logged(folder, tmp_path, old, new, named):
    edit(folder, old, new)
    said = []
    summary = experiment.resume(folder, say=said.append)
    assert summary["rounds"] == load(folder / "config.toml").train.rounds
    assert said[0].startswith("engine loop on cpu")
    notes = [
        line
        for line in (folder / "log.txt").read_text().splitlines()
        if line.startswith("continues with")
    ]
    assert notes == ([f"continues with {named}"] if named else [])
    assert said[1:] == notes
    experiment.start(resolve(TABLES, [f"train.rounds={summary['rounds']}"]), tmp_path / "whole")
    assert torch.equal(model(folder)[0], model(tmp_path / "whole")[0])


@pytest.mark.parametrize("table", [{"train": {"schedule": "cosine"}}, {"algorithm": "alt"}])
def test_more_rounds_are_refused_where_the_others_depend_on_how_many_there_are(tmp_path, table):
    folder = tmp_path / "run"
    tables = TABLES | table | {"train": TABLES["train"] | table.get("train", {}) | {"rounds": 2}}
    experiment.start(resolve(tables), folder)
    edit(folder, "rounds = 2", "rounds = 3")
    with pytest.raises(UserError, match=re.escape("train.rounds = 3 (it began with 2)")):
        experiment.resume(folder)


def test_slots_of_a_deterministic_run_stay():
    assert harmful(resolve({"run": {"slots": 3}}), flat(resolve({}))) == []
    exact = {"slots": 3, "deterministic": True}
    (said,) = harmful(resolve({"run": exact}), flat(resolve({"run": exact | {"slots": 0}})))
    assert said == "run.slots = 3 (it began with 0)"


def test_a_run_is_prolonged_unless_something_depends_on_the_number_of_rounds():
    def said(**more):
        return harmful(
            resolve({"train": {"rounds": 6}} | more), flat(resolve({"train": {"rounds": 4}} | more))
        )

    assert said(algorithm="fedavgm") == []
    assert said(algorithm="budget(share=0.5) + average") == [
        "train.rounds = 6 (it began with 4), on which budget and average depend"
    ]


def test_every_harmless_key_exists_and_another_gpu_is_no_edit():
    begun = flat(resolve({"run": {"device": "cuda"}}))
    assert begun.keys() >= HARMLESS
    assert edits(flat(resolve({"run": {"device": "cuda:1"}})), begun) == []
    assert [each.key for each in edits(flat(resolve({"run": {"device": "cpu"}})), begun)] == [
        "run.device"
    ]


def test_many_edits_are_one_sentence(folder):
    (folder / "config.toml").write_text("seed = 7\n")
    with pytest.raises(
        UserError,
        match=r"algorithm = 'fedavg' .*, seed = 7 .* and \d more; that would be another run",
    ):
        experiment.resume(folder)


@pytest.mark.parametrize(
    "content", [b"seed = ", b'algorithm = "\xe9"', b"seed = 0\nnonsense = 3\n"]
)
def test_a_damaged_configuration_is_one_sentence(folder, content):
    (folder / "config.toml").write_bytes(content)
    result = call("resume", folder, "-q")
    assert result.exit_code == 2
    assert len(result.stderr.splitlines()) == 1


def test_a_finished_run_that_was_edited_says_so(tmp_path):
    experiment.start(resolve(TABLES), tmp_path / "run")
    edit(tmp_path / "run", "seed = 0", "seed = 1")
    with pytest.raises(UserError, match="was edited: seed = 1"):
        experiment.resume(tmp_path / "run")


def test_a_run_of_a_sweep_that_was_edited_says_so(tmp_path):
    members = expand(TABLES | {"sweep": {"seed": [0]}})
    sweep(members, tmp_path)
    edit(tmp_path / "seed0", 'engine = "loop"', 'engine = "batched"')
    with pytest.raises(UserError, match=r"was edited: run\.engine = 'batched'"):
        sweep(members, tmp_path)


@pytest.mark.parametrize("name", ["population_hash", "layout_hash"])
def test_other_data_or_weights_than_it_began_with_are_refused(folder, name):
    about = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps(about | {name: "another"}))
    told = rf"its {name.replace('_', ' ')} was 'another' and is '\w+' now; restore the data and the model"
    with pytest.raises(UserError, match=told):
        experiment.resume(folder)


def test_a_char_lstm_whose_weights_are_in_another_order_is_not_read(folder):
    about = json.loads((folder / "run.json").read_text())
    about["config"]["model"]["name"] = "char_lstm"
    (folder / "run.json").write_text(json.dumps(about))
    Folder(folder).check_version()
    del about["layout_hash"]
    (folder / "run.json").write_text(json.dumps(about))
    for check in (Folder(folder).check_version, lambda: Folder(folder).check_start("model.start")):
        with pytest.raises(
            UserError,
            match=r"was begun before char_lstm was nn\.LSTM, and its weights are in another",
        ):
            check()


@pytest.mark.parametrize("about", ["{}", "[", '{"engine": "loop"}'])
def test_a_folder_that_does_not_say_how_it_began_is_trusted_once(folder, about):
    (folder / "run.json").write_text(about)
    edit(folder, "rounds = 3", "rounds = 4")
    experiment.resume(folder)
    assert (
        "does not record what the run began with: config.toml is used"
        in (folder / "log.txt").read_text()
    )
    edit(folder, "lr = 0.1", "lr = 0.2")
    with pytest.raises(UserError, match=r"train\.lr = 0\.2"):
        experiment.resume(folder)


def test_other_versions_are_logged(folder):
    about = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps(about | {"torch": "1.0"}))
    experiment.resume(folder)
    assert f"torch was 1.0 and is {torch.__version__} now" in (folder / "log.txt").read_text()


def test_a_new_run_from_the_model_of_another(folder, tmp_path):
    edit(folder, "lr = 0.1", "lr = 0.2")
    words = ["run", folder / "config.toml", "--from", folder, "--out", tmp_path / "new", "-q"]
    assert call(*words, "--set", "train.rounds=1", "--set", "train.lr=1e-30").exit_code == 0
    x, rounds = model(folder)
    assert rounds == 1
    torch.testing.assert_close(
        model(tmp_path / "new")[0], x, rtol=0, atol=0
    )  # steps of 1e-30 change nothing
    about = json.loads((tmp_path / "new" / "run.json").read_text())
    assert about["start"] == {"folder": str(folder), "round": 1}
    assert load(tmp_path / "new" / "config.toml").model.start == str(folder)


def test_a_model_to_start_from_must_be_there_and_fit(folder, tmp_path):
    with pytest.raises(
        UserError,
        match=r"model\.start = '.*nowhere' is not a run folder with a checkpoint; name one",
    ):
        experiment.start(resolve(TABLES, [f"model.start={tmp_path / 'nowhere'}"]), tmp_path / "a")
    assert not (tmp_path / "a").exists()
    with pytest.raises(
        UserError, match=r"has a model of 610 parameters, but this one has 685; choose"
    ):
        experiment.start(
            resolve(TABLES, [f"model.start={folder}", "model.hidden=[9]"]), tmp_path / "b"
        )


def test_before_its_first_checkpoint_a_run_may_be_edited(tmp_path):
    def stop(row):
        raise KeyboardInterrupt

    config = resolve(TABLES, ["run.checkpoint_every=10"])
    with pytest.raises(KeyboardInterrupt):
        experiment.start(config, tmp_path / "run", notify=stop)
    edit(tmp_path / "run", "seed = 0", "seed = 1")
    assert experiment.resume(tmp_path / "run")["missing_rounds"] == []
    experiment.start(resolve(TABLES, ["seed=1"]), tmp_path / "whole")
    assert torch.equal(model(tmp_path / "run")[0], model(tmp_path / "whole")[0])
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 3
    assert json.loads((tmp_path / "run" / "run.json").read_text())["seed"] == 1


def test_a_folder_of_the_first_version_is_not_resumed(folder):
    about = json.loads((folder / "run.json").read_text())
    (folder / "run.json").write_text(json.dumps(about | {"version": "0.1.0"}))
    before = sorted(path.name for path in folder.iterdir())
    said = call("resume", folder)
    assert said.exit_code == 2
    assert "was begun with kairosfl 0.1.0" in said.output
    assert "finish it with that version, or start a new run." in said.output
    assert sorted(path.name for path in folder.iterdir()) == before


def test_fewer_rounds_than_are_done_are_refused(folder):
    assert experiment.resume(folder)["rounds"] == 3
    edit(folder, "rounds = 3", "rounds = 2")
    said = call("resume", folder)
    assert said.exit_code == 2
    assert "has train.rounds = 2, but 3 rounds are done; set 3 or more." in " ".join(
        said.output.split()
    )
