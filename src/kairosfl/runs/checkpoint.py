"""Checkpoints: a complete `Run` in safetensors plus JSON; of the client rows, only those that
changed.

A checkpoint is `checkpoint-000040.json`, which names every file it needs with its checksum,
`state-000040.safetensors` (the model, the states, and where each client row is) and the
`rows-*.safetensors` written since the first one. The JSON is renamed into place last, so a
checkpoint is either complete or absent. The last two are kept.
"""

from __future__ import annotations

import json
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from kairosfl.core import flight as flights
from kairosfl.core.rule import Signals
from kairosfl.core.run import Run
from kairosfl.core.table import Table
from kairosfl.errors import UserError, first_line
from kairosfl.runs.files import read_json, write, write_json

KEPT = 2
EVERY = 10  # rounds between two checkpoints
SLOW, SHARE = 1.0, 0.1  # seconds that one may take, and the share of the time where it takes longer
T = TypeVar("T")


@dataclass
class Writing:
    """How long the checkpoints of all runs have taken that train side by side, in seconds."""

    seconds: float = 0.0


@dataclass
class Checkpoints:
    """The checkpoints of one run folder. Remembers where every row is and the checksums of the
    files.
    """

    folder: Path
    places: list[dict[int, tuple[str, int]]] = field(
        default_factory=list
    )  # per table: client -> (file, row)
    sums: dict[str, int] = field(default_factory=dict)  # checksum of every file that is in use
    took: float = 0.0  # seconds, by the last one
    ended: float = 0.0  # when it was complete
    # of this run and those beside it, and how much that was when the last one was complete
    writing: Writing = field(default_factory=Writing)
    before: float = 0.0

    def due(self, round: int, every: int) -> bool:
        """Whether to write one after this round: every `every` rounds.

        With 0, every ten, unless those of all runs would take more than a tenth of the time: the
        rows of a large cohort's control variates can be gigabytes.
        """
        if round % (every or EVERY):
            return False
        if every or self.took <= SLOW:
            return True
        others = self.writing.seconds - self.before
        return SHARE * (time.perf_counter() - self.ended) >= others + self.took

    def save(self, run: Run, about: dict[str, Any]) -> None:
        """Write a checkpoint of the run between two rounds."""
        if run.x.is_cuda:
            torch.cuda.synchronize(
                run.x.device
            )  # what was asked of it before is not part of the time
        began = time.perf_counter()
        self.places = self.places or [{} for _ in run.every_table]
        mark = f"{run.round:06d}"
        rows = self._rows_file(run, f"rows-{mark}.safetensors")
        tensors = {"x": run.x}
        if run.base is not None:
            tensors["base"] = run.base
        tensors |= {
            f"state.{i}.{name}": value
            for i, state in enumerate(run.states)
            for name, value in state.items()
        }
        in_flight, flight = flights.stored(run.flight, run.x)
        tensors |= in_flight
        files = sorted({file for places in self.places for file, _ in places.values()})
        for i, (table, places) in enumerate(zip(run.every_table, self.places, strict=True)):
            tensors[f"table.{i}.ids"] = torch.tensor(table.ids, dtype=torch.int64)
            tensors[f"table.{i}.file"] = torch.tensor(
                [files.index(places[c][0]) for c in table.ids], dtype=torch.int64
            )
            tensors[f"table.{i}.row"] = torch.tensor(
                [places[c][1] for c in table.ids], dtype=torch.int64
            )
        state = f"state-{mark}.safetensors"
        self._write(state, tensors)
        for table in run.every_table:
            table.written.clear()
        write_json(
            self.folder / f"checkpoint-{mark}.json",
            {
                "round": run.round,
                "seed": run.seed,
                "idle": run.idle,
                "time": run.time,
                **({"flight": flight} if len(run.flight) else {}),
                "signals": asdict(run.signals),
                "about": about,
                "rows": files,
                "sums": {name: self.sums[name] for name in {state, *files, *rows}},
            },
        )
        self._tidy()
        self.ended = time.perf_counter()
        self.took = self.ended - began
        self.writing.seconds += self.took
        self.before = self.writing.seconds

    def load(self, blank: Run) -> tuple[Run, list[str]]:
        """The newest intact checkpoint loaded into a blank run, and a line for each broken one that
        was skipped.

        Broken ones are renamed to `*.broken`, and their rounds are trained again.
        """
        (run, self.places, self.sums), passed = _newest(
            self.folder, lambda path: _load(path, blank)
        )
        for path, _ in passed:
            mark = path.stem.removeprefix("checkpoint-")
            for file in [
                path,
                *(each for each in self.folder.glob(f"*-{mark}.safetensors") if each.is_dir()),
            ]:
                with suppress(OSError):
                    file.rename(file.with_suffix(".broken"))
        return run, _skipped(passed)

    def _rows_file(self, run: Run, name: str) -> list[str]:
        """Write the rows that changed, and those of old files of which little is still in use."""
        tensors: dict[str, Tensor] = {}
        for i, (table, places) in enumerate(zip(run.every_table, self.places, strict=True)):
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
        """Clients whose rows are the last few in use of a file: moving them keeps disk use within a
        small factor.
        """
        alive: dict[str, list[int]] = {}
        written: dict[str, int] = {}
        for client, (file, row) in places.items():
            alive.setdefault(file, []).append(client)
            written[file] = max(written.get(file, 0), row + 1)
        return {
            c
            for file, clients in alive.items()
            if 4 * len(clients) < written[file]
            for c in clients
        }

    def _write(self, name: str, tensors: dict[str, Tensor]) -> None:
        whole = {key: value.detach().cpu().contiguous() for key, value in tensors.items()}
        write(self.folder / name, lambda path: save_file(whole, path))
        self.sums[name] = _checksum(self.folder / name)

    def _tidy(self) -> None:
        """Remove the files that no remaining checkpoint needs."""
        notes = [
            path for path in sorted(self.folder.glob("checkpoint-*.json")) if not path.is_dir()
        ]
        for old in notes[:-KEPT]:
            old.unlink()
        needed = {name for note in notes[-KEPT:] for name in read_json(note).get("sums", {})}
        for file in [
            *self.folder.glob("state-*.safetensors"),
            *self.folder.glob("rows-*.safetensors"),
        ]:
            if file.name not in needed and not file.is_dir():
                file.unlink()
                self.sums.pop(file.name, None)
        for file in self.folder.glob(".*.part"):  # of a process that was killed
            file.unlink()


