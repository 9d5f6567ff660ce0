"""MNIST, CIFAR and Tiny-ImageNet from small files in their official formats, and what is wrong with
bad ones.
"""

import gzip
import io
import os
import pickle
import pickletools

import numpy as np
import pytest
import torch

from kairosfl.data import load
from kairosfl.data.cifar import read_pickle
from kairosfl.errors import UserError

pytestmark = pytest.mark.filterwarnings("ignore:.*not the official:UserWarning")
FIX = "; delete it and run again, or replace it with an intact copy."
RNG = np.random.default_rng(0)


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("KAIROSFL_DATA", str(tmp_path))
    return tmp_path


def _put(path, data):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)


def _refusal(name, **options):
    with pytest.raises(UserError) as error:
        load(name, **options)
    return str(error.value)


def _idx(array):
    header = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">u4").tobytes()
    return gzip.compress(header + array.tobytes())


@pytest.fixture
def mnist(folder):
    images, labels = (
        RNG.integers(0, 256, (12, 28, 28), np.uint8),
        np.arange(12, dtype=np.uint8) % 10,
    )
    for name, count in (("train", 8), ("t10k", 4)):
        _put(folder / f"mnist/{name}-images-idx3-ubyte.gz", _idx(images[:count]))
        _put(folder / f"mnist/{name}-labels-idx1-ubyte.gz", _idx(labels[:count]))
    return images, labels


def test_idx_files(mnist):
    with pytest.warns(UserWarning, match="is not the official file"):
        data = load("mnist")
    assert (len(data.train), len(data.test), data.classes, data.shape) == (8, 4, 10, (1, 28, 28))
    assert data.train.inputs.dtype == torch.uint8
    assert np.array_equal(data.train.inputs[:, 0].numpy(), mnist[0][:8])
    assert data.train.targets.tolist() == list(range(8))
    assert set(data.hashes) == {
        f"mnist/{s}-{k}-ubyte.gz" for s in ("train", "t10k") for k in ("images-idx3", "labels-idx1")
    }


def test_pictures_are_resized_on_load(mnist):
    data = load("mnist", size=32)
    assert data.shape == (1, 32, 32)
    # bilinear, half-pixel centres: the middle of output pixel 3 lies at 3.5*28/32 - 0.5 = 2.5625 in
    # the input
    rows = mnist[0][0].astype(float)
    at = (3 + 0.5) * 28 / 32 - 0.5
    low, share = int(at), at - int(at)
    line = rows[low] * (1 - share) + rows[low + 1] * share
    want = line[low] * (1 - share) + line[low + 1] * share
    assert int(data.train.inputs[0, 0, 3, 3]) == round(want)
    assert (
        _refusal("mnist", size=0)
        == "data.size is 0; give the width of the images, such as 28 or 32."
    )


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (gzip.compress(b"\0\0\x08\x02" + b"\0" * 12),
         "it does not start with the header of a 3-dimensional idx file of bytes"),
        (_idx(np.zeros((8, 28, 14), np.uint8)), "its images are 14 x 28 pixels, not 28 x 28"),
        (gzip.compress(b"\0\0\x08\x03" + np.array([8, 28, 28], ">u4").tobytes() + b"\0" * 100),
         "its header announces 8 x 28 x 28 bytes, but it holds 100"),
    ],
    # gzip writes the time into its bytes, which would be in the name
    ids=["dimensions", "size", "length"],
)  # fmt: skip
def test_idx_files_that_are_not_what_they_say_are_named(folder, mnist, data, why):
    path = folder / "mnist/train-images-idx3-ubyte.gz"
    path.write_bytes(data)
    assert _refusal("mnist") == f"{path} is damaged: {why}{FIX}"


def test_half_an_idx_file_is_named(folder, mnist):
    path = folder / "mnist/t10k-images-idx3-ubyte.gz"
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    why = f"its compressed data is truncated after {len(whole) // 2} bytes"
    assert _refusal("mnist") == f"{path} is damaged: {why}{FIX}"


def test_as_many_labels_as_pictures(folder, mnist):
    _put(folder / "mnist/train-labels-idx1-ubyte.gz", _idx(np.zeros(5, np.uint8)))
    assert _refusal("mnist") == "8 inputs have 5 targets; give one target each."
    _put(folder / "mnist/train-labels-idx1-ubyte.gz", _idx(np.full(8, 11, np.uint8)))
    assert _refusal("mnist") == (
        "training sample 0 of data set 'mnist' has label 11; labels must be 0 to 9 for 10 classes."
    )


