"""Folders with one file or directory per client: tables, arrays and pictures, as people have them."""

import csv
import random
import sys
import time

import numpy as np
import pytest
import torch
from PIL import Image

from kairosfl.data import load
from kairosfl.errors import UserError
from kairosfl.runs.config import dump, read, resolve, tables
from kairosfl.runs.experiment import start
from kairosfl.runs.prepare import build_task
from kairosfl.tasks.partitions import partition
from kairosfl.tasks.population import own_tests


def write(place, **files):
    """Files by name, `ann_test` for ann.test.csv."""
    place.mkdir(exist_ok=True)
    for name, text in files.items():
        (place / f"{name.replace('_', '.')}.csv").write_text(text)
    return place


def refused(path, **options):
    with pytest.raises(UserError) as error:
        load("folder", path=path, **options)
    return str(error.value)


@pytest.fixture
def clients(tmp_path):
    place = write(
        tmp_path / "clients",
        ann="height,label,weight\n1.5,0,2\n2.5,1,3\n3.5,1,4\n4.5,0,5\n5.5,2,6\n",
    )
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
    assert (data.name, data.classes, data.key_names, data.shape) == (
        "clients",
        3,
        ("ann", "bob"),
        (2,),
    )
    assert data.train.inputs.tolist() == [[1.5, 2], [2.5, 3], [3.5, 4], [4.5, 5], [7, 8]]
    assert data.train.targets.tolist() == [0, 1, 1, 0, 1]
    assert data.test.inputs.tolist() == [[5.5, 6], [9, 10], [11, 12]]
    assert data.train.inputs.dtype == torch.float32
    population = partition(data, name="natural", clients=None, seed=0)
    assert population.sizes.tolist() == [4, 1]
    assert own_tests(data, population).sizes.tolist() == [1, 2]
    assert set(data.hashes) == {"ann.csv", "bob.npz"}


FILL = "fill it in, or set data.missing to 'mean', 'zero' or 'drop'."


@pytest.mark.parametrize(
    ("rows", "sentence"),
    [
        ("1,0,2\n2\n", "{} has 1 columns instead of 3 in line 3; fix that line."),
        (
            "1,0,2\nx,1,2\n",
            "{}, line 3, column 'height' has 'x', which is not a finite number; correct it, or add 'height' to "
            "data.categorical, which encodes each value as a column, or leave the column out with data.input.",
        ),
        (
            "1,0,inf\n",
            "{}, line 2, column 'weight' has 'inf', which is not a finite number; correct it.",
        ),
        (
            "1,0,-1e39\n",
            "{}, line 2, column 'weight' has '-1e+39', which is too large for float32; correct it.",
        ),
        (
            "1,1e39,2\n",
            "{}, line 2, column 'label' has '1e+39', which is too large for float32; correct it.",
        ),
        ('1,0,"2', "{} is malformed in line 2 (unexpected end of data); fix that line."),
        (
            "1,0.5,2\n",
            "{}, line 2, column 'label' has the label '0.5'; a class is an integer or a name; to predict a number, "
            "set data.kind to 'regression'.",
        ),
        ("1,0,2\n,1,2\n", "{}, line 3, column 'height' has no value; " + FILL),
        ("1,0,2\nNaN,1,2\n", "{}, line 3, column 'height' has no value; " + FILL),
        ("1,0,2\n?,1,x\n", "{}, line 3, column 'height' has no value; " + FILL),
        (
            "1,0,2\n1, ,2\n",
            "{}, line 3, column 'label' has no label; fill it in, or set data.missing to 'drop'.",
        ),
        ("1,inf,2\n", "{}, line 2, column 'label' has an infinite value; correct it."),
        (
            "1,0,2\n1,cat,2\n",
            "{} has the labels 0 and 'cat' in the column 'label'; make them all integers, or all names.",
        ),
        (
            "1,cat,2\n",
            "{} has names as labels, but ann.csv has integers; make them all integers, or all names.",
        ),
        ("", "client 'eve' has no data: {} is empty; add samples or remove the file."),
        ("1,-1,2\n", "{} has label -1; labels must be integers from 0."),
    ],
)
def test_a_bad_row_is_named(clients, rows, sentence):
    path = clients / "eve.csv"
    path.write_text(f"height,label,weight\n{rows}")
    assert refused(clients) == sentence.replace("{}", str(path))


