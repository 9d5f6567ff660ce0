"""Briefs and reports as Flower records: named numbers, and arrays of raw bytes.

The bytes are little-endian. No pickles, no code.

Only the form of a client's message is validated here; `checks` decides whether a report is
accepted.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import MISSING, dataclass
from typing import Any, cast

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from torch import Tensor

from kairosfl.core.fields import SQUARED_LOSS, Brief, Briefs, Field, Report, Reports, fields
from kairosfl.engines.flower.enrol import BASE, TASK
from kairosfl.errors import UserError

VERSION = 5
# What a client of this version can do, too. A brief says so if it asks for nothing newer.
BEFORE_KEPT = 4
READABLE = (BEFORE_KEPT, VERSION)
NEWER = (
    *("max_steps", "still", "own_epochs", "rank", "candidates", "base", "mixed"),
    *("second_lr", "second_pull", "second_centre", "second_when", "second_inner", "second_draw"),
)
RUN = "run"  # the mark of a run in which clients keep something
NUMBERS, VECTORS = "numbers", "vectors"
ENROL = (TASK, BASE)
SLACK = 1 << 20  # bytes that an answer may have besides its vectors
RAW = "kairosfl.raw"  # how the bytes of an array are to be read: as they are, little-endian
PIECE = 5 << 20  # bytes; vectors travel in pieces, since Flower copies what it reads and writes
# Bytes. Up to this, vectors travel among the numbers, since every record is another request.
SMALL = 256 << 10
DTYPES = {
    "float16": torch.float16,
    "float32": torch.float32,
    "float64": torch.float64,
    "int32": torch.int32,
}

# What travels: every field of the list that the server does not compute itself.
TOLD = tuple(entry for entry in fields(Briefs) if entry.travels)
ANSWERED = tuple(entry for entry in fields(Reports) if entry.travels and entry.number)
ROUND = Field(int, "each", "the round that a report answers", MISSING, name="round", row="round")


Packed = dict[tuple[Any, ...], list[Array]]  # where a vector is in memory → its pieces


class Malformed(ValueError):
    """The message is not a brief or report; the text says what is wrong with it."""


@dataclass(frozen=True)
class Packing:
    """How updates are sent: in full, as float16, or only some of their entries.

    These are the `keep` fraction that is largest in magnitude.
    """

    dtype: str = "float32"
    keep: float = 1.0

    def __post_init__(self) -> None:
        if self.dtype not in ("float32", "float16"):
            raise UserError(f"deploy.update = {self.dtype!r} must be 'float32' or 'float16'.")
        if not 0 < self.keep <= 1:
            raise UserError(f"deploy.keep = {self.keep} must be above 0 and at most 1.")

    def count(self, size: int) -> int:
        """How many entries of an update of this size are sent."""
        return size if self.keep == 1 else max(1, math.ceil(self.keep * size))


@dataclass(frozen=True)
class Limit:
    """What an answer may consist of at most; an honest one has less."""

    objects: int
    size: int  # bytes of all objects together


INTRODUCTION = Limit(3, SLACK)  # a message, its record and its numbers


def report_limit(size: int, dtype: torch.dtype, packing: Packing) -> Limit:
    """The limit of a report on a model of this size: an introduction's, and that of its vectors."""
    count = packing.count(size)
    entry = torch.float16 if packing.dtype == "float16" else dtype
    vectors = [count * entry.itemsize]
    if packing.keep < 1:
        vectors.append(count * torch.int32.itemsize)
    pieces = sum(max(1, math.ceil(length / PIECE)) for length in vectors)
    return Limit(INTRODUCTION.objects + pieces, INTRODUCTION.size + sum(vectors))


