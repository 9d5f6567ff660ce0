"""Data of one's own: torch and Hugging Face data sets, partitioners, and folders of per-client files."""

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from kairosfl.errors import UserError
from kairosfl.tasks.data import load
from kairosfl.tasks.data.own import from_hugging_face, from_partitioner, from_torch
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
        self.features = {name: self.Label() if named and name == "label" else None for name in self.column_names}

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
    return [{"image": [float(i), 1.0], "label": i % 3} | {k: v(i) for k, v in fields.items()} for i in range(count)]


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
        ([(1.0, "cat")], "training sample 0 cannot be made a tensor: 'cat' is not a number; encode it."),
        ([(1.0, 0.5)], "training sample 0 has label 0.5; labels must be integers from 0."),
        (
            [{"x": 1}],
            "training sample 0 is a dict, not a pair of input and target; wrap the data set in one that returns pairs.",
        ),
        ([], "the training data has no samples; add at least one."),
        ([(1.0, 3)], "training sample 0 of data set 'own' has label 3; labels must be 0 to 1 for 2 classes."),
    ],
)
def test_torch_data_that_cannot_be_used_is_refused(train, sentence):
    with pytest.raises(UserError) as error:
        from_torch(train, [(1.0, 0)], classes=2)
    assert str(error.value) == sentence


def test_a_hugging_face_data_set_with_natural_clients():
    writer = {"writer": lambda i: "zoe" if i % 2 else "abe"}
    data = from_hugging_face(Table(_rows(5, **writer)), Table(_rows(3, writer=lambda i: "new")), client="writer")
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
    data = from_partitioner(Partitioner([Table(rows[:2]), Table(rows[2:3]), Table(rows[3:])]), Table(_rows(2)))
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


@pytest.fixture
def clients(tmp_path):
    place = tmp_path / "clients"
    place.mkdir()
    (place / "ann.csv").write_text("height,label,weight\n1.5,0,2\n2.5,1,3\n3.5,1,4\n4.5,0,5\n5.5,2,6\n")
    np.savez(
        place / "bob.npz",
        inputs=np.array([[7.0, 8.0]]),
        targets=np.array([1]),
        test_inputs=np.array([[9.0, 10.0], [11.0, 12.0]]),
        test_targets=np.array([2, 0]),
    )
    return place


def test_a_folder_of_per_client_files(clients):
    data = load("folder", path=str(clients))
    assert (data.name, data.classes, data.key_names, data.shape) == ("clients", 3, ("ann", "bob"), (2,))
    assert data.train.inputs.tolist() == [[1.5, 2], [2.5, 3], [3.5, 4], [4.5, 5], [7, 8]]
    assert data.train.targets.tolist() == [0, 1, 1, 0, 1]
    assert data.test.inputs.tolist() == [[5.5, 6], [9, 10], [11, 12]]
    assert data.train.inputs.dtype == torch.float32
    population = partition(data, name="natural", clients=None, seed=0)
    assert population.sizes.tolist() == [4, 1]
    assert own_tests(data, population).sizes.tolist() == [1, 2]
    assert set(data.hashes) == {"ann.csv", "bob.npz"}


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        ("eve.csv", "a,label\n1,0\n2\n", "{} has 1 columns instead of 2 in line 3; fix that line."),
        (
            "eve.csv",
            "a,label\n1,0\nx,1\n",
            "{}, line 3, column 'a' has 'x', which is not a finite number; correct it or remove the column.",
        ),
        ("eve.csv", 'a,label\n1,"0', "{} is malformed in line 2 (unexpected end of data); fix that line."),
        (
            "eve.csv",
            "a,label\n1,0.5\n",
            "{}, line 2, column 'label' has the label '0.5'; a class is an integer or a name.",
        ),
        ("eve.csv", "a,label\n1,0\n,1\n", "{}, line 3, column 'a' has no value; fill it in or remove the line."),
        ("eve.csv", "a,label\n1,0\nNaN,1\n", "{}, line 3, column 'a' has no value; fill it in or remove the line."),
        ("eve.csv", "a,label\n1,0\n1, \n", "{}, line 3, column 'label' has no label; fill it in or remove the line."),
        (
            "eve.csv",
            "a,label\n1,0\n1,cat\n",
            "{} has the labels 0 and 'cat' in the column 'label'; make them all integers, or all names.",
        ),
        (
            "eve.csv",
            "height,label,weight\n1,cat,2\n",
            "{} has names as labels, but ann.csv has integers; make them all integers, or all names.",
        ),
        ("eve.csv", "a,b\n1,0\n", "{} has no column 'label' in its header; set data.label to the column of the class."),
        ("eve.csv", "", "{} has no column 'label' in its header; set data.label to the column of the class."),
        (
            "eve.csv",
            "a,b,label\n",
            "client 'eve' has no data: {} is empty; add samples or remove the file.",
        ),
        ("eve.csv", "a,b,label\n1,2,-1\n", "{} has label -1; labels must be integers from 0."),
        (
            "eve.csv",
            "a,label\n1,2\n",
            "{} has inputs of shape [1], but ann.csv has [2]; give all files the same shape.",
        ),
        ("notes.txt", "hello", "{} is neither .npz nor .csv; remove it from the directory."),
    ],
)
def test_a_bad_file_in_the_folder_is_named(clients, name, text, sentence):
    (clients / name).write_text(text)
    with pytest.raises(UserError) as error:
        load("folder", path=clients)
    assert str(error.value) == sentence.replace("{}", str(clients / name))