def test_a_file_in_utf_16_is_named(clients):
    (clients / "eve.csv").write_bytes("height,label,weight\n1,0,2\n".encode("utf-16"))
    assert refused(clients) == f"{clients / 'eve.csv'} is in UTF-16; save it as UTF-8."


@pytest.mark.parametrize(
    ("name", "text", "sentence"),
    [
        (
            "eve.csv",
            "a,b\n1,0\n",
            "{} has no column 'label' in its header (known: a, b); set data.target to the column to predict.",
        ),
        (
            "eve.csv",
            "height;label;weight\n1;0;2\n",
            "{} has no column 'label' in its header (known: height;label;weight); set data.target to the column to "
            "predict, or data.separator.",
        ),
        ("eve.csv", "", "{} is empty; add a header and rows, or move it out of the directory."),
        ("eve.csv", "a,a,label\n1,2,0\n", "{} has two columns 'a'; rename one."),
        (
            "eve.csv",
            ",a,label\n0,2,0\n",
            "{} has no name for column 1, perhaps row numbers that pandas wrote; name it, or leave it out with "
            "index=False.",
        ),
        (
            "eve.csv",
            "weight,label,height\n1,0,2\n",
            "{} has the columns weight, label, height, but ann.csv has height, label, weight; give all files the same "
            "columns in the same order, or set data.input.",
        ),
        (
            "notes.txt",
            "hello",
            "{} is not a .csv, .npz or .parquet file; move it out of the directory.",
        ),
        ("eve.parquet", "hello", "{} cannot be read as .parquet ("),
    ],
)
def test_a_bad_file_is_named(clients, name, text, sentence):
    if name.endswith(".parquet"):
        pytest.importorskip("pyarrow")
    (clients / name).write_text(text)
    assert refused(clients).startswith(sentence.replace("{}", str(clients / name)))


def test_bad_archives_are_named(clients):
    path = clients / "eve.npz"
    np.savez(path, inputs=np.ones((2, 2)))
    assert refused(clients) == f"{path} has the arrays inputs; it needs inputs and targets."
    np.savez(path, inputs=np.ones((2, 2)), targets=np.array([0.0, 1.0]))
    assert refused(clients) == (
        f"{path} must have one integer in targets for each row of inputs (data.kind may be 'regression')."
    )
    np.savez(path, inputs=np.ones((2, 3)), targets=np.array([0, 1]))
    assert (
        refused(clients)
        == f"{path} has inputs of shape [3], but ann.csv has [2]; give all files the same shape."
    )
    np.savez(path, inputs=np.array([[1, 2], [np.nan, 1]]), targets=np.array([0, 1]))
    assert refused(clients) == f"{path} has inputs that are not finite, first in sample 1; {FILL}"
    assert load("folder", path=clients, missing="mean").train.inputs[-1].tolist() == [
        pytest.approx(20 / 6),
        1,
    ]
    path.write_bytes(path.read_bytes()[:100])
    assert refused(clients).startswith(f"{path} is damaged: it cannot be read as .npz (")
    assert "delete" not in refused(clients)