Places = list[dict[int, tuple[str, int]]]


@dataclass(frozen=True)
class Note:
    """The JSON of a checkpoint, validated: its files exist and match their checksums."""

    round: int
    seed: int
    idle: int
    signals: dict[str, Any]
    rows: list[str]
    sums: dict[str, int]
    time: float = 0.0
    flight: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def read(cls, path: Path) -> Note:
        content = json.loads(path.read_bytes())
        if not isinstance(content, dict):
            raise ValueError("it does not hold a JSON object")
        content.setdefault("time", 0.0)  # checkpoints of 0.2 have none
        content.setdefault("flight", {})  # nor have those of runs without orders in flight
        for each in fields(cls):
            kind = {"int": int, "float": float, "dict": dict, "list": list}[
                str(each.type).partition("[")[0]
            ]
            if type(content.get(each.name)) is not kind:
                raise ValueError(f"its {each.name!r} is missing or has the wrong type")
        note = cls(**{each.name: content[each.name] for each in fields(cls)})
        if note.round < 0 or note.idle < 0 or path.name != f"checkpoint-{note.round:06d}.json":
            raise ValueError(f"it claims to be from round {note.round}, idle for {note.idle}")
        for name in (note.state, *note.rows):
            if name not in note.sums:
                raise ValueError(f"it has no checksum for {name}")
        for name, checksum in note.sums.items():
            if _checksum(path.parent / Path(name).name) != checksum:
                raise ValueError(f"{name} is damaged")
        return note

    @property
    def state(self) -> str:
        return f"state-{self.round:06d}.safetensors"


