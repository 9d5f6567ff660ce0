"""Shakespeare: next-character prediction, one client with its own test data per speaking role."""

from __future__ import annotations

import json
import string
from pathlib import Path

import numpy as np
import numpy.typing as npt

from kairosfl.data.fetch import Download
from kairosfl.data.files import File, content, damaged, data_folder, read_text
from kairosfl.data.plays import roles
from kairosfl.data.store import Arrays, arrays, split
from kairosfl.errors import UserError
from kairosfl.tasks.dataset import DataSet

ROLES = File("shakespeare/clients.json")
WORKS = File("shakespeare/100-0.txt")
DOWNLOAD = Download("https://www.gutenberg.org/files/100/100-0.txt", "", WORKS.path)

# 80 symbols: letters, digits, line end, space and this punctuation, in ASCII order
SYMBOLS = "".join(sorted(string.ascii_letters + string.digits + "\n " + "!\"&'(),-.:;>?[]}"))
PLAIN = str.maketrans({"‘": "'", "’": "'", "“": '"', "”": '"', "—": "-", "–": "-", "\t": " "})
LENGTH = 80
TEST_SHARE = 5  # the last 1/5 of the samples of a role are for testing


def shakespeare(*, stride: int = 10) -> DataSet:
    """Shakespeare's plays: 80 characters and the one that follows.

    There is a sample every `stride` characters. The last fifth of a role's samples is its test
    data; roles too short for one sample of each kind are left out. Roles come from `clients.json`
    (role to text) if it exists, otherwise from Project Gutenberg's eBook 100.
    """
    if stride < 1:
        raise UserError(f"data.stride is {stride}; give at least 1 character.")
    has_roles = (data_folder() / ROLES.path).is_file()

    def convert(root: Path) -> Arrays:
        if has_roles:
            texts = read_roles(root / ROLES.path)
        else:
            texts = _roles_of_works(root / WORKS.path)
        return _windows(texts, stride)

    files = [ROLES if has_roles else WORKS]
    converted, hashes = arrays("shakespeare", files, [DOWNLOAD], convert, {"stride": stride})
    names = tuple(converted["names"].tolist())
    return DataSet(
        "shakespeare",
        split(converted, "train"),
        split(converted, "test"),
        len(SYMBOLS),
        vocabulary=len(SYMBOLS),
        labels=tuple(SYMBOLS),
        keys=converted["keys"],
        test_keys=converted["test_keys"],
        key_names=names,
        hashes=hashes,
        notes={"roles": len(names), "characters": int(converted["characters"][0])},
    )


def encode(text: str) -> npt.NDArray[np.uint8]:
    """Ids 0..79 of the characters of a text.

    Typographic quotes and dashes become ASCII, unknown characters a space.
    """
    codes = np.frombuffer(text.translate(PLAIN).encode("utf-32-le", "surrogatepass"), "<u4")
    table = np.full(128, SYMBOLS.index(" "), dtype=np.uint8)
    table[[ord(symbol) for symbol in SYMBOLS]] = np.arange(len(SYMBOLS), dtype=np.uint8)
    ids: npt.NDArray[np.uint8] = table[np.where(codes < 128, codes, ord(" "))]
    return ids


def read_roles(path: Path) -> dict[str, str]:
    """Read a JSON object that maps roles to texts."""
    try:
        loaded = json.loads(content(path))
    except (ValueError, RecursionError) as error:
        raise damaged(path, f"it is not valid JSON ({error})") from None
    if not isinstance(loaded, dict) or not all(isinstance(text, str) for text in loaded.values()):
        raise damaged(path, "it is not a JSON object that maps roles to texts")
    return loaded


def _roles_of_works(path: Path) -> dict[str, str]:
    texts = roles(read_text(path))
    if not texts:
        raise damaged(path, "it contains no plays")
    return texts


def _windows(texts: dict[str, str], stride: int) -> Arrays:
    """Samples of every role: windows of 81 characters, of which the last is the target."""
    kept = []
    characters = 0
    blocks: dict[str, list[npt.NDArray[np.uint8]]] = {"train": [], "test": []}
    keys: dict[str, list[int]] = {"train": [], "test": []}
    for name, text in texts.items():
        ids = encode(text)
        if len(ids) < LENGTH + 1 + stride:  # fewer than two samples
            continue
        windows = np.lib.stride_tricks.sliding_window_view(ids, LENGTH + 1)[::stride]
        tests = max(1, len(windows) // TEST_SHARE)
        for part, block in (("train", windows[:-tests]), ("test", windows[-tests:])):
            blocks[part].append(block)
            keys[part].append(len(block))
        kept.append(name)
        characters += len(ids)
    converted: Arrays = {"names": np.array(kept), "characters": np.array([characters])}
    for part, suffix in (("train", "keys"), ("test", "test_keys")):
        joined = np.concatenate(blocks[part] or [np.empty((0, LENGTH + 1), np.uint8)])
        converted[f"{part}_inputs"] = np.ascontiguousarray(joined[:, :LENGTH])
        converted[f"{part}_targets"] = joined[:, LENGTH].astype(np.int64)
        converted[suffix] = np.repeat(np.arange(len(kept)), keys[part])
    return converted
