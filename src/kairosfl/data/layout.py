"""Where the samples of each client are: the layouts of a directory with one file or directory per
client.
"""

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
    return sorted(each for each in place.iterdir() if not each.name.startswith("."))


def find_clients(place: Path) -> list[Client]:
    """The clients in a directory, sorted by name, and the test samples of no client last."""
    entries = _visible(place)
    if not entries:
        raise UserError(
            f"data.path is {str(place)!r}, which is empty; add one .npz, .csv or .parquet file per client."
        )
    names = {each.name for each in entries if each.is_dir()}
    if "train" in names and names <= {"train", "test"} and len(names) == len(entries):
        own = find_clients(place / "train")
        tests = (
            {client.name: client.train for client in find_clients(place / "test")}
            if "test" in names
            else {}
        )
        strangers = sorted(tests.keys() - {client.name for client in own})
        if strangers:
            where = place / "test" / strangers[0]
            raise UserError(
                f"{where} has no training samples in {place / 'train'}; add some, or name it as there."
            )
        return [replace(client, test=tests.get(client.name, ())) for client in own]
    found: dict[str, dict[str, list[Path]]] = {}
    for entry in sorted(entries, key=lambda each: not each.is_dir()):
        if entry.is_dir():
            found[entry.name] = _within(entry)
            continue
        if entry.suffix.lower() not in FILES:
            raise UserError(
                f"{entry} is not a .csv, .npz or .parquet file; move it out of the directory."
            )
        name, _, split = entry.stem.rpartition(".")
        if split not in ("train", "test") or not name:
            name, split = ("", "test") if entry.stem == "test" else (entry.stem, "train")
        files = found.setdefault(name, {"train": [], "test": []})[split]
        if files:
            both = f"{files[0].name} and {entry.name}"
            raise UserError(f"client {name!r} is {both}; rename one, or put both into {name}/.")
        files.append(entry)
    clients = []
    for name, samples in sorted(found.items(), key=lambda pair: (not pair[0], pair[0])):
        if name and not samples["train"]:
            where = samples["test"][0] if samples["test"] else place / name
            raise UserError(
                f"client {name!r} has no data to train on, only {where}; "
                "add training samples or move it out of the directory."
            )
        clients.append(Client(name, tuple(samples["train"]), tuple(samples["test"])))
    return clients


def _within(place: Path) -> dict[str, list[Path]]:
    """What a client's directory has: files, or pictures, perhaps in `train` and `test`."""
    entries = _visible(place)
    names = {each.name for each in entries if each.is_dir()}
    if "train" in names and names <= {"train", "test"}:
        return {
            split: _within(place / split)["train"] if split in names else []
            for split in ("train", "test")
        }
    if names or any(is_picture(each) for each in entries):
        return {"train": [place], "test": []}
    wrong = next((each for each in entries if each.suffix.lower() not in FILES), None)
    if wrong is not None:
        raise UserError(
            f"{wrong} is not a .csv, .npz or .parquet file or a picture; move it out of the directory."
        )
    files = [each for each in entries if each.name != LABELS]
    tests = [each for each in files if each.stem == "test" or each.stem.endswith(".test")]
    return {"train": [each for each in files if each not in tests], "test": tests}
