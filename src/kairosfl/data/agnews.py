"""AG News: headlines and first sentences of four classes, as tokens of a fixed length."""

from __future__ import annotations

import csv
import io
import re
import zlib
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kairosfl.data.fetch import Download
from kairosfl.data.files import File, damaged, read_text
from kairosfl.data.store import Arrays, arrays, split
from kairosfl.errors import UserError
from kairosfl.tasks.dataset import DataSet

BASE = "https://raw.githubusercontent.com/mhjabreel/CharCnn_Keras/master/data/"
TRAIN = File("ag_news_csv/train.csv", "b1a00f826fdfbd249f79597b59e1dc12", 29470338)
TEST = File("ag_news_csv/test.csv", "d52ea96a97a2d943681189a97654912d", 1857427)
LABELS = ("World", "Sports", "Business", "Sci/Tech")
WORD = re.compile(r"[a-z0-9]+(?:'[a-z]+)?")
BYTES = 257  # one token per byte value, plus padding


def agnews(*, tokens: str = "words", length: int = 64, vocabulary: int = 8192) -> DataSet:
    """AG News: 120,000 training and 7,600 test texts, of title and description.

    They are truncated or padded to `length` tokens. Tokens are `words`, hashed to `vocabulary` ids,
    or `bytes` (257 ids). Id 0 is padding.
    """
    if tokens not in ("words", "bytes"):
        raise UserError(f"data.tokens is {tokens!r}; give 'words' or 'bytes'.")
    if length < 1:
        raise UserError(f"data.length is {length}; give at least 1 token.")
    if tokens == "bytes":
        vocabulary = BYTES
    elif vocabulary < 2:
        raise UserError(f"data.vocabulary is {vocabulary}; give at least 2: padding and one word.")

    def encode(text: str) -> list[int]:
        if tokens == "bytes":
            return encode_bytes(text)
        return encode_words(text, vocabulary)

    def convert(root: Path) -> Arrays:
        converted: Arrays = {}
        for part, file in (("train", TRAIN), ("test", TEST)):
            classes, texts = read_csv(root / file.path)
            converted[f"{part}_inputs"] = pad(list(map(encode, texts)), length)
            converted[f"{part}_targets"] = np.array(classes, dtype=np.int64)
        return converted

    downloads = [Download(BASE + file.path, file.md5, file.path) for file in (TRAIN, TEST)]
    options = {"tokens": tokens, "length": length, "vocabulary": vocabulary}
    converted, hashes = arrays("agnews", [TRAIN, TEST], downloads, convert, options)
    train = split(converted, "train")
    test = split(converted, "test")
    return DataSet("agnews", train, test, 4, vocabulary=vocabulary, labels=LABELS, hashes=hashes)


def read_csv(path: Path) -> tuple[list[int], list[str]]:
    """Classes (0..3) and texts from a file with the columns class (1..4), title, description."""
    reader = csv.reader(io.StringIO(read_text(path), newline=""), strict=True)
    classes = []
    texts = []
    try:
        for row in reader:
            if len(row) != 3:
                raise damaged(path, f"line {reader.line_num} has {len(row)} columns instead of 3")
            if row[0] not in ("1", "2", "3", "4"):
                raise damaged(
                    path, f"line {reader.line_num} has class {row[0]!r} instead of 1 to 4"
                )
            classes.append(int(row[0]) - 1)
            texts.append(f"{row[1]} {row[2]}".strip())
    except csv.Error as error:
        raise damaged(path, f"line {reader.line_num} is malformed ({error})") from None
    return classes, texts


def encode_words(text: str, vocabulary: int) -> list[int]:
    """Ids 1..vocabulary-1 of the words in a text, by a checksum that is the same everywhere."""
    return [1 + zlib.crc32(word.encode()) % (vocabulary - 1) for word in WORD.findall(text.lower())]


def encode_bytes(text: str) -> list[int]:
    """Ids 1..256 of the bytes of a text."""
    return [1 + byte for byte in text.encode()]


def pad(encoded: list[list[int]], length: int) -> npt.NDArray[np.int64]:
    """Tokens [n, length]: longer lists are truncated, shorter ones padded with 0."""
    out = np.zeros((len(encoded), length), dtype=np.int64)
    for row, ids in zip(out, encoded, strict=True):
        row[: len(ids)] = ids[:length]
    return out
