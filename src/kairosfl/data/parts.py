"""Files of clients as inputs and targets, still with missing values and names of classes."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from kairosfl.data.archives import Archive
from kairosfl.data.intake import Room, read_regular
from kairosfl.data.layout import Client
from kairosfl.data.pictures import read_pictures
from kairosfl.data.tables import (
    FILL,
    Array,
    Missing,
    Table,
    categories,
    check_columns,
    features,
    policy,
    read_csv,
    read_parquet,
    targets,
    without_missing,
)
from kairosfl.errors import UserError
from kairosfl.wording import listed

NAMED = ("classification", "binary", "")  # kinds whose target is one class; "": to be inferred


@dataclass(frozen=True, eq=False)
class Part:
    """Samples of one file, or of one directory of pictures."""

    file: Path
    inputs: Array
    targets: Array
    pictures: bool = False

    def __len__(self) -> int:
        return len(self.targets)

    def take(self, rows: Array) -> Part:
        """Only these samples."""
        return replace(self, inputs=self.inputs[rows], targets=self.targets[rows])


class Column(NamedTuple):
    """One column of the inputs, and the column of the table it is made of."""

    name: str
    missing: str  # what becomes of missing values
    number: bool  # whether it is a number, or one value of a categorical column


Sources = list[Table | Part]  # of a client: what its files have


@dataclass(eq=False)
class Reader:
    """Reads the files of clients; afterwards it knows their hashes and what was dropped."""

    target: Sequence[str]
    input: Sequence[str]
    kind: str
    missing: Missing
    categorical: Sequence[str]
    size: Sequence[int]
    separator: str
    hashes: dict[Path, str] = field(default_factory=dict)
    columns: list[Column] = field(default_factory=list)  # of tables; arrays have none
    dropped: int = 0
    room: Room = field(default_factory=Room)

    def read(self, clients: Sequence[Client]) -> list[tuple[list[Part], list[Part]]]:
        """Training and test samples of each client, a part per file."""
        # --- open all files ---
        sources: list[tuple[Sources, Sources]] = []
        for client in clients:
            train: Sources = []
            tests: Sources = []
            within: Sources = []  # the .npz files for training
            for path in client.train:
                source, held = self._open(path)
                train.append(source)
                if held is not None:
                    within.append(held)
            for path in client.test:
                source, _ = self._open(path)
                tests.append(source)
            sources.append((train, [*tests, *within]))

        # --- what all tables have in common ---
        training_tables: list[Table] = []
        tables: list[Table] = []
        for train, tests in sources:
            training_tables += _tables(train)
            tables += _tables(train)
            tables += _tables(tests)
        inputs: list[str] = []
        kinds: dict[str, tuple[str, ...]] = {}
        if tables:
            inputs = self._inputs(tables)
            kinds = categories(training_tables, self.categorical)
            self._learn(inputs, kinds, rows=sum(map(len, tables)))

        # --- inputs and targets ---
        parts = []
        for train, tests in sources:
            train_parts = self._parts(train, inputs, kinds)
            parts.append((train_parts, self._parts(tests, inputs, kinds)))
        return parts

    def _inputs(self, tables: Sequence[Table]) -> list[str]:
        """The columns to predict from, after the headers of all tables were checked."""
        named = list(self.categorical)
        if not isinstance(self.missing, str):
            named += self.missing
        check_columns(tables, self.target, self.input, named)
        inputs = list(self.input)
        if not inputs:
            inputs = [name for name in tables[0].columns if name not in self.target]
        for name in self.target:
            if name in inputs:
                raise UserError(
                    f"data.input and data.target both name the column {name!r}; "
                    "leave it out of one."
                )
        if not inputs:
            raise UserError(
                f"{tables[0].file} has no column besides {self.target[0]!r} to predict it from; "
                "add one."
            )
        used = set(inputs)
        for name in self.categorical:
            if name not in used:
                raise UserError(
                    f"data.categorical names the column {name!r}, which is not an input; "
                    "leave it out."
                )
        return inputs

    def _learn(self, inputs: list[str], kinds: dict[str, tuple[str, ...]], rows: int) -> None:
        """Note the columns of the inputs; refuse more than fit into memory."""
        self.columns = []
        for name in inputs:
            column = Column(name, policy(self.missing, name), name not in kinds)
            features = len(kinds.get(name, (name,)))
            self.columns += [column] * features
        what = f"{rows:,} rows of {len(self.columns):,} inputs"
        self.room.check(
            8 * rows * len(self.columns), what, "use fewer of them, see data.categorical"
        )

    def _open(self, path: Path) -> tuple[Table | Part, Part | None]:
        """What a file has, and the test samples in it."""
        if path.is_dir():
            inputs, labels, self.hashes[path] = read_pictures(
                path, self.size, self.target[0], self.room
            )
            return Part(path, inputs, labels, pictures=True), None
        content = read_regular(path, self.room)
        self.hashes[path] = hashlib.md5(content, usedforsecurity=False).hexdigest()
        if not content.strip():
            raise UserError(
                f"{path} is empty; add a header and rows, or move it out of the directory."
            )
        if path.suffix.lower() == ".npz":
            return self._arrays(path, content)
        if path.suffix.lower() == ".parquet":
            return read_parquet(path, content, self.room), None
        return read_csv(path, content, self.separator, self.room), None

    def _arrays(self, file: Path, content: bytes) -> tuple[Part, Part | None]:
        """The samples in an .npz file, and the test samples in it."""
        archive = Archive(file, content, self.room)
        if self.input:
            input = self.input[0]
        else:
            input = _either(archive, "inputs", "x")
        target = self.target[0]
        if target not in archive:
            target = _either(archive, "targets", "y")
        tests = None
        for form in ("test_{}", "{}_test"):
            if form.format(input) in archive or form.format(target) in archive:
                tests = self._pair(archive, form.format(input), form.format(target))
        return self._pair(archive, input, target), tests

    def _pair(self, archive: Archive, input: str, target: str) -> Part:
        """The inputs and the targets under these names, both arrays with a row per sample."""
        file = archive.file
        if input not in archive or target not in archive:
            names = listed(archive.sizes) or "none"
            raise UserError(f"{file} has the arrays {names}; it needs {input} and {target}.")
        inputs = archive[input]
        labels = archive[target]

        # Only numbers become tensors; targets may be names.
        for name, array, kinds in ((input, inputs, "biuf"), (target, labels, "biufU")):
            if array.dtype.kind not in kinds:
                raise UserError(
                    f"{file} has {name} of type {array.dtype}; "
                    "give numbers, such as float32 or int64."
                )
            if not array.ndim:
                raise UserError(
                    f"{file} has a single value as {name}; "
                    "give an array with one row for each sample."
                )

        classes = labels.ndim == 1 and labels.dtype.kind in "iuU"
        if inputs.shape[:1] != labels.shape[:1] or (self.kind in NAMED and not classes):
            one = "one integer" if self.kind in NAMED else "one target"
            fix = " (data.kind may be 'regression')" if labels.dtype.kind == "f" else ""
            raise UserError(f"{file} must have {one} in {target} for each row of {input}{fix}.")
        return Part(file, inputs, labels)

    def _parts(
        self, sources: Sources, inputs: list[str], kinds: dict[str, tuple[str, ...]]
    ) -> list[Part]:
        return [self._part(source, inputs, kinds) for source in sources]

    def _part(
        self, source: Table | Part, inputs: list[str], kinds: dict[str, tuple[str, ...]]
    ) -> Part:
        if isinstance(source, Part):
            part = self._finite(source)
        else:
            table = without_missing(source, [*inputs, *self.target], self.missing)
            labels = targets(table, self.target, self.kind not in NAMED)
            part = Part(table.file, features(table, inputs, kinds, self.missing), labels)
        self.dropped += len(source) - len(part)
        return part

    def _finite(self, part: Part) -> Part:
        """Arrays without samples that lack values, or as they are if those are filled in later."""
        if part.inputs.dtype.kind != "f" or np.isfinite(part.inputs).all():
            return part
        wrong = ~np.isfinite(part.inputs).reshape(len(part), -1).all(1)
        rule = policy(self.missing, None)
        if rule == "error" or np.isinf(part.inputs).any():
            where = int(wrong.argmax())
            raise UserError(
                f"{part.file} has inputs that are not finite, first in sample {where}; {FILL}."
            )
        if rule == "drop":
            return part.take(np.flatnonzero(~wrong))
        return part


def _tables(sources: Sources) -> list[Table]:
    """Those that are tables."""
    return [source for source in sources if isinstance(source, Table)]


def _either(archive: Archive, name: str, short: str) -> str:
    """The usual name of an array, or its short one if the archive has only that."""
    if short in archive and name not in archive:
        return short
    return name