@dataclass(frozen=True)
class Piece:
    """A part of a vector, as raw bytes."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes | memoryview


def brief_record(
    brief: Brief,
    packing: Packing,
    packed: Packed,
    asked: Mapping[str, str] | None = None,
    run: str = "",
) -> RecordDict:
    """A brief as a record.

    `packed` caches large vectors by where they are in memory: what briefs share is packed once.

    `asked` are the hashes that the client's task must have, and `run` is the mark of a run in which
    clients keep something.
    """
    version = BEFORE_KEPT
    if run or _newer(brief):
        version = VERSION
    numbers: dict[str, Any] = {
        "version": version,
        "pack_dtype": packing.dtype,
        "pack_keep": packing.keep,
    }
    if asked is not None:
        numbers |= asked
    if run:
        numbers[RUN] = run
    vectors: dict[str, Tensor] = {}
    for entry in TOLD:
        value = getattr(brief, entry.row)
        if value is None:
            continue
        if not entry.number:
            vectors[entry.row] = value
        elif entry.kind is frozenset:
            numbers[entry.row] = ",".join(sorted(map(str, value)))
        else:
            numbers[entry.row] = value
    if _small(vectors):
        return RecordDict({NUMBERS: ConfigRecord(numbers | _among(vectors))})
    arrays = ArrayRecord()
    for name, vector in vectors.items():
        where = (vector.data_ptr(), vector.shape, vector.stride())
        if where not in packed:
            packed[where] = [_array(piece) for piece in _pieces(vector)]
        for i, array in enumerate(packed[where]):
            arrays[f"{name}.{i}"] = (
                array  # one by one: the constructor would copy the arrays and hash them again
            )
    return RecordDict({NUMBERS: ConfigRecord(numbers), VECTORS: arrays})


def read_brief(record: RecordDict) -> tuple[Brief, Packing]:
    """The brief in a record, and how the update should be packed."""
    numbers: dict[str, Any] = dict(record[NUMBERS])
    version = numbers.get("version")
    if version not in READABLE:
        raise Malformed(
            f"the server uses version {version!r} of the records, this client {VERSION}"
        )
    vectors = _found_among(numbers)
    if VECTORS in record:
        for key, array in record.array_records[VECTORS].items():
            if array.stype == RAW:
                vectors[key] = Piece(array.dtype, array.shape, array.data)
    values: dict[str, Any] = {}
    for entry in TOLD:
        if not entry.number and f"{entry.row}.0" in vectors:
            values[entry.row] = _vector(vectors, entry.row)
        elif entry.kind is frozenset and entry.row in numbers:
            values[entry.row] = _set(numbers[entry.row])
        elif entry.number and entry.row in numbers:
            values[entry.row] = numbers[entry.row]
    if "candidates" in values:
        values["candidates"] = values["candidates"].view(-1, len(values["start"]))
    return Brief(**values), Packing(numbers["pack_dtype"], numbers["pack_keep"])


def _newer(brief: Brief) -> bool:
    """Whether an older client would do something else than this brief asks for."""
    if not brief.epochs or SQUARED_LOSS in brief.measure:
        return True
    return any(getattr(brief, name) is not None for name in NEWER)


def _set(text: str) -> frozenset[Any]:
    """Names, or numbers of tensors, that are separated by commas."""
    members: set[Any] = set()
    for member in filter(None, text.split(",")):
        if member.isdecimal():
            members.add(int(member))
        else:
            members.add(member)
    return frozenset(members)


def mark_of_run(record: RecordDict) -> str:
    """The mark of a run in which clients keep something; empty for another run."""
    return str(record[NUMBERS].get(RUN, ""))


def asked_hashes(record: RecordDict) -> dict[str, str]:
    """The hashes that the client's task must have; none where it was already checked."""
    return {name: value for name in ENROL if isinstance(value := record[NUMBERS].get(name), str)}


