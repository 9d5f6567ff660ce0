"""Damaged and hostile files of clients from a `random.Random`: the same on every machine."""

from __future__ import annotations

import io
import struct
import zipfile
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
from PIL import Image

Write = Callable[[Random], tuple[str, bytes]]  # the file's name, below the client's, and its bytes
ROWS = 6
CELLS = [
    "",
    " ",
    "0",
    "1",
    "1.5",
    "-1",
    "1e30",
    "1e400",
    "nan",
    "inf",
    "9" * 5000,
    "-" + "9" * 5000,
    "1_0",
]
CELLS += [
    "2020-01-01",
    "10000-13-45",
    "Malmö",
    "\u202e",
    "\ufffd",
    "'",
    '"',
    '""',
    ",",
    "\0",
    "x" * 200_000,
    "=1+1",
]
CELLS += [
    "0x10",
    "１２",
    "1,5",
    "true",
    "NA",
    "?",
    "\r",
    "\n",
    "9223372036854775808",
    "e\u0301",
    "a\x1bb",
]
NAMES = [
    "a",
    "label",
    "label",
    "",
    " ",
    "a",
    "b" * 5000,
    "label ",
    "Größe",
    "\x1b[31m",
    "file",
    "1",
]
TYPES = [
    "<f4",
    ">f4",
    "<f8",
    "f2",
    "g",
    "<i8",
    ">i4",
    "u1",
    "<u8",
    "?",
    "<c8",
    "<U3",
    "S3",
    "<M8[s]",
    "<m8[D]",
    "V4",
]
SUFFIXES = [".png", ".jpg", ".bmp", ".webp"]


def damaged(draw: Random, content: bytes) -> bytes:
    """The bytes with one of the things done to them that happen to files."""
    if not content:
        return content
    how = draw.randrange(6)
    changed = bytearray(content)
    if how == 0:
        return content[: draw.randrange(len(content))]
    if how == 1:  # the end is as long, and empty
        place = draw.randrange(len(content))
        return content[:place] + bytes(len(content) - place)
    if how == 2:
        place = draw.randrange(len(content))
        return content[:place] + draw.randbytes(draw.randint(1, 40)) + content[place:]
    if how == 3:  # a number in a header is another
        place = draw.randrange(max(len(content) - 4, 1))
        changed[place : place + 4] = struct.pack(
            "<I", draw.choice([0, 1, 2**31 - 1, 2**31, 2**32 - 1])
        )
        return bytes(changed)
    if how == 4:
        place, end = sorted(draw.randrange(len(content)) for _ in range(2))
        return content[:place] + content[end:]
    for _ in range(draw.randint(1, 8)):
        changed[draw.randrange(len(content))] = draw.randrange(256)
    return bytes(changed)


def csv(draw: Random) -> tuple[str, bytes]:
    """A table of odd cells, quoted or not, in any encoding."""
    if draw.random() < 0.2:
        return ".csv", "a,label\n1,Malmö\n2,Malmø\n3,Malmö\n".encode(
            draw.choice(["utf-8", "utf-8-sig", "latin-1"])
        )
    header = ["a", "label"] if draw.random() < 0.6 else draw.choices(NAMES, k=draw.randint(0, 4))
    lines = [header] + [draw.choices(CELLS, k=len(header)) for _ in range(draw.randrange(ROWS))]
    if draw.random() < 0.5:
        lines = [header] + [[str(draw.randrange(9)), str(draw.randrange(2))] for _ in range(ROWS)]
        lines[draw.randrange(len(lines))] = draw.choices(CELLS, k=draw.randint(1, 3))
    if draw.random() < 0.5:
        lines = [['"' + cell.replace('"', '""') + '"' for cell in line] for line in lines]
    text = draw.choice(["\n", "\r\n", "\r"]).join(",".join(line) for line in lines)
    encoding = draw.choice(
        ["utf-8", "utf-8", "utf-8-sig", "latin-1", "utf-16", "utf-16-le", "utf-32", "utf-7"]
    )
    return ".csv", text.encode(encoding, "replace")


