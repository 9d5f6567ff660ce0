"""Your own data: PyTorch and Hugging Face data sets and flwr-datasets partitioners as a `DataSet`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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


def from_any(
    train: Any,
    test: Any = None,
    *,
    input: str | None = None,
    target: str = "label",
    client: str | None = None,
    encode: Encode | None = None,
    name: str | None = None,
    classes: int | None = None,
    **fields: Any,
) -> DataSet:
    """Data in any form that `simulate` takes: it is read into memory once.

    Args:
        train: A `DataSet`; a tuple `(x, y)` of arrays or tensors; a torch data set of (input, class) pairs; a Hugging
            Face `Dataset`, or a `DatasetDict` with "train" and "test"; or a list with one of these for each client,
            which become the natural clients.
        test: The same for the test samples, in any of these forms; a list has each client's own. None where `train`
            contains them.
        input: Hugging Face: the column of inputs; by default "image", or the only column that is left.
        target: Hugging Face: the column of classes.
        client: Hugging Face: the column that names the natural client of each row.
        encode: Hugging Face: turns one value of the input column into an array.
        name: What reports call the data set; by default "own", or a `DataSet`'s own name.
        classes: The number of classes; by default counted from the labels.
        **fields: Further fields of `DataSet`, as in `from_torch`.
    """
    if isinstance(train, DataSet):
        if test is not None:
            raise UserError("test must be left out when train is a DataSet, which has test samples of its own.")
        if classes is not None or fields:
            wrong = "classes" if classes is not None else next(iter(fields))
            raise UserError(f"{wrong} must be left out when train is a DataSet, which has its own; change it there.")
        return replace(train, name=name or train.name)
    if isinstance(train, Mapping):
        train, test = _splits(train, test)
    if test is None:
        raise UserError("test is missing; give test samples, such as test=(x, y).")
    sets = [each for data in (train, test) for each in (data if _per_client(data) else [data])]
    tables = [each for each in sets if hasattr(each, "column_names")]
    for key, value in (("input", input), ("client", client), ("encode", encode)):
        if value is not None and (not tables or (key == "client" and len(tables) < len(sets))):
            raise UserError(f"{key} = {value!r} is about columns; leave it out, or give Hugging Face tables.")
    if input is None:
        input = _input_column(tables[0], {target, client}) if tables else "image"
    if len(tables) == len(sets) == 2 and not _per_client(train):
        columns: dict[str, Any] = {"input": input, "target": target, "client": client, "encode": encode}
        return from_hugging_face(train, test, name=name or "own", classes=classes, **columns, **fields)
    if _per_client(test) and not _per_client(train):
        raise UserError("test is a list with data for each client, and train is not; give both per client.")
    read = {"input": input, "target": target, "encode": encode}
    parts = _read_clients(train, "training", read) if _per_client(train) else [_read(train, "training", read)]
    tests = _read_clients(test, "test", read) if _per_client(test) else [_read(test, "test", read)]
    if _per_client(test) and len(tests) != len(parts):
        raise UserError(f"train is a list of {len(parts)} clients and test of {len(tests)}; give as many.")
    whole, held = _joined(parts, "training"), _joined(tests, "test")
    if held.inputs.shape[1:] != whole.inputs.shape[1:]:
        shapes = [list(samples.inputs.shape[1:]) for samples in (held, whole)]
        raise UserError(f"test inputs have shape {shapes[0]} and training inputs {shapes[1]}; give them the same.")
    data = _dataset(name or "own", whole, held, classes, fields)
    if not _per_client(train):
        return data
    keys, test_keys = (np.repeat(np.arange(len(each)), [len(part) for part in each]) for each in (parts, tests))
    return replace(data, keys=keys, test_keys=test_keys if _per_client(test) else None)


def _splits(train: Mapping[str, Any], test: Any) -> tuple[Any, Any]:
    """Both splits of a `DatasetDict`; test data that was given comes first."""
    for split in ("train", *(() if test is not None else ("test",))):
        if split not in train:
            raise UserError(f"train has the splits {', '.join(map(repr, train))} and no {split!r}; give it one.")
    return train["train"], train["test"] if test is None else test


def _input_column(table: Any, others: set[str | None]) -> str:
    left = [column for column in table.column_names if column not in others]
    if "image" in left or len(left) != 1:
        return "image"
    return str(left[0])


def _per_client(data: Any) -> bool:
    """Whether this is a list with data for each client, rather than a list of (input, class) pairs."""
    if not isinstance(data, list) or not data:
        return False
    first = data[0]
    return not (isinstance(first, tuple | list) and len(first) == 2 and np.ndim(first[1]) == 0)


def _read_clients(clients: Sequence[Any], split: str, read: dict[str, Any]) -> list[Samples]:
    parts: list[Samples | None] = []
    for number, data in enumerate(clients):
        size = len(data[1]) if isinstance(data, tuple) and len(data) == 2 else len(data)
        if not size and split == "training":
            raise UserError(f"client {number} of train has no samples; leave it out of the list.")
        parts.append(_read(data, f"client {number}: {split}", read) if size else None)
    some = next((part for part in parts if part is not None), None)
    if some is None:
        raise UserError("test has no samples for any client; give at least one.")
    none = Samples(some.inputs[:0], some.targets[:0])  # a client without test samples
    return [none if part is None else part for part in parts]


def _read(data: Any, split: str, read: dict[str, Any]) -> Samples:
    """One set of samples in any form."""
    if isinstance(data, Samples):
        return data
    if isinstance(data, tuple) and len(data) == 2:
        return _arrays(data[0], data[1], split)
    if hasattr(data, "column_names"):
        _check_columns(data, split, [read["input"], read["target"]])
        return _stack(_rows([data], **read), split)
    if isinstance(data, torch.Tensor | np.ndarray | str) or not hasattr(data, "__getitem__"):
        kind = type(data).__name__
        raise UserError(f"the {split} data is a {kind}; give (x, y) or a data set of (input, class) pairs.")
    return _stack(_pairs(data, split), split)


def _arrays(x: Any, y: Any, split: str) -> Samples:
    try:
        inputs = _tensor(x.detach().cpu() if isinstance(x, torch.Tensor) else np.asarray(x))
        labels = y.detach().cpu().numpy() if isinstance(y, torch.Tensor) else np.asarray(y)
    except (TypeError, ValueError) as error:
        raise UserError(f"the {split} data cannot be made a tensor: {error}; give x and y as arrays.") from None
    if labels.ndim != 1:
        raise UserError(f"the {split} labels have shape {list(labels.shape)}; give one class per input, shape [n].")
    if not inputs.ndim or len(inputs) != len(labels):
        count = len(inputs) if inputs.ndim else 0
        raise UserError(f"the {split} data has {count} inputs and {len(labels)} labels; give as many.")
    if not len(labels):
        raise UserError(f"the {split} data has no samples; add at least one.")
    if labels.dtype.kind not in "iub":
        labels = np.array([_class(label, f"{split} sample {number}") for number, label in enumerate(labels.tolist())])
    return Samples(inputs, torch.from_numpy(labels.astype(np.int64)))


def _joined(parts: Sequence[Samples], split: str) -> Samples:
    for number, part in enumerate(parts):
        shapes = [list(each.inputs.shape[1:]) for each in (part, parts[0])]
        if shapes[0] != shapes[1] and len(part):
            raise UserError(
                f"the {split} inputs of client {number} have shape {shapes[0]} and those of client 0 {shapes[1]}; "
                "give them the same."
            )
    return Samples(torch.cat([part.inputs for part in parts]), torch.cat([part.targets for part in parts]))


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
