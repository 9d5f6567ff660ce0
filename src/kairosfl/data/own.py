"""Your own data as a `DataSet`: of PyTorch, Hugging Face and flwr-datasets, or arrays."""

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
    """What is used of a flwr-datasets partitioner; its data set must be assigned."""

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
    samples = stacked(pairs(train, "training"), "training")
    tests = stacked(pairs(test, "test"), "test")
    return _dataset(name, samples, tests, classes, fields)


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
    """A Hugging Face `datasets.Dataset` for training and one for testing.

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
    columns = [*column_names(input), target]
    if client:
        columns.append(client)
    check_columns(train, "training", columns)
    samples = stacked(table_rows([train], input, target, encode), "training")
    check_columns(test, "test", columns)
    tests = stacked(table_rows([test], input, target, encode), "test")
    data = _dataset(name, samples, tests, classes, _class_names(train, target) | fields)
    if not client:
        return data

    # Clients are numbered by their names; -1: not among those that train.
    owners = list(train[client])
    names = sorted(set(owners), key=str)
    numbers = {key: number for number, key in enumerate(names)}
    keys = [numbers[key] for key in owners]
    test_keys = [numbers.get(key, -1) for key in test[client]]
    return replace(
        data,
        keys=np.array(keys, dtype=np.int64),
        test_keys=np.array(test_keys, dtype=np.int64),
        key_names=tuple(map(str, names)),
    )


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
    sizes = list(map(len, tables))
    if 0 in sizes:
        raise UserError(f"partition {sizes.index(0)} has no data; use fewer partitions.")
    tests = [test]
    test_keys = None
    if hasattr(test, "load_partition"):
        tests = _partitions(test)
        test_keys = _repeated(list(map(len, tests)))
        if len(tests) != len(tables):
            raise UserError(
                f"{len(tables)} training partitions have {len(tests)} test partitions; "
                "give as many."
            )

    columns = [*column_names(input), target]
    check_columns(tables[0], "training", columns)
    check_columns(tests[0], "test", columns)
    samples = stacked(table_rows(tables, input, target, encode), "training")
    held = stacked(table_rows(tests, input, target, encode), "test")
    data = _dataset(name, samples, held, classes, _class_names(tables[0], target) | fields)
    return replace(data, keys=_repeated(sizes), test_keys=test_keys)


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
        for key, value in ({"classes": classes} | fields).items():
            if value is not None:
                raise UserError(
                    f"{key} must be left out when train is a DataSet, which has its own; "
                    "change it there."
                )
        return replace(train, name=name or train.name)
    if isinstance(train, Mapping):
        train, test = _splits(train, test)
    for split, samples in (("training", train), ("test", test)):
        if isinstance(samples, str | os.PathLike):
            raise path_given(split, samples)
    if test is None:
        raise UserError("test is missing; give test samples, such as test=(x, y).")

    # --- Hugging Face tables, and what is said about their columns ---
    sets = [*_sets(train), *_sets(test)]
    tables = [samples for samples in sets if hasattr(samples, "column_names")]
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

    # --- samples in any form, of all clients or of each ---
    read = {"input": input, "target": target, "encode": encode, "lazy": lazy}
    parts = _read(train, "training", read)
    tests = _read(test, "test", read)
    if _per_client(test) and len(tests) != len(parts):
        raise UserError(
            f"train is a list of {len(parts)} clients and test of {len(tests)}; give as many."
        )
    samples = joined(parts, "training")
    held = joined(tests, "test")
    _check_alike(samples, held, with_targets=classes is None)
    data = _dataset(name or "own", samples, held, classes, fields)
    if not _per_client(train):
        return data
    test_keys = None
    if _per_client(test):
        test_keys = _repeated(list(map(len, tests)))
    return replace(data, keys=_repeated(list(map(len, parts))), test_keys=test_keys)


def _sets(data: Any) -> list[Any]:
    """The data of each client, or the one set of all."""
    return data if _per_client(data) else [data]


def _read(data: Any, split: str, read: dict[str, Any]) -> list[Samples | Streamed]:
    """The samples of each client, or the one set of all."""
    if _per_client(data):
        return read_clients(data, split, read)
    return [read_samples(data, split, read)]


def _repeated(sizes: Sequence[int]) -> np.ndarray:
    """The number of the client of every sample, for clients of these sizes."""
    return np.repeat(np.arange(len(sizes)), sizes)


def _check_alike(train: Samples | Streamed, test: Samples | Streamed, with_targets: bool) -> None:
    """Refuse test samples of another form than the training samples."""
    shapes = form(train.inputs)
    test_shapes = form(test.inputs)
    if test_shapes != shapes:
        raise UserError(
            f"test inputs have shape {test_shapes} and training inputs {shapes}; "
            "give them the same."
        )
    types = target_types(train.targets)
    test_types = target_types(test.targets)
    if with_targets and test_types != types:
        raise UserError(
            f"training targets are {types} and test targets {test_types}; give them the same."
        )


def _splits(train: Mapping[str, Any], test: Any) -> tuple[Any, Any]:
    """Both splits of a `DatasetDict`; test data that was given comes first."""
    needed = ["train"]
    if test is None:
        needed.append("test")
    for split in needed:
        if split not in train:
            raise UserError(
                f"train has the splits {', '.join(map(repr, train))} and no {split!r}; give it one."
            )
    if test is None:
        test = train["test"]
    return train["train"], test


def _input_column(table: Any, target: str, client: str | None) -> str:
    """The column to predict from, where nobody named it."""
    taken = [target, client] if client else [target]
    check_columns(table, "training", taken)
    free = [column for column in table.column_names if column not in taken]
    if "image" in free:
        return "image"
    if not free:
        raise UserError(
            f"the training data has no column besides {target!r} to predict it from; add one."
        )
    if len(free) > 1:
        raise UserError(
            f"the training data has the columns {', '.join(map(repr, free))} besides {target!r}; "
            f"name the input, such as input={free[0]!r}."
        )
    return str(free[0])


def _per_client(data: Any) -> bool:
    """Whether this is a list with data for each client, and not of (input, class) pairs."""
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
    """A data set of these samples, its lists as tuples and its classes counted by their labels."""
    hashable: dict[str, Any] = {}
    for key, value in fields.items():
        hashable[key] = tuple(value) if isinstance(value, list) else value
    classes = classes or len(hashable.get("labels", ()))
    if classes or hashable.get("kind") == "classification":
        train = _classified(train, "training")
        test = _classified(test, "test")
    return DataSet(name, train, test, classes, **hashable)


def _classified(samples: Samples | Streamed, split: str) -> Samples | Streamed:
    """With targets like 1.0 as whole numbers, since they are known to be classes."""
    targets = samples.targets
    if isinstance(samples, Streamed) or not isinstance(targets, torch.Tensor):
        return samples
    if not targets.is_floating_point():
        return samples
    beyond = targets.abs() > LARGEST_CLASS
    wrong = ((targets != targets.round()) | beyond).reshape(len(targets), -1).any(1).nonzero()
    if len(wrong):
        where = int(wrong[0])
        raise UserError(
            f"{split} sample {where} has label {targets[where].tolist()}; "
            "labels must be integers from 0."
        )
    return Samples(samples.inputs, targets.long())


def _class_names(table: Any, target: str) -> dict[str, Any]:
    """Class names of a `ClassLabel` feature, if there are any."""
    names = getattr(table.features[target], "names", None)
    if not names:
        return {}
    return {"labels": tuple(names)}
