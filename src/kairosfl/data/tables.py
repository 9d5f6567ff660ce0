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
    """The columns of one file.

    Numbers are float64 with NaN for a missing value, texts are objects with None.
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
    if isinstance(missing, str):
        return missing
    return missing.get(column or "", "error")


def read_csv(file: Path, content: bytes, separator: str, room: Room | None = None) -> Table:
    """A .csv file with a header."""
    text = as_text(file, content)
    room = room or Room()
    room.check(CELL * (text.count(separator) + text.count("\n") + 1), file)
    reader = csv.reader(io.StringIO(text, newline=""), strict=True, delimiter=separator)
    rows = []
    lines = []
    try:
        header = next(reader, [])
        for row in reader:
            if len(row) != len(header):
                raise UserError(
                    f"{file} has {len(row)} columns instead of {len(header)} in line "
                    f"{reader.line_num}; fix that line."
                )
            rows.append(row)
            lines.append(reader.line_num)
    except csv.Error as error:
        raise UserError(
            f"{file} is malformed in line {reader.line_num} ({error}); fix that line."
        ) from None
    header = list(map(str.strip, header))
    _check_header(file, header)
    room.take(8 * len(header) * len(rows), file)
    columns = {}
    for place, name in enumerate(header):
        columns[name] = _column([row[place] for row in rows])
    return Table(file, columns, lines)


def _check_header(file: Path, header: Sequence[str]) -> None:
    """Refuse columns without a name, or with the name of another."""
    before: set[str] = set()
    for name in header:
        if not name:
            raise UserError(
                f"{file} has no name for column {header.index(name) + 1}, perhaps row numbers that "
                "pandas wrote; name it, or leave it out with index=False."
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
        texts = []
        schema = source.schema_arrow
        for name, kind in zip(schema.names, schema.types, strict=True):
            if _is_text(arrow, kind):
                texts.append(name)
        source = parquet.ParquetFile(arrow.BufferReader(content), read_dictionary=texts)
        table = source.read()
        table.validate()
        header = list(map(str.strip, table.column_names))
        _check_header(file, header)
        columns = {}
        for name, column in zip(header, table.columns, strict=True):
            columns[name] = _arrow_column(arrow, column)
    except (UserError, MemoryError):
        raise
    except Exception as error:  # of a damaged file, anything may come out
        raise UserError(
            f"{file} cannot be read as .parquet ({first_line(error)}); write it again."
        ) from None
    return Table(file, columns, range(1, table.num_rows + 1), "row")


def _values_in(metadata: Any) -> int:
    """How many values a .parquet file declares; a small file may declare a great many."""
    count = 0
    for number in range(metadata.num_row_groups):
        group = metadata.row_group(number)
        for place in range(group.num_columns):
            count += group.column(place).num_values
    return count


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
    numeric = (
        kinds.is_integer,
        kinds.is_floating,
        kinds.is_boolean,
        kinds.is_null,
        kinds.is_decimal,
    )
    if any(is_kind(kind) for is_kind in numeric):
        return np.asarray(column.cast(arrow.float64(), safe=False).to_numpy(), dtype=np.float64)
    if kinds.is_temporal(kind):
        column = column.cast(arrow.string())  # Python's own dates end with the year 9999
        if any(str(text).startswith("<value out of range") for text in column.to_pylist()):
            raise ValueError("a date is out of range")
    texts = []
    for value in column.to_pylist():
        texts.append(None if value is None else str(value))
    return _numbers_or_texts(np.array(texts, dtype=object))


def _texts(arrow: Any, column: Any) -> Array:
    """The texts of a column that is stored as a dictionary; equal ones are one object."""
    blocks = [np.empty(0, dtype=object)]
    for chunk in column.chunks:
        texts = chunk.dictionary.cast(arrow.string()).to_pylist()
        rows = chunk.indices.fill_null(len(texts)).to_numpy(zero_copy_only=False)
        blocks.append(np.array([*texts, None], dtype=object)[rows])
    return _numbers_or_texts(np.concatenate(blocks))


def _numbers_or_texts(values: Array) -> Array:
    """A column of texts as numbers if all of them are, as they are where it has none."""
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
    numbers: list[float | None] = []
    texts: list[str | None] = []
    for cell in cells:
        text = cell.strip()
        if text.lower() in MISSING:
            numbers.append(math.nan)
            texts.append(None)
        else:
            numbers.append(number(cell))
            texts.append(text)
    if None not in numbers:
        return np.array(numbers, dtype=np.float64)
    return np.array(texts, dtype=object)


def number(text: str) -> float | None:
    """A text as a number; None if it is not one."""
    try:
        return float(text.replace("_", "?"))
    except ValueError:
        return None


def check_columns(
    tables: Sequence[Table], targets: Sequence[str], inputs: Sequence[str], named: Sequence[str]
) -> None:
    """Refuse columns that are not there, and headers that differ.

    Args:
        tables: Of all clients.
        targets: The columns to predict.
        inputs: The columns to predict from; empty: all others.
        named: The columns that other options mention.
    """
    first = tables[0]
    for table in tables:
        header = list(table.columns)
        for target in targets:
            if target not in header:
                hint = nearest(target, header) if header else "the file is empty"
                also = ", or data.separator" if len(header) == 1 and ";" in header[0] else ""
                raise UserError(
                    f"{table.file} has no column {target!r} in its header ({hint.rstrip('.?')}); "
                    f"set data.target to the column to predict{also}."
                )
        for name in inputs:
            if name not in header:
                raise UserError(
                    f"{table.file} has no column {excerpt(name)}, which data.input names; "
                    f"{nearest(name, header)}"
                )
        if not inputs and header != list(first.columns):
            raise UserError(
                f"{table.file} has the columns {listed(header)}, but {first.file.name} has "
                f"{listed(first.columns)}; give all files the same columns in the same order, or "
                "set data.input."
            )
    for name in named:
        if name not in first.columns:
            raise UserError(
                f"data.categorical or data.missing names the column {name!r}; "
                f"{nearest(name, list(first.columns))}"
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
    if values.dtype == object:
        return np.array([text is None for text in values], dtype=bool)
    return np.isnan(values)


def names_of(values: Array) -> Array:
    """A column as texts, numbers as they are usually written."""
    if values.dtype == object:
        return values
    names = []
    for value in values:
        names.append(None if math.isnan(value) else f"{value:.15g}")
    return np.array(names, dtype=object)


def categories(tables: Sequence[Table], columns: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """The values of categorical columns in all tables, sorted."""
    kinds = {}
    for column in columns:
        names: set[Any] = set()
        for table in tables:
            names.update(names_of(table.columns[column]))
        kinds[column] = tuple(sorted(names - {None}))
    return kinds


def features(
    table: Table, inputs: Sequence[str], kinds: Mapping[str, tuple[str, ...]], missing: Missing
) -> Array:
    """The inputs `[n, features]`, categorical columns one-hot.

    They are NaN where a missing value is to be filled in.

    Args:
        table: Of one file.
        inputs: The columns to predict from.
        kinds: The values of categorical columns, in the order of their features.
        missing: What becomes of missing values.
    """
    blocks = []
    for name in inputs:
        values = table.columns[name]
        lost = absent(values)
        if lost.any() and policy(missing, name) == "error":
            raise UserError(f"{table.where(int(lost.argmax()), name)} has no value; {FILL}.")
        if name in kinds:
            names = np.array(kinds[name], dtype=object)
            block = (names_of(values)[:, None] == names[None]).astype(np.float64)
            block[lost] = math.nan
            blocks.append(block)
            continue
        if values.dtype == object:
            row = _first_text(values)
            raise UserError(
                f"{table.where(row, name)} has {excerpt(values[row])}, which is not a finite "
                f"number; correct it, or add {name!r} to data.categorical, which encodes each "
                "value as a column, or leave the column out with data.input."
            )
        large = np.abs(values) > LARGEST
        if large.any():
            row = int(large.argmax())
            why = "not a finite number" if np.isinf(values[row]) else "too large for float32"
            raise UserError(
                f"{table.where(row, name)} has '{values[row]:g}', which is {why}; correct it."
            )
        blocks.append(values[:, None])
    return np.concatenate([*blocks, np.empty((len(table), 0))], axis=1)


def _first_text(values: Array) -> int:
    """The row of the first text that is not a number; 0 if there is none."""
    for row, text in enumerate(values):
        if text is not None and number(text) is None:
            return row
    return 0


def targets(table: Table, columns: Sequence[str], numeric: bool) -> Array:
    """What to predict: `[n]` of one column, `[n, k]` of several.

    Args:
        table: Of one file.
        columns: The columns to predict.
        numeric: Whether they are numbers; otherwise a single column has classes.
    """
    classes = not numeric and len(columns) == 1
    for name in columns:
        values = table.columns[name]
        lost = absent(values)
        if lost.any():
            where = table.where(int(lost.argmax()), name)
            raise UserError(f"{where} has no label; fill it in, or set data.missing to 'drop'.")
        if values.dtype == object:
            _check_names(table, name, classes)
        else:
            _check_numbers(table, name, classes)
    if len(columns) > 1:
        return np.stack([table.columns[name] for name in columns], axis=1)
    values = table.columns[columns[0]]
    if values.dtype == object:
        return values.astype(np.str_)
    return values if numeric else values.astype(np.int64)


def _check_names(table: Table, name: str, classes: bool) -> None:
    """Refuse text as a regression target, and classes that mix text with numbers."""
    values = table.columns[name]
    row = _first_text(values)
    if not classes:
        raise UserError(
            f"{table.where(row, name)} has {excerpt(values[row])}, which is not a number; "
            "correct it."
        )
    numbers = [text for text in values if number(text) is not None]
    if numbers:
        raise UserError(
            f"{table.file} has the labels {clipped(numbers[0])} and {excerpt(values[row])} in the "
            f"column {name!r}; make them all integers, or all names."
        )


def _check_numbers(table: Table, name: str, classes: bool) -> None:
    """Refuse numbers that float32 cannot hold, and classes that are not integers or too large."""
    values = table.columns[name]
    large = np.abs(values) > LARGEST
    if large.any():
        row = int(large.argmax())
        why = "an infinite value"
        if np.isfinite(values[row]):
            why = f"'{values[row]:g}', which is too large for float32"
        raise UserError(f"{table.where(row, name)} has {why}; correct it.")
    if not classes:
        return

    broken = values != np.floor(values)
    if broken.any():
        row = int(broken.argmax())
        raise UserError(
            f"{table.where(row, name)} has the label '{values[row]:g}'; a class is an integer or a "
            "name; to predict a number, set data.kind to 'regression'."
        )
    large = np.abs(values) > LARGEST_CLASS  # floating-point numbers cannot tell them apart
    if large.any():
        row = int(large.argmax())
        raise UserError(
            f"{table.where(row, name)} has the label '{values[row]:.17g}', which is too large for "
            "a class; number the classes from 0, or give them names."
        )