def array(draw: Random) -> np.ndarray:
    """An array of any type and shape."""
    shape = draw.choice(
        [
            (),
            (0,),
            (ROWS,),
            (ROWS,),
            (ROWS, 2),
            (ROWS, 2),
            (0, 2),
            (ROWS, 0),
            (ROWS, 2, 2),
            (1, ROWS),
        ]
    )
    numbers = np.frombuffer(draw.randbytes(int(np.prod(shape, dtype=int))), np.uint8).reshape(shape)
    kind = draw.choice(TYPES)
    with np.errstate(all="ignore"):
        return (
            numbers.astype("S4").view("V4").reshape(shape) if kind == "V4" else numbers.astype(kind)
        )


def declaring(shape: str, kind: str = "<f4") -> bytes:
    """An .npy file of sixty bytes that declares any shape."""
    header = f"{{'descr': '{kind}', 'fortran_order': False, 'shape': {shape}, }}".ljust(117) + "\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header.encode() + bytes(8)


def zipped(entries: dict[str, bytes], method: int = zipfile.ZIP_DEFLATED) -> bytes:
    """A zip archive."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, "w", method) as archive:
        for name, content in entries.items():
            archive.writestr(name, content)
    return stream.getvalue()


def npz(draw: Random) -> tuple[str, bytes]:
    """An archive of good arrays, of any, of what declares too much, or of none."""
    stream = io.BytesIO()
    how = draw.randrange(6)
    good = {"inputs": np.arange(2.0 * ROWS).reshape(ROWS, 2), "targets": np.arange(ROWS) % 2}
    if how < 3:
        (np.savez_compressed if how else np.savez)(stream, **good)
        return ".npz", damaged(
            draw, stream.getvalue()
        ) if draw.random() < 0.8 else stream.getvalue()
    if how == 3:
        names = draw.sample(["inputs", "targets", "x", "y", "test_inputs", "y_test", "other"], 4)
        np.savez(
            stream,
            **{**(good if draw.random() < 0.5 else {}), **{name: array(draw) for name in names}},
        )
        return ".npz", stream.getvalue()
    if how == 4:
        shape = draw.choice(
            ["(10**12, 100)", "(1000000000000, 100)", "(-1,)", "(2, 1<<70)", "6", "()", "(" * 50]
        )
        entry = declaring(shape, draw.choice(["<f4", "O", "<U999999999", "|V0", "<f3"]))
        return ".npz", zipped({"inputs.npy": entry, "targets.npy": declaring("(2,)", "<i4")})
    np.save(stream, good["inputs"])
    return ".npz", draw.choice(
        [
            stream.getvalue(),
            b"",
            b"PK",
            zipped({}),
            zipped({"inputs": b"x", "targets.npy": b""}),
            draw.randbytes(99),
        ]
    )


def column(draw: Random) -> Any:
    """A column of any type."""
    import pyarrow as arrow

    kinds = {
        arrow.int64(): [1, None, 2**53 + 1],
        arrow.uint64(): [1, 2**64 - 1, None],
        arrow.float32(): [0.5, None, float("inf")],
        arrow.float16(): [np.float16(0.5), None, np.float16(1)],
        arrow.bool_(): [True, False, None],
        arrow.string(): ["a", None, "Malmö"],
        arrow.large_string(): ["a", "b", "x" * 9000],
        arrow.binary(): [b"a", b"\xf6", None],
        arrow.null(): [None, None, None],
        arrow.list_(arrow.int64()): [[1], None, []],
        arrow.struct([("a", arrow.int64())]): [{"a": 1}, None, {"a": None}],
        arrow.dictionary(arrow.int32(), arrow.string()): ["a", None, "b"],
    }
    if draw.random() < 0.4:
        numbers = arrow.array([draw.choice([0, 1, 2**40, -(2**62), 2**62]), None, 1], arrow.int64())
        return numbers.cast(
            draw.choice(
                [arrow.timestamp("us"), arrow.timestamp("ns"), arrow.timestamp("us", "UTC")]
            )
        )
    kind = draw.choice(list(kinds))
    if kind == arrow.string() and draw.random() < 0.5:
        return arrow.array(["1.5", "2", None]).cast(arrow.decimal128(9, 2))
    return arrow.array(kinds[kind], kind)


def table(draw: Random) -> tuple[str, bytes]:
    """A .parquet file of good columns or of any, whole or damaged."""
    import pyarrow as arrow
    import pyarrow.parquet as parquet

    stream = io.BytesIO()
    if draw.random() < 0.5:
        names = ["a", "b", "label"]
        columns = [arrow.array([1.5, 2, 3]), arrow.array(["x", "y", "z"]), arrow.array([0, 1, 0])]
    else:
        names = [*draw.choices(NAMES, k=draw.randint(1, 3)), "label"]
        columns = [column(draw) for _ in names]
    rows = draw.choice([0, 3, 3, 3])
    whole = arrow.Table.from_arrays([each.slice(0, rows) for each in columns], names=names)
    compression = draw.choice(["none", "snappy", "gzip", "zstd"])
    parquet.write_table(whole, stream, compression=compression, use_dictionary=draw.random() < 0.5)
    content = stream.getvalue()
    return ".parquet", damaged(draw, content) if draw.random() < 0.6 else content


def picture(draw: Random) -> tuple[str, bytes]:
    """A picture, whole or damaged, perhaps of another format than its name says."""
    mode = draw.choice(["L", "RGB", "RGBA", "P", "1", "I;16", "CMYK"])
    size = draw.choice([(5, 4), (5, 4), (5, 4), (1, 1), (400, 3), (5, 5)])
    drawn = (
        Image.frombytes(mode, size, draw.randbytes(8 * size[0] * size[1]))
        if mode != "1"
        else Image.new("1", size)
    )
    formats = {
        "PNG": ["L", "RGB", "RGBA", "P", "1", "I;16"],
        "JPEG": ["L", "RGB", "CMYK"],
        "BMP": ["L", "RGB", "1"],
    }
    formats |= {
        "WEBP": ["RGB", "RGBA"],
        "GIF": ["L", "P"],
        "TIFF": ["L", "RGB", "CMYK", "I;16"],
        "PPM": ["L", "RGB"],
    }
    formats |= {"EPS": ["RGB"], "TGA": ["RGB"], "PCX": ["RGB"]}
    kind = draw.choice([name for name, modes in formats.items() if mode in modes])
    stream = io.BytesIO()
    drawn.save(stream, kind)
    content = stream.getvalue()
    if kind == "PNG" and draw.random() < 0.3:  # a size that is not that of the pixels
        size = struct.pack(">II", *draw.choices([0, 1, 2**15, 2**16, 2**31 - 1, 2**32 - 1], k=2))
        content = content[:16] + size + content[24:]
    kept = draw.random() < 0.2
    return f"/cat/1{draw.choice(SUFFIXES)}", content if kept else damaged(draw, content)


KINDS: dict[str, Write] = {"csv": csv, "npz": npz, "parquet": table, "pictures": picture}
OPTIONS = [
    {},
    {},
    {"missing": "drop"},
    {"missing": "mean", "standardise": True},
    {"kind": "regression"},
    {"test": 0.0},
]
OPTIONS += [
    {"categorical": ["a"], "missing": "drop"},
    {"input": ["a"]},
    {"size": [3, 2]},
    {"target": "a"},
]


def client(draw: Random, write: Write, place: Path, name: str) -> Path:
    """One client's file in a directory; returns its path."""
    ending, content = write(draw)
    file = place / f"{name}{ending}"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(content)
    return file
