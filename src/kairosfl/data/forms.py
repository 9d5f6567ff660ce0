"""The forms in which samples come: arrays, data sets of pairs, tables; read into memory, or when
they are needed.
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
    parts: list[Samples | Streamed | None] = []
    for number, data in enumerate(clients):
        samples = data[1] if isinstance(data, tuple) and len(data) == 2 else data
        empty = hasattr(samples, "__len__") and not len(samples)
        if empty and split == "training":
            raise UserError(f"client {number} of train has no samples; leave it out of the list.")
        parts.append(None if empty else _read_client(data, number, split, read))
    some = next((part for part in parts if part is not None), None)
    if some is None:
        raise UserError("test has no samples for any client; give at least one.")
    none = some.take(torch.arange(0))  # a client without test samples
    return [none if part is None else part for part in parts]


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
        mapped = (
            isinstance(data[0], np.memmap)
            if lazy is None
            else lazy and isinstance(data[0], np.ndarray)
        )
        return (
            of_arrays(data[0], _leaves(data[1], _target))
            if mapped
            else _arrays(data[0], data[1], split)
        )
    if hasattr(data, "column_names"):
        check_columns(data, split, [*column_names(read["input"]), read["target"]])
        return stacked(table_rows([data], read["input"], read["target"], read["encode"]), split)
    if isinstance(data, str | os.PathLike):
        raise path_given(split, data)
    if isinstance(data, DataLoader):
        raise UserError(
            f"the {split} data is a DataLoader, which makes batches; give its data set, loader.dataset."
        )
    if isinstance(data, torch.Tensor | np.ndarray) or not hasattr(data, "__getitem__"):
        kind = type(data).__name__
        raise UserError(
            f"the {split} data is a {kind}; give (x, y) or a data set of (input, class) pairs."
        )
    if lazy or (
        lazy is None and not isinstance(data, list) and len(data) and _must_stream(data, split)
    ):
        return of_items(
            data, lambda items: tuple(vars(stacked(pairs(items, split), split)).values())
        )
    return stacked(pairs(data, split), split)


def path_given(split: str, path: str | os.PathLike[str]) -> UserError:
    """The error for a path in place of samples."""
    name = os.fspath(path)
    return UserError(
        f"the {split} data is {name!r}; if this is a path, give kairosfl.data.load('folder', path={name!r})."
    )


def _must_stream(data: Any, split: str) -> bool:
    """Whether a data set transforms its samples at random, or would take more than half of the
    memory.
    """
    first = []
    for seed in (0, 1):
        with seeded(seed):
            first.append(stacked(pairs([data[0]], split), split))
    both = [
        list(zip(*(leaves(getattr(one, name)) for one in first), strict=True))
        for name in ("inputs", "targets")
    ]
    large = len(data) * sum(leaf.nbytes for leaf in leaves(first[0].inputs)) > memory() / 2
    return large or not all(torch.equal(*pair) for each in both for pair in each)


def _arrays(x: Any, y: Any, split: str) -> Samples:
    try:
        inputs, targets = _leaves(x, _tensor), _leaves(y, _target)
    except (TypeError, ValueError) as error:
        raise UserError(
            f"the {split} data cannot be made a tensor: {error}; give x and y as arrays."
        ) from None
    counts = [len(leaf) if leaf.ndim else 0 for leaf in (*leaves(inputs), *leaves(targets))]
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
    return tuple(map(change, value)) if isinstance(value, tuple) else change(value)


def joined(parts: Sequence[Samples | Streamed], split: str) -> Samples | Streamed:
    for number, part in enumerate(parts):
        types = [target_types(each.targets) for each in (part, parts[0])]
        if types[0] != types[1] and len(part):
            raise UserError(
                f"the {split} targets of client {number} are {types[0]} and those of client 0 {types[1]}."
            )
        shapes = [form(each.inputs) for each in (part, parts[0])]
        if shapes[0] != shapes[1] and len(part):
            raise UserError(
                f"the {split} inputs of client {number} have shape {shapes[0]} and those of client 0 {shapes[1]}; "
                "give them the same."
            )
    if len(parts) == 1 or any(isinstance(part, Streamed) for part in parts):
        return chained(parts) if len(parts) > 1 else parts[0]
    return Samples(
        *(
            join(torch.cat, [getattr(part, name) for part in parts])
            for name in ("inputs", "targets")
        )
    )


def form(inputs: Tree) -> Any:
    return tree_map(lambda leaf: list(leaf.shape[1:]), inputs)


def target_types(targets: Tree) -> Any:
    def one(leaf: torch.Tensor) -> str:
        return f"{str(leaf.dtype).removeprefix('torch.')} of shape [{', '.join(map(str, ('n', *leaf.shape[1:])))}]"

    return tree_map(one, targets)


def stacked(pairs: Iterable[tuple[Any, Any]], split: str) -> Samples:
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
            if (found := shapes(trees[-1])) != (first := shapes(trees[0])):
                raise UserError(
                    f"{split} sample {len(trees) - 1} has {what} of shape {found} and sample 0 of {first}; give all "
                    "the same shape."
                )
    if not inputs:
        raise UserError(f"the {split} data has no samples; add at least one.")
    return Samples(join(torch.stack, inputs), join(torch.stack, targets))


def _tensor(value: Any) -> torch.Tensor:
    """A value as the tensor to store: PIL images as uint8 [C,H,W], floating-point values as
    float32.
    """
    if hasattr(value, "convert") and hasattr(value, "mode"):  # a PIL image
        pixels = np.array(value if value.mode in ("L", "RGB") else value.convert("RGB"))
        return torch.from_numpy(pixels).reshape(*pixels.shape[:2], -1).permute(2, 0, 1).contiguous()
    if isinstance(value, str):
        raise TypeError(f"{value[:40]!r} is text")
    tensor = (
        value.detach().cpu()
        if isinstance(value, torch.Tensor)
        else torch.from_numpy(np.array(value))
    )
    return tensor.float() if tensor.is_floating_point() else tensor


def _target(value: Any) -> torch.Tensor:
    """A target: whole numbers as int64, others as float32; masks as whole numbers."""
    if hasattr(value, "convert") and hasattr(value, "mode"):  # a PIL image: a mask of classes
        return torch.from_numpy(np.array(value)).long()
    array = value.detach().cpu() if isinstance(value, torch.Tensor) else np.asarray(value)
    if isinstance(array, np.ndarray):
        if array.dtype.kind not in "iubf":
            raise TypeError(
                f"{array.reshape(-1)[:1].tolist()[0]!r} is not a number"
                if array.size
                else "it is empty"
            )
        array = torch.from_numpy(array.astype(array.dtype.newbyteorder("=")))
    if array.is_floating_point():
        return array.float()
    whole = array.long()
    if array.dtype == torch.uint64 and bool((whole < 0).any()):
        too_large = int(whole[whole < 0].flatten()[0]) + 2**64
        raise ValueError(f"{too_large} is too large for a class; number the classes from 0")
    return whole


def pairs(data: Any, split: str) -> Iterator[tuple[Any, Any]]:
    items = (
        (data[number] for number in range(len(data))) if hasattr(data, "__len__") else iter(data)
    )
    for number, item in enumerate(items):
        if not isinstance(item, (tuple, list)) or len(item) != 2:
            raise UserError(
                f"{split} sample {number} is a {type(item).__name__}, not a pair of input and target; "
                "wrap the data set in one that returns pairs."
            )
        yield item[0], item[1]


def table_rows(
    tables: Iterable[Any], input: str | Sequence[str], target: str, encode: Encode | None
) -> Iterator[tuple[Any, Any]]:
    for table in tables:
        for row in table:
            value = row[input] if isinstance(input, str) else {name: row[name] for name in input}
            yield encode(value) if encode else value, row[target]


def column_names(input: str | Sequence[str]) -> list[str]:
    return [input] if isinstance(input, str) else list(input)


def check_columns(table: Any, split: str, wanted: Sequence[str]) -> None:
    for column in wanted:
        if column not in table.column_names:
            hint = nearest(column, table.column_names)
            raise UserError(f"the {split} data has no column {column!r}; {hint}")
