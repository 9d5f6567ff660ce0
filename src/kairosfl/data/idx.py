"""MNIST and Fashion-MNIST: 28x28 grayscale images in ten classes, in four gzipped idx files."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F

from kairosfl.data.fetch import Download
from kairosfl.data.files import File, content, damaged
from kairosfl.data.store import Arrays, arrays, split
from kairosfl.errors import UserError
from kairosfl.tasks.dataset import DataSet

SIDE = 28
NAMES = (
    "train-images-idx3-ubyte.gz",
    "train-labels-idx1-ubyte.gz",
    "t10k-images-idx3-ubyte.gz",
    "t10k-labels-idx1-ubyte.gz",
)

# md5 of the idx file inside the .gz, and of the .gz as served
MNIST_SUMS = (
    ("6bbc9ace898e44ae57da46a324031adb", "f68b3c2dcbeaaa9fbdd348bbdeb94873"),
    ("a25bea736e30d166cdddb491f175f624", "d53e105ee54ea40749a09fcbcd1e9432"),
    ("2646ac647ad5339dbf082846283269ea", "9fb629c4189551a2d022fa330f9573f3"),
    ("27ae3e4e09519cfbb04c329615203637", "ec29112dd5afc8b62a52d9c1d73c3e9c"),
)
FASHION_SUMS = (
    ("f4a8712d7a061bf5bd6d2ca38dc4d50a", "8d4fb7e6c68d591d4c3dfef9ec88bf0d"),
    ("9018921c3c673c538a1fc5bad174d6f9", "25c81989df183df01b3e8a0aad5dffbe"),
    ("8181f5470baa50b63fa0f6fddb340f0a", "bef4ecab320f06d8554ea6380940ec79"),
    ("15d484375f8d13e6eb1aabb0c3f46965", "bb300cfdad3c16e7a12a480ee83cd310"),
)
FASHION_LABELS = (
    "T-shirt/top",
    "Trouser",
    "Pullover",
    "Dress",
    "Coat",
    "Sandal",
    "Shirt",
    "Sneaker",
    "Bag",
    "Ankle boot",
)


def mnist(*, size: int = SIDE) -> DataSet:
    """MNIST: 60,000 training and 10,000 test images of handwritten digits, 28x28 or resized.

    Args:
        size: Height and width, to which images are resized bilinearly.
    """
    base = "https://ossci-datasets.s3.amazonaws.com/mnist/"
    return _load("mnist", "mnist", base, MNIST_SUMS, size, 0.1307, 0.3081, tuple("0123456789"))


def fashion_mnist(*, size: int = SIDE) -> DataSet:
    """Fashion-MNIST: 60,000 training and 10,000 test images of clothing, 28x28 or resized.

    Args:
        size: Height and width, to which images are resized bilinearly.
    """
    base = "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/"
    return _load(
        "fashion_mnist", "fashion-mnist", base, FASHION_SUMS, size, 0.2860, 0.3530, FASHION_LABELS
    )


def _load(
    name: str,
    folder: str,
    base: str,
    sums: tuple[tuple[str, str], ...],
    size: int,
    mean: float,
    std: float,
    labels: tuple[str, ...],
) -> DataSet:
    if size < 1:
        raise UserError(f"data.size is {size}; give the width of the images, such as 28 or 32.")
    files = []
    downloads = []
    for file_name, (inner, outer) in zip(NAMES, sums, strict=True):
        path = f"{folder}/{file_name}"
        files.append(File(path, inner))
        downloads.append(Download(base + file_name, outer, path))

    def convert(root: Path) -> Arrays:
        converted: Arrays = {}
        for part, images, classes in (("train", files[0], files[1]), ("test", files[2], files[3])):
            pictures = read_idx(root / images.path, 3)
            if pictures.shape[1:] != (SIDE, SIDE):
                height, width = pictures.shape[1:]
                raise damaged(
                    root / images.path,
                    f"its images are {width} x {height} pixels, not {SIDE} x {SIDE}",
                )
            converted[f"{part}_inputs"] = _resize(pictures, size)[:, None]
            converted[f"{part}_targets"] = read_idx(root / classes.path, 1).astype(np.int64)
        return converted

    converted, hashes = arrays(name, files, downloads, convert, {"size": size})
    train = split(converted, "train")
    test = split(converted, "test")
    return DataSet(name, train, test, 10, (mean,), (std,), labels=labels, hashes=hashes)


def read_idx(path: Path, dimensions: int) -> npt.NDArray[np.uint8]:
    """An idx file of bytes: two zeros, the type, the number of dimensions, the sizes, the data."""
    data = content(path)
    if data[:4] != bytes([0, 0, 8, dimensions]):
        raise damaged(
            path,
            f"it does not start with the header of a {dimensions}-dimensional idx file of bytes",
        )
    start = 4 + 4 * dimensions
    shape = tuple(int(n) for n in np.frombuffer(data[4:start], ">u4"))
    if len(shape) < dimensions or len(data) - start != int(np.prod(shape, dtype=np.int64)):
        sides = " x ".join(map(str, shape))
        raise damaged(path, f"its header announces {sides} bytes, but it holds {len(data) - start}")
    return np.frombuffer(data, np.uint8, offset=start).reshape(shape)


def _resize(images: npt.NDArray[np.uint8], size: int) -> npt.NDArray[np.uint8]:
    if size == SIDE:
        return images
    blocks = []
    for block in np.array_split(images, max(1, len(images) // 4096)):
        pixels = torch.from_numpy(block.astype(np.float32))[:, None]
        larger = F.interpolate(pixels, (size, size), mode="bilinear", antialias=True)
        blocks.append(larger[:, 0])
    resized: npt.NDArray[np.uint8] = torch.cat(blocks).round().to(torch.uint8).numpy()
    return resized
