"""Slots: waiting clients move in, those in training are kept at the front, finished ones move out.

A step acts on the first `width` slots. Widths come in a few sizes, so that few steps have to be
captured; one of them is the usual number of clients. A finished client stays until its cohort is
complete or its slot is needed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from kairosfl.engines.batched.jobs import Job, Ticket, cohorts, joint
from kairosfl.engines.batched.state import Kind, State, Whole, places

Retire = Callable[[Ticket, list[Job]], None]
POLL = 8  # steps between two checks of clients that may stop at any batch


def widths(slots: int) -> list[int]:
    """1 to 8, then four sizes for every doubling, and the number of slots: few slots are wasted,
    few steps captured.
    """
    sizes, size = [], 1
    while size < slots:
        sizes.append(size)
        size += max(1, 2 ** (size.bit_length() - 3))
    return [*sizes, slots]


class Slots:
    """The jobs in a state's slots and those that wait."""

    def __init__(
        self,
        state: State,
        waiting: deque[Job],
        run: Callable[[Kind, int], None],
        *,
        fixed: bool,
        usual: int,
    ) -> None:
        self.state = state
        self.waiting = waiting
        self.jobs: list[Job | None] = [None] * state.slots
        self._run = run  # takes a number of steps of a kind
        self._fixed = fixed  # always all slots: the same operations whichever clients train
        self._any = state.device.type == "cpu"
        self._widths = sorted({*widths(state.slots), min(usual, state.slots)})
        self._looks: deque[tuple[Tensor, torch.cuda.Event | None, list[Job | None]]] = deque()

    def active(self) -> list[int]:
        """Slots whose clients still train, as far as the host knows."""
        return [
            slot for slot, job in enumerate(self.jobs) if job is not None and job.done < job.limit
        ]

    def advance(self, retire: Retire) -> None:
        """Move clients in and out and train until some have finished; `retire` is called for them."""
        self._settle(retire)
        active = self.active()
        if not active:
            return
        jobs = [job for job in (self.jobs[slot] for slot in active) if job is not None]
        count, kind = min(map(self._ahead, jobs)), joint(jobs)
        self.state.moved |= kind.momentum or kind.adamw
        self._run(kind.wide(self._width(active[-1] + 1)), count)
        for job in jobs:
            job.done += count
        self._poll(kind.stop)

    def _ahead(self, job: Job) -> int:
        """Steps until the host has to check this client again."""
        left = job.limit - job.done
        briefs = job.ticket.briefs
        if briefs.stop_below is None:
            return left
        return min(
            left, POLL if briefs.stop_per == "batch" else job.batches - job.done % job.batches
        )

    def _width(self, used: int) -> int:
        if self._fixed:
            return self.state.slots
        # Nothing is captured on a CPU, so any width will do.
        return used if self._any else next(size for size in self._widths if size >= used)

    def _poll(self, stops: bool) -> None:
        """Ask the device which clients have stopped; the answer is read one round of steps later,
        without waiting.
        """
        if stops:
            totals = self.state.wholes[Whole.TOTAL]
            event = None
            if totals.is_cuda:
                answer = torch.empty(totals.shape, dtype=totals.dtype, pin_memory=True)
                answer.copy_(totals, non_blocking=True)
                event = torch.cuda.Event()
                event.record()
            else:
                answer = totals.clone()
            self._looks.append((answer, event, list(self.jobs)))
        while self._looks and len(self._looks) > (1 if self.active() else 0):
            answer, event, asked = self._looks.popleft()
            if event is not None:
                event.synchronize()
            for job, total in zip(asked, answer.tolist(), strict=True):
                if job is not None and job.kind.stop:
                    job.limit = min(job.limit, total)

    def _settle(self, retire: Retire) -> None:
        """Move complete cohorts out and waiting clients in; keep those in training at the front."""
        finished = cohorts(job for job in self.jobs if job is not None and job.done >= job.limit)
        if self.jobs.count(None) >= len(
            self.waiting
        ):  # only cohorts without clients that train or wait
            finished = {
                ticket: mine for ticket, mine in finished.items() if len(mine) == ticket.left
            }
        for ticket, mine in finished.items():
            retire(ticket, mine)
            for job in mine:
                self.jobs[job.slot] = None
        if self.waiting:
            self._fill()
        self._close()

    def _fill(self) -> None:
        free = [slot for slot, job in enumerate(self.jobs) if job is None]
        coming: list[Job] = []
        training = (self.jobs[slot] for slot in self.active())
        kinds = [job.kind for job in training if job is not None]
        while len(coming) < len(free) and self.waiting:
            kind = self.waiting[0].kind
            if kind not in kinds:
                if self._fixed and kinds:
                    # a step of another kind has other operations and may differ in the last bits
                    break
                if not all(kind.meets(other) for other in kinds):
                    break
                kinds.append(kind)
            coming.append(self.waiting.popleft())
        for slot, job in zip(free, coming, strict=False):
            self.jobs[slot] = job
            job.slot, job.done, job.limit = slot, 0, job.total
        self._load(coming)

    def _load(self, coming: Sequence[Job]) -> None:
        state = self.state
        for ticket, mine in cohorts(coming).items():
            here = places([job.slot for job in mine], state.device)
            rows = places([job.row for job in mine], state.device)
            state.order[here, : ticket.order.shape[1]] = ticket.order[rows]
            state.reals[:, here] = ticket.reals[:, rows].to(state.dtype)
            state.numbers[:, here] = ticket.numbers[:, rows]
            if state.moved:
                state.v[here] = 0
            self._load_vectors(here, mine)

    def _load_vectors(self, here: slice | Tensor, jobs: list[Job]) -> None:
        """The model-sized rows of some clients of one cohort.

        Every client is compared with some model, if only with its own start and weight 0: at zero
        weights a model may give NaN, and 0 · NaN is NaN.
        """
        state, ticket = self.state, jobs[0].ticket
        briefs = ticket.briefs
        rows, needs = [job.row for job in jobs], joint(jobs).needs()

        def chosen(vectors: Tensor, own: Tensor | None = briefs.own) -> Tensor:
            """Of these clients, with this for their own part: as they were told, if nothing else."""
            picked = vectors if vectors.ndim == 1 else vectors[places(rows, vectors.device)]
            picked = picked.to(state.device, state.dtype)
            if own is None:
                return picked
            part = own[places(rows, own.device)].to(state.device, state.dtype)
            return torch.cat([picked.expand(len(rows), -1), part], 1)

        start = chosen(briefs.start, ticket.own)
        state.fill(state.w, here, start)
        if "anchor" in needs or "anchor" in state.extra:
            if (
                "anchor" not in state.extra
            ):  # also for clients in training, which may now be compared with it
                state.rows("anchor").copy_(state.w)
            state.fill(state.rows("anchor"), here, start)
        if "push" in needs and briefs.push is not None:
            nothing = None if ticket.own is None else torch.zeros_like(ticket.own)
            push = chosen(briefs.push, nothing)
            if (
                briefs.push_after
            ):  # momentum that begins with push, and gradients that keep it there
                state.fill(state.v, here, push)
                state.moved = True
                push = push * (1 - briefs.momentum[rows]).to(push)[:, None]
            state.fill(state.rows("push"), here, push)
        elif "push" in state.extra:
            state.extra["push"][here] = 0
        if "previous" in needs and briefs.previous is not None:
            if "previous" not in state.extra:
                state.rows("previous").copy_(state.rows("anchor"))
            previous, compared = chosen(briefs.previous), briefs.contrast[rows] != 0
            if not compared.all():
                previous = torch.where(compared.to(state.device)[:, None], previous, start)
            state.fill(state.rows("previous"), here, previous)
        elif "previous" in state.extra:
            state.fill(state.rows("previous"), here, start)
        if briefs.stop_reference is not None:
            if "reference" not in state.extra:  # the others use their start
                state.rows("reference").copy_(state.rows("anchor"))
            state.fill(state.rows("reference"), here, chosen(briefs.stop_reference))
        elif "reference" in state.extra:
            state.fill(state.rows("reference"), here, start)
        for name in needs & {"second", "here"}:
            state.rows(name)
        if "second" in state.extra:
            state.extra["second"][here] = 0

    def _close(self) -> None:
        """Move the clients in training to the front if a smaller width then suffices."""
        active = self.active()
        count = len(active)
        if not active or self._width(count) == self._width(active[-1] + 1):
            return
        last = [slot for slot in active if slot >= count]
        gaps = sorted(set(range(count)) - set(active))
        self.state.swap(gaps, last)
        for gap, slot in zip(gaps, last, strict=True):
            self.jobs[gap], self.jobs[slot] = self.jobs[slot], self.jobs[gap]
            for place in (gap, slot):
                if (job := self.jobs[place]) is not None:
                    job.slot = place