def report_record(report: Report, round: int, packing: Packing) -> RecordDict:
    """A report as a record, packed as the server asked.

    Large vectors are byte records rather than arrays, because Flower's reader would hold two copies
    of an array.
    """
    numbers: dict[str, Any] = {"version": VERSION, "round": round}
    for entry in ANSWERED:
        if getattr(report, entry.row) is not None:
            numbers[entry.row] = getattr(report, entry.row)
    if not report.steps:  # it only measured
        return RecordDict({NUMBERS: ConfigRecord(numbers)})
    delta = report.delta.detach().cpu()
    vectors = {}
    if packing.keep < 1:
        where = (
            torch.topk(delta.abs(), packing.count(len(delta)), sorted=False).indices.sort().values
        )
        vectors["where"] = where.to(torch.int32)
        delta = delta[where]
    vectors["delta"] = delta.to(torch.float16) if packing.dtype == "float16" else delta
    if _small(vectors):
        return RecordDict({NUMBERS: ConfigRecord(numbers | _among(vectors))})
    record = RecordDict({NUMBERS: ConfigRecord(numbers)})
    for name, vector in vectors.items():
        for i, piece in enumerate(_pieces(vector)):
            record[f"{name}.{i}"] = piece_record(piece)
    return record


def piece_record(piece: Piece) -> ConfigRecord:
    """A part of a vector as a report holds it."""
    return ConfigRecord(
        {"dtype": piece.dtype, "shape": list(piece.shape), "data": bytes(piece.data)}
    )


def read_report(record: RecordDict, packing: Packing, out: Tensor) -> tuple[Report, int]:
    """The report in a record, its update written into `out`, and the round that it names."""
    numbers, vectors = _parts(record)
    values: dict[str, Any] = {}
    for entry in (ROUND, *ANSWERED):
        value = numbers.get(entry.row)
        if value is None:
            if entry.default is MISSING:
                raise Malformed(f"its report lacks {entry.row!r}")
            continue
        # A whole number passes for a float.
        if isinstance(value, bool) or not isinstance(
            value, int if entry.kind is int else int | float
        ):
            raise Malformed(f"its {entry.row} is of type {type(value).__name__}")
        values[entry.row] = entry.kind(value)
    round: int = values.pop("round")
    if not len(out):  # it only measured
        return Report(delta=out, **values), round
    count = packing.count(len(out))
    dtype = "float16" if packing.dtype == "float16" else _word(out.dtype)
    if packing.keep == 1:
        _update(vectors, "delta", dtype, out)
    else:
        where, kept = torch.empty(count, dtype=torch.int32), torch.empty(count, dtype=out.dtype)
        _update(vectors, "where", "int32", where)
        _update(vectors, "delta", dtype, kept)
        if (
            not bool((where[1:] > where[:-1]).all())
            or int(where[0]) < 0
            or int(where[-1]) >= len(out)
        ):
            raise Malformed("the indices of its update are not ascending or out of range")
        out.zero_().index_copy_(0, where.long(), kept)
    return Report(delta=out, **values), round


def _parts(record: RecordDict) -> tuple[ConfigRecord, dict[str, Piece]]:
    """The numbers of a report and the pieces of its vectors, whose contents are not checked yet."""
    numbers = record.get(NUMBERS)
    if not isinstance(numbers, ConfigRecord):
        raise Malformed("its answer is not a report")
    vectors = _found_among(numbers)
    for key, part in record.items():
        if key == NUMBERS:
            continue
        vectors[key] = _piece(key, part)
    return numbers, vectors


def _piece(key: str, part: Any) -> Piece:
    """A part of a vector, as `piece_record` writes it."""
    entries: list[Any] = []
    if isinstance(part, ConfigRecord):
        entries = list(map(part.get, ("dtype", "shape", "data")))
    match entries:
        case [str(dtype), list(shape), bytes(data)] if set(map(type, shape)) <= {int}:
            return Piece(dtype, tuple(map(int, shape)), data)
    raise Malformed(f"its {key} has an unknown format")


def _small(vectors: Mapping[str, Tensor]) -> bool:
    return sum(vector.nbytes for vector in vectors.values()) <= SMALL


