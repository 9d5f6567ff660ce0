"""Your own data: PyTorch and Hugging Face data sets and flwr-datasets partitioners as a `DataSet`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol

import numpy as np
import torch

from kairosfl.errors import UserError, nearest
from kairosfl.tasks.dataset import DataSet, Samples
from kairosfl.tasks.tree import Tree, join, leaves, shapes, tree_map

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
    input: str | Sequence[str] = "image",
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
        _check_columns(table, split, [*_names(input), target, *([client] if client else [])])
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
        _check_columns(table, split, [*_names(input), target])
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
    input: str | Sequence[str] | None = None,
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
        given = {"classes": classes} | fields
        if any(value is not None for value in given.values()):
            wrong = next(key for key, value in given.items() if value is not None)
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
    if (there := _form(held.inputs)) != (here := _form(whole.inputs)):
        raise UserError(f"test inputs have shape {there} and training inputs {here}; give them the same.")
    if classes is None and (there := _types(held.targets)) != (here := _types(whole.targets)):
        raise UserError(f"training targets are {here} and test targets {there}; give them the same.")
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
    none = some.take(torch.arange(0))  # a client without test samples
    return [none if part is None else part for part in parts]


def _read(data: Any, split: str, read: dict[str, Any]) -> Samples:
    """One set of samples in any form."""
    if isinstance(data, Samples):
        return data
    if isinstance(data, tuple) and len(data) == 2:
        return _arrays(data[0], data[1], split)
    if hasattr(data, "column_names"):
        _check_columns(data, split, [*_names(read["input"]), read["target"]])
        return _stack(_rows([data], **read), split)
    if isinstance(data, torch.Tensor | np.ndarray | str) or not hasattr(data, "__getitem__"):
        kind = type(data).__name__
        raise UserError(f"the {split} data is a {kind}; give (x, y) or a data set of (input, class) pairs.")
    return _stack(_pairs(data, split), split)


def _arrays(x: Any, y: Any, split: str) -> Samples:
    try:
        inputs, targets = _leaves(x, _tensor), _leaves(y, _target)
    except (TypeError, ValueError) as error:
        raise UserError(f"the {split} data cannot be made a tensor: {error}; give x and y as arrays.") from None
    counts = [len(leaf) if leaf.ndim else 0 for leaf in (*leaves(inputs), *leaves(targets))]
    if len(set(counts)) > 1:
        raise UserError(f"the {split} data has {counts[0]} inputs and {counts[-1]} targets; give as many.")
    if not counts[0]:
        raise UserError(f"the {split} data has no samples; add at least one.")
    return Samples(inputs, targets)


def _leaves(value: Any, change: Callable[[Any], torch.Tensor]) -> Any:
    """A tensor, or a tuple or dict of tensors."""
    if isinstance(value, Mapping):
        return {str(name): change(part) for name, part in value.items()}
    return tuple(map(change, value)) if isinstance(value, tuple) else change(value)


def _form(inputs: Tree) -> Any:
    return tree_map(lambda leaf: list(leaf.shape[1:]), inputs)


def _types(targets: Tree) -> Any:
    def one(leaf: torch.Tensor) -> str:
        return f"{str(leaf.dtype).removeprefix('torch.')} of shape [{', '.join(map(str, ('n', *leaf.shape[1:])))}]"

    return tree_map(one, targets)


def _joined(parts: Sequence[Samples], split: str) -> Samples:
    for number, part in enumerate(parts):
        types = [_types(each.targets) for each in (part, parts[0])]
        if types[0] != types[1] and len(part):
            raise UserError(f"the {split} targets of client {number} are {types[0]} and those of client 0 {types[1]}.")
        shapes = [_form(each.inputs) for each in (part, parts[0])]
        if shapes[0] != shapes[1] and len(part):
            raise UserError(
                f"the {split} inputs of client {number} have shape {shapes[0]} and those of client 0 {shapes[1]}; "
                "give them the same."
            )
    return Samples(*(join(torch.cat, [getattr(part, name) for part in parts]) for name in ("inputs", "targets")))


def _partitions(partitioner: Partitioner) -> list[Any]:
    return [partitioner.load_partition(number) for number in range(partitioner.num_partitions)]


def _dataset(name: str, train: Samples, test: Samples, classes: int | None, fields: dict[str, Any]) -> DataSet:
    fields = {key: tuple(value) if isinstance(value, list) else value for key, value in fields.items()}
    classes = classes or len(fields.get("labels", ()))
    if classes or fields.get("kind") == "classification":
        train, test = _classified(train, "training"), _classified(test, "test")
    return DataSet(name, train, test, classes, **fields)


def _classified(samples: Samples, split: str) -> Samples:
    """With targets like 1.0 as whole numbers, since they are known to be classes."""
    targets = samples.targets
    if not isinstance(targets, torch.Tensor) or not targets.is_floating_point():
        return samples
    wrong = (targets != targets.round()).reshape(len(targets), -1).any(1).nonzero()
    if len(wrong):
        where = int(wrong[0])
        raise UserError(f"{split} sample {where} has label {targets[where].tolist()}; labels must be integers from 0.")
    return Samples(samples.inputs, targets.long())


def _stack(pairs: Iterable[tuple[Any, Any]], split: str) -> Samples:
    inputs: list[Any] = []
    targets: list[Any] = []
    for value, target in pairs:
        try:
            inputs.append(_leaves(value, _tensor))
            targets.append(_leaves(target, _target))
        except (TypeError, ValueError) as error:
            raise UserError(f"{split} sample {len(targets)} cannot be made a tensor: {error}; encode it.") from None
        for what, trees in (("an input", inputs), ("a target", targets)):
            if (found := shapes(trees[-1])) != (first := shapes(trees[0])):
                raise UserError(
                    f"{split} sample {len(trees) - 1} has {what} of shape {found} and sample 0 of {first}; give all "
                    "the same shape."
                )
    if not inputs:
        raise UserError(f"the {split} data has no samples; add at least one.")
    return Samples(join(torch.stack, inputs), join(torch.stack, targets))


def _tensor(value: Any) -> torch.Tensor:
    """A value as the tensor to store: PIL images as uint8 [C,H,W], floating-point values as float32."""
    if hasattr(value, "convert") and hasattr(value, "mode"):  # a PIL image
        pixels = np.array(value if value.mode in ("L", "RGB") else value.convert("RGB"))
        return torch.from_numpy(pixels).reshape(*pixels.shape[:2], -1).permute(2, 0, 1).contiguous()
    tensor = value.detach().cpu() if isinstance(value, torch.Tensor) else torch.from_numpy(np.array(value))
    return tensor.float() if tensor.is_floating_point() else tensor


def _target(value: Any) -> torch.Tensor:
    """A target: whole numbers as int64, others as float32; masks as whole numbers."""
    if hasattr(value, "convert") and hasattr(value, "mode"):  # a PIL image: a mask of classes
        return torch.from_numpy(np.array(value)).long()
    array = value.detach().cpu() if isinstance(value, torch.Tensor) else np.asarray(value)
    if isinstance(array, np.ndarray):
        if array.dtype.kind not in "iubf":
            raise TypeError(f"{value!r} is not a number")
        array = torch.from_numpy(array.copy())
    return array.float() if array.is_floating_point() else array.long()


def _pairs(data: Any, split: str) -> Iterator[tuple[Any, Any]]:
    items = (data[number] for number in range(len(data))) if hasattr(data, "__len__") else iter(data)
    for number, item in enumerate(items):
        if not isinstance(item, (tuple, list)) or len(item) != 2:
            raise UserError(
                f"{split} sample {number} is a {type(item).__name__}, not a pair of input and target; "
                "wrap the data set in one that returns pairs."
            )
        yield item[0], item[1]


def _rows(
    tables: Iterable[Any], input: str | Sequence[str], target: str, encode: Encode | None
) -> Iterator[tuple[Any, Any]]:
    for table in tables:
        for row in table:
            value = row[input] if isinstance(input, str) else {name: row[name] for name in input}
            yield encode(value) if encode else value, row[target]


def _names(input: str | Sequence[str]) -> list[str]:
    return [input] if isinstance(input, str) else list(input)


def _check_columns(table: Any, split: str, wanted: Sequence[str]) -> None:
    for column in wanted:
        if column not in table.column_names:
            hint = nearest(column, table.column_names)
            raise UserError(f"the {split} data has no column {column!r}; {hint}")


def _class_names(table: Any, target: str) -> dict[str, Any]:
    """Class names of a `ClassLabel` feature, if there are any."""
    names = getattr(table.features[target], "names", None)
    return {"labels": tuple(names)} if names else {}
