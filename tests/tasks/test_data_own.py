"""Data of one's own: torch and Hugging Face data sets, and partitioners."""

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from kairosfl.data.own import from_hugging_face, from_partitioner, from_torch
from kairosfl.errors import UserError
from kairosfl.tasks.partitions import partition
from kairosfl.tasks.population import own_tests


class Pictures(Dataset):
    def __init__(self, count, mode="RGB", size=(5, 4)):
        self.count, self.mode, self.size = count, mode, size

    def __len__(self):
        return self.count

    def __getitem__(self, index):
        return Image.new(self.mode, self.size, index), index % 3


class Stream(IterableDataset):
    def __iter__(self):
        return iter([(1.5, 0), (2.5, 1)])


class Table:
    """As much of a Hugging Face data set as is used."""

    class Label:
        names = ("cat", "dog", "cow")

    def __init__(self, rows, named=True):
        self.rows = rows
        self.column_names = list(rows[0]) if rows else []
        self.features = {
            name: self.Label() if named and name == "label" else None for name in self.column_names
        }

    def __len__(self):
        return len(self.rows)

    def __iter__(self):
        return iter(self.rows)

    def __getitem__(self, column):
        return [row[column] for row in self.rows]


class Partitioner:
    """As much of a flwr-datasets partitioner as is used."""

    def __init__(self, tables):
        self.tables, self.num_partitions = tables, len(tables)

    def load_partition(self, partition_id):
        return self.tables[partition_id]


def _rows(count, **fields):
    return [
        {"image": [float(i), 1.0], "label": i % 3} | {k: v(i) for k, v in fields.items()}
        for i in range(count)
    ]


def test_a_torch_data_set_of_pictures():
    data = from_torch(Pictures(7), Pictures(2, "P"), name="mine", mean=[0.5] * 3, std=[0.2] * 3)
    assert (data.name, data.classes, data.shape) == ("mine", 3, (3, 4, 5))
    assert data.train.inputs.dtype == torch.uint8
    assert data.train.inputs[6, 0].unique().tolist() == [6]
    assert data.mean == (0.5, 0.5, 0.5)
    assert from_torch(Pictures(2, "L"), Pictures(1, "L")).shape == (1, 4, 5)


def test_a_torch_data_set_of_tensors_a_list_and_a_stream():
    tensors = TensorDataset(torch.arange(6.0).view(3, 2).double(), torch.tensor([0, 1, 1]))
    data = from_torch(tensors, [(np.ones(2), 4)], classes=5)
    assert data.train.inputs.tolist() == [[0, 1], [2, 3], [4, 5]]
    assert data.train.inputs.dtype == torch.float32
    assert data.classes == 5
    assert from_torch(Stream(), Stream()).train.inputs.tolist() == [1.5, 2.5]
    tokens = from_torch([([1, 2, 3], 0)], [([4, 5, 6], 1)], vocabulary=10)
    assert (tokens.train.inputs.dtype, tokens.vocabulary) == (torch.int64, 10)


@pytest.mark.parametrize(
    ("train", "sentence"),
    [
        (
            [(1.0, 0), ([1.0, 2.0], 1)],
            "training sample 1 has an input of shape [2] and sample 0 of []; give all the same shape.",
        ),
        (
            [(1.0, "cat")],
            "training sample 0 cannot be made a tensor: 'cat' is not a number; encode it.",
        ),
        ([(1.0, 0.5)], "training sample 0 has label 0.5; labels must be integers from 0."),
        (
            [{"x": 1}],
            "training sample 0 is a dict, not a pair of input and target; wrap the data set in one that returns pairs.",
        ),
        ([], "the training data has no samples; add at least one."),
        (
            [(1.0, 3)],
            "training sample 0 of data set 'own' has label 3; labels must be 0 to 1 for 2 classes.",
        ),
    ],
)
def test_torch_data_that_cannot_be_used_is_refused(train, sentence):
    with pytest.raises(UserError) as error:
        from_torch(train, [(1.0, 0)], classes=2)
    assert str(error.value) == sentence


def test_labels_that_are_identifiers_do_not_make_a_million_classes():
    with pytest.raises(UserError) as error:
        from_torch([(1.0, 0), (2.0, 999_999)], [(1.0, 0)])
    assert str(error.value) == (
        "data set 'own' has label 999999, which makes 1,000,000 classes of 3 samples: number the labels from 0, give "
        "them as text, or say how many `classes` there are."
    )
    assert (
        from_torch([(1.0, 0), (2.0, 999_999)], [(1.0, 0)], classes=1_000_000).classes == 1_000_000
    )
    assert (
        from_torch([(1.0, 0), (2.0, 999)], [(1.0, 0)]).classes == 1000
    )  # the samples of one client


def test_a_hugging_face_data_set_with_natural_clients():
    writer = {"writer": lambda i: "zoe" if i % 2 else "abe"}
    data = from_hugging_face(
        Table(_rows(5, **writer)), Table(_rows(3, writer=lambda i: "new")), client="writer"
    )
    assert (data.classes, data.labels) == (3, ("cat", "dog", "cow"))
    assert data.key_names == ("abe", "zoe")
    assert data.keys.tolist() == [0, 1, 0, 1, 0]
    assert data.test_keys.tolist() == [-1, -1, -1]
    population = partition(data, name="natural", clients=None, seed=0)
    assert [own.tolist() for own in population] == [[0, 2, 4], [1, 3]]
    assert own_tests(data, population).sizes.tolist() == [0, 0]


def test_a_hugging_face_data_set_of_texts():
    table = Table([{"text": "ab", "label": 0}, {"text": "b", "label": 1}], named=False)
    data = from_hugging_face(
        table, table, input="text", encode=lambda text: list(text.ljust(2).encode()), vocabulary=256
    )
    assert data.train.inputs.tolist() == [[97, 98], [98, 32]]
    assert (data.classes, data.keys, data.labels) == (2, None, ())
    with pytest.raises(UserError) as error:
        from_hugging_face(table, table, input="texts")
    assert str(error.value) == "the training data has no column 'texts'; did you mean 'text'?"


def test_a_partitioner_as_it_is():
    rows = _rows(6)
    data = from_partitioner(
        Partitioner([Table(rows[:2]), Table(rows[2:3]), Table(rows[3:])]), Table(_rows(2))
    )
    population = partition(data, name="natural", clients=None, seed=0)
    assert population.sizes.tolist() == [2, 1, 3]
    assert data.train.inputs[population[2]][:, 0].tolist() == [3, 4, 5]
    with pytest.raises(UserError) as error:
        from_partitioner(Partitioner([Table(rows), Table([])]), Table(_rows(2)))
    assert str(error.value) == "partition 1 has no data; use fewer partitions."


def test_a_second_partitioner_holds_the_clients_test_samples():
    rows = _rows(6)
    train = Partitioner([Table(rows[:2]), Table(rows[2:])])
    data = from_partitioner(train, Partitioner([Table(rows[3:]), Table(rows[:1])]))
    population = partition(data, name="natural", clients=None, seed=0)
    assert [own.tolist() for own in own_tests(data, population)] == [[0, 1, 2], [3]]
    with pytest.raises(UserError) as error:
        from_partitioner(train, Partitioner([Table(rows)]))
    assert str(error.value) == "2 training partitions have 1 test partitions; give as many."