def _among(vectors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Small vectors as entries of the numbers: their bytes, and their type."""
    entries: dict[str, Any] = {}
    for name, vector in vectors.items():
        for i, piece in enumerate(_pieces(vector)):
            entries |= {f"{name}.{i}": bytes(piece.data), f"{name}.{i}.dtype": piece.dtype}
    return entries


def _found_among(numbers: Mapping[str, Any]) -> dict[str, Piece]:
    """The vectors among the numbers."""
    vectors: dict[str, Piece] = {}
    for key, data in numbers.items():
        if isinstance(data, bytes):
            dtype = numbers.get(f"{key}.dtype")
            if not isinstance(dtype, str) or dtype not in DTYPES:
                raise Malformed(f"its {key} has an unknown format")
            vectors[key] = Piece(dtype, (len(data) // np.dtype(dtype).itemsize,), data)
    return vectors


def _array(piece: Piece) -> Array:
    """A Flower array that refers to the bytes without a copy, unlike one that is constructed so."""
    array = Array(dtype=piece.dtype, shape=piece.shape, stype=RAW, data=b"")
    array.data = cast(Any, piece.data)
    return array


def _update(vectors: Mapping[str, Piece], name: str, dtype: str, out: Tensor) -> None:
    """Read a vector of a report into `out`; its shape is checked before its contents."""
    shapes = []
    for key, array in vectors.items():
        if key.partition(".")[0] == name:
            shapes.append(tuple(array.shape))
    if not shapes:
        raise Malformed("its report contains no update")
    length = sum(map(math.prod, shapes))
    if set(map(len, shapes)) != {1} or length != len(out):
        shape: tuple[int, ...] = (length,)
        if len(shapes) == 1:
            shape = shapes[0]
        raise Malformed(f"its update has the shape {shape}, not ({len(out)},)")
    pieces = _found(vectors, name)
    if pieces[0].dtype != dtype:
        raise Malformed(f"its update is {pieces[0].dtype}, not {dtype}")
    _fill(pieces, name, out)


def _word(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _pieces(vector: Tensor) -> list[Piece]:
    """A vector in pieces, without a copy where its bytes are already in the right order."""
    array = vector.detach().cpu().contiguous().view(-1).numpy()
    array = array.astype(array.dtype.newbyteorder("<"), copy=False)
    step = PIECE // array.itemsize
    pieces = []
    for begin in range(0, len(array), step):
        piece = array[begin : begin + step]
        pieces.append(Piece(array.dtype.name, piece.shape, piece.data.cast("B")))
    return pieces


def _vector(vectors: Mapping[str, Piece], name: str) -> Tensor:
    """The vector of this name; its length follows from the bytes received."""
    pieces = _found(vectors, name)
    size = sum(len(piece.data) for piece in pieces) // np.dtype(pieces[0].dtype).itemsize
    joined = torch.empty(size, dtype=DTYPES[pieces[0].dtype])
    _fill(pieces, name, joined)
    return joined


def _found(vectors: Mapping[str, Piece], name: str) -> list[Piece]:
    """The pieces of a vector in order, all of the same dtype."""
    pieces: list[Piece] = []
    while f"{name}.{len(pieces)}" in vectors:
        pieces.append(vectors[f"{name}.{len(pieces)}"])
    dtypes = [piece.dtype for piece in pieces]
    dtype = next(iter(dtypes), "nothing")
    if dtype not in DTYPES or len(set(dtypes)) > 1:
        raise Malformed(f"its {name} has dtype {dtype!r} in an unknown format")
    return pieces


def _fill(pieces: list[Piece], name: str, out: Tensor) -> None:
    """Copy the pieces into `out`, which may have another dtype."""
    kind = np.dtype(pieces[0].dtype).newbyteorder("<")
    for piece in pieces:
        if len(piece.data) != math.prod(piece.shape) * kind.itemsize:
            raise Malformed(f"the number of bytes of its {name} does not match its shape")
    to = out.numpy()
    begin = 0
    for piece in pieces:
        part = np.frombuffer(piece.data, kind)
        to[begin : begin + len(part)] = part
        begin += len(part)
    if begin != len(to):
        raise Malformed(f"the number of bytes of its {name} does not match its shape")
