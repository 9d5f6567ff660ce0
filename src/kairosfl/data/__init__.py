"""The built-in data sets: `load(name, **options)`."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, get_type_hints

from kairosfl.data.agnews import agnews
from kairosfl.data.cifar import cifar10, cifar100
from kairosfl.data.digits import digits
from kairosfl.data.folder import folder
from kairosfl.data.idx import fashion_mnist, mnist
from kairosfl.data.intake import enough_memory
from kairosfl.data.shakespeare import shakespeare
from kairosfl.data.synthetic import synthetic
from kairosfl.data.tables import Missing
from kairosfl.data.tinyimagenet import tinyimagenet
from kairosfl.errors import UserError, nearest
from kairosfl.plugins import Registry
from kairosfl.tasks.dataset import DataSet

DATASETS: Registry[Callable[..., DataSet]] = Registry(
    "kairosfl.data",
    {
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
    },
)


def load(name: str, **options: object) -> DataSet:
    """The data set called `name`, downloaded when it is not in the data folder.

    Args:
        name: One of `DATASETS`, such as "digits" or "cifar10".
        **options: Keyword arguments of its loader, such as `coarse=True` for "cifar100".

    Raises:
        UserError: For an unknown name or option, and for files that are missing or damaged.
    """
    if name not in DATASETS:
        raise UserError(f"data.name is {name!r}, which does not exist; {nearest(name, DATASETS)}")
    known, hints = inspect.signature(DATASETS[name]).parameters, get_type_hints(DATASETS[name])
    for option, value in options.items():
        if option not in known:
            hint = nearest(option, known) if known else "it has none"
            raise UserError(f"data.{option} is not an option of data set {name!r}; {hint}")
        if option in hints:
            _check_type(option, value, hints[option])
    for option, parameter in known.items():
        if parameter.default is parameter.empty and option not in options:
            raise UserError(f"data.{option} is missing; data set {name!r} needs it.")
    with enough_memory(f"data set {name!r}"):
        return DATASETS[name](**options)


def _check_type(option: str, value: object, hint: Any) -> None:
    whole = isinstance(value, int) and not isinstance(value, bool)
    fits, words = {
        int: (whole, "an integer"),
        float: (whole or isinstance(value, float), "a number"),
        bool: (isinstance(value, bool), "true or false"),
        str: (isinstance(value, str), "a string"),
        Sequence[int]: (_list_of(value, int), "a list of integers"),
        Sequence[str]: (_list_of(value, str), "a list of strings"),
        str | Sequence[str]: (
            isinstance(value, str) or _list_of(value, str),
            "a string or a list of strings",
        ),
        Missing: (
            isinstance(value, str)
            or (isinstance(value, Mapping) and _list_of([*value, *value.values()], str)),
            "a string, or a table with one for each column",
        ),
    }.get(hint, (isinstance(value, str | os.PathLike), "a path"))
    if not fits:
        raise UserError(f"data.{option} is {value!r}; give {words}.")


def _list_of(value: object, kind: type) -> bool:
    return isinstance(value, list | tuple) and all(type(each) is kind for each in value)