def _newest(folder: Path, read: Callable[[Path], T]) -> tuple[T, list[tuple[Path, str]]]:
    """What `read` returns for the newest checkpoint that it can read, and the newer ones with their
    faults.
    """
    passed: list[tuple[Path, str]] = []
    for path in sorted(folder.glob("checkpoint-*.json"), reverse=True):
        try:
            return read(path), passed
        except (MemoryError, torch.OutOfMemoryError):  # not the checkpoint's fault
            raise
        except Exception as error:  # whatever is wrong with it, the one before it may be intact
            passed.append((path, first_line(error)))
    why = f" ({'; '.join(f'{path.name}: {reason}' for path, reason in passed)})" if passed else ""
    raise UserError(f"{folder} has no intact checkpoint to resume from{why}; start the run again.")


def _load(path: Path, blank: Run) -> tuple[Run, Places, dict[str, int]]:
    note = Note.read(path)
    with _readable(path.parent / note.state) as file:
        tensors = load_file(file)
    if tensors["x"].shape != blank.x.shape or tensors["x"].dtype != blank.x.dtype:
        raise ValueError(f"its model is {_form(tensors['x'])}, the run's is {_form(blank.x)}")
    tables, places = [], []
    none = torch.empty(
        0, dtype=torch.int64
    )  # of a table that checkpoints did not have when this one was written
    for i, table in enumerate(blank.every_table):
        table = Table(table.default, table.allocate)
        stored = {part: tensors.get(f"table.{i}.{part}") for part in ("ids", "file", "row")}
        if i < len(blank.tables) and any(column is None for column in stored.values()):
            raise ValueError(f"its table.{i} is missing")
        ids, files, numbers = (none if column is None else column for column in stored.values())
        table.reserve(ids)
        where = list(zip(files.tolist(), numbers.tolist(), strict=True))
        for number, name in enumerate(note.rows):
            mine = [slot for slot, (file, _) in enumerate(where) if file == number]
            if mine:
                rows = torch.tensor([where[slot][1] for slot in mine])
                table.write(ids[mine], _read_rows(path.parent / name, i, rows, table))
        table.written.clear()
        tables.append(table)
        places.append({c: (note.rows[f], r) for c, (f, r) in zip(ids.tolist(), where, strict=True)})
    *by_rule, kept, counted = tables
    base = tensors.get("base")
    x = tensors["x"].to(blank.x.device)
    run = replace(
        blank,
        seed=note.seed,
        round=note.round,
        idle=note.idle,
        time=note.time,
        signals=_signals(note.signals),
        x=x,
        flight=flights.restored(tensors, note.flight, x),
        base=None if base is None else base.to(blank.x.device),
        states=_states(tensors, blank.states, blank.x),
        tables=tuple(by_rule),
        kept=kept,
        counted=counted,
        writes=tuple(table.writes for table in tables),
    )
    return run, places, dict(note.sums)


def _signals(content: dict[str, Any]) -> Signals:
    """The signals in a checkpoint's JSON; those of 0.2 had the values of two detectors under names
    of their own.
    """
    unknown = content.keys() - {"critical", "values", "elud", "coherence", "fgn", "fisher"}
    if unknown:
        raise ValueError(f"its signals have an unknown {sorted(unknown)[0]!r}")
    values = content.get("values")
    if values is None:
        values = {"fgn": content.get("fgn"), "fedfim": content.get("fisher")}
        values = {name: value for name, value in values.items() if value is not None}
    numbers = {name: _number(content.get(name)) for name in ("elud", "coherence")}
    return Signals(
        critical=bool(content.get("critical", True)),
        values={name: _number(value) for name, value in values.items()},
        **numbers,
    )


def _number(value: Any) -> float:
    return float("nan") if value is None else float(value)


