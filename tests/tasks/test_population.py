"""Populations: ownership, hashing and refusals."""

import hashlib

import numpy as np
import pytest
import torch
from torch import nn

from kairosfl.engines.loop import Loop
from kairosfl.errors import UserError
from kairosfl.tasks.dataset import DataSet, Samples
from kairosfl.tasks.population import Population, own_tests
from kairosfl.tasks.task import Task


def test_from_owner_groups_samples_by_client_and_leaves_out_nobodys():
    population = Population.from_owner(np.array([1, 0, -1, 1, 2, 0]), 4)
    assert [list(samples) for samples in population] == [[1, 5], [0, 3], [4], []]
    assert list(population.sizes) == [2, 2, 1, 0]
    assert len(population) == 4


def test_hash_is_that_of_both_arrays_as_little_endian_64_bit_whatever_their_type():
    offsets, order = np.array([0, 1, 3]), np.array([2, 0, 1])
    want = hashlib.sha256(
        offsets.astype("<i8").tobytes() + order.astype("<i8").tobytes()
    ).hexdigest()
    assert Population(order, offsets).hash() == want
    assert Population(order.astype(np.int32), offsets.astype(">i8")).hash() == want
    assert Population(order[::-1], offsets).hash() != want


def test_from_lists_keeps_the_order_given():
    population = Population.from_lists([np.array([4, 2]), np.array([0])])
    assert list(population.order) == [4, 2, 0]
    assert list(population.offsets) == [0, 2, 3]


def test_index_out_of_range_is_an_index_error():
    with pytest.raises(IndexError, match="client 2 of a population of 2"):
        Population.from_lists([np.array([0]), np.array([1])])[2]


@pytest.mark.parametrize(
    ("clients", "sentence"),
    [
        ([[0], [], [1], []], "client 1 (and 1 more) has no data; give it samples or leave it out."),
        ([[0], [5]], "the population names sample 5; the data has samples 0 to 3."),
        ([[0], [-1]], "the population names sample -1; the data has samples 0 to 3."),
        ([[0, 2], [2]], "sample 2 belongs to 2 clients; give it to one."),
    ],
)
def test_check_names_what_is_wrong(clients, sentence):
    with pytest.raises(UserError) as error:
        Population.from_lists([np.array(c, dtype=np.int64) for c in clients]).check(4)
    assert str(error.value) == sentence


def test_a_population_without_clients_or_with_falling_offsets_is_refused():
    with pytest.raises(UserError, match="at least one client"):
        Population.from_lists([])
    with pytest.raises(UserError, match="offsets must rise from 0 to the number of samples, 2"):
        Population(np.array([0, 1]), np.array([0, 2, 1]))
    with pytest.raises(
        UserError, match="sample 1 belongs to client 3, but there are only 3 clients"
    ):
        Population.from_owner(np.array([0, 3]), 3)


def _data(**fields):
    samples = Samples(torch.zeros(4, 2), torch.tensor([0, 1, 1, 0]))
    return DataSet(**({"name": "toy", "train": samples, "test": samples, "classes": 2} | fields))


def test_own_tests_follow_the_natural_key_of_each_client():
    data = _data(keys=np.array([0, 1, 2, 2]), test_keys=np.array([2, 0, 2, 5]))
    population = Population.from_owner(np.array([-1, 0, 1, 1]), 2, keys=np.array([1, 2]))
    tests = own_tests(data, population)
    assert tests is not None
    assert [list(samples) for samples in tests] == [[], [0, 2]]
    assert own_tests(_data(), population) is None


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        (
            {"classes": 1},
            "training sample 1 of data set 'toy' has label 1; labels must be 0 to 0 for 1 classes.",
        ),
        (
            {"keys": np.arange(3)},
            "keys of data set 'toy' has shape [3]; give one key for each of the 4 samples.",
        ),
        (
            {"mean": (0.5,)},
            "data set 'toy' has 1 means and 0 deviations; give one of each per channel.",
        ),
        (
            {"train": Samples(torch.zeros(0, 2), torch.zeros(0, dtype=torch.int64))},
            "data set 'toy' has no training samples.",
        ),
        (
            {"test": Samples(torch.zeros(2, 2), torch.tensor([0, -7]))},
            "test sample 1 of data set 'toy' has label -7; labels must be 0 to 1 for 2 classes.",
        ),
    ],
)
def test_a_data_set_refuses_what_cannot_be_trained_on(fields, sentence):
    with pytest.raises(UserError) as error:
        _data(**fields)
    assert str(error.value) == sentence


