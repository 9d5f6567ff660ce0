"""A directory with one file or directory per client, as a data set with natural clients."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from kairosfl.data.intake import LARGEST_CLASS, readable
from kairosfl.data.layout import Client, find_clients
from kairosfl.data.parts import NAMED, Column, Part, Reader
from kairosfl.data.pictures import joined, unequal
from kairosfl.data.tables import POLICIES, Array, Missing, number, policy
from kairosfl.errors import UserError, nearest
from kairosfl.tasks.dataset import DataSet, Samples
from kairosfl.tasks.kinds import KINDS
from kairosfl.wording import listed

Parts = list[tuple[list[Part], list[Part]]]  # training and test samples of each client


def folder(
    *,
    path: str | os.PathLike[str],
    target: str | Sequence[str] = "label",
    input: str | Sequence[str] = (),
    kind: str = "",
    test: float = 0.2,
    missing: Missing = "error",
    categorical: Sequence[str] = (),
    standardise: bool = False,
    size: Sequence[int] = (),
    separator: str = ",",
    classes: int = 0,
    label: str = "",
) -> DataSet:
    """One client per file or sub-directory of a directory; use it with the partition `natural`.

    A client is a .csv, .parquet or .npz file, or a directory with such files or with pictures. Test
    samples are those in `test` next to `train`, at any level, or in `ann.test.csv` next to
    `ann.csv`; those in `test.csv` next to the clients belong to no client. Of a client without test
    samples, the last fraction `test` of its samples is used.

    Args:
        path: The directory.
        target: The column to predict, or several; of .npz files the array, by default `targets` or
        `y`.
        input: The columns to predict from, by default all others; of .npz files the array, by
        default `inputs` or `x`.
        kind: "regression" if the target is a number. Classes are integers from 0, or names, which
        are sorted.
        test: The fraction of samples to test on, of clients without test samples.
        missing: What becomes of missing values: "error", "mean" of all clients' training samples,
            "zero", "drop" the row; or one of these per column.
        categorical: Columns whose values are encoded as one column each, 1 where the row has it.
        standardise: Whether columns of numbers get mean 0 and deviation 1 over all clients'
        training samples.
        size: Height and width to which pictures are resized.
        separator: Between the columns of a .csv file.
        classes: The number of classes, by default counted.
        label: The former name of `target`.
    """
    _check_options(test, missing, size, separator, kind)
    place = Path(path).expanduser()
    if not place.is_dir():
        raise UserError(
            f"data.path is {str(path)!r}, which is not a directory; give the directory with the clients' files."
        )
    clients = find_clients(place)
    wanted = _listed(label or target)
    reader = Reader(wanted, _listed(input), kind, missing, categorical, size, separator)
    parts = [
        _split(client, *own, test) if client.name else own
        for client, own in zip(clients, reader.read(clients), strict=True)
    ]
    _check_shapes(parts)
    names = _class_names(parts, classes) if kind in NAMED and len(wanted) == 1 else ()
    train, tests = (
        _join(parts, which, names, kind if len(wanted) == 1 else "regression") for which in (0, 1)
    )
    fields: dict[str, Any] = {"notes": {"rows_dropped": reader.dropped} if reader.dropped else {}}
    if next(part for own, _ in parts for part in own).pictures:
        fields |= _channels(train[0])
    elif train[0].dtype.kind == "f":
        fields["notes"] |= _fill([train[0], tests[0]], reader.columns, policy(missing, None))
        if standardise:
            _standardise(train[0], tests[0], reader.columns)
    return DataSet(
        readable(place.name),
        Samples(*map(_tensor, train)),
        Samples(*map(_tensor, tests)),
        classes or len(names),
        labels=names,
        keys=_owners(clients, parts, 0),
        test_keys=_owners(clients, parts, 1),
        key_names=tuple(readable(client.name) for client in clients if client.name),
        hashes={
            readable(file.relative_to(place).as_posix()): digest
            for file, digest in reader.hashes.items()
        },
        kind=kind or None,
        **fields,
    )


def _listed(names: str | Sequence[str]) -> list[str]:
    return ([names] if names else []) if isinstance(names, str) else list(names)


def _check_options(
    test: float, missing: Missing, size: Sequence[int], separator: str, kind: str
) -> None:
    if not 0 <= test < 1:
        raise UserError(
            f"data.test is {test}; give a fraction of at least 0 and below 1, such as 0.2."
        )
    for each in [missing] if isinstance(missing, str) else missing.values():
        if each not in POLICIES:
            raise UserError(f"data.missing is {each!r}; {nearest(each, POLICIES)}")
    if len(size) not in (0, 2) or any(side < 1 for side in size):
        raise UserError(
            f"data.size is {list(size)}; give the height and the width, such as [32, 32]."
        )
    if len(separator) != 1:
        raise UserError(f"data.separator is {separator!r}; give one character, such as ';'.")
    if kind and kind not in KINDS:
        raise UserError(f"data.kind is {kind!r}; {nearest(kind, KINDS)}")


def _split(
    client: Client, train: list[Part], tests: list[Part], fraction: float
) -> tuple[list[Part], list[Part]]:
    """Training and test samples of a client; without test samples, the last ones are held out."""
    if not sum(map(len, train)):
        file = client.train[0]
        raise UserError(
            f"client {client.name!r} has no data: {file} is empty; add samples or remove the file."
        )
    if tests:
        return train, tests
    kept, held = [], []
    for part in train:
        # Pictures are sorted by class: the last ones would be of one class.
        order = (
            np.random.default_rng(0).permutation(len(part))
            if part.pictures
            else np.arange(len(part))
        )
        cut = len(part) - int(len(part) * fraction)
        kept.append(part.take(np.sort(order[:cut])))
        held.append(part.take(np.sort(order[cut:])))
    return kept, held


def _check_shapes(parts: Parts) -> None:
    first = next(part for train, _ in parts for part in train)
    for part in (each for own in parts for split in own for each in split):
        shapes = [list(each.inputs.shape[2 if first.pictures else 1 :]) for each in (part, first)]
        if part.pictures != first.pictures:
            raise UserError(
                f"{part.file} and {first.file} have pictures and numbers; give all clients the same."
            )
        if shapes[0] != shapes[1] and first.pictures:
            raise UserError(unequal(part.file, part.inputs, first.file, first.inputs))
        if shapes[0] != shapes[1]:
            raise UserError(
                f"{part.file} has inputs of shape {shapes[0]}, but {first.file.name} has {shapes[1]}; "
                "give all files the same shape."
            )


def _class_names(parts: Parts, classes: int) -> tuple[str, ...]:
    """The names of the classes, sorted; empty if they are integers."""
    flat = [part for own in parts for split in own for part in split if len(part)]
    named = [part.targets.dtype.kind == "U" for part in flat]
    if any(named) and not all(named):
        a, b = flat[named.index(True)].file, flat[named.index(False)].file
        raise UserError(
            f"{a} has names as labels, but {b.name} has integers; make them all integers, or all names."
        )
    if not any(named):
        for part in flat:
            low, high = int(part.targets.min()), int(part.targets.max())
            if low < 0 or high >= (classes or LARGEST_CLASS):
                limit = f"0 to {classes - 1}" if classes else "integers from 0"
                raise UserError(
                    f"{part.file} has label {low if low < 0 else high}; labels must be {limit}."
                )
        return ()
    names = tuple(sorted({name for part in flat for name in np.unique(part.targets).tolist()}))
    if classes and len(names) > classes:
        raise UserError(
            f"data.classes is {classes}, but the files have {len(names)} labels ({listed(names)}); leave it out."
        )
    return names


def _join(parts: Parts, which: int, names: tuple[str, ...], kind: str) -> tuple[Array, Array]:
    """Inputs and targets of all clients' training or test samples; classes as integers."""
    chosen = [part for own in parts for part in own[which]] or [parts[0][0][0].take(np.arange(0))]
    if chosen[0].pictures:
        inputs = joined([part.inputs for part in chosen], np.concatenate)
    else:
        inputs = np.concatenate([part.inputs for part in chosen])
    targets = np.concatenate([part.targets for part in chosen])
    if names:
        targets = np.searchsorted(np.array(names), targets)
    elif targets.dtype.kind == "U":
        wrong = next(
            (part for part in chosen for each in part.targets if number(each) is None), None
        )
        if wrong is not None:
            raise UserError(
                f"{wrong.file} has names as targets, but data.kind is {kind!r}; leave data.kind out."
            )
        targets = targets.astype(np.float64)
    if inputs.dtype.kind == "f":
        inputs = inputs.astype(np.float64)
    return inputs, targets.astype(
        np.float64 if kind == "regression" or targets.dtype.kind == "f" else np.int64
    )