def model(folder: Path) -> tuple[Tensor, int]:
    """The model in the newest intact checkpoint of a run folder, and the number of rounds it was
    trained.
    """

    def read(path: Path) -> tuple[Tensor, int]:
        note = Note.read(path)
        with _readable(path.parent / note.state) as name, safe_open(name, framework="pt") as file:
            return file.get_tensor("x"), note.round

    return _newest(folder / "checkpoint", read)[0]


def states(folder: Path) -> dict[int, dict[str, Tensor]]:
    """What every rule, then every detector remembers in the newest intact checkpoint of a run
    folder, by its number.
    """

    def read(path: Path) -> dict[int, dict[str, Tensor]]:
        note = Note.read(path)
        remembered: dict[int, dict[str, Tensor]] = {}
        with safe_open(path.parent / note.state, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118
                if key.startswith("state."):
                    _, number, name = key.split(".", 2)
                    remembered.setdefault(int(number), {})[name] = file.get_tensor(key)
        return remembered

    return _newest(folder / "checkpoint", read)[0]


def newest(checkpoints: Path, blank: Run) -> tuple[Run, list[str]]:
    """As `Checkpoints.load`, for a run that is not continued: nothing is renamed."""
    (run, _, _), passed = _newest(checkpoints, lambda path: _load(path, blank))
    return run, _skipped(passed)


def _skipped(passed: list[tuple[Path, str]]) -> list[str]:
    return [
        f"{path.name} is broken ({reason}); trying the one before it" for path, reason in passed
    ]


def rounds_done(checkpoints: Path) -> int | None:
    """The round of the newest readable checkpoint, without loading tensors; None if there is none."""
    for path in sorted(checkpoints.glob("checkpoint-*.json"), reverse=True):
        if type(round := read_json(path).get("round")) is int:
            return round
    return None


def _states(
    tensors: dict[str, Tensor], blank: tuple[dict[str, Tensor], ...], x: Tensor
) -> tuple[dict[str, Tensor], ...]:
    found: list[dict[str, Tensor]] = [{} for _ in blank]
    for key, value in tensors.items():
        if key.startswith("state."):
            _, i, name = key.split(".", 2)
            like = blank[int(i)].get(name)
            found[int(i)][name] = value.to(like.device) if like is not None else value
    for number, (state, mine) in enumerate(zip(blank, found, strict=True)):
        for name, like in state.items():
            # Tensors of other lengths than the model's may change their length from round to round.
            if name not in mine or (like.shape == x.shape and mine[name].shape != x.shape):
                form = _form(mine[name]) if name in mine else "missing"
                raise ValueError(f"its state.{number}.{name} is {form}, the run's is {_form(like)}")
    return tuple(found)


def _read_rows(path: Path, rule: int, rows: Tensor, table: Table) -> dict[str, Tensor]:
    with _readable(path) as name, safe_open(name, framework="pt") as file:
        found = {key: file.get_tensor(f"{rule}.{key}")[rows] for key in table.default}
    for name, default in table.default.items():
        # A default of one number may represent a vector, whose length is not known here.
        if found[name].dtype != default.dtype or (
            default.ndim and found[name].shape[1:] != default.shape
        ):
            raise ValueError(
                f"{path.name} has rows {_form(found[name])}, but a row is {_form(default)}"
            )
    return {name: value.to(table.default[name].device) for name, value in found.items()}


@contextmanager
def _readable(path: Path) -> Iterator[str]:
    """The name of a file for safetensors, which reads none that is not UTF-8."""
    if _is_utf8(path):
        yield str(path)
        return
    with path.open("rb") as file:
        yield f"/dev/fd/{file.fileno()}"


def _is_utf8(path: Path) -> bool:
    try:
        str(path).encode()
    except UnicodeEncodeError:
        return False
    return True


def _form(value: Tensor) -> str:
    return f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"


def _checksum(path: Path) -> int:
    checksum = 0
    with path.open("rb") as handle:
        while block := handle.read(1 << 22):
            checksum = zlib.crc32(block, checksum)
    return checksum
