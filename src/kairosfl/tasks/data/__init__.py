"""The data sets that come with the library: `load(name, **options)`."""

from __future__ import annotations

import inspect
from collections.abc import Callable

from kairosfl.errors import UserError, nearest
from kairosfl.tasks.data.agnews import agnews
from kairosfl.tasks.data.cifar import cifar10, cifar100
from kairosfl.tasks.data.digits import digits
from kairosfl.tasks.data.folder import folder
from kairosfl.tasks.data.idx import fashion_mnist, mnist
from kairosfl.tasks.data.shakespeare import shakespeare
from kairosfl.tasks.data.synthetic import synthetic
from kairosfl.tasks.data.tinyimagenet import tinyimagenet
from kairosfl.tasks.dataset import DataSet

DATASETS: dict[str, Callable[..., DataSet]] = {
    "digits": digits,
    "mnist": mnist,
    "fashion_mnist": fashion_mnist,
    "cifar10": cifar10,
    "cifar100": cifar100,
    "tinyimagenet": tinyimagenet,
    "shakespeare": shakespeare,
    "agnews": agnews,
    "synthetic": synthetic,
    "folder": folder,
}


def load(name: str, **options: object) -> DataSet:
    """The data set called `name`; options are the keyword arguments of its loader."""
    if name not in DATASETS:
        raise UserError(f"data.name is {name!r}, which does not exist; {nearest(name, DATASETS)}")
    known = inspect.signature(DATASETS[name]).parameters
    for option in options:
        if option not in known:
            hint = nearest(option, known) if known else "it has none"
            raise UserError(f"data.{option} is no option of data set {name!r}; {hint}")
    return DATASETS[name](**options)
