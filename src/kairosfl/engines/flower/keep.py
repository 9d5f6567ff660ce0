"""What a client keeps on its device: one file for every run and client, which no message carries.

The file has the last order that the client trained on, what it kept before and after it, and the
report. So an order that comes twice, since a server, a SuperLink or a node was started again, is
answered without training twice, and what is kept moves once. An order of that round with other
terms, or of an earlier round, comes from a server that went back to a checkpoint: it starts from
what was kept before.

The file is replaced as a whole, after what replaces it is on the disk.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from kairosfl.core.fields import Brief, Briefs, Field, Report, fields
from kairosfl.engines.flower.wire import ANSWERED, TOLD
from kairosfl.errors import UserError
from kairosfl.tasks.task import Task

PLACE = "KAIROSFL_KEPT"  # the folder of these files
MARK = re.compile(r"[0-9a-f]{16}")  # what a server draws for a run, and a folder is named after
KEPT = tuple(entry for entry in fields(Briefs) if entry.kept)
NUMBERS = {int: torch.int64, float: torch.float64}
FORMAT = "1"
BEFORE, AFTER, DELTA = "before.", "after.", "delta"  # names in the file

Kept = Mapping[str, Tensor]


def place() -> Path:
    """`KAIROSFL_KEPT`, or a folder for state in the home directory."""
    if os.environ.get(PLACE):
        return Path(os.environ[PLACE])
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "kairosfl" / "kept"


@dataclass(frozen=True)
class Visit:
    """The last order that a client trained on."""

    round: int
    order: str  # digest of the brief
    before: Kept
    after: Kept
    report: Report

    def kept(self, round: int) -> Kept:
        """What an order of this round starts from."""
        if round > self.round:
            return self.after
        return self.before


class Store:
    """The file of one client in one run.

    Args:
        run: The mark of the run.
        client: The client's id.
        layout: The hash of the layout of the model.
    """

    def __init__(self, run: str, client: int, layout: str) -> None:
        if not MARK.fullmatch(run):
            raise UserError(f"the mark of the server's run, {run[:40]!r}, is not of 16 hex digits.")
        self.client = client
        self.path = place() / run / f"client-{client}.safetensors"
        self.marks = {"format": FORMAT, "run": run, "client": str(client), "layout": layout}

    def read(self) -> Visit | None:
        """The last visit; None before the first."""
        try:
            with safe_open(self.path, "pt") as file:
                about: dict[str, str] = file.metadata() or {}
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except FileNotFoundError:
            return None
        except SafetensorError:
            raise self._put_aside() from None
        except OSError as error:
            raise UserError(f"{self.path} cannot be read: {error.strerror}.") from None
        self._check_marks(about)
        if about.get("sum") != _sum(about, tensors):
            raise self._put_aside()
        numbers = json.loads(about["report"])
        return Visit(
            round=int(about["round"]),
            order=about["order"],
            before=_named(BEFORE, tensors),
            after=_named(AFTER, tensors),
            report=Report(delta=tensors[DELTA], **numbers),
        )

    def write(self, visit: Visit) -> None:
        """Replace the file; when this returns, the new one is on the disk."""
        tensors = {DELTA: _apart(visit.report.delta)}
        for prefix, kept in ((BEFORE, visit.before), (AFTER, visit.after)):
            for name, tensor in kept.items():
                tensors[prefix + name] = _apart(tensor)
        answers = {entry.row: getattr(visit.report, entry.row) for entry in ANSWERED}
        about = {
            **self.marks,
            "round": str(visit.round),
            "order": visit.order,
            "report": json.dumps(answers),
        }
        about["sum"] = _sum(about, tensors)
        try:
            _replace(self.path, save(tensors, about))
        except OSError as error:
            raise UserError(
                f"what client {self.client} keeps cannot be written to {self.path}: "
                f"{error.strerror}; its update is not sent."
            ) from None

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """One process at a time follows orders of this client in this run."""
        try:
            import fcntl
        except ImportError:  # not on this system, where a node is not resident either
            yield
            return
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with self.path.with_suffix(".lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def _check_marks(self, about: Mapping[str, str]) -> None:
        """Refuse a file that was written for something else, and copied here."""
        for name, mark in self.marks.items():
            if about.get(name) != mark:
                raise UserError(
                    f"{self.path} has the {name} {about.get(name)}, not {mark}: "
                    "it belongs elsewhere; remove it, and the client starts anew."
                )

    def _put_aside(self) -> UserError:
        """Keep a damaged file for whoever wants to look at it; what to say of it."""
        aside = self.path.with_suffix(".damaged")
        with contextlib.suppress(OSError):
            os.replace(self.path, aside)
        return UserError(
            f"what client {self.client} kept is damaged and is now {aside.name}; "
            "it skips this order and starts from its first part with the next one."
        )


def visit(store: Store, brief: Brief, task: Task, train: Callable[[Brief], Report]) -> Report:
    """The report on a brief: the one in the file, or of training with what the client keeps.

    Args:
        store: Where the client keeps it.
        brief: The order, as it came.
        task: Has the own part before the first visit.
        train: What a trainer does with a brief.
    """
    last = store.read()
    order = digest(brief)
    kept: Kept = {}
    if last is not None:
        if brief.round == last.round and order == last.order:
            return last.report
        kept = last.kept(brief.round)
    report = train(replace(brief, **_told(kept, brief, task)))  # type: ignore[type-var]
    if brief.epochs:
        after = {**kept, **_moved(report)}
        store.write(Visit(brief.round, order, kept, after, report))
    return report


def digest(brief: Brief) -> str:
    """Of everything that a client was told."""
    parts = hashlib.sha256()
    for entry in TOLD:
        term = getattr(brief, entry.row)
        if isinstance(term, Tensor):
            parts.update(f"{entry.row} {list(term.shape)} {term.dtype}\n".encode())
            parts.update(_bytes(term))
        elif isinstance(term, frozenset):
            parts.update(f"{entry.row} {sorted(term)}\n".encode())
        else:
            parts.update(f"{entry.row} {term!r}\n".encode())
    return parts.hexdigest()


def _told(kept: Kept, brief: Brief, task: Task) -> dict[str, Any]:
    """The kept fields of a brief: what was kept last, or what they are before the first visit."""
    terms: dict[str, Any] = {}
    for entry in KEPT:
        if entry.name not in kept:
            terms[entry.row] = _first(entry, brief, task)
        elif entry.number:
            terms[entry.row] = kept[entry.name].item()
        else:
            terms[entry.row] = kept[entry.name]
    return terms


def _first(entry: Field, brief: Brief, task: Task) -> Any:
    """What is kept before the first visit."""
    if entry.first == "model":
        return brief.start
    if entry.shape == "own":
        return task.own_start()
    if entry.shape == "vector":
        return torch.full_like(brief.start, float(entry.first))
    return entry.first


def _moved(report: Report) -> dict[str, Tensor]:
    """What a report says is kept from now on."""
    moved = {}
    for entry in KEPT:
        kept = getattr(report, entry.row)
        if isinstance(kept, Tensor):
            moved[entry.name] = kept
        elif kept is not None:
            moved[entry.name] = torch.tensor(kept, dtype=NUMBERS[entry.kind])
    return moved


def _named(prefix: str, tensors: Kept) -> dict[str, Tensor]:
    """The tensors whose names begin so, without that beginning."""
    named = {}
    for name, tensor in tensors.items():
        if name.startswith(prefix):
            named[name.removeprefix(prefix)] = tensor
    return named


def _apart(tensor: Tensor) -> Tensor:
    """A tensor on the CPU that shares its memory with no other, as the file needs it."""
    return tensor.detach().cpu().clone(memory_format=torch.contiguous_format)


def _sum(about: Mapping[str, str], tensors: Kept) -> str:
    """A checksum of everything in the file."""
    parts = hashlib.sha256()
    for name in sorted(about.keys() - {"sum"}):
        parts.update(f"{name} {about[name]}\n".encode())
    for name in sorted(tensors):
        tensor = tensors[name]
        parts.update(f"{name} {list(tensor.shape)} {tensor.dtype}\n".encode())
        parts.update(_bytes(tensor))
    return parts.hexdigest()


def _bytes(tensor: Tensor) -> Any:
    """What a digest reads."""
    return tensor.detach().cpu().contiguous().numpy()


def _replace(path: Path, content: bytes) -> None:
    """Put a file in the place of another, so that a crash leaves one of them, complete."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    temporary = path.with_suffix(".part")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    if hasattr(os, "O_DIRECTORY"):  # the new name, too, is to survive a power cut
        folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
