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
            f"data.path is {str(path)!r}, which is not a directory; give the directory with the "
            "clients' files."
        )

    # --- read every client ---
    clients = find_clients(place)
    to_predict = _listed(label or target)
    reader = Reader(to_predict, _listed(input), kind, missing, categorical, size, separator)
    parts: Parts = []
    for client, own in zip(clients, reader.read(clients), strict=True):
        if client.name:
            own = _split(client, *own, test)
        parts.append(own)

    # --- one array of all clients' samples ---
    _check_shapes(parts)
    if len(to_predict) > 1:
        kind_of_target = "regression"
    else:
        kind_of_target = kind
    names: tuple[str, ...] = ()
    if kind in NAMED and len(to_predict) == 1:
        names = _class_names(parts, classes)
    train = _join(parts, 0, names, kind_of_target)
    tests = _join(parts, 1, names, kind_of_target)

    # --- make it ready for a model ---
    notes: dict[str, int] = {}
    if reader.dropped:
        notes["rows_dropped"] = reader.dropped
    channels: dict[str, Any] = {}
    if _first(parts).pictures:
        channels = _channels(train[0])
    elif train[0].dtype.kind == "f":
        notes |= _fill([train[0], tests[0]], reader.columns, policy(missing, None))
        if standardise:
            _standardise(train[0], tests[0], reader.columns)

    hashes = {}
    for file, digest in reader.hashes.items():
        hashes[readable(file.relative_to(place).as_posix())] = digest
    return DataSet(
        readable(place.name),
        Samples(*map(_tensor, train)),
        Samples(*map(_tensor, tests)),
        classes or len(names),
        labels=names,
        keys=_owners(clients, parts, 0),
        test_keys=_owners(clients, parts, 1),
        key_names=tuple(readable(client.name) for client in clients if client.name),
        hashes=hashes,
        kind=kind or None,
        notes=notes,
        **channels,
    )


def _listed(names: str | Sequence[str]) -> list[str]:
    """One name, several, or none (empty) as a list."""
    if not isinstance(names, str):
        return list(names)
    return [names] if names else []


def _first(parts: Parts) -> Part:
    """The first part that has training samples."""
    return next(part for train, _ in parts for part in train)


def _all(parts: Parts) -> list[Part]:
    """All parts of all clients, training samples of a client before its test samples."""
    flat: list[Part] = []
    for train, tests in parts:
        flat += train
        flat += tests
    return flat


def _check_options(
    test: float, missing: Missing, size: Sequence[int], separator: str, kind: str
) -> None:
    if not 0 <= test < 1:
        raise UserError(
            f"data.test is {test}; give a fraction of at least 0 and below 1, such as 0.2."
        )
    policies = [missing] if isinstance(missing, str) else missing.values()
    for name in policies:
        if name not in POLICIES:
            raise UserError(f"data.missing is {name!r}; {nearest(name, POLICIES)}")
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
    kept = []
    held = []
    for part in train:
        order = np.arange(len(part))
        if part.pictures:  # they are sorted by class: the last ones would be of one class
            order = np.random.default_rng(0).permutation(len(part))
        cut = len(part) - int(len(part) * fraction)
        kept.append(part.take(np.sort(order[:cut])))
        held.append(part.take(np.sort(order[cut:])))
    return kept, held


def _check_shapes(parts: Parts) -> None:
    """Refuse inputs that differ in shape; channels of pictures may, since grey ones become RGB."""
    first = _first(parts)
    begin = 2 if first.pictures else 1
    shape_of_first = list(first.inputs.shape[begin:])
    for part in _all(parts):
        shape = list(part.inputs.shape[begin:])
        if part.pictures != first.pictures:
            raise UserError(
                f"{part.file} and {first.file} have pictures and numbers; "
                "give all clients the same."
            )
        if shape == shape_of_first:
            continue
        if first.pictures:
            raise UserError(unequal(part.file, part.inputs, first.file, first.inputs))
        raise UserError(
            f"{part.file} has inputs of shape {shape}, but {first.file.name} has "
            f"{shape_of_first}; give all files the same shape."
        )


def _class_names(parts: Parts, classes: int) -> tuple[str, ...]:
    """The names of the classes, sorted; empty if they are integers."""
    filled = [part for part in _all(parts) if len(part)]
    named = [part.targets.dtype.kind == "U" for part in filled]
    if not any(named):
        for part in filled:
            _check_integers(part, classes)
        return ()
    if not all(named):
        with_names = filled[named.index(True)].file
        with_integers = filled[named.index(False)].file.name
        raise UserError(
            f"{with_names} has names as labels, but {with_integers} has integers; "
            "make them all integers, or all names."
        )
    distinct: set[str] = set()
    for part in filled:
        distinct.update(np.unique(part.targets).tolist())
    names = tuple(sorted(distinct))
    if classes and len(names) > classes:
        raise UserError(
            f"data.classes is {classes}, but the files have {len(names)} labels ({listed(names)}); "
            "leave it out."
        )
    return names