def test_wrong_options(clients, tmp_path):
    assert (
        refused(clients, classes=2) == f"{clients / 'ann.csv'} has label 2; labels must be 0 to 1."
    )
    assert (
        refused(clients, test=1.0)
        == "data.test is 1.0; give a fraction of at least 0 and below 1, such as 0.2."
    )
    assert refused(clients, missing="median") == "data.missing is 'median'; did you mean 'mean'?"
    assert (
        refused(clients, missing=3)
        == "data.missing is 3; give a string, or a table with one for each column."
    )
    assert refused(clients, missing={"hight": "mean"}).endswith(
        "names the column 'hight'; did you mean 'height'?"
    )
    assert (
        refused(clients, categorical="height")
        == "data.categorical is 'height'; give a list of strings."
    )
    unused = "data.categorical names the column 'label', which is not an input; leave it out."
    assert refused(clients, categorical=["label"]) == unused
    assert (
        refused(clients, kind="regresion") == "data.kind is 'regresion'; did you mean 'regression'?"
    )
    assert (
        refused(clients, size=[3])
        == "data.size is [3]; give the height and the width, such as [32, 32]."
    )
    assert refused("nowhere") == (
        "data.path is 'nowhere', which is not a directory; give the directory with the clients' files."
    )
    (clients / "bob.npz").unlink()
    assert refused(clients, input=["hight"]).endswith(
        "which data.input names; did you mean 'height'?"
    )
    (tmp_path / "empty").mkdir()
    assert refused(tmp_path / "empty").endswith(
        "which is empty; add one .npz, .csv or .parquet file per client."
    )


def test_labels_may_be_names(tmp_path):
    write(
        tmp_path,
        ann="a,kind\n1,wolf\n2, dog \n3,wolf\n4,dog\n5,cat\n",
        bob="a,kind\n6,1_0\n7,dog\n",
    )
    data = load("folder", path=tmp_path, target="kind")
    assert (data.classes, data.labels) == (4, ("1_0", "cat", "dog", "wolf"))
    assert data.train.targets.tolist() == [3, 2, 3, 2, 0, 2]
    assert data.test.targets.tolist() == [1]
    assert load("folder", path=tmp_path, label="kind", classes=6).classes == 6
    assert refused(tmp_path, target="kind", classes=3) == (
        "data.classes is 3, but the files have 4 labels (1_0, cat, dog, wolf); leave it out."
    )


def test_integers_may_be_written_as_tables_write_them(tmp_path):
    write(tmp_path, ann="a,label\n1,0.0\n2,1.0\n3,+2\n")
    data = load("folder", path=tmp_path, test=0.0)
    assert (data.train.targets.tolist(), data.labels) == ([0, 1, 2], ())


def test_regression_and_several_targets(tmp_path):
    write(
        tmp_path,
        ann="id;area;price;rent\n7;1;100.5;1\n8;2;200;2\n",
        bob="id;area;price;rent\n9;3;300;3.5\n",
    )
    data = load(
        "folder",
        path=tmp_path,
        target="price",
        input="area",
        kind="regression",
        separator=";",
        test=0.5,
    )
    assert (data.kind, data.shape, data.outputs, data.labels) == ("regression", (1,), 1, ())
    assert data.train.targets.tolist() == [100.5, 300]
    assert data.train.targets.dtype == torch.float32
    assert data.test.inputs.tolist() == [[2]]
    both = load(
        "folder", path=tmp_path, target=["price", "rent"], input=["area"], separator=";", test=0.0
    )
    assert (both.kind, both.outputs) == ("regression", 2)
    assert both.train.targets.tolist() == [[100.5, 1], [200, 2], [300, 3.5]]
    write(tmp_path, eve="id;area;price;rent\n9;3;much;3.5\n")
    assert refused(tmp_path, target="price", kind="regression", separator=";").endswith(
        "eve.csv, line 2, column 'price' has 'much', which is not a number; correct it."
    )


