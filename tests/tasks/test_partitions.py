"""Partitions: same indices everywhere, no sample lost or twice, sizes and statistics as promised."""

import time

import numpy as np
import pytest
import torch

from kairosfl.data import load
from kairosfl.errors import UserError
from kairosfl.tasks.dataset import DataSet, Samples
from kairosfl.tasks.partitions import (
    PARTITIONS,
    client_dirichlet,
    counts,
    dirichlet,
    disjoint_dirichlet,
    iid,
    labels,
    mixed,
    natural,
    partition,
    quantity,
    shards,
)
from kairosfl.tasks.shares import cut, fill, from_largest

TARGETS = np.arange(10_000) % 10
SKEWED = {
    "dirichlet": {"alpha": 0.1, "minimum": 5},
    "balanced": {"alpha": 0.1, "minimum": 5, "balance": True},
    "quantity": {"alpha": 0.3, "minimum": 5},
    "shards": {},
    "mixed": {"alpha": 0.1, "minimum": 5},
    "iid": {},
}


def _function(name):
    return PARTITIONS["dirichlet" if name == "balanced" else name]


@pytest.mark.parametrize("name", SKEWED)
@pytest.mark.parametrize("clients", [1, 7, 100, 2000])
def test_every_sample_has_exactly_one_client(name, clients):
    population = _function(name)(TARGETS, clients, 3, **SKEWED[name])
    assert len(population) == clients
    assert np.array_equal(np.sort(population.order), np.arange(10_000))
    if "minimum" in SKEWED[name]:
        assert population.sizes.min() >= 5


@pytest.mark.parametrize("name", SKEWED)
def test_a_function_of_the_seed(name):
    first, again, other = (
        _function(name)(TARGETS, 20, seed, **SKEWED[name]).hash() for seed in (0, 0, 1)
    )
    assert first == again != other


@pytest.mark.parametrize("wanted", [1, 2, 3, 10])
def test_labels_are_dealt_as_in_niid_bench(wanted):
    population = labels(TARGETS, 25, 4, labels_per_client=wanted)
    held = [np.unique(TARGETS[own]) for own in population]
    assert [len(each) for each in held] == [wanted] * 25
    assert all(client % 10 in each for client, each in enumerate(held))
    for label in range(10):  # in equal parts
        parts = [
            np.sum(TARGETS[own] == label)
            for own, each in zip(population, held, strict=True)
            if label in each
        ]
        assert sum(parts) == 1000
        assert max(parts) - min(parts) <= 1
    others = [tuple(labels(TARGETS, 10, seed, labels_per_client=2)[0]) for seed in range(9)]
    assert len({frozenset(TARGETS[list(own)]) for own in others}) > 3  # drawn at random


def test_a_table_of_counts_is_followed():
    table = [[300, 0, 20, *[0] * 7], [0, 250, 40, *[0] * 7], [1] * 10]
    population = counts(TARGETS, 3, 0, class_counts=table)
    population.check(10_000)
    assert [np.bincount(TARGETS[own], minlength=10).tolist() for own in population] == table
    assert counts(TARGETS, 3, 0, class_counts=table).hash() == population.hash()
    assert counts(TARGETS, 3, 1, class_counts=table).hash() != population.hash()  # other samples
    whole = counts(TARGETS, 2, 0, class_counts=[[400] * 10, [600] * 10])
    assert np.array_equal(np.sort(whole.order), np.arange(10_000))


@pytest.mark.parametrize(
    ("clients", "table", "sentence"),
    [
        (
            3,
            [[1] * 10] * 2,
            "data.class_counts has 2 rows, but data.clients is 3; give one row for each client.",
        ),
        (2, [], "data.class_counts has 0 rows, but data.clients is 2"),
        (
            2,
            [[1] * 10, [1, 2]],
            r"has \[1, 2\] for client 1; give 10 numbers, one for each class, 0 or more",
        ),
        (
            1,
            [[5, -1, *[0] * 8]],
            "for client 0; give 10 numbers, one for each class, 0 or more and not all 0.",
        ),
        (1, [[0] * 10], "not all 0"),
        (
            2,
            [[600] * 10, [*[0] * 9, 401]],
            "asks for 1001 samples of class 9, but there are only 1000; lower its",
        ),
    ],
)
def test_a_table_of_counts_that_cannot_be_followed(clients, table, sentence):
    with pytest.raises(UserError, match=sentence):
        counts(TARGETS, clients, 0, class_counts=table)


