"""The forms in which samples come: arrays, data sets of pairs, tables.

They are read into memory, or when they are needed.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader

from kairosfl.data.intake import memory
from kairosfl.errors import UserError, nearest
from kairosfl.tasks.dataset import Samples
from kairosfl.tasks.streamed import Streamed, chained, of_arrays, of_items, seeded
from kairosfl.tasks.tree import Tree, join, leaves, shapes, tree_map

Encode = Callable[[Any], Any]


def read_clients(
    clients: Sequence[Any], split: str, read: dict[str, Any]
) -> list[Samples | Streamed]:
    """The samples of every client, in any form.

    Args:
        clients: What was given for each client.
        split: "training" or "test"; a client may be without test samples.
        read: How to read them: `input`, `target`, `encode` and `lazy`.
    """
    parts: dict[int, Samples | Streamed] = {}
    for number, data in enumerate(clients):
        if not _is_empty(data):
            parts[number] = _read_client(data, number, split, read)
        elif split == "training":
            raise UserError(f"client {number} of train has no samples; leave it out of the list.")
    if not parts:
        raise UserError("test has no samples for any client; give at least one.")
    some = next(iter(parts.values()))
    none = some.take(torch.arange(0))
    return [parts.get(number, none) for number in range(len(clients))]


def _is_empty(data: Any) -> bool:
    """Whether it evidently has no samples; of arrays (x, y), whether y has none."""
    if isinstance(data, tuple) and len(data) == 2:
        data = data[1]
    return hasattr(data, "__len__") and not len(data)


def _read_client(data: Any, number: int, split: str, read: dict[str, Any]) -> Samples | Streamed:
    try:
        return read_samples(data, split, read)
    except UserError as error:
        raise UserError(f"client {number}: {error}") from error.__cause__


def read_samples(data: Any, split: str, read: dict[str, Any]) -> Samples | Streamed:
    """One set of samples in any form."""
    lazy = read["lazy"]
    if isinstance(data, Samples | Streamed):
        return data
    if isinstance(data, tuple) and len(data) == 2:
        x, y = data
        if lazy is None:
            mapped = isinstance(x, np.memmap)
        else:
            mapped = lazy and isinstance(x, np.ndarray)
        if mapped:
            return of_arrays(x, _leaves(y, _target))
        return _arrays(x, y, split)
    if hasattr(data, "column_names"):
        check_columns(data, split, [*column_names(read["input"]), read["target"]])
        return stacked(table_rows([data], read["input"], read["target"], read["encode"]), split)
    if isinstance(data, str | os.PathLike):
        raise path_given(split, data)
    if isinstance(data, DataLoader):
        raise UserError(
            f"the {split} data is a DataLoader, which makes batches; "
            "give its data set, loader.dataset."
        )
    if isinstance(data, torch.Tensor | np.ndarray) or not hasattr(data, "__getitem__"):
        kind = type(data).__name__
        raise UserError(
            f"the {split} data is a {kind}; give (x, y) or a data set of (input, class) pairs."
        )
    if lazy is None:
        lazy = not isinstance(data, list) and len(data) > 0 and _must_stream(data, split)
    if not lazy:
        return stacked(pairs(data, split), split)

    def read_items(items: Any) -> tuple[Any, ...]:
        samples = stacked(pairs(items, split), split)
        return tuple(vars(samples).values())

    return of_items(data, read_items)


def path_given(split: str, path: str | os.PathLike[str]) -> UserError:
    """The error for a path in place of samples."""
    name = os.fspath(path)
    return UserError(
        f"the {split} data is {name!r}; if this is a path, "
        f"give kairosfl.data.load('folder', path={name!r})."
    )


def _must_stream(data: Any, split: str) -> bool:
    """Whether a data set draws samples at random, or would take more than half of the memory."""
    with seeded(0):
        first = stacked(pairs([data[0]], split), split)
    with seeded(1):
        again = stacked(pairs([data[0]], split), split)
    if len(data) * sum(leaf.nbytes for leaf in leaves(first.inputs)) > memory() / 2:
        return True
    once = (*leaves(first.inputs), *leaves(first.targets))
    twice = (*leaves(again.inputs), *leaves(again.targets))
    return not all(torch.equal(*pair) for pair in zip(once, twice, strict=True))


def _arrays(x: Any, y: Any, split: str) -> Samples:
    try:
        inputs = _leaves(x, _tensor)
        targets = _leaves(y, _target)
    except (TypeError, ValueError) as error:
        raise UserError(
            f"the {split} data cannot be made a tensor: {error}; give x and y as arrays."
        ) from None
    counts = []
    for leaf in (*leaves(inputs), *leaves(targets)):
        counts.append(len(leaf) if leaf.ndim else 0)
    if len(set(counts)) > 1:
        raise UserError(
            f"the {split} data has {counts[0]} inputs and {counts[-1]} targets; give as many."
        )
    if not counts[0]:
        raise UserError(f"the {split} data has no samples; add at least one.")
    return Samples(inputs, targets)


def _leaves(value: Any, change: Callable[[Any], torch.Tensor]) -> Any:
    """A tensor, or a tuple or dict of tensors."""
    if isinstance(value, Mapping):
        return {str(name): change(part) for name, part in value.items()}
    if isinstance(value, tuple):
        return tuple(map(change, value))
    return change(value)


def joined(parts: Sequence[Samples | Streamed], split: str) -> Samples | Streamed:
    """The samples of all clients as one set, in their order."""
    types_of_first = target_types(parts[0].targets)
    shapes_of_first = form(parts[0].inputs)
    for number, part in enumerate(parts):
        if not len(part):
            continue
        types = target_types(part.targets)
        if types != types_of_first:
            raise UserError(
                f"the {split} targets of client {number} are {types} and those of client 0 "
                f"{types_of_first}."
            )
        shapes = form(part.inputs)
        if shapes != shapes_of_first:
            raise UserError(
                f"the {split} inputs of client {number} have shape {shapes} and those of client 0 "
                f"{shapes_of_first}; give them the same."
            )
    if len(parts) == 1:
        return parts[0]
    if any(isinstance(part, Streamed) for part in parts):
        return chained(parts)
    inputs = join(torch.cat, [part.inputs for part in parts])
    targets = join(torch.cat, [part.targets for part in parts])
    return Samples(inputs, targets)


def form(inputs: Tree) -> Any:
    """The shape of one sample, of every leaf."""
    return tree_map(lambda leaf: list(leaf.shape[1:]), inputs)


def target_types(targets: Tree) -> Any:
    """The type and the shape of the targets in words, of every leaf."""

    def described(leaf: torch.Tensor) -> str:
        kind = str(leaf.dtype).removeprefix("torch.")
        shape = ", ".join(map(str, ("n", *leaf.shape[1:])))
        return f"{kind} of shape [{shape}]"

    return tree_map(described, targets)


def stacked(pairs: Iterable[tuple[Any, Any]], split: str) -> Samples:
    """Pairs of inputs and targets as one set of samples in memory."""
    inputs: list[Any] = []
    targets: list[Any] = []
    for value, target in pairs:
        try:
            inputs.append(_leaves(value, _tensor))
            targets.append(_leaves(target, _target))
        except (TypeError, ValueError) as error:
            raise UserError(
                f"{split} sample {len(targets)} cannot be made a tensor: {error}; encode it."
            ) from None
        for what, trees in (("an input", inputs), ("a target", targets)):
            shape = shapes(trees[-1])
            first = shapes(trees[0])
            if shape != first:
                raise UserError(
                    f"{split} sample {len(trees) - 1} has {what} of shape {shape} and sample 0 of "
                    f"{first}; give all the same shape."
                )
    if not inputs:
        raise UserError(f"the {split} data has no samples; add at least one.")
    return Samples(join(torch.stack, inputs), join(torch.stack, targets))


def _tensor(value: Any) -> torch.Tensor:
    """A value as the tensor to store: images as uint8 [C,H,W], floating-point values as float32."""
    if hasattr(value, "convert") and hasattr(value, "mode"):  # a PIL image
        if value.mode not in ("L", "RGB"):
            value = value.convert("RGB")
        pixels = np.array(value)
        return torch.from_numpy(pixels).reshape(*pixels.shape[:2], -1).permute(2, 0, 1).contiguous()
    if isinstance(value, str):
        raise TypeError(f"{value[:40]!r} is text")
    if isinstance(value, torch.Tensor):
        tensor = value.detach().cpu()
    else:
        tensor = torch.from_numpy(np.array(value))
    if tensor.is_floating_point():
        return tensor.float()
    return tensor


def _target(value: Any) -> torch.Tensor:
    """A target: whole numbers as int64, others as float32; masks as whole numbers."""
    if hasattr(value, "convert") and hasattr(value, "mode"):  # a PIL image: a mask of classes
        return torch.from_numpy(np.array(value)).long()
    array = value.detach().cpu() if isinstance(value, torch.Tensor) else np.asarray(value)
    if isinstance(array, np.ndarray):
        if array.dtype.kind not in "iubf":
            if not array.size:
                raise TypeError("it is empty")
            first = array.reshape(-1)[:1].tolist()[0]
            raise TypeError(f"{first!r} is not a number")
        array = torch.from_numpy(array.astype(array.dtype.newbyteorder("=")))
    if array.is_floating_point():
        return array.float()
    classes = array.long()
    if array.dtype == torch.uint64 and bool((classes < 0).any()):
        too_large = int(classes[classes < 0].flatten()[0]) + 2**64
        raise ValueError(f"{too_large} is too large for a class; number the classes from 0")
    return classes


def pairs(data: Any, split: str) -> Iterator[tuple[Any, Any]]:
    """The pairs of a data set, by index if it has a length, since many cannot be iterated over."""
    if hasattr(data, "__len__"):
        items = (data[number] for number in range(len(data)))
    else:
        items = iter(data)
    for number, item in enumerate(items):
        if not isinstance(item, (tuple, list)) or len(item) != 2:
            raise UserError(
                f"{split} sample {number} is a {type(item).__name__}, not a pair of input and "
                "target; wrap the data set in one that returns pairs."
            )
        yield item[0], item[1]


def table_rows(
    tables: Iterable[Any], input: str | Sequence[str], target: str, encode: Encode | None
) -> Iterator[tuple[Any, Any]]:
    """The rows of tables as pairs; several columns of inputs are a dict."""
    for table in tables:
        for row in table:
            if isinstance(input, str):
                value = row[input]
            else:
                value = {name: row[name] for name in input}
            if encode:
                value = encode(value)
            yield value, row[target]


def column_names(input: str | Sequence[str]) -> list[str]:
    """One column or several as a list."""
    return [input] if isinstance(input, str) else list(input)


def check_columns(table: Any, split: str, columns: Sequence[str]) -> None:
    """Refuse a table without one of these columns."""
    for column in columns:
        if column not in table.column_names:
            hint = nearest(column, table.column_names)
            raise UserError(f"the {split} data has no column {column!r}; {hint}")
