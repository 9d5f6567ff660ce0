"""Where the samples of each client are, in a directory with one file or directory per client."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from kairosfl.data.pictures import LABELS, is_picture
from kairosfl.errors import UserError

FILES = (".csv", ".npz", ".parquet")


@dataclass(frozen=True)
class Client:
    """Where the samples of a client are; without a name: test samples of no client."""

    name: str
    train: tuple[Path, ...]
    test: tuple[Path, ...] = ()


def _visible(place: Path) -> list[Path]:
    return sorted(entry for entry in place.iterdir() if not entry.name.startswith("."))


def _folders(entries: list[Path]) -> set[str]:
    """The names of those that are directories."""
    return {entry.name for entry in entries if entry.is_dir()}


def find_clients(place: Path) -> list[Client]:
    """The clients in a directory, sorted by name, and the test samples of no client last."""
    entries = _visible(place)
    if not entries:
        raise UserError(
            f"data.path is {str(place)!r}, which is empty; add one .npz, .csv or .parquet file per "
            "client."
        )
    names = _folders(entries)
    if "train" in names and names <= {"train", "test"} and len(names) == len(entries):
        return _in_both(place)

    # The files of each client; "" has the test samples of no client.
    files_of: dict[str, dict[str, list[Path]]] = {}
    for entry in entries:
        if entry.is_dir():
            files_of[entry.name] = _within(entry)
    for entry in entries:
        if entry.is_dir():
            continue
        name, split = _named(entry)
        files = files_of.setdefault(name, {"train": [], "test": []})[split]
        if files:
            both = f"{files[0].name} and {entry.name}"
            raise UserError(f"client {name!r} is {both}; rename one, or put both into {name}/.")
        files.append(entry)

    ownerless = files_of.pop("", None)
    clients = []
    for name, samples in sorted(files_of.items()):
        if not samples["train"]:
            where = samples["test"][0] if samples["test"] else place / name
            raise UserError(
                f"client {name!r} has no data to train on, only {where}; "
                "add training samples or move it out of the directory."
            )
        clients.append(Client(name, tuple(samples["train"]), tuple(samples["test"])))
    if ownerless is not None:
        clients.append(Client("", tuple(ownerless["train"]), tuple(ownerless["test"])))
    return clients


def _in_both(place: Path) -> list[Client]:
    """The clients in `train`, with the test samples that `test` has under the same names."""
    clients = find_clients(place / "train")
    tests: dict[str, tuple[Path, ...]] = {}
    if (place / "test").is_dir():
        for client in find_clients(place / "test"):
            tests[client.name] = client.train
    strangers = sorted(tests.keys() - {client.name for client in clients})
    if strangers:
        where = place / "test" / strangers[0]
        raise UserError(
            f"{where} has no training samples in {place / 'train'}; add some, or name it as there."
        )
    return [replace(client, test=tests.get(client.name, ())) for client in clients]


def _named(file: Path) -> tuple[str, str]:
    """Whose samples a file has, and for what: `ann.csv` and `ann.train.csv`, or `ann.test.csv`."""
    if file.suffix.lower() not in FILES:
        raise UserError(
            f"{file} is not a .csv, .npz or .parquet file; move it out of the directory."
        )
    name, _, split = file.stem.rpartition(".")
    if name and split in ("train", "test"):
        return name, split
    if file.stem == "test":
        return "", "test"
    return file.stem, "train"


def _within(place: Path) -> dict[str, list[Path]]:
    """What a client's directory has: files, or pictures, perhaps in `train` and `test`."""
    entries = _visible(place)
    names = _folders(entries)
    files: dict[str, list[Path]] = {"train": [], "test": []}
    if "train" in names and names <= {"train", "test"}:
        for split in sorted(names, reverse=True):  # "train" first
            files[split] = _within(place / split)["train"]
        return files
    if names or any(map(is_picture, entries)):
        files["train"] = [place]
        return files
    for entry in entries:
        if entry.suffix.lower() not in FILES:
            raise UserError(
                f"{entry} is not a .csv, .npz or .parquet file or a picture; "
                "move it out of the directory."
            )
    for entry in entries:
        if entry.name != LABELS:
            is_test = entry.stem == "test" or entry.stem.endswith(".test")
            files["test" if is_test else "train"].append(entry)
    return files