def test_bad_archives_are_named(clients):
    path = clients / "eve.npz"
    np.savez(path, inputs=np.ones((2, 2)))
    with pytest.raises(UserError) as error:
        load("folder", path=clients)
    assert str(error.value) == f"{path} has the arrays inputs; it needs inputs and targets."
    np.savez(path, inputs=np.ones((2, 2)), targets=np.array([0.0, 1.0]))
    with pytest.raises(UserError) as error:
        load("folder", path=clients)
    assert str(error.value) == f"{path} must have one integer in targets for each row of inputs."
    path.write_bytes(path.read_bytes()[:100])
    with pytest.raises(UserError) as error:
        load("folder", path=clients)
    assert str(error.value).startswith(f"{path} is damaged: it cannot be read as .npz (")


def test_labels_out_of_range_and_wrong_options(clients, tmp_path):
    with pytest.raises(UserError) as error:
        load("folder", path=clients, classes=2)
    assert str(error.value) == f"{clients / 'ann.csv'} has label 2; labels must be 0 to 1."
    with pytest.raises(UserError) as error:
        load("folder", path=clients, test=1.0)
    assert str(error.value) == "data.test is 1.0; give a fraction of at least 0 and below 1, such as 0.2."
    with pytest.raises(UserError) as error:
        load("folder", path="nowhere")
    assert (
        str(error.value)
        == "data.path is 'nowhere', which is not a directory; give the directory with the clients' files."
    )
    (tmp_path / "empty").mkdir()
    with pytest.raises(UserError) as error:
        load("folder", path=tmp_path / "empty")
    assert str(error.value).endswith("which is empty; add one .npz or .csv file per client.")


def test_clients_with_their_columns_in_another_order_are_refused(clients):
    first = next(iter(sorted(clients.glob("*.csv")))).read_text().splitlines()
    columns = [line.split(",") for line in first]
    (clients / "zoe.csv").write_text("\n".join(",".join(reversed(line)) for line in columns))
    with pytest.raises(
        UserError, match=r"zoe\.csv has the columns .*, but .*; give all files the same columns in the same order"
    ):
        load("folder", path=clients)


def test_labels_may_be_names(tmp_path):
    (tmp_path / "ann.csv").write_text("a,kind\n1,wolf\n2, dog \n3,wolf\n4,dog\n5,cat\n")
    (tmp_path / "bob.csv").write_text("a,kind\n6,1_0\n7,dog\n")
    data = load("folder", path=tmp_path, label="kind")
    assert (data.classes, data.labels) == (4, ("1_0", "cat", "dog", "wolf"))
    assert data.train.targets.tolist() == [3, 2, 3, 2, 0, 2]
    assert data.test.targets.tolist() == [1]
    assert load("folder", path=tmp_path, label="kind", classes=6).classes == 6
    with pytest.raises(
        UserError, match=r"^data\.classes is 3, but the files have 4 labels \(1_0, cat, dog, wolf\); leave"
    ):
        load("folder", path=tmp_path, label="kind", classes=3)


def test_integers_may_be_written_as_tables_write_them(tmp_path):
    (tmp_path / "ann.csv").write_text("a,label\n1,0.0\n2,1.0\n3,+2\n")
    data = load("folder", path=tmp_path, test=0.0)
    assert (data.train.targets.tolist(), data.labels) == ([0, 1, 2], ())


@pytest.mark.parametrize("text", ["nan", "inf"])
def test_inputs_that_are_not_finite_are_refused(clients, text):
    first = next(iter(sorted(clients.glob("*.csv")))).read_text().splitlines()
    header, row = first[0].split(","), first[1].split(",")
    row[next(i for i, name in enumerate(header) if name != "label")] = text
    (clients / "zoe.csv").write_text(f"{first[0]}\n{','.join(row)}\n")
    with pytest.raises(
        UserError, match=r"zoe\.csv, line 2, column 'height' has (no value|'inf', which is not a finite)"
    ):
        load("folder", path=clients)
    (clients / "zoe.csv").unlink()
    inputs = np.full((2, len(header) - 1), float(text), dtype=np.float32)
    np.savez(clients / "zoe.npz", inputs=inputs, targets=np.array([0, 1]))
    with pytest.raises(UserError, match="inputs that are not finite; remove or impute those samples"):
        load("folder", path=clients)