def test_equal_sizes_with_a_class_distribution_for_each_client():
    population = client_dirichlet(TARGETS, 100, 0, alpha=0.1)
    population.check(10_000)
    assert set(population.sizes) == {100}
    counts = np.stack([np.bincount(TARGETS[own], minlength=10) for own in population])
    # E[share²] of a Dirichlet is (alpha + 1) / (K (K alpha + 1)), and the draw of 100 samples adds
    # a little
    squares = ((counts / 100) ** 2).sum(1).mean()
    assert squares == pytest.approx(0.55 + 0.45 / 100, abs=0.06)
    totals, used = counts.sum(0), np.bincount(population.order, minlength=10_000)
    for label in range(10):  # used again only when a class is exhausted
        times = used[label == TARGETS]
        assert times.sum() == totals[label]
        assert times.max() - times.min() <= 1
    assert client_dirichlet(TARGETS, 100, 0, alpha=0.1).hash() == population.hash()
    near = client_dirichlet(TARGETS, 10, 0, alpha=1e6)
    assert np.abs(np.bincount(TARGETS[near[0]], minlength=10) - 100).max() < 45


def test_equal_sizes_and_no_sample_twice():
    population = disjoint_dirichlet(TARGETS, 99, 0, alpha=0.1)
    population.check(10_000)
    assert set(population.sizes) == {101}
    assert np.bincount(population.order, minlength=10_000).max() == 1
    counts = np.stack([np.bincount(TARGETS[own], minlength=10) for own in population])
    # The first half is drawn before a class is exhausted: E[share²] of a Dirichlet, and a little
    # from 101 draws.
    squares = ((counts / 101) ** 2).sum(1)
    assert squares[:50].mean() == pytest.approx(0.55 + 0.45 / 101, abs=0.07)
    near = disjoint_dirichlet(TARGETS, 10, 0, alpha=1e6)
    assert np.abs(np.bincount(TARGETS[near[0]], minlength=10) - 100).max() < 45
    assert disjoint_dirichlet(TARGETS, 99, 0, alpha=0.1).hash() == population.hash()


def test_the_last_client_gets_what_the_others_left():
    """Three clients of one class each, by a tiny alpha: the third may find its class exhausted."""
    targets = np.array([0] * 4 + [2] * 5)
    for seed in range(20):
        population = disjoint_dirichlet(targets, 3, seed, alpha=1e-3)
        assert sorted(np.concatenate(list(population))) == list(range(9))
        assert set(population.sizes) == {3}


def test_iid_sizes_differ_by_at_most_one():
    assert sorted(set(iid(TARGETS, 7, 0).sizes)) == [1428, 1429]


def test_shards_give_each_client_at_most_so_many_classes():
    population = shards(TARGETS, 100, 0, shards=2)
    assert set(population.sizes) == {100}
    assert all(len(np.unique(TARGETS[own])) <= 2 for own in population)


def test_dirichlet_statistics():
    """Sums over classes of a Dirichlet's moments: mean share 1/N, variance
    (1/N)(1-1/N)/(N*alpha+1).
    """
    clients, alpha = 20, 0.5
    shares = []
    for seed in range(60):
        population = dirichlet(TARGETS, clients, seed, alpha=alpha)
        shares += [np.bincount(TARGETS[own], minlength=10) / 1000 for own in population]
    values = np.array(shares)
    variance = (1 / clients) * (1 - 1 / clients) / (clients * alpha + 1)
    assert values.mean() == pytest.approx(1 / clients, rel=1e-9)
    # 12,000 shares; the relative error of a variance estimate of so skewed a variable is about 3 %
    assert values.var() == pytest.approx(variance, rel=0.1)


def test_small_alpha_gives_each_class_to_one_client_and_large_alpha_to_all_alike():
    lonely = dirichlet(TARGETS, 10, 0, alpha=1e-4)
    assert sum(np.count_nonzero(np.bincount(TARGETS[own]) > 1) for own in lonely) == 10
    even = dirichlet(TARGETS, 10, 0, alpha=1e7)
    assert np.abs(np.stack([np.bincount(TARGETS[own]) for own in even]) - 100).max() <= 1


def test_balance_gives_nothing_more_to_clients_that_hold_their_part():
    def dealt_beyond(balance):
        population = dirichlet(TARGETS, 50, 1, alpha=0.3, balance=balance)
        counts = np.stack([np.bincount(TARGETS[own], minlength=10) for own in population])
        before = np.cumsum(counts, axis=1) - counts
        return int(counts[before >= 10_000 / 50].sum())

    assert dealt_beyond(balance=True) == 0 < dealt_beyond(balance=False)


def test_quantity_skews_sizes_but_not_labels():
    population = quantity(TARGETS, 10, 0, alpha=0.5, minimum=200)
    assert population.sizes.std() > 400
    for own in population:
        labels = np.bincount(TARGETS[own], minlength=10) / len(own)
        assert np.abs(labels - 0.1).max() < 5 * np.sqrt(0.09 / len(own))


