"""Tables of a client: .csv and .parquet files, and how their columns become inputs and targets."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kairosfl.data.intake import LARGEST_CLASS, Room, as_text
from kairosfl.errors import UserError, first_line, nearest
from kairosfl.wording import clipped, excerpt, listed

Array = npt.NDArray[Any]
Missing = str | Mapping[str, str]
MISSING = ("", "?", "na", "n/a", "nan", "null", "none")  # in lower case
POLICIES = ("error", "mean", "zero", "drop")
LARGEST = float(np.finfo(np.float32).max)  # models compute in float32
CELL = 64  # bytes that a cell takes while a .csv file is read
FILL = "fill it in, or set data.missing to 'mean', 'zero' or 'drop'"


@dataclass(frozen=True, eq=False)
class Table:
    """The columns of one file: numbers as float64 with NaN for a missing value, texts as objects
    with None.
    """

    file: Path
    columns: Mapping[str, Array]
    lines: Sequence[int]  # of the rows, as an editor counts them
    word: str = "line"

    def __len__(self) -> int:
        return len(self.lines)

    def where(self, row: int, column: str) -> str:
        return f"{self.file}, {self.word} {self.lines[row]}, column {column!r}"

    def take(self, rows: Array) -> Table:
        """Only these rows."""
        columns = {name: values[rows] for name, values in self.columns.items()}
        return Table(self.file, columns, np.asarray(self.lines)[rows].tolist(), self.word)


def policy(missing: Missing, column: str | None) -> str:
    """What becomes of a missing value of a column; None: of data without named columns."""
    return missing if isinstance(missing, str) else missing.get(column or "", "error")


def read_csv(file: Path, content: bytes, separator: str, room: Room | None = None) -> Table:
    """A .csv file with a header."""
    text = as_text(file, content)
    room = room or Room()
    room.check(CELL * (text.count(separator) + text.count("\n") + 1), file)
    reader = csv.reader(io.StringIO(text, newline=""), strict=True, delimiter=separator)
    rows, lines = [], []
    try:
        header = next(reader, [])
        for row in reader:
            if len(row) != len(header):
                raise UserError(
                    f"{file} has {len(row)} columns instead of {len(header)} in line {reader.line_num}; fix that line."
                )
            rows.append(row)
            lines.append(reader.line_num)
    except csv.Error as error:
        raise UserError(
            f"{file} is malformed in line {reader.line_num} ({error}); fix that line."
        ) from None
    header = [name.strip() for name in header]
    _check_header(file, header)
    room.take(8 * len(header) * len(rows), file)
    cells = zip(*rows, strict=True) if rows else [()] * len(header)
    return Table(
        file, {name: _column(each) for name, each in zip(header, cells, strict=True)}, lines
    )


def _check_header(file: Path, header: Sequence[str]) -> None:
    """Refuse columns without a name, or with the name of another."""
    before: set[str] = set()
    for name in header:
        if not name:
            raise UserError(
                f"{file} has no name for column {header.index(name) + 1}, perhaps row numbers that pandas wrote; "
                "name it, or leave it out with index=False."
            )
        if name in before:
            raise UserError(f"{file} has two columns {excerpt(name)}; rename one.")
        before.add(name)


def read_parquet(file: Path, content: bytes, room: Room | None = None) -> Table:
    """A .parquet file; needs pyarrow."""
    try:
        import pyarrow as arrow
        import pyarrow.parquet as parquet
    except ImportError:
        raise UserError(
            f"{file} needs pyarrow to be read: pip install 'kairosfl[files]', or write it as .csv."
        ) from None
    room = room or Room()
    try:
        source = parquet.ParquetFile(arrow.BufferReader(content))
        room.take(8 * _values_in(source.metadata), file)

        # A text that fills millions of rows is stored once: read as a dictionary, it is also kept
        # once.
        texts = [
            name
            for name, kind in zip(*_fields(source.schema_arrow), strict=True)
            if _is_text(arrow, kind)
        ]
        source = parquet.ParquetFile(arrow.BufferReader(content), read_dictionary=texts)
        table = source.read()
        table.validate()
        _check_header(file, [name.strip() for name in table.column_names])
        columns = {
            name.strip(): _arrow_column(arrow, column)
            for name, column in zip(table.column_names, table.columns, strict=True)
        }
    except (UserError, MemoryError):
        raise
    except Exception as error:  # of a damaged file, anything may come out
        raise UserError(
            f"{file} cannot be read as .parquet ({first_line(error)}); write it again."
        ) from None
    return Table(file, columns, range(1, table.num_rows + 1), "row")


def _values_in(metadata: Any) -> int:
    """How many values a .parquet file declares; a small file may declare a great many."""
    groups = [metadata.row_group(number) for number in range(metadata.num_row_groups)]
    return sum(
        group.column(number).num_values for group in groups for number in range(group.num_columns)
    )


def _fields(schema: Any) -> tuple[list[str], list[Any]]:
    return list(schema.names), list(schema.types)


def _is_text(arrow: Any, kind: Any) -> bool:
    return kind in (arrow.string(), arrow.binary(), arrow.large_string(), arrow.large_binary())


def _arrow_column(arrow: Any, column: Any) -> Array:
    """A column of a .parquet file: numbers as float64, all others as texts."""
    kinds = arrow.types
    kind = column.type
    if kinds.is_dictionary(kind) and not _is_text(arrow, kind.value_type):
        column = column.cast(kind.value_type)
        kind = column.type
    if kinds.is_dictionary(kind):
        return _texts(arrow, column)
    if (
        kinds.is_integer(kind)
        or kinds.is_floating(kind)
        or kinds.is_boolean(kind)
        or kinds.is_null(kind)
    ):
        return np.asarray(column.cast(arrow.float64(), safe=False).to_numpy(), dtype=np.float64)
    if kinds.is_decimal(kind):
        return np.asarray(column.cast(arrow.float64(), safe=False).to_numpy(), dtype=np.float64)
    if kinds.is_temporal(kind):
        column = column.cast(arrow.string())  # Python's own dates end with the year 9999
        if any(str(text).startswith("<value out of range") for text in column.to_pylist()):
            raise ValueError("a date is out of range")
    texts = [None if value is None else str(value) for value in column.to_pylist()]
    return _numbers_or_texts(np.array(texts, dtype=object))


def _texts(arrow: Any, column: Any) -> Array:
    """The texts of a column that is stored as a dictionary; equal ones are one object."""
    blocks = [np.empty(0, dtype=object)]
    for chunk in column.chunks:
        known = chunk.dictionary.cast(arrow.string()).to_pylist()
        rows = chunk.indices.fill_null(len(known)).to_numpy(zero_copy_only=False)
        blocks.append(np.array([*known, None], dtype=object)[rows])
    return _numbers_or_texts(np.concatenate(blocks))


def _numbers_or_texts(values: Array) -> Array:
    """A column of texts as numbers if all of its texts are numbers, as they are where it has none."""
    if values.dtype != object:
        return values
    numbers = [math.nan if text is None else number(text) for text in values]
    if None in numbers:
        return values
    return np.array(numbers, dtype=np.float64)


def _column(cells: Sequence[str]) -> Array:
    """The cells of a column as numbers, or as texts if one of them is not a number."""
    try:
        if not any("_" in cell for cell in cells):  # Python reads 1_0 as 10; here it is a name
            return np.array([float(cell) for cell in cells], dtype=np.float64)
    except ValueError:
        pass
    numbers = [math.nan if cell.strip().lower() in MISSING else number(cell) for cell in cells]
    if None not in numbers:
        return np.array(numbers, dtype=np.float64)
    return np.array(
        [None if cell.strip().lower() in MISSING else cell.strip() for cell in cells], dtype=object
    )


def number(text: str) -> float | None:
    """A text as a number; None if it is not one."""
    try:
        return float(text.replace("_", "?"))
    except ValueError:
        return None


def check_columns(
    tables: Sequence[Table], targets: Sequence[str], inputs: Sequence[str], named: Sequence[str]
) -> None:
    """Refuse columns that are not there, and headers that differ; `named` are those that options
    mention.
    """
    first = tables[0]
    for table in tables:
        known = list(table.columns)
        for target in targets:
            if target not in table.columns:
                hint = "the file is empty"
                if known:
                    hint = nearest(target, known)
                also = ", or data.separator" if len(known) == 1 and ";" in known[0] else ""
                raise UserError(
                    f"{table.file} has no column {target!r} in its header ({hint.rstrip('.?')}); set data.target to "
                    f"the column to predict{also}."
                )
        for name in inputs:
            if name not in table.columns:
                raise UserError(
                    f"{table.file} has no column {excerpt(name)}, which data.input names; {nearest(name, known)}"
                )
        if not inputs and known != list(first.columns):
            raise UserError(
                f"{table.file} has the columns {listed(known)}, but {first.file.name} has "
                f"{listed(first.columns)}; give all files the same columns in the same order, or set data.input."
            )
    for name in named:
        if name not in first.columns:
            known = list(first.columns)
            raise UserError(
                f"data.categorical or data.missing names the column {name!r}; {nearest(name, known)}"
            )


def without_missing(table: Table, used: Sequence[str], missing: Missing) -> Table:
    """Without the rows that lack a value of a column whose policy is "drop"."""
    dropped = np.zeros(len(table), dtype=bool)
    for name in used:
        if policy(missing, name) == "drop":
            dropped |= absent(table.columns[name])
    if not dropped.any():
        return table
    complete = table.take(np.flatnonzero(~dropped))
    columns = {name: _numbers_or_texts(values) for name, values in complete.columns.items()}
    return replace(complete, columns=columns)


def absent(values: Array) -> npt.NDArray[np.bool_]:
    """Which values are missing."""
    return (
        np.array([each is None for each in values], dtype=bool)
        if values.dtype == object
        else np.isnan(values)
    )


def names_of(values: Array) -> Array:
    """A column as texts, numbers as they are usually written."""
    if values.dtype == object:
        return values
    return np.array(
        [None if math.isnan(value) else f"{value:.15g}" for value in values], dtype=object
    )


def categories(tables: Sequence[Table], columns: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """The values of categorical columns in all tables, sorted."""
    return {
        name: tuple(
            sorted(
                {
                    each
                    for table in tables
                    for each in names_of(table.columns[name])
                    if each is not None
                }
            )
        )
        for name in columns
    }


def features(
    table: Table, inputs: Sequence[str], kinds: Mapping[str, tuple[str, ...]], missing: Missing
) -> Array:
    """The inputs `[n, features]`, categorical columns one-hot; NaN where a missing value is to be
    filled in.
    """
    blocks = []
    for name in inputs:
        values = table.columns[name]
        lost = absent(values)
        if lost.any() and policy(missing, name) == "error":
            raise UserError(f"{table.where(int(lost.argmax()), name)} has no value; {FILL}.")
        if name in kinds:
            block = (names_of(values)[:, None] == np.array(kinds[name], dtype=object)[None]).astype(
                np.float64
            )
            block[lost] = math.nan
            blocks.append(block)
            continue
        if values.dtype == object:
            row = next(
                (i for i, each in enumerate(values) if each is not None and number(each) is None), 0
            )
            raise UserError(
                f"{table.where(row, name)} has {excerpt(values[row])}, which is not a finite number; "
                f"correct it, or add {name!r} to data.categorical, which encodes each value as a "
                "column, or leave the column out with data.input."
            )
        if (large := np.abs(values) > LARGEST).any():
            row = int(large.argmax())
            why = "not a finite number" if np.isinf(values[row]) else "too large for float32"
            raise UserError(
                f"{table.where(row, name)} has '{values[row]:g}', which is {why}; correct it."
            )
        blocks.append(values[:, None])
    return np.concatenate([*blocks, np.empty((len(table), 0))], axis=1)


def targets(table: Table, columns: Sequence[str], numeric: bool) -> Array:
    """What to predict: `[n]` of one column, `[n, k]` of several; `numeric`: numbers, otherwise
    classes.
    """
    for name in columns:
        values = table.columns[name]
        lost = absent(values)
        if lost.any():
            where = table.where(int(lost.argmax()), name)
            raise UserError(f"{where} has no label; fill it in, or set data.missing to 'drop'.")
        if values.dtype == object and (numeric or len(columns) > 1):
            row = next(i for i, each in enumerate(values) if number(each) is None)
            raise UserError(
                f"{table.where(row, name)} has {excerpt(values[row])}, which is not a number; correct it."
            )
        if values.dtype == object and (
            found := [each for each in values if number(each) is not None]
        ):
            other = next(each for each in values if number(each) is None)
            raise UserError(
                f"{table.file} has the labels {clipped(found[0])} and {excerpt(other)} in the column {name!r}; "
                "make them all integers, or all names."
            )
        if values.dtype != object and (large := np.abs(values) > LARGEST).any():
            row = int(large.argmax())
            why = (
                "an infinite value"
                if np.isinf(values[row])
                else f"'{values[row]:g}', which is too large for float32"
            )
            raise UserError(f"{table.where(row, name)} has {why}; correct it.")
        if (
            values.dtype != object
            and not numeric
            and len(columns) == 1
            and (wrong := values != np.floor(values)).any()
        ):
            row = int(wrong.argmax())
            raise UserError(
                f"{table.where(row, name)} has the label '{values[row]:g}'; a class is an integer or a name; to "
                "predict a number, set data.kind to 'regression'."
            )
        if values.dtype != object and not numeric and len(columns) == 1:
            _check_classes(table, name)
    if len(columns) > 1:
        return np.stack([table.columns[name] for name in columns], axis=1)
    values = table.columns[columns[0]]
    if values.dtype == object:
        return values.astype(np.str_)
    return values if numeric else values.astype(np.int64)


def _check_classes(table: Table, name: str) -> None:
    """Refuse classes so large that floating-point numbers cannot tell them apart."""
    values = table.columns[name]
    large = np.abs(values) > LARGEST_CLASS
    if large.any():
        row = int(large.argmax())
        raise UserError(
            f"{table.where(row, name)} has the label '{values[row]:.17g}', which is too large for a class; number the "
            "classes from 0, or give them names."
        )
