"""Your own data: PyTorch and Hugging Face data sets and flwr-datasets partitioners as a `DataSet`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import torch

from kairosfl.errors import UserError, nearest
from kairosfl.tasks.dataset import DataSet, Samples

Encode = Callable[[Any], Any]


class Partitioner(Protocol):
    """The part of the flwr-datasets partitioner interface that is used; its data set must be assigned."""

    @property
    def num_partitions(self) -> int: ...
    def load_partition(self, partition_id: int) -> Any: ...


def from_torch(train: Any, test: Any, *, name: str = "own", classes: int | None = None, **fields: Any) -> DataSet:
    """Any `torch.utils.data.Dataset` (or list) of (input, class) pairs, read into memory once.

    Args:
        train: Training pairs. Inputs may be tensors, arrays, numbers or pictures, all of one shape.
        test: Test pairs.
        name: What reports call the data set.
        classes: The number of classes; by default counted from the labels.
        **fields: Further fields of `DataSet`: `mean` and `std` per channel for uint8 images, `vocabulary` for
            tokens, `labels`.
    """
    parts = [_stack(_pairs(data, split), split) for data, split in ((train, "training"), (test, "test"))]
    return _dataset(name, parts[0], parts[1], classes, fields)


def from_hugging_face(
    train: Any,
    test: Any,
    *,
    input: str = "image",
    target: str = "label",
    client: str | None = None,
    encode: Encode | None = None,
    name: str = "own",
    classes: int | None = None,
    **fields: Any,
) -> DataSet:
    """A Hugging Face `datasets.Dataset` for training and one for testing; `input` and `target` name the columns.

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
        _check_columns(table, split, [input, target, *([client] if client else [])])
        parts.append(_stack(_rows([table], input, target, encode), split))
        named.append(list(table[client]) if client else [])
    data = _dataset(name, parts[0], parts[1], classes, _class_names(train, target) | fields)
    if not client:
        return data
    names = sorted(set(named[0]), key=str)
    place = {key: number for number, key in enumerate(names)}
    keys, test_keys = (np.array([place.get(key, -1) for key in column], dtype=np.int64) for column in named)
    return replace(data, keys=keys, test_keys=test_keys, key_names=tuple(map(str, names)))


def from_partitioner(
    partitioner: Partitioner,
    test: Any,
    *,
    input: str = "image",
    target: str = "label",
    encode: Encode | None = None,
    name: str = "own",
    classes: int | None = None,
    **fields: Any,
) -> DataSet:
    """A flwr-datasets partitioner: its partitions become the natural clients.

    Args:
        partitioner: With its data set assigned.
        test: The test table, or a second partitioner whose partitions are the same clients' test samples.
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
        raise UserError(f"{len(tables)} training partitions have {len(tests)} test partitions; give as many.")
    for table, split in ((tables[0], "training"), (tests[0], "test")):
        _check_columns(table, split, [input, target])
    train, held = (
        _stack(_rows(each, input, target, encode), split) for each, split in ((tables, "training"), (tests, "test"))
    )
    data = _dataset(name, train, held, classes, _class_names(tables[0], target) | fields)
    test_keys = None if tests[0] is test else np.repeat(np.arange(len(tests)), [len(table) for table in tests])
    return replace(data, keys=np.repeat(np.arange(len(sizes)), sizes), test_keys=test_keys)


def _partitions(partitioner: Partitioner) -> list[Any]:
    return [partitioner.load_partition(number) for number in range(partitioner.num_partitions)]


def _dataset(name: str, train: Samples, test: Samples, classes: int | None, fields: dict[str, Any]) -> DataSet:
    if classes is None:
        named = len(fields.get("labels", ()))
        classes = named or 1 + max(int(part.targets.max()) for part in (train, test) if len(part))
    fields = {key: tuple(value) if isinstance(value, Sequence) else value for key, value in fields.items()}
    return DataSet(name, train, test, classes, **fields)


def _stack(pairs: Iterable[tuple[Any, Any]], split: str) -> Samples:
    inputs: list[torch.Tensor] = []
    targets: list[int] = []
    for value, target in pairs:
        tensor = _tensor(value)
        if inputs and tensor.shape != inputs[0].shape:
            raise UserError(
                f"{split} sample {len(inputs)} has shape {list(tensor.shape)} and sample 0 "
                f"{list(inputs[0].shape)}; give all inputs the same shape."
            )
        inputs.append(tensor)
        targets.append(_class(target, f"{split} sample {len(targets)}"))
    if not inputs:
        raise UserError(f"the {split} data has no samples; add at least one.")
    return Samples(torch.stack(inputs), torch.tensor(targets))


def _tensor(value: Any) -> torch.Tensor:
    """A value as the tensor to store: PIL images as uint8 [C,H,W], floating-point values as float32."""
    if hasattr(value, "convert") and hasattr(value, "mode"):  # a PIL image
        pixels = np.array(value if value.mode in ("L", "RGB") else value.convert("RGB"))
        return torch.from_numpy(pixels).reshape(*pixels.shape[:2], -1).permute(2, 0, 1).contiguous()
    tensor = value if isinstance(value, torch.Tensor) else torch.from_numpy(np.array(value))
    return tensor.float() if tensor.is_floating_point() else tensor


def _class(target: Any, where: str) -> int:
    try:
        number = int(target)
        if number == target:
            return number
    except (TypeError, ValueError):
        pass
    raise UserError(f"{where} has label {target!r}; labels must be integers from 0.")


def _pairs(data: Any, split: str) -> Iterator[tuple[Any, Any]]:
    items = (data[number] for number in range(len(data))) if hasattr(data, "__len__") else iter(data)
    for number, item in enumerate(items):
        if not isinstance(item, (tuple, list)) or len(item) != 2:
            raise UserError(
                f"{split} sample {number} is a {type(item).__name__}, not a pair of input and class; "
                "wrap the data set in one that returns pairs."
            )
        yield item[0], item[1]


def _rows(tables: Iterable[Any], input: str, target: str, encode: Encode | None) -> Iterator[tuple[Any, Any]]:
    for table in tables:
        for row in table:
            yield encode(row[input]) if encode else row[input], row[target]


def _check_columns(table: Any, split: str, wanted: Sequence[str]) -> None:
    for column in wanted:
        if column not in table.column_names:
            hint = nearest(column, table.column_names)
            raise UserError(f"the {split} data has no column {column!r}; {hint}")


def _class_names(table: Any, target: str) -> dict[str, Any]:
    """Class names of a `ClassLabel` feature, if there are any."""
    names = getattr(table.features[target], "names", None)
    return {"labels": tuple(names)} if names else {}
