"""Files of clients as inputs and targets, which may still have missing values and names of classes."""

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
        raw = [
            ([self._open(path) for path in c.train], [self._open(path) for path in c.test])
            for c in clients
        ]
        tables = [
            each for own in raw for split in own for each, _ in split if isinstance(each, Table)
        ]
        inputs: list[str] = []
        kinds: dict[str, tuple[str, ...]] = {}
        if tables:
            named = [*self.categorical, *(() if isinstance(self.missing, str) else self.missing)]
            check_columns(tables, self.target, self.input, named)
            inputs = list(self.input) or [
                name for name in tables[0].columns if name not in self.target
            ]
            if both := [name for name in self.target if name in inputs]:
                raise UserError(
                    f"data.input and data.target both name the column {both[0]!r}; leave it out of one."
                )
            if not inputs:
                raise UserError(
                    f"{tables[0].file} has no column besides {self.target[0]!r} to predict it from; add one."
                )
            used = set(inputs)
            if unused := [name for name in self.categorical if name not in used]:
                raise UserError(
                    f"data.categorical names the column {unused[0]!r}, which is not an input; leave it out."
                )
            learnt = [each for train, _ in raw for each, _ in train if isinstance(each, Table)]
            kinds = categories(learnt, self.categorical)
            self.columns = [
                Column(name, policy(self.missing, name), name not in kinds)
                for name in inputs
                for _ in kinds.get(name, (name,))
            ]
            rows = sum(len(each) for each in tables)
            what = f"{rows:,} rows of {len(self.columns):,} inputs"
            self.room.check(
                8 * rows * len(self.columns), what, "use fewer of them, see data.categorical"
            )
        made = []
        for train, tests in raw:
            within = [
                tests for _, tests in train if tests is not None
            ]  # in the .npz file of the client
            made.append(
                (
                    [self._part(each, inputs, kinds) for each, _ in train],
                    [
                        self._part(each, inputs, kinds)
                        for each in (*(each for each, _ in tests), *within)
                    ],
                )
            )
        return made

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
        input = self.input[0] if self.input else _either(archive, "inputs", "x")
        target = self.target[0] if self.target[0] in archive else _either(archive, "targets", "y")
        tests = None
        for form in ("test_{}", "{}_test"):
            if form.format(input) in archive or form.format(target) in archive:
                tests = self._pair(archive, form.format(input), form.format(target))
        return self._pair(archive, input, target), tests

    def _pair(self, archive: Archive, input: str, target: str) -> Part:
        file = archive.file
        if input not in archive or target not in archive:
            names = listed(archive.sizes) or "none"
            raise UserError(f"{file} has the arrays {names}; it needs {input} and {target}.")
        inputs, wanted = archive[input], archive[target]

        # Only numbers become tensors; targets may be names.
        for name, array, kinds in ((input, inputs, "biuf"), (target, wanted, "biufU")):
            if array.dtype.kind not in kinds:
                raise UserError(
                    f"{file} has {name} of type {array.dtype}; give numbers, such as float32 or int64."
                )
            if not array.ndim:
                raise UserError(
                    f"{file} has a single value as {name}; give an array with one row for each sample."
                )

        classes = wanted.ndim == 1 and wanted.dtype.kind in "iuU"
        if inputs.shape[:1] != wanted.shape[:1] or (self.kind in NAMED and not classes):
            each = "one integer" if self.kind in NAMED else "one target"
            fix = " (data.kind may be 'regression')" if wanted.dtype.kind == "f" else ""
            raise UserError(f"{file} must have {each} in {target} for each row of {input}{fix}.")
        return Part(file, inputs, wanted)

    def _part(
        self, source: Table | Part, inputs: list[str], kinds: dict[str, tuple[str, ...]]
    ) -> Part:
        if isinstance(source, Part):
            part = self._finite(source)
        else:
            table = without_missing(source, [*inputs, *self.target], self.missing)
            wanted = targets(table, self.target, self.kind not in NAMED)
            part = Part(table.file, features(table, inputs, kinds, self.missing), wanted)
        self.dropped += len(source) - len(part)
        return part

    def _finite(self, part: Part) -> Part:
        """Arrays without the samples that have missing values, or as they are if those are filled
        in later.
        """
        if part.inputs.dtype.kind != "f" or np.isfinite(part.inputs).all():
            return part
        wrong = ~np.isfinite(part.inputs).reshape(len(part), -1).all(1)
        rule = policy(self.missing, None)
        if rule == "error" or np.isinf(part.inputs).any():
            where = int(wrong.argmax())
            raise UserError(
                f"{part.file} has inputs that are not finite, first in sample {where}; {FILL}."
            )
        return part.take(np.flatnonzero(~wrong)) if rule == "drop" else part


def _either(archive: Archive, name: str, short: str) -> str:
    """The usual name of an array, or its short one if the archive has only that."""
    return short if short in archive and name not in archive else name