def _cifar100(folder, protocol=2, count=6):
    """The documented form: a pickled dictionary of bytes keys, fine and coarse labels, rows of 3072
    bytes.
    """
    pictures = RNG.integers(0, 256, (count, 3072), np.uint8)
    for name in ("train", "test"):
        batch = {
            b"filenames": [b"x.png"] * count,
            b"batch_label": name.encode(),
            b"fine_labels": [99 - i for i in range(count)],
            b"coarse_labels": [i % 20 for i in range(count)],
            b"data": pictures,
        }
        _put(folder / "cifar-100-python" / name, pickle.dumps(batch, protocol))
    meta = {
        b"fine_label_names": [f"fine {i}".encode() for i in range(100)],
        b"coarse_label_names": [f"coarse {i}".encode() for i in range(20)],
    }
    _put(folder / "cifar-100-python/meta", pickle.dumps(meta, protocol))
    return pictures


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_cifar100_in_its_documented_form(folder, protocol):
    pictures = _cifar100(folder, protocol)
    data = load("cifar100")
    assert (len(data.train), data.classes, data.shape) == (6, 100, (3, 32, 32))
    assert data.train.targets.tolist() == [99, 98, 97, 96, 95, 94]
    assert np.array_equal(data.train.inputs.numpy(), pictures.reshape(6, 3, 32, 32))
    assert data.labels[99] == "fine 99"
    coarse = load("cifar100", coarse=True)
    assert (coarse.classes, coarse.train.targets.tolist()) == (20, [0, 1, 2, 3, 4, 5])
    assert coarse.labels[19] == "coarse 19"


def test_a_pickle_as_python_2_wrote_it(folder):
    """Protocol 2 with the old module name of numpy and keys as byte strings, as in the official
    files.
    """
    raw = np.arange(2, dtype=np.uint8).repeat(3072).tobytes()
    stream = (
        b"\x80\x02}(U\x06labels](K\x03K\x04eU\x04data"
        b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R"
        b"(K\x01K\x02M\x00\x0c\x86cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R"
        b"(K\x03U\x01|NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89"
        b"T" + len(raw).to_bytes(4, "little") + raw + b"tbu."
    )
    pickletools.dis(stream, io.StringIO())
    _put(folder / "batch", stream)
    loaded = read_pickle(folder / "batch")
    assert loaded["labels"] == [3, 4]
    assert loaded["data"].shape == (2, 3072)
    assert loaded["data"][1, 5] == 1


class _Evil:
    def __reduce__(self):
        return os.system, ("exit 1",)


def test_a_pickle_that_would_run_code_is_refused(folder):
    _cifar100(folder)
    path = folder / "cifar-100-python/train"
    path.write_bytes(pickle.dumps({b"data": _Evil()}, 2))
    assert (
        _refusal("cifar100")
        == f"{path} is damaged: it is not a CIFAR pickle (it refers to posix.system){FIX}"
    )


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        (
            {"data": np.zeros((6, 3071), np.uint8)},
            "'data' is not an array of 3 x 32 x 32 byte images",
        ),
        ({"data": None}, "'data' is not an array of 3 x 32 x 32 byte images"),
        ({"fine_labels": [1, 2]}, "it has 6 images but 'fine_labels' is not a list of 6 integers"),
        ({"fine_labels": [0, 1, 2, 3, 4, 100]}, "its labels range from 0 to 100, not from 0 to 99"),
    ],
)
def test_cifar_pickles_of_another_form_are_named(folder, fields, why):
    _cifar100(folder)
    path = folder / "cifar-100-python/train"
    batch = pickle.loads(path.read_bytes()) | {key.encode(): value for key, value in fields.items()}
    path.write_bytes(pickle.dumps(batch))
    assert _refusal("cifar100") == f"{path} is damaged: {why}{FIX}"


def test_half_a_cifar_file_is_named(folder):
    _cifar100(folder)
    path = folder / "cifar-100-python/test"
    path.write_bytes(path.read_bytes()[:5000])
    assert _refusal("cifar100").startswith(f"{path} is damaged: it is not a CIFAR pickle (")


def test_cifar10_is_five_batches_in_order(folder):
    for number in range(1, 6):
        batch = {b"labels": [number, number], b"data": np.full((2, 3072), number, np.uint8)}
        _put(folder / f"cifar-10-batches-py/data_batch_{number}", pickle.dumps(batch, 2))
    _put(
        folder / "cifar-10-batches-py/test_batch",
        pickle.dumps({b"labels": [9], b"data": np.zeros((1, 3072), np.uint8)}),
    )
    _put(folder / "cifar-10-batches-py/batches.meta", pickle.dumps({b"label_names": [b"a"] * 10}))
    data = load("cifar10")
    assert data.train.targets.tolist() == [1, 1, 2, 2, 3, 3, 4, 4, 5, 5]
    assert data.train.inputs[:, 0, 0, 0].tolist() == data.train.targets.tolist()
    assert data.test.targets.tolist() == [9]


