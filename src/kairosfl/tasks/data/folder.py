"""A directory with one .npz or .csv file per client, as a data set with natural clients."""

from __future__ import annotations

import csv
import hashlib
import math
import os
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from kairosfl.errors import UserError
from kairosfl.tasks.data.files import damaged
from kairosfl.tasks.dataset import DataSet, Samples

Part = tuple[npt.NDArray[Any], npt.NDArray[Any]]  # inputs and classes, as int64 or by name
MISSING = ("", "?", "na", "n/a", "nan", "null")  # in lower case


def folder(*, path: str | os.PathLike[str], label: str = "label", test: float = 0.2, classes: int = 0) -> DataSet:
    """One client per file in a directory; use it with the partition `natural`.

    An .npz file holds `inputs` [n,...] and `targets` [n], and optionally `test_inputs` and `test_targets`. A .csv
    file has a header, the class in the column `label` and numbers in all other columns. Classes are integers from 0, or
    names, which are sorted. If a client has no test data, the last `test` fraction of its samples is used. `classes` is
    inferred from the labels unless given.
    """
    if not 0 <= test < 1:
        raise UserError(f"data.test is {test}; give a fraction of at least 0 and below 1, such as 0.2.")
    place = Path(path).expanduser()
    if not place.is_dir():
        raise UserError(
            f"data.path is {str(path)!r}, which is not a directory; give the directory with the clients' files."
        )
    files = sorted(file for file in place.iterdir() if not file.name.startswith("."))
    if not files:
        raise UserError(f"data.path is {str(path)!r}, which is empty; add one .npz or .csv file per client.")
    parts = [_client(file, label, test, classes) for file in files]
    shapes = [list(train[0].shape[1:]) for train, _ in parts]
    for file, shape in zip(files, shapes, strict=True):
        if shape != shapes[0]:
            raise UserError(
                f"{file} has inputs of shape {shape}, but {files[0].name} has {shapes[0]}; "
                "give all files the same shape."
            )
    headers = {file: _header(file) for file in files if file.suffix == ".csv"}
    for file, header in headers.items():
        first, wanted = next(iter(headers.items()))
        if header != wanted:
            raise UserError(
                f"{file} has the columns {', '.join(header)}, but {first.name} has {', '.join(wanted)}; "
                "give all files the same columns in the same order."
            )
    names = _names(files, parts, classes)
    if names:
        parts = [(_numbered(train, names), _numbered(tests, names)) for train, tests in parts]
    train, tests = _join([part[0] for part in parts]), _join([part[1] for part in parts])
    keys, test_keys = (np.repeat(np.arange(len(parts)), [len(part[which][1]) for part in parts]) for which in (0, 1))
    return DataSet(
        place.name,
        train,
        tests,
        classes or len(names),
        labels=names,
        keys=keys,
        test_keys=test_keys,
        key_names=tuple(file.stem for file in files),
        hashes={file.name: hashlib.md5(file.read_bytes(), usedforsecurity=False).hexdigest() for file in files},
    )


def _client(file: Path, label: str, test: float, classes: int) -> tuple[Part, Part]:
    """Training and test data of one client, validated."""
    if file.suffix == ".npz":
        own = read_npz(file)
    elif file.suffix == ".csv":
        own = read_csv(file, label)
    else:
        raise UserError(f"{file} is neither .npz nor .csv; remove it from the directory.")
    inputs, targets = own["inputs"], own["targets"]
    if "test_inputs" in own:
        train, tests = (inputs, targets), (own["test_inputs"], own["test_targets"])
    else:
        cut = len(targets) - int(len(targets) * test)
        train, tests = (inputs[:cut], targets[:cut]), (inputs[cut:], targets[cut:])
    if not len(train[1]):
        raise UserError(f"client {file.stem!r} has no data: {file} is empty; add samples or remove the file.")
    if np.issubdtype(inputs.dtype, np.floating) and not np.isfinite(inputs).all():
        raise UserError(f"{file} has inputs that are not finite; remove or impute those samples.")
    if targets.dtype.kind == "U":
        return train, tests
    low, high = int(targets.min()), int(targets.max())
    if low < 0 or (classes and high >= classes):
        limit = f"0 to {classes - 1}" if classes else "integers from 0"
        raise UserError(f"{file} has label {low if low < 0 else high}; labels must be {limit}.")
    return train, tests