def test_columns_and_clients_that_are_named_twice(tmp_path):
    write(tmp_path, ann="a,label\n1,0\n2,1\n")
    assert refused(tmp_path, input=["a", "label"]) == (
        "data.input and data.target both name the column 'label'; leave it out of one."
    )
    np.savez(tmp_path / "ann.npz", x=np.zeros((2, 1)), y=np.arange(2))
    assert (
        refused(tmp_path)
        == "client 'ann' is ann.csv and ann.npz; rename one, or put both into ann/."
    )
    (tmp_path / "ann.npz").unlink()
    (tmp_path / "ann").mkdir()
    write(tmp_path / "ann", rows="a,label\n1,0\n")
    assert (
        refused(tmp_path)
        == "client 'ann' is rows.csv and ann.csv; rename one, or put both into ann/."
    )
    write(tmp_path / "alone", ann="label\n0\n1\n")
    assert refused(tmp_path / "alone").endswith(
        "ann.csv has no column besides 'label' to predict it from; add one."
    )


def test_missing_values(tmp_path):
    write(
        tmp_path,
        ann="age,dose,label\n20,1,0\n,3,1\n40,NA,1\n",
        ann_test="age,dose,label\n?,null,1\n",
        bob="age,dose,label\n60,1,0\n50,5,\n",
        bob_test="age,dose,label\n70,7,1\n",
    )
    assert "bob.csv, line 3, column 'label' has no label" in refused(tmp_path, missing="mean")
    (tmp_path / "bob.csv").write_text("age,dose,label\n60,1,0\n50,5,1\n")
    filled = load("folder", path=tmp_path, missing="mean")
    assert filled.train.inputs.tolist() == [[20, 1], [42.5, 3], [40, 2.5], [60, 1], [50, 5]]
    assert filled.test.inputs.tolist() == [
        [42.5, 2.5],
        [70, 7],
    ]  # means of the training samples of all clients
    assert dict(filled.notes) == {"missing_values_filled": 4}
    assert load("folder", path=tmp_path, missing="zero").train.inputs.tolist()[1:3] == [
        [0, 3],
        [40, 0],
    ]
    dropped = load("folder", path=tmp_path, missing="drop")
    assert dropped.train.inputs.tolist() == [[20, 1], [60, 1], [50, 5]]
    assert (dropped.test.inputs.tolist(), dict(dropped.notes)) == ([[70, 7]], {"rows_dropped": 3})
    each = load("folder", path=tmp_path, missing={"age": "drop", "dose": "zero"})
    assert each.train.inputs.tolist() == [[20, 1], [40, 0], [60, 1], [50, 5]]
    assert refused(tmp_path, missing={"age": "mean"}).endswith(
        f"line 4, column 'dose' has no value; {FILL}"
    )
    write(tmp_path, ann="age,dose,label\n,1,0\n", bob="age,dose,label\n,2,1\n")
    assert refused(tmp_path, missing="mean") == (
        "The column 'age' has no value in any training sample; leave it out with data.input."
    )
    assert refused(tmp_path, missing="drop").startswith("client 'ann' has no data: ")


def test_categorical_columns_are_one_column_per_value(tmp_path):
    write(
        tmp_path,
        ann="sex,ward,label\nf,1,0\nm,2,1\n",
        ann_test="sex,ward,label\nx,2,1\n",
        bob="sex,ward,label\n,10,0\nf,2,1\n",
        bob_test="sex,ward,label\nm,1,1\n",
    )
    data = load("folder", path=tmp_path, categorical=["sex", "ward"], missing="mean")
    wanted = [[1, 0, 1, 0, 0], [0, 1, 0, 0, 1], [2 / 3, 1 / 3, 0, 1, 0], [1, 0, 0, 0, 1]]
    assert np.allclose(data.train.inputs, wanted)
    assert data.test.inputs.tolist() == [
        [0, 0, 0, 0, 1],
        [0, 1, 1, 0, 0],
    ]  # "x" is in no training sample
    scaled = load("folder", path=tmp_path, categorical=["sex"], missing="mean", standardise=True)
    assert torch.equal(scaled.train.inputs[:, :2], data.train.inputs[:, :2])
    ward = np.array([1, 2, 10, 2.0])
    assert np.allclose(scaled.train.inputs[:, 2], (ward - ward.mean()) / ward.std())
    assert np.allclose(scaled.test.inputs[:, 2], (np.array([2, 1]) - ward.mean()) / ward.std())