def _check_integers(part: Part, classes: int) -> None:
    """Refuse labels below 0, and those that are too large."""
    low = int(part.targets.min())
    high = int(part.targets.max())
    if low < 0 or high >= (classes or LARGEST_CLASS):
        wrong = low if low < 0 else high
        limit = f"0 to {classes - 1}" if classes else "integers from 0"
        raise UserError(f"{part.file} has label {wrong}; labels must be {limit}.")


def _join(parts: Parts, which: int, names: tuple[str, ...], kind: str) -> tuple[Array, Array]:
    """Inputs and targets of all clients' training or test samples; classes as integers."""
    chosen: list[Part] = []
    for own in parts:
        chosen += own[which]
    if not chosen:  # no samples, in the form of the others
        chosen = [parts[0][0][0].take(np.arange(0))]

    blocks = [part.inputs for part in chosen]
    inputs = joined(blocks, np.concatenate) if chosen[0].pictures else np.concatenate(blocks)
    if inputs.dtype.kind == "f":
        inputs = inputs.astype(np.float64)

    targets = np.concatenate([part.targets for part in chosen])
    if names:
        targets = np.searchsorted(np.array(names), targets)
    elif targets.dtype.kind == "U":
        for part in chosen:
            if None in map(number, part.targets):
                raise UserError(
                    f"{part.file} has names as targets, but data.kind is {kind!r}; "
                    "leave data.kind out."
                )
        targets = targets.astype(np.float64)
    numeric = kind == "regression" or targets.dtype.kind == "f"
    return inputs, targets.astype(np.float64 if numeric else np.int64)


def _fill(splits: list[Array], columns: list[Column], rule: str) -> dict[str, int]:
    """Fill in missing values in place; returns how many there were.

    Args:
        splits: The inputs of the training samples and of the test samples.
        columns: Of tables, each with its own rule; of arrays there are none.
        rule: What becomes of missing values of arrays.
    """
    lost = [np.isnan(values) for values in splits]
    count = sum(int(missing.sum()) for missing in lost)
    if not count:
        return {}
    counts = (~lost[0]).sum(0)  # of values that training samples have
    if columns:
        zero = np.array([column.missing == "zero" for column in columns])
    else:
        zero = np.full(counts.shape, rule == "zero")

    unknown = (counts == 0) & ~zero & (lost[0].any(0) | lost[1].any(0))
    if unknown.any():
        place = int(unknown.argmax())
        name = columns[place].name if columns else f"inputs[{place}]"
        raise UserError(
            f"The column {name!r} has no value in any training sample; "
            "leave it out with data.input."
        )
    means = np.where(lost[0], 0, splits[0]).sum(0) / np.maximum(counts, 1)
    for values, missing in zip(splits, lost, strict=True):
        values[missing] = np.broadcast_to(np.where(zero, 0.0, means), values.shape)[missing]
    return {"missing_values_filled": count}


def _standardise(train: Array, tests: Array, columns: list[Column]) -> None:
    """In place, every number to mean 0 and deviation 1 of the training samples."""
    mean = train.mean(0)
    deviation = train.std(0)
    # What is constant becomes 0.
    deviation = np.where(deviation > 1e-12 * np.maximum(np.abs(mean), 1), deviation, 1.0)
    if columns:
        numbers = np.array([column.number for column in columns])
        mean = np.where(numbers, mean, 0.0)
        deviation = np.where(numbers, deviation, 1.0)
    for values in (train, tests):
        values -= mean
        values /= deviation


def _channels(pixels: Array) -> dict[str, tuple[float, ...]]:
    """Mean and deviation of each channel over the training pictures, which normalise them."""
    levels = np.arange(256) / 255
    means = []
    deviations = []
    for channel in range(pixels.shape[1]):
        counts = np.bincount(pixels[:, channel].ravel(), minlength=256)
        mean = float(counts @ levels / counts.sum())
        square = float(counts @ levels**2 / counts.sum())
        variance = max(square - mean * mean, 0.0)
        means.append(mean)
        deviations.append(max(variance**0.5, 1 / 255))
    return {"mean": tuple(means), "std": tuple(deviations)}


def _owners(clients: list[Client], parts: Parts, which: int) -> Array:
    """The client of every sample, -1 for the test samples of no client."""
    owners = []
    for place, (client, own) in enumerate(zip(clients, parts, strict=True)):
        samples = sum(map(len, own[which]))
        owners.append(np.full(samples, place if client.name else -1))
    return np.concatenate(owners)


def _tensor(values: Array) -> torch.Tensor:
    if values.dtype == np.float64:
        values = values.astype(np.float32)
    return torch.from_numpy(values)
