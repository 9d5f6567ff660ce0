"""The accuracy of every class and who is taken for whom: recorded by engines, drawn by the report."""

import json

import fake
import numpy as np
import pytest
import torch

from kairosfl.report.figures import figures
from kairosfl.report.read import read_groups
from kairosfl.runs.config import resolve
from kairosfl.runs.experiment import start
from kairosfl.runs.metrics import CONFUSED_CLASSES, _by_class
from kairosfl.tasks.metrics import confusion


def test_the_confusion_counts_every_sample_once():
    generator = np.random.default_rng(0)
    scores, targets = generator.standard_normal((50, 5)), generator.integers(0, 4, 50)
    found = confusion(torch.from_numpy(scores), torch.from_numpy(targets), 4).numpy()
    expected = np.zeros((4, 5))
    for row, target in zip(scores, targets, strict=True):
        expected[target, min(row.argmax(), 4)] += 1  # a fifth output is none of the classes
    np.testing.assert_array_equal(found, expected)
    single = confusion(torch.tensor([-1.0, 2.0, 3.0]), torch.tensor([0, 0, 1]), 2)
    assert single.tolist() == [[1, 1, 0], [0, 1, 0]]


def test_what_is_written_is_bounded_and_names_classes_without_samples():
    assert _by_class([[1, 2, 1], [0, 0, 0]]) == {
        "class_accuracy": [0.25, None],
        "confusion": [[1, 2], [0, 0]],
    }
    many = _by_class([[1] * (CONFUSED_CLASSES + 2)] * (CONFUSED_CLASSES + 1))
    assert many["confusion"] is None
    assert len(many["class_accuracy"]) == CONFUSED_CLASSES + 1


@pytest.mark.parametrize("engine", ["loop", "batched"])
def test_engines_record_it_in_evaluated_rounds(tmp_path, engine):
    run = {"device": "cpu", "engine": engine, "eval_every": 2}
    start(resolve({"algorithm": "fedavg", "train": {"rounds": 5}, "run": run}), tmp_path / "a")
    rows = [
        json.loads(line) for line in (tmp_path / "a" / "clients.jsonl").read_text().splitlines()
    ]
    scores = [
        json.loads(line) for line in (tmp_path / "a" / "metrics.jsonl").read_text().splitlines()
    ]
    assert ["confusion" in row for row in rows] == [False, True, False, True, True]
    evaluated = [
        (row, score) for row, score in zip(rows, scores, strict=True) if "confusion" in row
    ]
    for row, score in evaluated:
        counts = np.array(row["confusion"])
        assert counts.trace() / counts.sum() == pytest.approx(score["accuracy"], rel=1e-12)
        np.testing.assert_allclose(
            row["class_accuracy"], counts.diagonal() / counts.sum(1), rtol=1e-3
        )
    pictures = {each.key: each for each in figures(read_groups([tmp_path]))[0]}
    assert pictures["classes-0"].grid.shape == (10, 3)
    assert not np.isnan(pictures["classes-0"].grid).any()
    assert list(pictures["worst-class"].series[0].mean) == [
        min(row["class_accuracy"]) for row, _ in evaluated
    ]
    np.testing.assert_allclose(np.nansum(pictures["confusion-5-0"].grid, axis=1), 1)


def test_a_damaged_matrix_costs_itself_alone(tmp_path):
    run = fake.write_run(tmp_path / "a", rounds=4)
    path = run / "clients.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows[1] |= {"class_accuracy": [0.5, None], "confusion": [[1, 1], [0, 0]]}
    rows[2] |= {"class_accuracy": [0.5, 2], "confusion": [[1, 1], [0]]}
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    groups = read_groups([run])
    pictures = {each.key: each for each in figures(groups)[0]}
    assert [key for key in pictures if "confusion" in key] == ["confusion-2-0"]
    assert list(pictures["worst-class"].series[0].mean) == [0.5]
    (said,) = {
        sentence for sentence in groups[0].runs[0].clients_damaged if "confusion" in sentence
    }
    assert said.endswith("confusion in round 3 is damaged and left out.")