def test_samples_refuse_targets_of_the_wrong_type_or_number():
    floats = Samples(torch.zeros(2, 1), torch.zeros(2))
    with pytest.raises(
        UserError,
        match=r"training targets of data set 'own' are torch.float32; classification needs",
    ):
        DataSet("own", floats, floats, kind="classification")
    with pytest.raises(UserError, match="3 inputs have 2 targets"):
        Samples(torch.zeros(3, 1), torch.tensor([0, 1]))


def test_clients_can_bring_test_samples_of_their_own():
    lists = [np.array([0, 1]), np.array([2])]
    population = Population.from_lists(lists, tests=[[3, 0], []])
    tests = own_tests(_data(), population)
    assert [list(samples) for samples in tests] == [[3, 0], []]
    assert Population.from_lists(lists).hash() != population.hash()
    assert Population.from_lists(lists, tests=[[3], [0]]).hash() != population.hash()
    assert (
        own_tests(_data(), Population.from_owner(np.array([0, 0, 1, 1]), 2, tests=tests)) is tests
    )


def test_clients_whose_samples_have_one_key_each_get_the_test_samples_of_that_key():
    data = _data(keys=np.array([4, 4, 1, 0]), test_keys=np.array([1, 4, 4, 2]))
    whole = Population.from_lists([np.array([1, 0]), np.array([2])])
    assert [list(samples) for samples in own_tests(data, whole)] == [[1, 2], [0]]
    mixed, shared = Population.from_lists([[0, 2], [3]]), Population.from_lists([[0], [1]])
    assert own_tests(data, mixed) is None
    assert own_tests(data, shared) is None


def test_test_samples_that_do_not_fit_are_refused():
    with pytest.raises(UserError, match=r"tests has 1 clients; give one list for each of the 2\."):
        Population.from_lists([[0], [1]], tests=[[0]])
    with pytest.raises(
        UserError, match=r"the population names sample 4; the data has test samples 0 to 3\."
    ):
        Task(nn.Linear(2, 2), _data(), Population.from_lists([[0], [1]], tests=[[0], [4]]))


def test_accuracy_of_clients_is_taken_on_their_own_test_samples_and_says_so():
    """The model answers class 0 always: a client's accuracy is its share of class 0."""
    model = nn.Linear(2, 2)
    with torch.no_grad():
        model.weight.zero_()
        model.bias.copy_(torch.tensor([1.0, 0.0]))
    train = Samples(torch.zeros(4, 2), torch.tensor([0, 0, 1, 1]))
    data = DataSet("toy", train, Samples(torch.zeros(3, 2), torch.tensor([1, 0, 0])), 2)

    def accuracy(population):
        task = Task(model, data, population)
        return Loop(task).evaluate_clients(task.start()).tolist(), task.client_accuracy_on

    lists = [[0, 1], [2, 3]]
    assert accuracy(Population.from_lists(lists)) == ([1.0, 0.0], "train")
    assert accuracy(Population.from_lists(lists, tests=[[0], [1, 2]])) == ([0.0, 1.0], "test")
    (known, unknown), on = accuracy(Population.from_lists(lists, tests=[[0, 1], []]))
    assert (known, np.isnan(unknown), on) == (0.5, True, "test")
    assert accuracy(Population.from_lists(lists, tests=[[], []])) == ([1.0, 0.0], "train")