def test_a_constant_column_is_standardised_to_zero(tmp_path):
    write(tmp_path, ann="a,b,label\n0.1,1,0\n0.1,2,1\n0.1,4,0\n")
    data = load("folder", path=tmp_path, standardise=True, test=0.0)
    assert np.allclose(data.train.inputs[:, 0], 0, atol=1e-12)
    assert float(data.train.inputs[:, 1].mean()) == pytest.approx(0, abs=1e-6)


def test_every_layout_of_training_and_test_samples(tmp_path):
    train, test = "a,label\n1,0\n2,1\n", "a,label\n3,1\n"
    whole = {"ann": train, "bob": train}
    flat = write(tmp_path / "flat", **whole, ann_test=test, bob_test=test)
    marked = write(
        tmp_path / "marked", ann_train=train, bob_train=train, ann_test=test, bob_test=test
    )
    split = tmp_path / "split"
    split.mkdir()
    write(split / "train", **whole)
    write(split / "test", ann=test, bob=test)
    nested = tmp_path / "nested"
    nested.mkdir()
    for name in whole:
        write(nested / name, train=train, test=test)
    deep = tmp_path / "deep"
    for name in whole:
        for part, text in (("train", train), ("test", test)):
            (deep / name / part).mkdir(parents=True)
            write(deep / name / part, rows=text)
    for place in (flat, marked, split, nested, deep):
        data = load("folder", path=place)
        assert data.key_names == ("ann", "bob"), place
        assert data.train.inputs.tolist() == [[1], [2], [1], [2]], place
        assert data.test.inputs.tolist() == [[3], [3]], place
        assert (data.keys.tolist(), data.test_keys.tolist()) == ([0, 0, 1, 1], [0, 1]), place
    write(split / "test", eve=test)
    assert refused(split).endswith("add some, or name it as there.")
    write(flat, eve_test=test)
    assert refused(flat).startswith("client 'eve' has no data to train on, only ")
    common = write(tmp_path / "common", **whole, test=test)
    data = load("folder", path=common, test=0.0)
    assert (data.key_names, data.test_keys.tolist()) == (("ann", "bob"), [-1])
    assert data.test.inputs.tolist() == [[3]]


def test_clients_of_one_sample_and_without_test_samples(tmp_path):
    write(tmp_path, ann="a,label\n1,0\n", bob="a,label\n1,0\n2,1\n3,1\n4,0\n5,1\n")
    data = load("folder", path=tmp_path)
    population = partition(data, name="natural", clients=None, seed=0)
    assert population.sizes.tolist() == [1, 4]
    assert own_tests(data, population).sizes.tolist() == [0, 1]
    for name in ("ann", "bob"):
        (tmp_path / f"{name}.csv").write_text("a,label\n1,0\n")
    given = {
        "name": "folder",
        "path": str(tmp_path),
        "partition": "natural",
        "clients": 0,
        "minimum": 1,
    }
    with pytest.raises(
        UserError,
        match=r"has no test samples, so no model can be evaluated; add some, or set data\.",
    ):
        build_task(resolve({"data": given, "train": {"cohort": 1}}))
    assert build_task(
        resolve({"data": given | {"validation": 0.5}, "train": {"cohort": 1}})
    ).clients.sizes.tolist() == [1]


