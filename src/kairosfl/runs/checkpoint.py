"""Checkpoints: the whole of a `Run` in safetensors plus JSON, and of the client rows only those that changed.

A checkpoint is `checkpoint-000040.json`, which names every file it needs with its checksum, `state-000040.safetensors`
(the model, the states, and where each client row lies) and the `rows-*.safetensors` written since the first one. The
JSON is renamed into place last, so a checkpoint is whole or it is not there. The last two are kept.
"""

from __future__ import annotations

import json
import zlib
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from kairosfl.core.round import Run
from kairosfl.core.table import Table
from kairosfl.detectors import Signals
from kairosfl.errors import UserError
from kairosfl.runs.files import write, write_json

KEPT = 2


@dataclass
class Checkpoints:
    """The checkpoints of one run folder. Remembers where every row lies and which files are whole."""

    folder: Path
    places: list[dict[int, tuple[str, int]]] = field(default_factory=list)  # per table: client -> (file, row)
    sums: dict[str, int] = field(default_factory=dict)  # checksum of every file that is in use

    def save(self, run: Run, about: dict[str, Any]) -> None:
        """Write a checkpoint of the run as it stands between two rounds."""
        self.places = self.places or [{} for _ in run.tables]
        mark = f"{run.round:06d}"
        rows = self._rows_file(run, f"rows-{mark}.safetensors")
        tensors = {"x": run.x}
        tensors |= {f"state.{i}.{name}": value for i, state in enumerate(run.states) for name, value in state.items()}
        files = sorted({file for places in self.places for file, _ in places.values()})
        for i, (table, places) in enumerate(zip(run.tables, self.places, strict=True)):
            tensors[f"table.{i}.ids"] = torch.tensor(table.ids, dtype=torch.int64)
            tensors[f"table.{i}.file"] = torch.tensor([files.index(places[c][0]) for c in table.ids], dtype=torch.int64)
            tensors[f"table.{i}.row"] = torch.tensor([places[c][1] for c in table.ids], dtype=torch.int64)
        state = f"state-{mark}.safetensors"
        self._write(state, tensors)
        for table in run.tables:
            table.written.clear()
        write_json(
            self.folder / f"checkpoint-{mark}.json",
            {
                "round": run.round,
                "seed": run.seed,
                "idle": run.idle,
                "signals": asdict(run.signals),
                "about": about,
                "rows": files,
                "sums": {name: self.sums[name] for name in {state, *files, *rows}},
            },
        )
        self._tidy()

    def load(self, blank: Run) -> tuple[Run, list[str]]:
        """The newest whole checkpoint put into a blank run, and a line for each broken one that was passed over."""
        passed: list[str] = []
        for path in sorted(self.folder.glob("checkpoint-*.json"), reverse=True):
            try:
                return self._load(path, blank), passed
            except (OSError, ValueError, KeyError, TypeError, SafetensorError, RuntimeError) as error:
                passed.append(f"{path.name} is broken ({error}); trying the one before it")
        raise UserError(f"{self.folder} holds no whole checkpoint to resume from; start the run again.")

    def _rows_file(self, run: Run, name: str) -> list[str]:
        """Write the rows that changed, and those of old files in which little is still alive."""
        tensors: dict[str, Tensor] = {}
        for i, (table, places) in enumerate(zip(run.tables, self.places, strict=True)):
            clients = sorted(table.written | self._stale(places))
            if not clients:
                continue
            stacked = table.rows(torch.tensor(clients, dtype=torch.int64))
            tensors |= {f"{i}.{key}": value for key, value in stacked.items()}
            places.update({client: (name, row) for row, client in enumerate(clients)})
        if not tensors:
            return []
        self._write(name, tensors)
        return [name]

    def _stale(self, places: dict[int, tuple[str, int]]) -> set[int]:
        """Clients whose rows are the last few in a file: move them on, so that disk use stays within a small factor."""
        alive: dict[str, list[int]] = {}
        written: dict[str, int] = {}
        for client, (file, row) in places.items():
            alive.setdefault(file, []).append(client)
            written[file] = max(written.get(file, 0), row + 1)
        return {c for file, clients in alive.items() if 4 * len(clients) < written[file] for c in clients}

    def _write(self, name: str, tensors: dict[str, Tensor]) -> None:
        whole = {key: value.detach().cpu().contiguous() for key, value in tensors.items()}
        write(self.folder / name, lambda path: save_file(whole, path))
        self.sums[name] = _checksum(self.folder / name)

    def _tidy(self) -> None:
        """Remove what no kept checkpoint needs."""
        notes = sorted(self.folder.glob("checkpoint-*.json"))
        for old in notes[:-KEPT]:
            old.unlink()
        needed = {name for note in notes[-KEPT:] for name in json.loads(note.read_text())["sums"]}
        for file in [*self.folder.glob("state-*.safetensors"), *self.folder.glob("rows-*.safetensors")]:
            if file.name not in needed:
                file.unlink()
                self.sums.pop(file.name, None)

    def _load(self, path: Path, blank: Run) -> Run:
        note = json.loads(path.read_text())
        for name, checksum in note["sums"].items():
            if _checksum(self.folder / name) != checksum:
                raise ValueError(f"{name} is damaged")
        tensors = load_file(self.folder / f"state-{note['round']:06d}.safetensors")
        tables, places = [], []
        for i, table in enumerate(blank.tables):
            table = Table(table.default)
            ids = tensors[f"table.{i}.ids"]
            table.reserve(ids)
            where = list(zip(tensors[f"table.{i}.file"].tolist(), tensors[f"table.{i}.row"].tolist(), strict=True))
            for number, name in enumerate(note["rows"]):
                mine = [slot for slot, (file, _) in enumerate(where) if file == number]
                if mine:
                    rows = torch.tensor([where[slot][1] for slot in mine])
                    table.write(ids[mine], _read_rows(self.folder / name, i, rows, table))
            table.written.clear()
            tables.append(table)
            places.append({c: (note["rows"][f], r) for c, (f, r) in zip(ids.tolist(), where, strict=True)})
        self.places, self.sums = places, dict(note["sums"])
        signals: dict[str, Any] = {k: float("nan") if v is None else v for k, v in note["signals"].items()}
        return replace(
            blank,
            seed=note["seed"],
            round=note["round"],
            idle=note["idle"],
            signals=Signals(**signals),
            x=tensors["x"].to(blank.x.device),
            states=_states(tensors, blank.states),
            tables=tuple(tables),
            writes=tuple(table.writes for table in tables),
        )


def about(checkpoints: Path) -> dict[str, Any]:
    """What the newest readable checkpoint says about its run, without loading any tensor."""
    for path in sorted(checkpoints.glob("checkpoint-*.json"), reverse=True):
        try:
            note: dict[str, Any] = json.loads(path.read_text())
            return note
        except json.JSONDecodeError:
            continue
    return {}


def _states(tensors: dict[str, Tensor], blank: tuple[dict[str, Tensor], ...]) -> tuple[dict[str, Tensor], ...]:
    found: list[dict[str, Tensor]] = [{} for _ in blank]
    for key, value in tensors.items():
        if key.startswith("state."):
            _, i, name = key.split(".", 2)
            like = blank[int(i)].get(name)
            found[int(i)][name] = value.to(like.device) if like is not None else value
    return tuple(found)


def _read_rows(path: Path, rule: int, rows: Tensor, table: Table) -> dict[str, Tensor]:
    with safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(f"{rule}.{name}")[rows].to(value.device) for name, value in table.default.items()}


def _checksum(path: Path) -> int:
    checksum = 0
    with path.open("rb") as handle:
        while block := handle.read(1 << 22):
            checksum = zlib.crc32(block, checksum)
    return checksum