def test_cifar10_as_fedlab_stores_it_has_each_image_cropped_once(folder):
    images = np.random.default_rng(0).integers(1, 256, (50, 3, 32, 32), np.uint8)
    for number in range(1, 6):
        batch = {
            b"labels": [number] * 10,
            b"data": images[10 * number - 10 : 10 * number].reshape(10, 3072),
        }
        _put(folder / f"cifar-10-batches-py/data_batch_{number}", pickle.dumps(batch, 2))
    _put(
        folder / "cifar-10-batches-py/test_batch",
        pickle.dumps({b"labels": [9], b"data": images[:1].reshape(1, -1)}),
    )
    _put(folder / "cifar-10-batches-py/batches.meta", pickle.dumps({b"label_names": [b"a"] * 10}))
    data, again = load("cifar10", fedlab=True), load("cifar10", fedlab=True)
    assert np.array_equal(data.train.inputs, again.train.inputs)
    assert np.array_equal(data.test.inputs[0], images[0])
    places, mirrored = set(), 0
    for image, stored in zip(
        np.pad(images, ((0, 0), (0, 0), (4, 4), (4, 4))), data.train.inputs.numpy(), strict=True
    ):
        crops = {(y, x): image[:, y : y + 32, x : x + 32] for y in range(9) for x in range(9)}
        (found,) = [
            (place, flipped)
            for place, crop in crops.items()
            for flipped in (False, True)
            if np.array_equal(stored, crop[:, :, ::-1] if flipped else crop)
        ]
        places.add(found[0])
        mirrored += found[1]
    assert len(places) > 25  # 50 draws of 81 places give 37 different ones on average
    assert 10 < mirrored < 40


def _jpeg(colour, size=(64, 64), mode="RGB"):
    from PIL import Image

    stream = io.BytesIO()
    Image.new(mode, size, colour).save(stream, "JPEG", quality=100)
    return stream.getvalue()


@pytest.fixture
def tiny(folder):
    root = folder / "tiny-imagenet-200"
    _put(root / "wnids.txt", b"n02\nn01\n")
    _put(root / "words.txt", b"n01\tgoldfish\nn02\tnewt\nn03\ttoad\n")
    _put(root / "train/n01/images/n01_0.JPEG", _jpeg((200, 0, 0)))
    _put(root / "train/n02/images/n02_0.JPEG", _jpeg((0, 200, 0)))
    _put(root / "train/n02/images/n02_1.JPEG", _jpeg(100, mode="L"))
    _put(root / "train/n02/n02_boxes.txt", b"n02_0.JPEG\t0\t0\t63\t63\n")
    _put(root / "val/images/val_0.JPEG", _jpeg((0, 0, 200)))
    _put(root / "val/val_annotations.txt", b"val_0.JPEG\tn02\t0\t0\t63\t63\n")
    return root


def test_tiny_imagenet_tree(tiny):
    with pytest.warns(UserWarning, match="train has 3 images, not the official 100000"):
        data = load("tinyimagenet")
    assert (data.classes, data.labels, data.shape) == (2, ("goldfish", "newt"), (3, 64, 64))
    assert data.train.targets.tolist() == [0, 1, 1]
    assert data.test.targets.tolist() == [1]
    centre = data.train.inputs[:, :, 32, 32].int()
    assert (centre - torch.tensor([[200, 0, 0], [0, 200, 0], [100, 100, 100]])).abs().max() <= 3
    assert set(data.hashes) >= {"tiny-imagenet-200/train", "tiny-imagenet-200/val"}
    again = load("tinyimagenet")
    assert again.hashes == data.hashes
    _put(tiny / "train/n01/images/n01_1.JPEG", _jpeg((1, 2, 3)))
    assert len(load("tinyimagenet").train) == 4


def test_what_is_wrong_with_an_image_folder_is_named(tiny):
    text = tiny / "train/n01/images/notes.txt"
    _put(text, b"hello")
    assert (
        _refusal("tinyimagenet")
        == f"{text} is not a JPEG file; remove it from the image directory."
    )
    text.unlink()
    picture = tiny / "train/n01/images/n01_0.JPEG"
    whole = picture.read_bytes()
    picture.write_bytes(whole[: len(whole) // 2])
    assert _refusal("tinyimagenet").startswith(
        f"{picture} is damaged: it cannot be decoded as an image ("
    )
    picture.write_bytes(b"hello")
    assert _refusal("tinyimagenet").startswith(
        f"{picture} is damaged: it cannot be decoded as an image ("
    )
    picture.write_bytes(_jpeg((0, 0, 0), (32, 64)))
    assert (
        _refusal("tinyimagenet") == f"{picture} is damaged: it is 32 x 64 pixels, not 64 x 64{FIX}"
    )
    picture.write_bytes(whole)
    notes = tiny / "val/val_annotations.txt"
    _put(notes, b"val_0.JPEG\tn09\n")
    assert _refusal("tinyimagenet") == (
        f"{notes} is damaged: line 1 does not name an image and one of the classes{FIX}"
    )
    _put(notes, b"val_7.JPEG\tn01\n")
    missing = tiny / "val/images/val_7.JPEG"
    assert (
        _refusal("tinyimagenet")
        == f"{missing} is missing, but line 1 of {notes} names it; copy it there."
    )
    _put(tiny / "wnids.txt", b"n01 n02 n03")
    images = tiny / "train/n03/images"
    assert (
        _refusal("tinyimagenet")
        == f"{images} is missing; copy the training images of class n03 there."
    )
