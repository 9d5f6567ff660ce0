"""Measures of heterogeneity against numbers worked out by hand, and the picture."""

import math

import numpy as np
import pytest
import torch

from kairosfl.data import load
from kairosfl.tasks.dataset import DataSet, Samples
from kairosfl.tasks.heterogeneity import (
    describe,
    earth_movers_distance,
    label_counts,
    label_entropy,
    size_gini,
)
from kairosfl.tasks.partitions import partition
from kairosfl.tasks.picture import _by_main_class, _columns, draw_partition
from kairosfl.tasks.population import Population

TARGETS = np.array([0, 0, 1, 1, 2, 2, 2, 2])
POPULATION = Population.from_lists([np.array([0, 2]), np.array([1, 3, 4, 5]), np.array([6, 7])])


def test_label_counts():
    want = [[1, 1, 0], [1, 1, 2], [0, 0, 2]]
    assert label_counts(TARGETS, POPULATION, 3).tolist() == want
    assert label_counts(TARGETS, POPULATION, 3, 1, 3).tolist() == want[1:]


def test_label_entropy_in_bits():
    counts = np.array([[1, 1, 0], [1, 1, 2], [0, 0, 2], [0, 0, 0]])
    assert label_entropy(counts) == pytest.approx([1.0, 1.5, 0.0, 0.0])


def test_earth_movers_distance_is_the_sum_of_differences():
    counts, whole = np.array([[1, 1, 0], [1, 1, 2], [0, 0, 2]]), np.array([2, 2, 4])
    # whole is (1/4, 1/4, 1/2): |1/2-1/4|*2 + 1/2 = 1; 0; 1/4 + 1/4 + 1/2 = 1
    assert earth_movers_distance(counts, whole) == pytest.approx([1.0, 0.0, 1.0])
    assert earth_movers_distance(np.array([[3, 0]]), np.array([0, 5])) == pytest.approx([2.0])


def test_size_gini():
    assert size_gini(np.array([5, 5, 5])) == 0
    # mean absolute difference over twice the mean: (|1-3|*2)/4 / (2*2)
    assert size_gini(np.array([3, 1])) == pytest.approx(0.25)
    assert size_gini(np.array([0, 0, 0, 8])) == pytest.approx(0.75)
    sizes = np.random.default_rng(0).integers(1, 100, 50)
    pairs = np.abs(sizes[:, None] - sizes[None]).mean() / (2 * sizes.mean())
    assert size_gini(sizes) == pytest.approx(pairs)


def test_describe_says_it_all_in_plain_values(monkeypatch):
    samples = Samples(torch.zeros(8, 2), torch.from_numpy(TARGETS))
    data = DataSet("toy", samples, samples, 3, notes={"roles": 3})
    facts = describe(data, POPULATION)
    assert facts == {
        "name": "toy",
        "samples": 8,
        "test_samples": 8,
        "classes": 3,
        "shape": [2],
        "roles": 3,
        "clients": 3,
        "smallest_client": 2,
        "median_client": 2.0,
        "largest_client": 4,
        "size_gini": pytest.approx(1 / 6),
        "classes_per_client": pytest.approx(2.0),
        "label_entropy": pytest.approx(2.5 / 3),
        "label_entropy_of_all": pytest.approx(1.5),
        "earth_movers_distance": pytest.approx(2 / 3),
        "partition_hash": POPULATION.hash(),
    }
    assert {type(value) for value in facts.values()} <= {str, int, float, list}
    monkeypatch.setattr("kairosfl.tasks.heterogeneity.BLOCK", 3)  # one client at a time
    assert describe(data, POPULATION) == facts


def test_clients_are_sorted_by_main_class_the_purest_first():
    assert _by_main_class(np.array([[0, 4], [3, 1], [2, 0], [1, 2]])).tolist() == [2, 1, 0, 3]


def test_neighbours_share_a_column_when_there_are_too_many():
    counts = np.tile([[1, 0], [0, 3]], (800, 1))  # 1600 clients, two to a column
    shares, sizes, edges = _columns(counts)
    assert shares.shape == (800, 2)
    assert np.all(shares == 0.5)
    assert np.all(sizes == 2)
    assert edges.tolist()[:3] == [-0.5, 1.5, 3.5]


@pytest.mark.parametrize("clients", [5, 100, 1400])
def test_the_picture_is_written_whole(tmp_path, clients):
    data = load("digits")
    path = tmp_path / "partition.png"
    draw_partition(
        path, data, partition(data, name="dirichlet", clients=clients, seed=0, alpha=0.3)
    )
    assert path.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    assert [file.name for file in tmp_path.iterdir()] == ["partition.png"]


def test_skew_shows_in_the_measures():
    data = load("digits")
    even, skewed = (
        describe(data, partition(data, name="dirichlet", clients=20, seed=0, alpha=alpha))
        for alpha in (1e4, 0.05)
    )
    assert even["label_entropy"] > 3.2 > math.log2(10) / 2 > skewed["label_entropy"]
    assert even["earth_movers_distance"] < 0.25 < 1.2 < skewed["earth_movers_distance"]
    assert even["size_gini"] < 0.02 < 0.3 < skewed["size_gini"]