def test_mixed_has_two_kinds_of_clients():
    population = mixed(TARGETS, 21, 0, alpha=0.1, minimum=10)
    labels = np.stack([np.bincount(TARGETS[own], minlength=10) / len(own) for own in population])
    assert abs(population.sizes[:10] - 10_000 / 21).max() < 1
    assert abs(labels[:10] - 0.1).max() < 0.07  # five deviations of a share of 476 samples
    assert labels[10:].max(1).min() > 0.25
    assert population.sizes[10:].min() >= 10
    assert mixed(TARGETS, 1, 0, alpha=0.1).sizes.tolist() == [10_000]


def test_cutting_is_exact_integer_arithmetic():
    assert list(cut(10, np.array([1, 1, 2]))) == [2, 3, 5]  # cuts at 10*1//4, 10*2//4, 10
    assert list(cut(3, np.array([0, 5, 0]))) == [0, 3, 0]
    assert cut(9_000_000_000, np.array([10**9])) == 9_000_000_000


def test_samples_are_taken_one_by_one_from_the_largest():
    def one_by_one(sizes, total):
        sizes = list(sizes)
        start = list(sizes)
        for _ in range(total):
            sizes[int(np.argmax(sizes))] -= 1
        return [a - b for a, b in zip(start, sizes, strict=True)]

    rng = np.random.default_rng(0)
    for _ in range(50):
        sizes = rng.integers(0, 30, 12)
        total = int(rng.integers(0, sizes.sum() + 1))
        assert list(from_largest(sizes, total)) == one_by_one(sizes, total)


def test_moving_keeps_every_sample_and_reaches_the_minimum():
    owner = np.array([0] * 9 + [1] * 2 + [2] * 6)
    filled = fill(np.random.default_rng(0), owner, 5, 3)
    assert list(np.bincount(filled)) == [
        4,
        3,
        4,
        3,
        3,
    ]  # 7 missing: 5 from client 0, 2 from client 2
    assert np.count_nonzero(filled != owner) == 7


def test_a_minimum_of_everything_is_met_exactly():
    assert set(dirichlet(TARGETS, 1000, 0, alpha=0.05, minimum=10).sizes) == {10}


def test_natural_clients_are_keys():
    keys = np.array([3, 0, 3, 1, 1, 3])
    population = natural(keys, None, 0)
    assert [list(own) for own in population] == [[1], [3, 4], [0, 2, 5]]
    assert list(population.keys) == [0, 1, 3]
    with pytest.warns(
        UserWarning,
        match=r"^1 of 3 natural clients have fewer than data\.minimum = 2 samples and are",
    ):
        assert list(natural(keys, None, 0, minimum=2).keys) == [1, 3]
    few = natural(keys, 2, 0)
    assert all(set(keys[own]) == {key} for own, key in zip(few, few.keys, strict=True))


# Committed: a change means that every published run with these partitions can no longer be
# repeated.
DIGITS_HASHES = {
    "iid": "c6c556d3796bdc084dcc9e1941713d9fddc0cf476bfb8f6cb48e7ddc55ad0b16",
    "dirichlet": "ed3eb50800c04ff46eee3e0a008b66f4c3a39067ccc964b7b92b021ef5129506",
    "quantity": "492c7e654af13a02bf9c914dd62d997d3d94e9f333b400e3340c8c2dd2fbfc08",
    "shards": "442f580ff26b1c288d85022b8bec96df91b522fa4541ca612485c320097b4f73",
    "mixed": "e5e365d2cdb477c6f13204dfb82b7b5079d503a279c12ef8cae359316625ceed",
}


def test_a_balanced_and_a_synthetic_partition_are_as_they_always_were():
    balanced = dirichlet(TARGETS, 128, 0, alpha=0.5, minimum=10, balance=True)
    assert balanced.hash() == "4759fcf7886b926c18affa56370114cfc3e7b3f4b3d74c257e2d1915fee57dbd"
    data = load("synthetic", samples=5_000, test_samples=0, features=2)
    assert (
        partition(data, name="dirichlet", clients=100, seed=1, alpha=0.1, minimum=10).hash()
        == "f72e73e3160094386879afc0d30b508e2211227277e791ab3a116751e2245577"
    )


@pytest.mark.parametrize("name", DIGITS_HASHES)
def test_digits_are_cut_as_they_always_were(name):
    population = partition(load("digits"), name=name, clients=40, seed=0, alpha=0.3, minimum=5)
    population.check(1437)
    assert population.hash() == DIGITS_HASHES[name]


