"""CIFAR-10 and CIFAR-100: 32x32 colour images in pickles, of which no code is executed."""

from __future__ import annotations

import codecs
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kairosfl.data.fetch import Download
from kairosfl.data.files import File, damaged
from kairosfl.data.store import Arrays, arrays, split
from kairosfl.tasks.crops import augment
from kairosfl.tasks.dataset import DataSet
from kairosfl.tasks.prepare import sample_keys

SITE = "https://www.cs.toronto.edu/~kriz/"
TEN = "cifar-10-batches-py"
HUNDRED = "cifar-100-python"

CIFAR10_TRAIN = (
    File(f"{TEN}/data_batch_1", "c99cafc152244af753f735de768cd75f", 31035704),
    File(f"{TEN}/data_batch_2", "d4bba439e000b95fd0a9bffe97cbabec", 31035320),
    File(f"{TEN}/data_batch_3", "54ebc095f3ab1f0389bbae665268c751", 31035999),
    File(f"{TEN}/data_batch_4", "634d18415352ddfa80567beed471001a", 31035696),
    File(f"{TEN}/data_batch_5", "482c414d41f54cd18b22e5b47cb7c3cb", 31035623),
)
CIFAR10_TEST = File(f"{TEN}/test_batch", "40351d587109b95175f43aff81a1287e", 31035526)
CIFAR10_META = File(f"{TEN}/batches.meta", "5ff9c542aee3614f3951f8cda6e48888", 158)
CIFAR10 = Download(
    SITE + "cifar-10-python.tar.gz", "c58f30108f718f92721af3b95e74349a", TEN, archive=True
)

CIFAR100_TRAIN = File(f"{HUNDRED}/train", "16019d7e3df5f24257cddd939b257f8d", 155249918)
CIFAR100_TEST = File(f"{HUNDRED}/test", "f0ef6b0ae62326f3e7ffdfab6717acfc")
CIFAR100_META = File(f"{HUNDRED}/meta", "7973b15100ade9c7d40fb424638fde48", 1473)
CIFAR100 = Download(
    SITE + "cifar-100-python.tar.gz", "eb9058c3a382ffc7106e4002c42a8d85", HUNDRED, archive=True
)


def cifar10(*, fedlab: bool = False) -> DataSet:
    """CIFAR-10: 50,000 training and 10,000 test images in ten classes.

    With `fedlab` as FedLab stores it with the usual transforms: each training image is cropped and
    mirrored once, the same for all epochs and seeds, and the deviations of the channels are those
    of a single image on average.
    """

    def convert(root: Path) -> Arrays:
        batches = [_batch(root / file.path, "labels", 10) for file in CIFAR10_TRAIN]
        inputs, targets = (np.concatenate(parts) for parts in zip(*batches, strict=True))
        names = _names(root / CIFAR10_META.path, "label_names", 10)
        return _arrays((inputs, targets), _batch(root / CIFAR10_TEST.path, "labels", 10), names)

    files = (*CIFAR10_TRAIN, CIFAR10_TEST, CIFAR10_META)
    converted, hashes = arrays("cifar10", files, [CIFAR10], convert)
    train = split(converted, "train")
    test = split(converted, "test")
    labels = tuple(converted["labels"].tolist())
    mean = (0.4914, 0.4822, 0.4465)
    std = (0.2470, 0.2435, 0.2616)
    if fedlab:
        keys = sample_keys(torch.arange(len(train)), seed=0, round=0, client=0, step=0)
        cropped = augment(torch.from_numpy(converted["train_inputs"]), keys)
        train = replace(train, inputs=cropped)
        std = (0.2023, 0.1994, 0.2010)
    return DataSet("cifar10", train, test, 10, mean, std, labels=labels, hashes=hashes)


