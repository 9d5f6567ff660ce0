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
    parameters = inspect.signature(DATASETS[name]).parameters
    hints = get_type_hints(DATASETS[name])
    for option, value in options.items():
        if option not in parameters:
            hint = nearest(option, parameters) if parameters else "it has none"
            raise UserError(f"data.{option} is not an option of data set {name!r}; {hint}")
        if option in hints:
            _check_type(option, value, hints[option])
    for option, parameter in parameters.items():
        if parameter.default is parameter.empty and option not in options:
            raise UserError(f"data.{option} is missing; data set {name!r} needs it.")
    with enough_memory(f"data set {name!r}"):
        return DATASETS[name](**options)


def _check_type(option: str, value: object, hint: Any) -> None:
    """Refuse a value, perhaps read from a file, that does not match a loader's annotation."""
    integer = isinstance(value, int) and not isinstance(value, bool)
    text = isinstance(value, str)
    table: bool = isinstance(value, Mapping) and _list_of([*value, *value.values()], str)
    one_or_several: bool = text or _list_of(value, str)
    one_or_table: bool = text or table
    answers = {
        int: (integer, "an integer"),
        float: (integer or isinstance(value, float), "a number"),
        bool: (isinstance(value, bool), "true or false"),
        str: (text, "a string"),
        Sequence[int]: (_list_of(value, int), "a list of integers"),
        Sequence[str]: (_list_of(value, str), "a list of strings"),
        str | Sequence[str]: (one_or_several, "a string or a list of strings"),
        Missing: (one_or_table, "a string, or a table with one for each column"),
    }
    a_path = (isinstance(value, str | os.PathLike), "a path")
    fits, words = answers.get(hint, a_path)
    if not fits:
        raise UserError(f"data.{option} is {value!r}; give {words}.")


def _list_of(value: object, kind: type) -> bool:
    return isinstance(value, list | tuple) and all(type(element) is kind for element in value)