def test_rounded_to_the_nearest_the_last_client_is_like_the_others():
    """By default it has nearly every class; partitions of 60 seeds, 10 classes of 600 samples."""
    targets = np.arange(6_000) % 10

    def without_a_class(**options):
        absent = np.zeros(10)
        for seed in range(60):
            population = dirichlet(targets, 10, seed, alpha=0.1, **options)
            population.check(6_000)
            absent += [10 - len(np.unique(targets[population[client]])) for client in range(10)]
        return absent / 600

    common, nearest = without_a_class(), without_a_class(nearest=True)
    assert common[-1] < 0.2 < 0.4 < common[:-1].min()
    assert np.abs(nearest - nearest.mean()).max() < 0.06  # three standard errors of 600 draws
    np.testing.assert_array_equal(cut(7, np.array([1, 1, 1])), [2, 2, 3])
    np.testing.assert_array_equal(cut(7, np.array([1, 1, 1]), nearest=True), [2, 3, 2])


@pytest.mark.parametrize("name", ["dirichlet", "mixed"])
def test_partitions_are_rounded_to_the_nearest_on_request_alone(name):
    options = {"name": name, "clients": 40, "seed": 0, "alpha": 0.3, "minimum": 5}
    digits = load("digits")
    assert partition(digits, **options, nearest=False).hash() == DIGITS_HASHES[name]
    assert partition(digits, **options, nearest=True).hash() != DIGITS_HASHES[name]


def test_ten_thousand_clients_in_two_seconds():
    targets = np.arange(60_000) % 10
    start = time.process_time()
    population = dirichlet(targets, 10_000, 0, alpha=0.1)
    assert time.process_time() - start < 2
    assert population.sizes.min() >= 1
    assert population.hash() == "3aee9d3bba41e48fcac92cd63010eaf48553b9ffebf0413faf43bfb3e34ca26b"


@pytest.mark.slow
def test_a_million_clients_in_ten_seconds():
    data = load("synthetic", samples=5_000_000, test_samples=0, features=2)
    start = time.process_time()
    population = partition(data, name="dirichlet", clients=1_000_000, seed=0, alpha=0.5)
    assert time.process_time() - start < 10
    population.check(5_000_000)
    assert population.order.nbytes + population.offsets.nbytes < 30e6


def _toy(**fields):
    samples = Samples(torch.zeros(6, 1), torch.tensor([0, 1, 2, 0, 1, 2]))
    return DataSet(**({"name": "toy", "train": samples, "test": samples, "classes": 3} | fields))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (
            {"name": "dirichlet", "alpha": -1.0},
            "data.alpha is -1.0; give a positive number, such as 0.5.",
        ),
        (
            {"name": "quantity", "alpha": float("nan")},
            "data.alpha is nan; give a positive number, such as 0.5.",
        ),
        ({"name": "iid", "clients": 0}, "data.clients is 0; give at least 1."),
        (
            {"name": "iid", "clients": 7},
            "data.clients is 7 with at least 1 sample each, but there are only 6 samples; "
            "lower data.clients or data.minimum.",
        ),
        (
            {"name": "dirichlet", "minimum": 4},
            "data.clients is 2 with at least 4 samples each, but there are only 6 samples; "
            "lower data.clients or data.minimum.",
        ),
        (
            {"name": "dirichlet", "minimum": 0},
            "data.minimum is 0; a client needs at least 1 sample.",
        ),
        ({"name": "shards", "shards": 0}, "data.shards is 0; give at least 1 shard per client."),
        (
            {"name": "dirichlt"},
            "data.partition is 'dirichlt', which does not exist; did you mean 'dirichlet'?",
        ),
        (
            {"name": "natural"},
            "data.partition is 'natural', but data set 'toy' has no natural clients; use 'dirichlet'.",
        ),
        (
            {"name": "iid", "clients": None},
            "data.clients is missing: partition 'iid' needs the number of clients; give at least 1.",
        ),
        ({"name": "iid", "seed": -1}, "seed is -1; give a number from 0 to 2^63 - 1."),
    ],
)
def test_wrong_options_are_refused_in_one_sentence(options, sentence):
    with pytest.raises(UserError) as error:
        partition(_toy(), **({"clients": 2, "seed": 0} | options))
    assert str(error.value) == sentence


def test_more_natural_clients_than_there_are_is_refused():
    with pytest.raises(UserError) as error:
        partition(_toy(keys=np.array([0, 0, 1, 1, 2, 2])), name="natural", clients=4, seed=0)
    assert str(error.value) == (
        "data.clients is 4, but the data has 3 natural clients with at least 1 samples; give 1 to 3."
    )
