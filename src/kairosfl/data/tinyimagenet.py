"""Tiny-ImageNet-200: 64x64 colour images in 200 classes, stored as a tree of JPEG files."""

from __future__ import annotations

import hashlib
import os
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kairosfl.data.fetch import Download, ensure
from kairosfl.data.files import File, check, damaged, data_folder, read_text
from kairosfl.data.store import VERSION, Arrays, cached, split
from kairosfl.errors import UserError, first_line
from kairosfl.tasks.dataset import DataSet

ROOT = "tiny-imagenet-200"
CLASSES = File(f"{ROOT}/wnids.txt")
WORDS = File(f"{ROOT}/words.txt")
VALIDATION = File(f"{ROOT}/val/val_annotations.txt")
SIZE = 64
COMPLETE = {"train": 100_000, "val": 10_000}
ARCHIVE = Download(
    "http://cs231n.stanford.edu/tiny-imagenet-200.zip",
    "90528d7ca1a48142e341f4ef8d21d0de",
    ROOT,
    archive=True,
)

Picture = tuple[Path, int]  # a file and its class


def tinyimagenet() -> DataSet:
    """Tiny-ImageNet-200: 100,000 training images; the 10,000 images of the validation set are the
    test set.
    """
    files = (CLASSES, WORDS, VALIDATION)
    folder = data_folder()
    ensure("tinyimagenet", folder, files, [ARCHIVE])
    hashes = check(folder, files)
    wnids = sorted(read_text(folder / CLASSES.path).split())
    pictures = {
        "train": _training(folder / ROOT, wnids),
        "val": _validation(folder / VALIDATION.path, wnids),
    }
    for part, complete in COMPLETE.items():
        if len(pictures[part]) != complete:
            warnings.warn(
                f"{folder / ROOT / part} has {len(pictures[part])} images, not the official "
                f"{complete}; results are not comparable with those on the official data.",
                stacklevel=3,
            )

    def convert(_: Path) -> Arrays:
        train, train_sum = _decode(pictures["train"])
        test, test_sum = _decode(pictures["val"])
        return {
            "train_inputs": train,
            "train_targets": _labels(pictures["train"]),
            "test_inputs": test,
            "test_targets": _labels(pictures["val"]),
            "sums": np.array([train_sum, test_sum]),
        }

    identity = [VERSION, *hashes.values(), _stamp(pictures["train"] + pictures["val"])]
    converted = cached(folder, "tinyimagenet", identity, convert)
    for part, md5 in zip(COMPLETE, converted["sums"], strict=True):
        hashes[f"{ROOT}/{part}"] = str(md5)
    words = {}
    for line in read_text(folder / WORDS.path).splitlines():
        if "\t" in line:
            wnid, words_of_class = line.split("\t", 1)
            words[wnid] = words_of_class
    labels = tuple(words.get(wnid, wnid) for wnid in wnids)
    mean = (0.4802, 0.4481, 0.3975)
    std = (0.2770, 0.2691, 0.2821)
    train = split(converted, "train")
    test = split(converted, "test")
    return DataSet("tinyimagenet", train, test, len(wnids), mean, std, labels=labels, hashes=hashes)


def _labels(pictures: list[Picture]) -> npt.NDArray[np.int64]:
    return np.array([label for _, label in pictures])


def _training(root: Path, wnids: list[str]) -> list[Picture]:
    """The images in every class directory, sorted by name."""
    pictures: list[Picture] = []
    for label, wnid in enumerate(wnids):
        images = root / "train" / wnid / "images"
        if not images.is_dir():
            raise UserError(f"{images} is missing; copy the training images of class {wnid} there.")
        for path in sorted(images.iterdir()):
            if path.suffix not in (".JPEG", ".jpeg", ".jpg"):
                raise UserError(f"{path} is not a JPEG file; remove it from the image directory.")
            pictures.append((path, label))
    return pictures


def _validation(annotations: Path, wnids: list[str]) -> list[Picture]:
    """The images that the annotations name, in their order."""
    label_of = {wnid: label for label, wnid in enumerate(wnids)}
    pictures: list[Picture] = []
    for number, line in enumerate(read_text(annotations).splitlines(), start=1):
        columns = line.split("\t")
        if len(columns) < 2 or columns[1] not in label_of:
            raise damaged(
                annotations, f"line {number} does not name an image and one of the classes"
            )
        path = annotations.parent / "images" / columns[0]
        if not path.is_file():
            raise UserError(
                f"{path} is missing, but line {number} of {annotations} names it; copy it there."
            )
        pictures.append((path, label_of[columns[1]]))
    return pictures


def _stamp(pictures: list[Picture]) -> str:
    """A hash that changes when an image is added, removed, replaced or moved to another class."""
    digest = hashlib.sha256()
    for path, label in pictures:
        stat = path.stat()
        digest.update(f"{path.name} {label} {stat.st_size} {stat.st_mtime_ns}\n".encode())
    return digest.hexdigest()


def _decode(pictures: list[Picture]) -> tuple[npt.NDArray[np.uint8], str]:
    """All images as [n,3,64,64], and the md5 of their concatenated files."""
    digest = hashlib.md5(usedforsecurity=False)
    out = np.empty((len(pictures), 3, SIZE, SIZE), dtype=np.uint8)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        decoded = pool.map(read_jpeg, [path for path, _ in pictures])
        for place, (data, picture) in enumerate(decoded):
            digest.update(data)
            out[place] = picture
    return out, digest.hexdigest()


def read_jpeg(path: Path) -> tuple[bytes, npt.NDArray[np.uint8]]:
    """A file's bytes, and its pixels as [3,64,64]."""
    try:
        from PIL import Image
    except ImportError:
        raise UserError(
            "data set 'tinyimagenet' needs pillow, which is not installed; "
            'pip install "kairosfl[cli]"'
        ) from None
    with path.open("rb") as stream:
        data = stream.read()
        stream.seek(0)
        try:
            picture = np.asarray(Image.open(stream).convert("RGB"))
        except Exception as error:  # of a damaged file, anything may come out
            raise damaged(path, f"it cannot be decoded as an image ({first_line(error)})") from None
    if picture.shape != (SIZE, SIZE, 3):
        height, width = picture.shape[:2]
        raise damaged(path, f"it is {width} x {height} pixels, not {SIZE} x {SIZE}")
    return data, picture.transpose(2, 0, 1)