def cifar100(*, coarse: bool = False) -> DataSet:
    """CIFAR-100: 50,000 training and 10,000 test images in a hundred classes.

    Args:
        coarse: Whether the classes are their twenty superclasses.
    """
    kind = "fine"
    classes = 100
    if coarse:
        kind = "coarse"
        classes = 20

    def convert(root: Path) -> Arrays:
        train = _batch(root / CIFAR100_TRAIN.path, f"{kind}_labels", classes)
        test = _batch(root / CIFAR100_TEST.path, f"{kind}_labels", classes)
        names = _names(root / CIFAR100_META.path, f"{kind}_label_names", classes)
        return _arrays(train, test, names)

    files = (CIFAR100_TRAIN, CIFAR100_TEST, CIFAR100_META)
    converted, hashes = arrays("cifar100", files, [CIFAR100], convert, {"coarse": coarse})
    train = split(converted, "train")
    test = split(converted, "test")
    labels = tuple(converted["labels"].tolist())
    mean = (0.5071, 0.4865, 0.4409)
    std = (0.2673, 0.2564, 0.2762)
    return DataSet("cifar100", train, test, classes, mean, std, labels=labels, hashes=hashes)


Batch = tuple[npt.NDArray[np.uint8], npt.NDArray[np.int64]]


def _arrays(train: Batch, test: Batch, names: list[str]) -> Arrays:
    return {
        "train_inputs": train[0],
        "train_targets": train[1],
        "test_inputs": test[0],
        "test_targets": test[1],
        "labels": np.array(names),
    }


def _batch(path: Path, key: str, classes: int) -> Batch:
    """Images [n,3,32,32] and their labels."""
    loaded = read_pickle(path)
    data = np.asarray(loaded.get("data"))
    labels = np.asarray(loaded.get(key))
    if data.ndim != 2 or data.shape[1] != 3072 or data.dtype != np.uint8:
        raise damaged(path, "'data' is not an array of 3 x 32 x 32 byte images")
    if labels.shape != (len(data),) or not np.issubdtype(labels.dtype, np.integer):
        raise damaged(
            path, f"it has {len(data)} images but '{key}' is not a list of {len(data)} integers"
        )
    if len(labels) and (labels.min() < 0 or labels.max() >= classes):
        raise damaged(
            path,
            f"its labels range from {labels.min()} to {labels.max()}, not from 0 to {classes - 1}",
        )
    return data.reshape(-1, 3, 32, 32), labels.astype(np.int64)


def _names(path: Path, key: str, classes: int) -> list[str]:
    names = read_pickle(path).get(key)
    if not isinstance(names, list) or len(names) != classes:
        raise damaged(path, f"'{key}' does not list {classes} class names")
    return [_text(name) for name in names]


def _text(name: object) -> str:
    """A text of a pickle, which Python 2 wrote as bytes."""
    if isinstance(name, bytes):
        return name.decode()
    return str(name)


def read_pickle(path: Path) -> dict[str, Any]:
    """The dictionary in a CIFAR pickle written by Python 2 or 3."""
    try:
        with path.open("rb") as stream:
            loaded = _Unpickler(stream, encoding="bytes").load()
    except Exception as error:  # a corrupt pickle can raise nearly anything
        raise damaged(path, f"it is not a CIFAR pickle ({error or type(error).__name__})") from None
    if not isinstance(loaded, dict):
        raise damaged(path, "it is not a CIFAR pickle (not a dictionary)")
    return {_text(key): value for key, value in loaded.items()}


# The globals that a pickled array refers to, in any numpy version; none of them can be used to run
# other code.
_RECONSTRUCT = np.empty(0, np.uint8).__reduce__()[0]
_FROMBUFFER = np.empty(1, np.uint8).__reduce_ex__(5)[0]
_ALLOWED: dict[tuple[str, str], Any] = {
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
    ("numpy.core.multiarray", "_reconstruct"): _RECONSTRUCT,
    ("numpy._core.multiarray", "_reconstruct"): _RECONSTRUCT,
    ("numpy.core.numeric", "_frombuffer"): _FROMBUFFER,
    ("numpy._core.numeric", "_frombuffer"): _FROMBUFFER,
    ("_codecs", "encode"): codecs.encode,
}


class _Unpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in _ALLOWED:
            raise pickle.UnpicklingError(f"it refers to {module}.{name}")
        return _ALLOWED[module, name]
