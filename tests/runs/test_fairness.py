"""The accuracy of every client is measured after the last round where that is cheap, and changes
nothing else.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from kairosfl import UserError
from kairosfl.report.figures import figures
from kairosfl.report.read import read_study
from kairosfl.report.tables import cells, results
from kairosfl.runs import experiment
from kairosfl.runs.checkpoint import model
from kairosfl.runs.config import resolve
from kairosfl.runs.files import read_lines
from kairosfl.runs.prepare import about_of, build_task, prepare
from kairosfl.tasks.streamed import Streamed

TABLES: dict[str, Any] = {
    "data": {"clients": 8},
    "model": {"hidden": [8]},
    "train": {"rounds": 24, "cohort": 4},
    "run": {"engine": "loop", "checkpoint_every": 5},
}
TIMED = {"seconds", "samples_per_second"}
CLIENTS = ("client_accuracy_mean", "client_accuracy_worst")


def rows(folder: Path) -> list[dict[str, Any]]:
    return [
        {key: value for key, value in row.items() if key not in TIMED}
        for row in read_lines(folder / "metrics.jsonl")
    ]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("fairness") / "run"
    experiment.start(resolve(TABLES), folder)
    return folder


def test_the_last_round_alone_is_measured_and_nothing_else_changes(folder, tmp_path):
    *before, last = rows(folder)
    assert all(row[name] is None for row in before for name in CLIENTS)
    assert 0 <= last["client_accuracy_worst"] <= last["client_accuracy_mean"] <= 1
    assert json.loads((folder / "run.json").read_text())["client_accuracy_on"] == "train"
    experiment.start(resolve(TABLES, ["run.client_accuracy=false"]), tmp_path / "off")
    assert torch.equal(model(folder)[0], model(tmp_path / "off")[0])
    assert rows(tmp_path / "off") == [row | dict.fromkeys(CLIENTS) for row in rows(folder)]
    assert json.loads((tmp_path / "off" / "run.json").read_text())["client_accuracy_on"] is None


def test_it_is_what_a_request_measures(folder, tmp_path):
    experiment.start(resolve(TABLES, ["run.client_accuracy=true"]), tmp_path / "asked")
    asked = rows(tmp_path / "asked")
    assert asked[-1] == rows(folder)[-1]
    assert all(row[name] is not None for row in asked for name in CLIENTS)


def test_a_resumed_run_records_the_same(folder, tmp_path):
    prepared = prepare(resolve(TABLES))
    engine = prepared.engine
    recorded = experiment.begin(prepared, experiment.Folder(tmp_path / "run"))
    briefs = next(recorded)
    for _ in range(7):
        briefs = recorded.send(engine.train(briefs))
    recorded.close()
    experiment.resume(tmp_path / "run")
    assert rows(tmp_path / "run") == rows(folder)
    ours, whole = (list(read_lines(each / "clients.jsonl")) for each in (tmp_path / "run", folder))
    assert ours == whole
    assert [("accuracy_quantiles" in line) for line in ours] == [False] * 23 + [True]


@pytest.mark.parametrize(
    ("changes", "measured"),
    [
        (["train.rounds=12"], True),  # 30,186 passes over a sample, and clients have 1,437 samples
        (["train.rounds=12", "run.eval_every=12"], False),  # 26,226
        (["train.rounds=2"], False),
        (["algorithm=privacy(epsilon=8)"], False),
        (["algorithm=localprivacy"], False),
    ],
)
def test_it_is_measured_where_it_is_cheap_and_private_to_nobody(changes, measured):
    config = resolve(TABLES, changes)
    assert about_of(config, build_task(config)).measures_last is measured


def test_data_that_is_read_for_every_batch_or_elsewhere_is_left_alone():
    config = resolve(TABLES)
    task = build_task(config)
    streamed = Streamed(
        task.dataset.train.read, len(task.dataset.train), task.dataset.train.targets
    )
    elsewhere = replace(task, dataset=replace(task.dataset, train=streamed))
    assert not about_of(config, elsewhere).measures_last
    asked = resolve(TABLES, ["run.client_accuracy=true", "train.rounds=1"])
    assert about_of(asked, task).measures_clients
    pytest.importorskip("flwr")
    from kairosfl.deploy import Remote

    remote = replace(task, clients=Remote.with_clients(8))
    assert not about_of(config, remote).measures_last


def test_another_value_is_refused():
    with pytest.raises(
        UserError, match=r"run\.client_accuracy = 'always' must be true, false or 'auto'\."
    ):
        resolve({"run": {"client_accuracy": "always"}})
    with pytest.raises(UserError, match=r"run\.client_accuracy = 1 must be"):
        resolve({"run": {"client_accuracy": 1}})


def test_the_report_shows_it(folder):
    groups = read_study([folder]).groups
    drawn, left = figures(groups)
    assert "Final accuracy of every client, on its training samples" in [
        each.title for each in drawn
    ]
    (why,) = (each.why for each in left if each.title == "Accuracy per client")
    assert "after the last round alone; set run.client_accuracy = true" in why
    (row,) = results(groups, 0.5)
    assert row.worst_clients.mean == rows(folder)[-1]["client_accuracy_worst"]
    assert cells(row)["worst clients"] == f"{100 * row.worst_clients.mean:.2f}"
