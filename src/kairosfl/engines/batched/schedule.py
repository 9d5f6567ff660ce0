"""The samples that every client of a cohort trains on, in order: a round ahead if the cohort can be
guessed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Self

import numpy as np
import torch
from torch import Tensor

from kairosfl.core.fields import Briefs
from kairosfl.core.streams import Streams, drawn, word
from kairosfl.core.work import epoch_of
from kairosfl.engines.batched.ahead import Luck
from kairosfl.engines.batched.state import upload
from kairosfl.tasks.task import Task


class Draw(NamedTuple):
    """What a schedule depends on."""

    task: Task
    seed: int
    rounds: tuple[int, ...]  # each client's: the version of the model that it was sent
    clients: tuple[int, ...]
    batch: tuple[int, ...]
    epochs: tuple[int, ...]
    drop_last: bool
    phase: str = ""  # before the names of its random streams: "own " where own parts train alone

    @classmethod
    def of(cls, task: Task, briefs: Briefs) -> Self:
        return cls(
            task,
            briefs.seed,
            tuple(briefs.round.tolist()),
            tuple(briefs.ids.tolist()),
            tuple(briefs.batch_size.tolist()),
            tuple(briefs.epochs.tolist()),
            briefs.drop_last,
        )

    def next(self) -> Self:
        """The next round's if no rule selects its clients and they are told what these are."""
        coming, count = max(self.rounds, default=-1) + 1, len(self.clients)
        ids = drawn(self.seed, coming, len(self.task.clients), count)
        return self._replace(rounds=(coming,) * count, clients=tuple(ids.tolist()))


@dataclass(frozen=True)
class Schedule:
    """One entry or row per client."""

    mine: list[np.ndarray]  # its samples
    n: np.ndarray  # how many
    size: np.ndarray  # samples in a batch
    end: np.ndarray  # samples used in an epoch
    batches: np.ndarray  # in an epoch
    epochs: np.ndarray
    drops: list[int]  # keys of its dropout; empty if the model has none
    order: Tensor  # [m, longest] samples of all epochs, on the device

    @property
    def steps(self) -> int:
        """Of the client that takes most."""
        return int((self.batches * self.epochs).max(initial=0))


class Schedules:
    """The schedule of a draw. `foresee` works out the next round's while the device trains and the
    host would wait.
    """

    def __init__(self, device: torch.device, drops: bool) -> None:
        self._device, self._drops = device, drops
        self._streams = Streams()
        self._ahead: tuple[Draw, Schedule] | None = None
        self.luck = Luck()

    def __call__(self, draw: Draw) -> Schedule:
        ahead, self._ahead = self._ahead, None
        if ahead is not None and self.luck(ahead[0] == draw):
            return ahead[1]
        return self._made(draw)

    def foresee(self, draw: Draw) -> tuple[Draw, Schedule] | None:
        """Work out what follows this draw, unless rules select the clients."""
        if not self.luck:
            return None
        coming = draw.next()
        self._ahead = coming, self._made(coming)
        return self._ahead

    def _made(self, draw: Draw) -> Schedule:
        ids, owned = np.array(draw.clients, dtype=np.int64), draw.task.clients
        begin, stop = owned.offsets[ids], owned.offsets[ids + 1]
        mine = [owned.order[a:b] for a, b in zip(begin.tolist(), stop.tolist(), strict=True)]
        n, epochs = stop - begin, np.array(draw.epochs, dtype=np.int64)
        size, end, steps = epoch_of(
            n, np.array(draw.batch, dtype=np.int64), drop_last=draw.drop_last
        )
        drops = (
            [
                word(draw.seed, draw.phase + "dropout", version, client)
                for version, client in zip(draw.rounds, draw.clients, strict=True)
            ]
            if self._drops
            else []
        )
        order = upload(self._order(draw, mine, end.tolist()), self._device)
        return Schedule(mine, n, size, end, steps, epochs, drops, order)

    def _order(self, draw: Draw, mine: list[np.ndarray], ends: list[int]) -> np.ndarray:
        """The samples of every client in the order of `client.trainer.batches`, epoch after epoch."""
        longest = max(
            (end * times for end, times in zip(ends, draw.epochs, strict=True)), default=0
        )
        order = np.zeros((len(mine), longest), dtype=np.int64)
        for row, version, client, samples, end, times in zip(
            order, draw.rounds, draw.clients, mine, ends, draw.epochs, strict=True
        ):
            stream = self._streams(draw.seed, draw.phase + "batches", version, client)
            for begin in range(0, end * times, end):
                used = row[begin : begin + end]
                mixed = (
                    used if end == len(samples) else np.empty_like(samples)
                )  # more if the last batch is dropped
                mixed[:] = samples
                stream.shuffle(mixed)
                if mixed is not used:
                    used[:] = mixed[:end]
        return order
