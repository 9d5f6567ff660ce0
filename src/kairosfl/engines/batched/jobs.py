"""Jobs, each one client's brief prepared for a slot, and tickets, a cohort's jobs and their results
so far.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from functools import cache, reduce
from operator import or_
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kairosfl.client.local import all_hidden
from kairosfl.core.fields import AFTER, REALS, SQUARED_LOSS, Briefs, Reports, reals
from kairosfl.core.streams import word
from kairosfl.engines.batched.rows import RowLayout
from kairosfl.engines.batched.schedule import Draw, Schedule, Schedules
from kairosfl.engines.batched.scoring import Measured
from kairosfl.engines.batched.state import Kind, Real, Sum, Whole, upload
from kairosfl.errors import UserError
from kairosfl.tasks.task import Task

# Flags of a kind that say whether a real number of the brief is not zero.
NONZERO = {
    "decay": Real.weight_decay,
    "pull": Real.pull,
    "momentum": Real.momentum,
    "contrast": Real.contrast,
    "sam": Real.radius,
    "mislabel": Real.label_noise,
}


@dataclass(eq=False)
class Ticket:
    """A cohort in training. `reals` and `numbers` are columns of the slots as clients begin, `ends`
    as they end.
    """

    task: Task
    briefs: Briefs
    delta: Tensor  # [m, d], filled as clients finish
    left: int  # clients that have not finished
    jobs: list[Job] = field(default_factory=list)  # until all have finished
    n: Tensor = field(init=False)  # [m] samples
    reals: Tensor = field(init=False)  # [reals, m] float64, on the engine's device as the next two
    numbers: Tensor = field(init=False)  # [wholes and sums, m] int64, the sums as bits of float64
    ends: Tensor = field(init=False)  # as `numbers`; apart, since a client may have to begin again
    order: Tensor = field(init=False)  # [m, longest]: samples of all epochs, one by one
    own: Tensor | None = None  # [m, e]: the clients' own parts as they begin
    own_ends: Tensor | None = None  # [m, e]: and as they end
    first: Ticket | None = None  # which came before it, only with their own parts
    then: Ticket | None = None  # what follows for these clients: this only trains their own parts
    rows: list[int] = field(default_factory=list)  # which of its clients they are
    before: Measured | None = None  # what was measured before training, if requested
    after: dict[str, Tensor] = field(default_factory=dict)  # [m] float64, filled as clients finish
    ready: torch.cuda.Event | None = None  # recorded when the device has filled all this
    answer: Reports | None = (
        None  # once it is known; from the loop, where the model cannot be stacked
    )
    began: float = field(default_factory=time.perf_counter)

    @classmethod
    def of(cls, task: Task, briefs: Briefs) -> Ticket:
        """A ticket before training."""
        m, start = len(briefs), briefs.start
        length = 0 if briefs.measures_only() else start.shape[-1]
        delta = torch.empty(m, length, dtype=start.dtype, device=start.device)
        return cls(task, briefs, delta, left=m)

    def prepare(self, schedule: Schedule, device: torch.device) -> None:
        """Prepare its clients for slots."""
        briefs, clients = self.briefs, self.briefs.ids.tolist()
        batch = self.briefs.batch_size.clamp(
            max=self.task.clients.largest
        ).tolist()  # beyond that all would be padding
        count, total = schedule.batches, schedule.batches * schedule.epochs
        if briefs.max_steps is not None:
            total = np.minimum(total, briefs.max_steps.numpy())
        real = reals(briefs)
        lengths, kinds = (schedule.end * schedule.epochs).tolist(), _kinds(briefs, batch, real)
        rows = zip(
            clients,
            schedule.mine,
            batch,
            count.tolist(),
            total.tolist(),
            lengths,
            kinds,
            strict=True,
        )
        self.jobs = [Job(self, row, *each) for row, each in enumerate(rows)]
        self.n, self.order = torch.from_numpy(schedule.n.astype(np.int64)), schedule.order
        numbers = np.zeros((len(Whole) + len(Sum) + len(REALS), len(clients)), dtype=np.int64)
        wholes, floats = numbers[: len(Whole)], numbers[len(Whole) :].view(np.float64)
        wholes[Whole.TOTAL], wholes[Whole.SIZE], wholes[Whole.END] = (
            total,
            schedule.size,
            schedule.end,
        )
        wholes[Whole.BATCHES], wholes[Whole.CLIENT] = count, clients
        wholes[Whole.LATE], wholes[Whole.LABELS] = briefs.clip_after, word(briefs.seed, "labels")
        if self.task.varies:
            versions = briefs.round.tolist()
            keys = {version: word(briefs.seed, "augment", version) for version in set(versions)}
            wholes[Whole.CROPS] = [keys[version] for version in versions]
        if schedule.drops:
            wholes[Whole.DROPS] = schedule.drops
        if briefs.stop_below is not None:
            wholes[Whole.STOPS] = ~briefs.stop_below.isnan()  # some may not be told
            wholes[Whole.LEAST] = briefs.stop_statistic == "min"
            wholes[Whole.AT_ONCE] = briefs.stop_per == "batch"
        floats[Sum.SIMILARITY] = 1.0  # before the first comparison
        floats[len(Sum) :] = real.T
        there = upload(numbers, device)
        self.numbers, self.reals = there[: -len(REALS)], there[-len(REALS) :].view(torch.float64)
        self.ends = torch.empty_like(self.numbers)
        if briefs.own is not None:
            self.own = briefs.own.to(device, briefs.start.dtype, copy=True)
            self.own_ends = torch.empty_like(self.own)

    def opening(self, schedules: Schedules, device: torch.device) -> Ticket:
        """What comes first: a cohort of the clients of which the own part trains alone for a while,
        or this one, if there are none.
        """
        alone = self.briefs.own_epochs
        if alone is None:
            return self
        rows = torch.nonzero((alone > 0) & (self.briefs.epochs > 0)).flatten()
        if not len(rows):
            return self
        shared = frozenset(range(len(self.task.layout.entries)))
        briefs = replace(
            self.briefs.take(rows),
            epochs=alone[rows],
            own_epochs=None,
            still=shared,
            max_steps=None,
            stop_below=None,
            stop_reference=None,
            contrast=torch.zeros(len(rows), dtype=torch.float64),
            previous=None,
            measure=frozenset(),
        )
        delta = self.delta.new_empty(len(rows), 0)  # what clients share does not move
        first = Ticket(self.task, briefs, delta, len(rows), then=self, rows=rows.tolist())
        draw = Draw.of(self.task, briefs)._replace(phase="own ")
        first.prepare(schedules(draw), device)
        longest = max(job.length for job in self.jobs)
        for job in first.jobs:  # slots that take them will take what follows
            job.length = max(job.length, longest)
        return first

    def hand_over(self) -> Ticket:
        """The cohort that follows, which begins with the own parts that this one ended with."""
        following = self.then
        self.then = None
        assert following is not None
        assert following.own is not None
        assert self.own_ends is not None
        following.own[upload(self.rows, following.own.device)] = self.own_ends
        # The device has not done this yet: what it reads stays until that cohort is collected.
        following.first = self
        return following

    def make_room_for_scores(self, device: torch.device) -> None:
        """For what its clients measure after training."""
        for name in self.briefs.measure.intersection(AFTER):
            self.after[name] = torch.empty(len(self.briefs), dtype=torch.float64, device=device)

    def take(
        self, rows: Tensor | slice, layout: RowLayout, weights: Tensor, numbers: Tensor
    ) -> None:
        """The results of some of its clients."""
        self.ends[:, rows] = numbers
        if self.own_ends is not None:
            end = self.own_ends.new_empty(len(weights), self.own_ends.shape[1])
            layout.own_part.unpack(weights[:, layout.shared_part.width :], end)
            self.own_ends[rows] = end
        if not self.delta.shape[1]:
            return
        layout, weights = layout.shared_part, weights[:, : layout.shared_part.width]
        start = self.briefs.start
        there = rows if isinstance(rows, slice) else rows.to(start.device)
        delta = (
            self.delta[there]
            if isinstance(there, slice)
            else self.delta.new_empty(len(there), self.delta.shape[1])
        )
        layout.subtract(weights, start if start.ndim == 1 else start[there], delta)
        if not isinstance(there, slice):
            self.delta[there] = delta

    def finish(self, clients: int) -> bool:
        """Whether the cohort is complete now that so many more of its clients are."""
        self.left -= clients
        if not self.left:
            # they refer back to the ticket: without them its memory is freed with the last
            # reference
            self.jobs = []
        return not self.left

    def reports(self) -> Reports:
        """The cohort's reports; waits for the device."""
        if self.answer is not None:
            return self.answer
        numbers = self.ends.cpu().numpy()  # one wait for the device
        wholes, sums = numbers[: len(Whole)], numbers[len(Whole) :].view(np.float64)
        steps, batches = wholes[Whole.POSITION], wholes[Whole.BATCHES]
        idle = steps == 0  # told to measure while others train: what training gives is NaN
        columns = {
            "epochs": steps // batches + steps % batches / batches,
            "loss": sums[Sum.LOSS] / np.maximum(wholes[Whole.SAMPLES], 1),
            "grad_sq": sums[Sum.GRAD_SQ],
            "seconds": np.full(
                len(self.n), (time.perf_counter() - self.began) / max(1, len(self.n))
            ),
        }
        if self.briefs.stop_below is not None:
            silent = idle | (wholes[Whole.STOPS] == 0)
            columns["similarity"] = np.where(silent, np.nan, sums[Sum.SIMILARITY])
        if SQUARED_LOSS in self.briefs.measure:
            first = np.minimum(steps * wholes[Whole.SIZE], wholes[Whole.END])  # epoch's samples
            squared = sums[Sum.SQUARED] / np.maximum(first, 1)
            columns[SQUARED_LOSS] = np.where(idle, np.nan, squared)
        made = torch.from_numpy(np.stack([*columns.values()])).unbind()
        reported: dict[str, Any] = dict(zip(columns, made, strict=True))
        if self.before is not None:
            reported |= self.before.reported()
        for name, values in self.after.items():
            reported[name] = values.cpu().where(torch.from_numpy(~idle), torch.nan)
        reports = Reports(
            ids=self.briefs.ids,
            n=self.n,
            steps=torch.from_numpy(steps.copy()),
            delta=self.delta,
            own=self.own_ends,
            **reported,
        )
        self.answer = all_hidden(reports, self.briefs)
        return self.answer