def _fill(splits: list[Array], columns: list[Column], rule: str) -> dict[str, int]:
    """Fill in missing values in place, those of arrays by one rule; returns how many there were."""
    lost = [np.isnan(each) for each in splits]
    count = sum(int(each.sum()) for each in lost)
    if not count:
        return {}
    known = (~lost[0]).sum(0)
    zero = (
        np.array([column.missing == "zero" for column in columns])
        if columns
        else np.full(known.shape, rule == "zero")
    )
    unknown = (known == 0) & ~zero & (lost[0].any(0) | lost[1].any(0))
    if unknown.any():
        name = (
            columns[int(unknown.argmax())].name if columns else f"inputs[{int(unknown.argmax())}]"
        )
        raise UserError(
            f"The column {name!r} has no value in any training sample; leave it out with data.input."
        )
    means = np.where(lost[0], 0, splits[0]).sum(0) / np.maximum(known, 1)
    for values, where in zip(splits, lost, strict=True):
        values[where] = np.broadcast_to(np.where(zero, 0.0, means), values.shape)[where]
    return {"missing_values_filled": count}


def _standardise(train: Array, tests: Array, columns: list[Column]) -> None:
    """In place, every number to mean 0 and deviation 1 of the training samples; one that is
    constant becomes 0.
    """
    mean, deviation = train.mean(0), train.std(0)
    deviation = np.where(deviation > 1e-12 * np.maximum(np.abs(mean), 1), deviation, 1.0)
    if columns:
        numbers = np.array([column.number for column in columns])
        mean, deviation = np.where(numbers, mean, 0.0), np.where(numbers, deviation, 1.0)
    for values in (train, tests):
        values -= mean
        values /= deviation


def _channels(pixels: Array) -> dict[str, tuple[float, ...]]:
    """Mean and deviation of each channel over the training pictures, by which they are normalised."""
    levels = [
        np.bincount(pixels[:, channel].ravel(), minlength=256) for channel in range(pixels.shape[1])
    ]
    values = np.arange(256) / 255
    mean = [float(count @ values / count.sum()) for count in levels]
    square = [float(count @ values**2 / count.sum()) for count in levels]
    std = tuple(
        max((s - m * m) ** 0.5 if s > m * m else 0.0, 1 / 255)
        for m, s in zip(mean, square, strict=True)
    )
    return {"mean": tuple(mean), "std": std}


def _owners(clients: list[Client], parts: Parts, which: int) -> Array:
    """The client of every sample, -1 for the test samples of no client."""
    numbers = [number if client.name else -1 for number, client in enumerate(clients)]
    sizes = [sum(map(len, own[which])) for own in parts]
    return np.repeat(np.array(numbers), sizes)


def _tensor(values: Array) -> torch.Tensor:
    return torch.from_numpy(values.astype(np.float32) if values.dtype == np.float64 else values)
