"""scikit-learn's handwritten digits: 1,797 grayscale 8x8 images, ten classes; no download."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import numpy as np
import torch

from kairosfl.errors import UserError
from kairosfl.tasks.dataset import DataSet, Samples


def digits() -> DataSet:
    """scikit-learn's handwritten digits, scaled to 0..1: 1,437 for training, 360 for testing."""
    package = find_spec("sklearn")
    if package is None or package.origin is None:
        raise UserError(
            "data set 'digits' needs scikit-learn, which is not installed; "
            'pip install "kairosfl[cli]"'
        )
    path = Path(package.origin).parent / "datasets" / "data" / "digits.csv.gz"
    if path.exists():  # read as load_digits does, which takes two seconds to import
        table = np.loadtxt(path, delimiter=",")
    else:
        from sklearn.datasets import load_digits

        table = np.column_stack(load_digits(return_X_y=True))
    inputs = torch.from_numpy((table[:, :-1].reshape(-1, 1, 8, 8) / 16).astype(np.float32))
    targets = torch.from_numpy(table[:, -1].astype(np.int64))
    # The file is ordered by writer; a fixed permutation makes the test set representative.
    order = torch.from_numpy(np.random.Generator(np.random.Philox(key=0)).permutation(len(targets)))
    cut = len(targets) * 4 // 5
    train = Samples(inputs[order[:cut]], targets[order[:cut]])
    test = Samples(inputs[order[cut:]], targets[order[cut:]])
    return DataSet("digits", train, test, classes=10, labels=tuple("0123456789"))