@dataclass(eq=False, slots=True)
class Job:
    """One client in a ticket."""

    ticket: Ticket
    row: int  # in the ticket
    client: int
    mine: np.ndarray  # its samples
    batch: int
    batches: int  # in an epoch
    total: int  # steps
    length: int  # samples in all epochs
    kind: Kind  # what its step needs
    slot: int = -1
    done: int = 0  # steps launched
    limit: int = 0  # steps to launch, as far as the host knows


def joint(jobs: Iterable[Job]) -> Kind:
    """A kind of step that suits all of these clients."""
    kinds = [job.kind for job in jobs]
    return reduce(
        or_, dict(zip(map(id, kinds), kinds, strict=True)).values()
    )  # from a cache; hashing takes longer


def cohorts(jobs: Iterable[Job]) -> dict[Ticket, list[Job]]:
    """These clients by their tickets."""
    found: dict[Ticket, list[Job]] = {}
    for job in jobs:
        found.setdefault(job.ticket, []).append(job)
    return found


def _kinds(briefs: Briefs, batch: list[int], numbers: np.ndarray) -> list[Kind]:
    """What each client's step needs, from its batch size and the real numbers of its brief."""
    everyone = {
        "push": briefs.push is not None,
        "stop": briefs.stop_below is not None,
        "reference": briefs.stop_reference is not None,
        "adamw": briefs.optimizer == "adamw",
        "squared": SQUARED_LOSS in briefs.measure,
    }
    always = tuple(name for name, asked in everyone.items() if asked)
    clips = numbers[:, Real.clip] < np.inf
    some = [clips, clips & briefs.clip_after, *(numbers[:, list(NONZERO.values())] != 0).T]
    rows = list(zip(batch, *(flags.tolist() for flags in some), strict=True))
    still = briefs.still or frozenset()
    made = {row: _kind(always, still, *row) for row in set(rows)}
    return [made[row] for row in rows]


@cache
def _kind(always: tuple[str, ...], still: frozenset[int], batch: int, *flags: bool) -> Kind:
    """The kind with the flags in `always`, and those that are true of clip, late and `NONZERO`."""
    names = (name for name, flag in zip(("clip", "late", *NONZERO), flags, strict=True) if flag)
    return Kind(1, batch, still=still, **dict.fromkeys((*always, *names), True))


def check_alike(task: Task, own: Task) -> None:
    """Refuse a task whose clients cannot train together with those of an engine's own task."""
    alike = {
        "model": repr(task.model) == repr(own.model) and task.layout == own.layout,
        "frozen part of the model": task.base_hash == own.base_hash,
        "data set": task.dataset.train is own.dataset.train,
        "loss": task.loss is own.loss,
        "augmentation": task.augment == own.augment,
    }
    for what, same in alike.items():
        if not same:
            raise UserError(
                f"A task with another {what} cannot share this engine: give it an engine of its own."
            )