def read_npz(file: Path) -> dict[str, npt.NDArray[Any]]:
    """The arrays in a client's .npz file."""
    try:
        with np.load(file, allow_pickle=False) as archive:
            own = {name: archive[name] for name in archive.files}
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
        raise damaged(file, f"it cannot be read as .npz ({error})") from None
    for inputs, targets in (("inputs", "targets"), ("test_inputs", "test_targets")):
        if inputs not in own and targets not in own and inputs != "inputs":
            continue
        if inputs not in own or targets not in own:
            raise UserError(f"{file} has the arrays {', '.join(own) or 'none'}; it needs {inputs} and {targets}.")
        if own[targets].shape != own[inputs].shape[:1] or not np.issubdtype(own[targets].dtype, np.integer):
            raise UserError(f"{file} must have one integer in {targets} for each row of {inputs}.")
        own[targets] = own[targets].astype(np.int64)
    return own


def _header(file: Path) -> list[str]:
    with file.open(newline="", encoding="utf-8-sig", errors="replace") as stream:
        return next(csv.reader(stream), [])


def read_csv(file: Path, label: str) -> dict[str, npt.NDArray[Any]]:
    """The numbers in a client's .csv file."""
    with file.open(newline="", encoding="utf-8-sig", errors="replace") as stream:
        reader = csv.reader(stream, strict=True)
        header = next(reader, [])
        if label not in header:
            raise UserError(f"{file} has no column {label!r} in its header; set data.label to the column of the class.")
        at = header.index(label)
        inputs, labels = [], []
        columns = [*header[:at], *header[at + 1 :]]
        try:
            for row in reader:
                line = reader.line_num
                if len(row) != len(header):
                    raise UserError(
                        f"{file} has {len(row)} columns instead of {len(header)} in line {line}; fix that line."
                    )
                values = zip(columns, row[:at] + row[at + 1 :], strict=True)
                inputs.append([_number(value, f"{file}, line {line}, column {name!r}") for name, value in values])
                labels.append(_label(row[at].strip(), f"{file}, line {line}, column {label!r}"))
        except csv.Error as error:
            raise UserError(f"{file} is malformed in line {reader.line_num} ({error}); fix that line.") from None
    if len({type(each) for each in labels}) > 1:
        number, name = (next(each for each in labels if isinstance(each, kind)) for kind in (int, str))
        raise UserError(
            f"{file} has the labels {number} and {name!r} in the column {label!r}; "
            "make them all integers, or all names."
        )
    return {
        "inputs": np.array(inputs, dtype=np.float32).reshape(len(inputs), len(columns)),
        "targets": np.array(labels, dtype=np.str_ if labels and isinstance(labels[0], str) else np.int64),
    }


def _number(text: str, where: str) -> float:
    if text.strip().lower() in MISSING:
        raise UserError(f"{where} has no value; fill it in or remove the line.")
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise UserError(f"{where} has {text!r}, which is not a finite number; correct it or remove the column.")
    return number


def _label(text: str, where: str) -> int | str:
    if text.lower() in MISSING:
        raise UserError(f"{where} has no label; fill it in or remove the line.")
    try:
        number = float(text.replace("_", "?"))  # Python reads 1_0 as 10; here it is a name
    except ValueError:
        return text
    if not number.is_integer():
        raise UserError(f"{where} has the label {text!r}; a class is an integer or a name.")
    return int(number)


def _names(files: list[Path], parts: list[tuple[Part, Part]], classes: int) -> tuple[str, ...]:
    """The names of the classes, sorted; empty if they are integers."""
    named = [train[1].dtype.kind == "U" for train, _ in parts]
    if not any(named):
        return ()
    if not all(named):
        a, b = files[named.index(True)], files[named.index(False)]
        raise UserError(f"{a} has names as labels, but {b.name} has integers; make them all integers, or all names.")
    names = tuple(sorted({str(name) for part in parts for _, targets in part for name in targets}))
    if classes and len(names) > classes:
        raise UserError(
            f"data.classes is {classes}, but the files have {len(names)} labels ({', '.join(names)}); leave it out."
        )
    return names


def _numbered(part: Part, names: tuple[str, ...]) -> Part:
    return part[0], np.searchsorted(np.array(names), part[1]).astype(np.int64)


def _join(parts: list[Part]) -> Samples:
    inputs = np.concatenate([part[0] for part in parts])
    if inputs.dtype == np.float64:
        inputs = inputs.astype(np.float32)
    return Samples(torch.from_numpy(inputs), torch.from_numpy(np.concatenate([part[1] for part in parts])))