def test_arrays_of_any_name(tmp_path):
    for name in ("ann", "bob"):
        np.savez(tmp_path / f"{name}.npz", x=np.zeros((4, 2, 2)), y=np.arange(4) % 2)
    assert load("folder", path=tmp_path).shape == (2, 2)
    for name in ("ann", "bob"):
        np.savez(
            tmp_path / f"{name}.npz",
            image=np.zeros((4, 3), np.uint8),
            kind=np.array(["a", "b", "a", "b"]),
            other=1,
        )
    data = load("folder", path=tmp_path, input="image", target="kind")
    assert (data.labels, data.train.inputs.dtype, len(data.test)) == (("a", "b"), torch.uint8, 0)
    for name in ("ann", "bob"):
        np.savez(tmp_path / f"{name}.npz", x=np.zeros((4, 2)), y=np.ones((4, 3)) / 2, x_test=np.ones((1, 2)),
                 y_test=np.ones((1, 3)))  # fmt: skip
    data = load("folder", path=tmp_path, kind="regression")
    assert (data.outputs, data.test.inputs.tolist()) == (3, [[1, 1], [1, 1]])


def test_parquet(tmp_path, monkeypatch):
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    columns = {
        "age": [30, None, 50],
        "ill": [True, False, True],
        "sex": ["f", "m", None],
        "price": [1.5, 2.0, 3.0],
    }
    parquet.write_table(arrow.table(columns), tmp_path / "ann.parquet")
    options = {"target": "price", "kind": "regression", "test": 0.0}
    assert refused(tmp_path, **options).endswith(
        f"ann.parquet, row 2, column 'age' has no value; {FILL}"
    )
    data = load("folder", path=tmp_path, categorical=["sex"], missing="mean", **options)
    assert data.train.inputs.tolist() == [[30, 1, 1, 0], [40, 0, 0, 1], [50, 1, 0.5, 0.5]]
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    assert refused(tmp_path, **options).endswith(
        "needs pyarrow to be read: pip install 'kairosfl[files]', or write it as .csv."
    )


def picture(path, level, size=(5, 4), mode="RGB"):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, level if mode == "L" else (level, 0, 255)).save(path)


def test_pictures_in_a_directory_per_class(tmp_path):
    for client in ("ann", "bob"):
        for kind, level in (("cat", 10), ("dog", 20)):
            for number in range(5):
                picture(tmp_path / client / kind / f"{number}.png", level + number)
    data = load("folder", path=tmp_path)
    assert (data.labels, data.shape, data.key_names) == (("cat", "dog"), (3, 4, 5), ("ann", "bob"))
    assert (data.train.inputs.dtype, len(data.train), len(data.test)) == (torch.uint8, 16, 4)
    assert set(data.train.targets[data.keys == 0].tolist()) == {0, 1}
    red = data.train.inputs[:, 0].double() / 255
    assert data.mean[0] == pytest.approx(float(red.mean()))
    assert data.std[0] == pytest.approx(float(red.std(correction=0)))
    assert set(data.hashes) == {"ann", "bob"}
    before = data.hashes["bob"]
    picture(tmp_path / "bob" / "dog" / "0.png", 200)
    assert load("folder", path=tmp_path).hashes["bob"] != before
    picture(tmp_path / "bob" / "dog" / "0.png", 20, size=(6, 4))
    assert refused(tmp_path) == (
        f"{tmp_path / 'bob/dog/0.png'} is 6x4 pixels, but {tmp_path / 'bob/cat/0.png'} is 5x4; set data.size to a "
        "common height and width, such as [4, 5]."
    )
    assert load("folder", path=tmp_path, size=[8, 7]).shape == (3, 8, 7)
    (tmp_path / "bob" / "dog" / "0.png").write_text("no picture")
    assert "0.png cannot be read as a picture (" in refused(tmp_path)


