"""Your own data: PyTorch and Hugging Face data sets and flwr-datasets partitioners as a `DataSet`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import torch

from kairosfl.data.forms import (
    Encode,
    check_columns,
    column_names,
    form,
    joined,
    pairs,
    path_given,
    read_clients,
    read_samples,
    stacked,
    table_rows,
    target_types,
)
from kairosfl.data.intake import LARGEST_CLASS
from kairosfl.errors import UserError
from kairosfl.tasks.dataset import DataSet, Samples
from kairosfl.tasks.streamed import Streamed


class Partitioner(Protocol):
    """The part of the flwr-datasets partitioner interface that is used; its data set must be
    assigned.
    """

    @property
    def num_partitions(self) -> int: ...
    def load_partition(self, partition_id: int) -> Any: ...


def from_torch(
    train: Any, test: Any, *, name: str = "own", classes: int | None = None, **fields: Any
) -> DataSet:
    """Any `torch.utils.data.Dataset` (or list) of (input, class) pairs, read into memory once.

    Args:
        train: Training pairs. Inputs may be tensors, arrays, numbers or pictures, all of one shape.
        test: Test pairs.
        name: What reports call the data set.
        classes: The number of classes; by default counted from the labels.
        **fields: Further fields of `DataSet`: `mean` and `std` per channel for uint8 images,
            `vocabulary` for tokens, `labels`.
    """
    parts = [
        stacked(pairs(data, split), split) for data, split in ((train, "training"), (test, "test"))
    ]
    return _dataset(name, parts[0], parts[1], classes, fields)


def from_hugging_face(
    train: Any,
    test: Any,
    *,
    input: str | Sequence[str] = "image",
    target: str = "label",
    client: str | None = None,
    encode: Encode | None = None,
    name: str = "own",
    classes: int | None = None,
    **fields: Any,
) -> DataSet:
    """A Hugging Face `datasets.Dataset` for training and one for testing; `input` and `target` name
    the columns.

    Args:
        train: The training table.
        test: The test table.
        input: The column of inputs.
        target: The column of classes.
        client: The column that names the natural client of each row, if there is one.
        encode: Turns one value of the input column into an array, such as a text into tokens.
        name: What reports call the data set.
        classes: The number of classes; by default counted from the labels.
        **fields: Further fields of `DataSet`, as in `from_torch`.
    """
    parts, named = [], []
    for table, split in ((train, "training"), (test, "test")):
        check_columns(table, split, [*column_names(input), target, *([client] if client else [])])
        parts.append(stacked(table_rows([table], input, target, encode), split))
        named.append(list(table[client]) if client else [])
    data = _dataset(name, parts[0], parts[1], classes, _class_names(train, target) | fields)
    if not client:
        return data
    names = sorted(set(named[0]), key=str)
    place = {key: number for number, key in enumerate(names)}
    keys, test_keys = (
        np.array([place.get(key, -1) for key in column], dtype=np.int64) for column in named
    )
    return replace(data, keys=keys, test_keys=test_keys, key_names=tuple(map(str, names)))


def from_partitioner(
    partitioner: Partitioner,
    test: Any,
    *,
    input: str | Sequence[str] = "image",
    target: str = "label",
    encode: Encode | None = None,
    name: str = "own",
    classes: int | None = None,
    **fields: Any,
) -> DataSet:
    """A flwr-datasets partitioner: its partitions become the natural clients.

    Args:
        partitioner: With its data set assigned.
        test: The test table, or a second partitioner whose partitions are the same clients' test
            samples.
        input: The column of inputs.
        target: The column of classes.
        encode: Turns one value of the input column into an array.
        name: What reports call the data set.
        classes: The number of classes; by default counted from the labels.
        **fields: Further fields of `DataSet`, as in `from_torch`.
    """
    tables = _partitions(partitioner)
    tests = _partitions(test) if hasattr(test, "load_partition") else [test]
    sizes = [len(table) for table in tables]
    if 0 in sizes:
        raise UserError(f"partition {sizes.index(0)} has no data; use fewer partitions.")
    if tests[0] is not test and len(tests) != len(tables):
        raise UserError(
            f"{len(tables)} training partitions have {len(tests)} test partitions; give as many."
        )
    for table, split in ((tables[0], "training"), (tests[0], "test")):
        check_columns(table, split, [*column_names(input), target])
    train, held = (
        stacked(table_rows(each, input, target, encode), split)
        for each, split in ((tables, "training"), (tests, "test"))
    )
    data = _dataset(name, train, held, classes, _class_names(tables[0], target) | fields)
    test_keys = (
        None
        if tests[0] is test
        else np.repeat(np.arange(len(tests)), [len(table) for table in tests])
    )
    return replace(data, keys=np.repeat(np.arange(len(sizes)), sizes), test_keys=test_keys)


def from_any(
    train: Any,
    test: Any = None,
    *,
    input: str | Sequence[str] | None = None,
    target: str = "label",
    client: str | None = None,
    encode: Encode | None = None,
    lazy: bool | None = None,
    name: str | None = None,
    classes: int | None = None,
    **fields: Any,
) -> DataSet:
    """Data in any form that `simulate` takes.

    Args:
        train: A `DataSet`; a tuple `(x, y)` of arrays or tensors; a torch data set of (input,
            class) pairs; a Hugging Face `Dataset`, or a `DatasetDict` with "train" and "test"; or a
            list with one of these for each client, which become the natural clients.
        test: The same for the test samples, in any of these forms; a list has each client's own.
            None where `train` contains them.
        input: Hugging Face: the column of inputs; by default "image", or the only column that is
            left.
        target: Hugging Face: the column of classes.
        client: Hugging Face: the column that names the natural client of each row.
        encode: Hugging Face: turns one value of the input column into an array.
        lazy: Whether samples are read, and random transforms drawn anew, for every batch, instead
            of once into memory.
        name: What reports call the data set; by default "own", or a `DataSet`'s own name.
        classes: The number of classes; by default counted from the labels.
        **fields: Further fields of `DataSet`, as in `from_torch`.
    """
    if isinstance(train, DataSet):
        if test is not None:
            raise UserError(
                "test must be left out when train is a DataSet, which has test samples of its own."
            )
        given = {"classes": classes} | fields
        if any(value is not None for value in given.values()):
            wrong = next(key for key, value in given.items() if value is not None)
            raise UserError(
                f"{wrong} must be left out when train is a DataSet, which has its own; change it there."
            )
        return replace(train, name=name or train.name)
    if isinstance(train, Mapping):
        train, test = _splits(train, test)
    for split, samples in (("training", train), ("test", test)):
        if isinstance(samples, str | os.PathLike):
            raise path_given(split, samples)
    if test is None:
        raise UserError("test is missing; give test samples, such as test=(x, y).")
    sets = [each for data in (train, test) for each in (data if _per_client(data) else [data])]
    tables = [each for each in sets if hasattr(each, "column_names")]
    for key, value in (("input", input), ("client", client), ("encode", encode)):
        if value is not None and (not tables or (key == "client" and len(tables) < len(sets))):
            raise UserError(
                f"{key} = {value!r} is about columns; leave it out, or give Hugging Face tables."
            )
    if input is None:
        input = _input_column(tables[0], target, client) if tables else "image"
    if len(tables) == len(sets) == 2 and not _per_client(train):
        columns: dict[str, Any] = {
            "input": input,
            "target": target,
            "client": client,
            "encode": encode,
        }
        return from_hugging_face(
            train, test, name=name or "own", classes=classes, **columns, **fields
        )
    if _per_client(test) and not _per_client(train):
        raise UserError(
            "test is a list with data for each client, and train is not; give both per client."
        )
    read = {"input": input, "target": target, "encode": encode, "lazy": lazy}
    parts = (
        read_clients(train, "training", read)
        if _per_client(train)
        else [read_samples(train, "training", read)]
    )
    tests = (
        read_clients(test, "test", read)
        if _per_client(test)
        else [read_samples(test, "test", read)]
    )
    if _per_client(test) and len(tests) != len(parts):
        raise UserError(
            f"train is a list of {len(parts)} clients and test of {len(tests)}; give as many."
        )
    whole, held = joined(parts, "training"), joined(tests, "test")
    if (there := form(held.inputs)) != (here := form(whole.inputs)):
        raise UserError(
            f"test inputs have shape {there} and training inputs {here}; give them the same."
        )
    if classes is None and (there := target_types(held.targets)) != (
        here := target_types(whole.targets)
    ):
        raise UserError(
            f"training targets are {here} and test targets {there}; give them the same."
        )
    data = _dataset(name or "own", whole, held, classes, fields)
    if not _per_client(train):
        return data
    keys, test_keys = (
        np.repeat(np.arange(len(each)), [len(part) for part in each]) for each in (parts, tests)
    )
    return replace(data, keys=keys, test_keys=test_keys if _per_client(test) else None)


def _splits(train: Mapping[str, Any], test: Any) -> tuple[Any, Any]:
    """Both splits of a `DatasetDict`; test data that was given comes first."""
    for split in ("train", *(() if test is not None else ("test",))):
        if split not in train:
            raise UserError(
                f"train has the splits {', '.join(map(repr, train))} and no {split!r}; give it one."
            )
    return train["train"], train["test"] if test is None else test


def _input_column(table: Any, target: str, client: str | None) -> str:
    known = [target, client] if client else [target]
    check_columns(table, "training", known)
    left = [column for column in table.column_names if column not in known]
    if "image" in left:
        return "image"
    if not left:
        raise UserError(
            f"the training data has no column besides {target!r} to predict it from; add one."
        )
    if len(left) > 1:
        found = ", ".join(map(repr, left))
        raise UserError(
            f"the training data has the columns {found} besides {target!r}; name the input, such as input={left[0]!r}."
        )
    return str(left[0])


def _per_client(data: Any) -> bool:
    """Whether this is a list with data for each client, rather than a list of (input, class) pairs."""
    if not isinstance(data, list) or not data:
        return False
    first = data[0]
    return not (isinstance(first, tuple | list) and len(first) == 2 and np.ndim(first[1]) == 0)


def _partitions(partitioner: Partitioner) -> list[Any]:
    return [partitioner.load_partition(number) for number in range(partitioner.num_partitions)]


def _dataset(
    name: str,
    train: Samples | Streamed,
    test: Samples | Streamed,
    classes: int | None,
    fields: dict[str, Any],
) -> DataSet:
    fields = {
        key: tuple(value) if isinstance(value, list) else value for key, value in fields.items()
    }
    classes = classes or len(fields.get("labels", ()))
    if classes or fields.get("kind") == "classification":
        train, test = _classified(train, "training"), _classified(test, "test")
    return DataSet(name, train, test, classes, **fields)


def _classified(samples: Samples | Streamed, split: str) -> Samples | Streamed:
    """With targets like 1.0 as whole numbers, since they are known to be classes."""
    targets = samples.targets
    if (
        isinstance(samples, Streamed)
        or not isinstance(targets, torch.Tensor)
        or not targets.is_floating_point()
    ):
        return samples
    beyond = targets.abs() > LARGEST_CLASS
    wrong = ((targets != targets.round()) | beyond).reshape(len(targets), -1).any(1).nonzero()
    if len(wrong):
        where = int(wrong[0])
        raise UserError(
            f"{split} sample {where} has label {targets[where].tolist()}; labels must be integers from 0."
        )
    return Samples(samples.inputs, targets.long())


def _class_names(table: Any, target: str) -> dict[str, Any]:
    """Class names of a `ClassLabel` feature, if there are any."""
    names = getattr(table.features[target], "names", None)
    return {"labels": tuple(names)} if names else {}
