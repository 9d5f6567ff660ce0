"""Public benchmarks: the settings are the sources', and every kind of cell runs, on random images."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from kairosfl.data import DATASETS
from kairosfl.runs import prepare
from kairosfl.tasks.dataset import DataSet, Samples
from kairosfl_reproductions.catalogue import ITEMS
from kairosfl_reproductions.details import section
from kairosfl_reproductions.public import parties
from kairosfl_reproductions.reproduce import reproduce
from kairosfl_reproductions.results import save, table
from kairosfl_reproductions.verdicts import outcome, published

PUBLIC = {name: item for name, item in ITEMS.items() if item.paper == "public"}
TINY = [
    "train.epochs=1",
    "train.batch_size=10",
    "data.minimum=1",
    "run.device=cpu",
    "run.threads=1",
]
FEW = ["data.clients=10", "train.cohort=3"]


def images(side: int, channels: int, samples: int = 120) -> DataSet:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randint(
        0, 256, (samples, channels, side, side), generator=generator, dtype=torch.uint8
    )
    held = Samples(inputs, torch.arange(samples) % 10)
    return DataSet("images", held, held, 10, mean=(0.5,) * channels, std=(0.25,) * channels)


@pytest.fixture(autouse=True)
def _random_images(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(DATASETS.own, "cifar10", lambda: images(32, 3))
    for name in ("mnist", "fashion_mnist"):
        monkeypatch.setitem(DATASETS.own, name, lambda: images(28, 1))
    prepare._load.cache_clear()
    yield
    prepare._load.cache_clear()


@pytest.mark.parametrize(
    ("item", "cells", "changes"),
    [
        (
            "niid-bench-10",
            ["labels2", "dir0.5 scaffold", "noise0.1 fedavg", "fashion_mnist fedprox"],
            [],
        ),
        ("niid-bench-100", ["iid fedavg", "dir0.5 scaffold"], FEW),
        ("fl-simulator", ["dir0.1"], [*FEW, "model.width=4"]),
        ("pfl-cifar10-iid", [], [*FEW, "model.hidden=8", "run.eval_every=1"]),
        ("pfl-cifar10-dirichlet", [], [*FEW, "model.hidden=8", "run.eval_every=1"]),
        ("pfl-cifar10-private", [], [*FEW, "model.hidden=8", "run.eval_every=1"]),
        ("fl-simulator-readings", ["fedavg"], [*FEW, "model.width=4"]),
        ("blazefl", [], ["data.clients=10", "train.cohort=10"]),
        ("flute-mnist", [], FEW),
    ],
)
def test_its_cells_run(tmp_path, item, cells, changes):
    found = reproduce(
        PUBLIC[f"public/{item}"],
        cells=cells,
        seeds=1,
        rounds=2,
        changes=[*TINY, *changes],
        out=tmp_path,
        say=str,
    )
    rows = table(found)
    assert len(rows) >= max(1, len(cells))
    assert all(row["rounds"].startswith("2") for row in rows)
    assert all(float(row["seconds of the run"]) >= 0 for row in rows)
    assert f"kairosfl reproduce public/{item}" in section(found)
    save(found, tmp_path / "results")


def test_niid_bench_has_sixteen_cells_and_flowers_in_the_same_setting():
    cells, readings = (PUBLIC[f"public/niid-bench-10{name}"].cells for name in ("", "-readings"))
    for source, count in (("final", 16), ("best", 20)):
        assert sum(source in cell.printed for cell in cells.values()) == count
    fashion = cells["fashion_mnist-scaffold"].config()
    assert (fashion.data.name, fashion.data.alpha, fashion.data.augment) == (
        "fashion_mnist",
        0.5,
        False,
    )
    assert readings["labels2-scaffold-released"].printed == cells["labels2-scaffold"].printed
    assert str(readings["labels2-mu0.001-fedprox"].config().algorithm) == "fedprox(mu=0.001)"
    config = cells["dir0.5-fedprox"].config()
    assert (config.train.rounds, config.train.epochs, config.train.batch_size, config.train.lr) == (
        50,
        10,
        64,
        0.01,
    )
    assert (config.train.momentum, config.train.weight_decay) == (0.9, 1e-5)
    assert str(config.algorithm) == "fedprox(mu=0.001)"
    assert not config.data.normalise
    hundred = PUBLIC["public/niid-bench-100"].cells["labels2-scaffold"]
    config = hundred.config()
    assert (config.data.clients, config.train.cohort, config.train.rounds) == (100, 10, 500)
    assert hundred.printed == {"final": 10.0}


def test_the_parties_of_both_sources_are_theirs():
    """Tables that the loops of both repositories gave, run on the labels of CIFAR-10."""
    assert parties.flower("dir0.5")[0] == [60, 568, 12, 186, 145, 1, 273, 476, 8, 56]
    assert parties.flower("dir0.5")[9] == [7, 292, 5, 833, 15, 1, 74, 440, 104, 1942]
    assert parties.niid_bench("dir0.5")[0] == [953, 142, 141, 75, 695, 819, 0, 2482, 0, 0]
    assert parties.niid_bench("dir0.5", seed=2)[9] == [14, 3, 401, 13, 18, 10, 783, 159, 1033, 790]
    labels = [
        [[label for label in range(10) if row[label]] for row in table][:4]
        for table in _label_tables()
    ]
    assert labels == [
        [[0, 7], [1, 6], [2, 4], [3, 4]],
        [[0, 6, 7], [1, 4, 8], [0, 2, 6], [0, 2, 3]],
        [[0, 6], [1, 6], [0, 2], [3, 4]],
        [[0, 1, 5], [1, 2, 4], [2, 4, 9], [0, 3, 9]],
    ]
    assert [sum(row) for row in parties.flower("labels3")][:4] == [4167, 5001, 5417, 6666]
    tables = [*_label_tables(), parties.flower("dir0.5"), parties.niid_bench("dir0.5")]
    assert all(
        [sum(column) for column in zip(*table, strict=True)] == [5000] * 10 for table in tables
    )


def _label_tables() -> list[parties.Table]:
    flower, first = parties.flower, parties.niid_bench
    return [flower("labels2"), flower("labels3"), first("labels2"), first("labels3", seed=2)]


def test_readings_with_the_parties_of_a_source_have_its_value_alone():
    cells = PUBLIC["public/niid-bench-10-readings"].cells
    assert cells["dir0.5-fedavg-flower"].printed == {"best": 62.47}
    assert cells["labels2-fedprox-first"].printed == {"final": 50.7}
    data = cells["labels3-scaffold-flower"].config().data
    assert (data.partition, data.padding, len(data.class_counts)) == ("counts", "reflect", 10)
    whole = {"item": "public/niid-bench-10"}
    assert published([whole]) == published([whole, {"item": "public/niid-bench-10-readings"}]) == 28


def test_fl_simulator_is_as_its_repository_has_it():
    cells = PUBLIC["public/fl-simulator"].cells
    config = cells["dir0.1-mofedsam"].config()
    assert str(config.algorithm) == "fedsam(rho=0.1) + fedcm"  # whose default alpha is 0.1
    assert config.train.lr_at(1000) == pytest.approx(0.1 * 0.998**1000)
    assert (config.train.clip, config.train.clip_after, config.train.weight_decay) == (
        10.0,
        True,
        1e-3,
    )
    assert dict(config.model.options) == {"stem": 7, "groups": 2}
    assert [
        cells[f"dir0.1-{name}"].printed["best"]
        for name in ("fedavg", "scaffold", "feddyn", "fedcm")
    ] == [
        77.31,
        79.92,
        78.96,
        78.92,
    ]


def test_a_cell_that_agrees_with_one_of_two_sources_is_reproduced():
    cell = {
        "printed": {"final": 68.2, "best": 62.5},
        "rounds": 1,
        "comparable": True,
        "runs": [{"rounds": 1, "values": {"final": 63.0, "best": 63.5}}],
    }
    results = {"measures": ["final", "best"], "sources": {"final": "a", "best": "b"}}
    assert outcome(results, cell) == "reproduced"
    assert outcome({"measures": ["final", "best"]}, cell) == "not reproduced"


def test_results_of_before_a_key_was_added_are_kept(tmp_path):
    item = PUBLIC["public/flute-mnist"]
    found = reproduce(
        item, seeds=1, rounds=1, changes=[*TINY, *FEW], out=tmp_path / "runs", say=str
    )
    cell = found["cells"]["shards-fedavg"]
    old = {**found, "cells": {"shards-fedavg": {**cell, "runs": [{**cell["runs"][0], "seed": 7}]}}}
    data = {
        key: value
        for key, value in cell["config"]["data"].items()
        if key not in ("noise", "normalise")
    }
    old["cells"]["shards-fedavg"]["config"] = {**cell["config"], "data": data}
    save(old, tmp_path)
    path = save(found, tmp_path)
    assert path.read_text().count('"seed": ') == 2