def test_pictures_with_a_table_of_labels_and_grey_ones(tmp_path):
    for client, mode in (("ann", "L"), ("bob", "RGB")):
        for number in range(5):
            picture(tmp_path / client / f"{number}.png", 10 * number, mode=mode)
        assert "pictures without a class, such as 0.png" in refused(tmp_path)
        rows = [f"{number}.png,{'odd' if number % 2 else 'even'}" for number in range(5)]
        (tmp_path / client / "labels.csv").write_text("\n".join(["file,label", *rows]))
    data = load("folder", path=tmp_path, test=0.0)
    assert (data.labels, data.shape) == (("even", "odd"), (3, 4, 5))
    assert data.train.targets.tolist() == [0, 1, 0, 1, 0] * 2
    (tmp_path / "ann" / "labels.csv").write_text("file,label\n0.png,a\n9.png,b\n")
    assert refused(tmp_path).endswith(
        "names 9.png in line 3, which does not exist; correct the line."
    )
    (tmp_path / "ann" / "labels.csv").write_text("file,label\n0.png,a\n")
    assert refused(tmp_path).endswith("has no line for 1.png; add one.")


def test_a_number_to_predict_from_pictures(tmp_path):
    for client in ("ann", "bob"):
        for kind in ("1.5", "2"):
            picture(tmp_path / client / kind / "0.png", 9)
    data = load("folder", path=tmp_path, kind="regression", test=0.0)
    assert data.train.targets.tolist() == [1.5, 2, 1.5, 2]
    picture(tmp_path / "bob" / "cat" / "0.png", 9)
    assert refused(tmp_path, kind="regression").endswith(
        "bob has names as targets, but data.kind is 'regression'; leave data.kind out."
    )


def test_pictures_with_training_and_test_samples(tmp_path):
    for part, count in (("train", 3), ("test", 1)):
        for client in ("ann", "bob"):
            for number in range(count):
                picture(tmp_path / part / client / str(number % 2) / f"{number}.jpg", 9)
                picture(tmp_path / "other" / client / part / str(number % 2) / f"{number}.jpg", 9)
    other = load("folder", path=tmp_path / "other")
    (tmp_path / "other").rename(tmp_path.parent / "elsewhere")
    for data in (other, load("folder", path=tmp_path)):
        assert (len(data.train), data.test_keys.tolist(), data.labels) == (6, [0, 1], ("0", "1"))


def test_all_of_it_by_configuration(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    draw = random.Random(0)
    for client in range(3):
        rows = [f"{draw.random()},{draw.choice('ab')},{draw.random()}" for _ in range(20)]
        write(
            tmp_path / "homes", **{f"home{client}": "\n".join(["area,zone,price", *rows, ",a,0.5"])}
        )
    data = {
        "name": "folder",
        "path": "homes",
        "target": "price",
        "kind": "regression",
        "categorical": ["zone"],
    }
    data |= {"missing": {"area": "mean"}, "standardise": True, "partition": "natural", "clients": 0}
    given = {
        "data": data,
        "model": {"name": "logistic"},
        "train": {"rounds": 2, "cohort": 2},
        "run": {"engine": "loop"},
    }
    config = resolve(given)
    (tmp_path / "again.toml").write_text(dump(tables(config)))
    assert resolve(read(tmp_path / "again.toml")) == config
    assert resolve(given, ["data.missing.area=zero"]).data.options["missing"] == {"area": "zero"}
    summary = start(config, tmp_path / "run")
    assert summary["metric"] == "rmse"
    assert build_task(config).dataset is build_task(config).dataset
    assert "missing values filled: 3" in (tmp_path / "run" / "log.txt").read_text()


@pytest.mark.slow
def test_ten_thousand_clients(tmp_path):
    draw = random.Random(0)
    for client in range(10_000):
        with (tmp_path / f"{client:05d}.csv").open("w", newline="") as file:
            rows = csv.writer(file)
            rows.writerow(["a", "b", "c", "label"])
            rows.writerows(
                [draw.random(), draw.random(), draw.random(), draw.choice("xyz")] for _ in range(5)
            )
    began = time.perf_counter()
    data = load("folder", path=tmp_path, standardise=True)
    seconds = time.perf_counter() - began
    assert (len(data.train), len(data.test), len(data.key_names)) == (40_000, 10_000, 10_000)
    assert seconds < 60, seconds
    print(f"{seconds:.1f} s")
