"""Files of clients as inputs and targets, which may still have missing values and names of classes."""

from __future__ import annotations

import hashlib
import io
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from kairosfl.errors import UserError
from kairosfl.tasks.data.layout import Client
from kairosfl.tasks.data.pictures import read_pictures
from kairosfl.tasks.data.tables import (
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

    def read(self, clients: Sequence[Client]) -> list[tuple[list[Part], list[Part]]]:
        """Training and test samples of each client, a part per file."""
        raw = [([self._open(path) for path in c.train], [self._open(path) for path in c.test]) for c in clients]
        tables = [each for own in raw for split in own for each, _ in split if isinstance(each, Table)]
        inputs: list[str] = []
        kinds: dict[str, tuple[str, ...]] = {}
        if tables:
            named = [*self.categorical, *(() if isinstance(self.missing, str) else self.missing)]
            check_columns(tables, self.target, self.input, named)
            inputs = list(self.input) or [name for name in tables[0].columns if name not in self.target]
            if both := [name for name in inputs if name in self.target]:
                raise UserError(f"data.input and data.target both name the column {both[0]!r}; leave it out of one.")
            if not inputs:
                raise UserError(
                    f"{tables[0].file} has no column besides {self.target[0]!r} to predict it from; add one."
                )
            if unused := [name for name in self.categorical if name not in inputs]:
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
        made = []
        for train, tests in raw:
            within = [tests for _, tests in train if tests is not None]  # in the .npz file of the client
            made.append(
                (
                    [self._part(each, inputs, kinds) for each, _ in train],
                    [self._part(each, inputs, kinds) for each in (*(each for each, _ in tests), *within)],
                )
            )
        return made

    def _open(self, path: Path) -> tuple[Table | Part, Part | None]:
        """What a file has, and the test samples in it."""
        if path.is_dir():
            inputs, labels, self.hashes[path] = read_pictures(path, self.size, self.target[0])
            return Part(path, inputs, labels, pictures=True), None
        content = path.read_bytes()
        self.hashes[path] = hashlib.md5(content, usedforsecurity=False).hexdigest()
        if not content.strip():
            raise UserError(f"{path} is empty; add a header and rows, or move it out of the directory.")
        if path.suffix.lower() == ".npz":
            return self._arrays(path, content)
        table = read_parquet(path, content) if path.suffix.lower() == ".parquet" else None
        return table or read_csv(path, content, self.separator), None

    def _arrays(self, file: Path, content: bytes) -> tuple[Part, Part | None]:
        try:
            with np.load(io.BytesIO(content), allow_pickle=False) as archive:
                own = {name: archive[name] for name in archive.files}
        except (OSError, ValueError, EOFError, zipfile.BadZipFile, AttributeError) as error:
            raise UserError(f"{file} is damaged: it cannot be read as .npz ({error}); write it again.") from None
        input = self.input[0] if self.input else "x" if "x" in own and "inputs" not in own else "inputs"
        target = self.target[0] if self.target[0] in own else "y" if "y" in own and "targets" not in own else "targets"
        tests = None
        for form in ("test_{}", "{}_test"):
            if form.format(input) in own or form.format(target) in own:
                tests = self._pair(file, own, form.format(input), form.format(target))
        return self._pair(file, own, input, target), tests

    def _pair(self, file: Path, own: dict[str, Array], input: str, target: str) -> Part:
        if input not in own or target not in own:
            raise UserError(f"{file} has the arrays {', '.join(own) or 'none'}; it needs {input} and {target}.")
        inputs, wanted = own[input], own[target]
        classes = wanted.ndim == 1 and (np.issubdtype(wanted.dtype, np.integer) or wanted.dtype.kind == "U")
        if inputs.shape[:1] != wanted.shape[:1] or (self.kind in NAMED and not classes):
            each = "one integer" if self.kind in NAMED else "one target"
            fix = " (data.kind may be 'regression')" if wanted.dtype.kind == "f" else ""
            raise UserError(f"{file} must have {each} in {target} for each row of {input}{fix}.")
        return Part(file, inputs, wanted)

    def _part(self, source: Table | Part, inputs: list[str], kinds: dict[str, tuple[str, ...]]) -> Part:
        if isinstance(source, Part):
            part = self._finite(source)
        else:
            table = without_missing(source, [*inputs, *self.target], self.missing)
            wanted = targets(table, self.target, self.kind not in NAMED)
            part = Part(table.file, features(table, inputs, kinds, self.missing), wanted)
        self.dropped += len(source) - len(part)
        return part

    def _finite(self, part: Part) -> Part:
        """Arrays without the samples that have missing values, or as they are if those are filled in later."""
        if part.inputs.dtype.kind != "f" or np.isfinite(part.inputs).all():
            return part
        wrong = ~np.isfinite(part.inputs).reshape(len(part), -1).all(1)
        rule = policy(self.missing, None)
        if rule == "error" or np.isinf(part.inputs).any():
            where = int(wrong.argmax())
            raise UserError(f"{part.file} has inputs that are not finite, first in sample {where}; {FILL}.")
        return part.take(np.flatnonzero(~wrong)) if rule == "drop" else part
