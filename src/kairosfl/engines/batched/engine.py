"""Engine `batched`: clients of one run or of many trained side by side, on a GPU or, for tiny models, a CPU."""

from __future__ import annotations

import gc
import time
import warnings
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from operator import attrgetter

import numpy as np
import torch
from torch import Tensor

from kairosfl.client.trainer import Trainer
from kairosfl.core.fields import AFTER, BEFORE, FISHER, FISHER_SAMPLED, Briefs, Reports
from kairosfl.engines.batched.captured import capture, end_capture
from kairosfl.engines.batched.evaluator import GraphEvaluator, plain, single
from kairosfl.engines.batched.graphs import Steps
from kairosfl.engines.batched.jobs import Job, Ticket, joint
from kairosfl.engines.batched.layers import Unstackable, line
from kairosfl.engines.batched.memory import SERVER_VECTORS, affordable, home
from kairosfl.engines.batched.schedule import Draw, Schedules
from kairosfl.engines.batched.scoring import scores
from kairosfl.engines.batched.slots import Slots, widths
from kairosfl.engines.batched.stack import stack
from kairosfl.engines.batched.state import State, places, upload
from kairosfl.engines.batched.step import Work
from kairosfl.engines.choices import Cache
from kairosfl.engines.evaluate import Evaluator, Scores
from kairosfl.engines.loop import one_by_one
from kairosfl.engines.memory import available
from kairosfl.engines.precision import Precision
from kairosfl.errors import UserError
from kairosfl.tasks.dataset import Samples
from kairosfl.tasks.task import Task

FIXED_SLOTS = 16  # used if results must not depend on which other clients train
PASS = 1 << 28  # numbers moved out of the slots at a time
AHEAD = 0.02  # seconds of work left queued on the device while the caller is busy


class Batched(Evaluator):
    """Trains as `Loop` does, many clients at a time. `why` says how the model is run.

    The servers have room for the vectors of `room` clients; `home` is the host if one cohort's vectors are more than
    the device should hold.

    Args:
        task: What is learnt.
        device: Where clients train.
        precision: "float32", "tf32" or "bfloat16"; by default "tf32" on a GPU.
        slots: How many clients train at the same time, by default as many as memory allows.
        deterministic: Whether that number is fixed, so that a client's result does not depend, to the bit, on which
            other clients train at the same time.
        cohorts: The largest cohort of each run that will train here.
    """

    def __init__(
        self,
        task: Task,
        device: torch.device | str = "cpu",
        *,
        precision: str | None = None,
        slots: int | None = None,
        deterministic: bool = False,
        cohorts: Sequence[int] = (1,),
    ) -> None:
        if slots is not None and slots < 1:
            raise UserError(f"run.slots = {slots} must be 1 or more.")
        self.trainer = Trainer(task, torch.device(device))
        super().__init__(task, self.trainer.device, self.trainer.predict)
        self.precision = Precision.of(precision, self.device)
        if self.device.type == "cuda" and not deterministic:
            self.choices.cache = Cache.of(self.device, self.precision)
        size = task.layout.size * self.trainer.w.element_size()
        self.home, self.room, self._reserved = home(cohorts, size, self.device)
        self._fixed = deterministic
        self._limit = slots or (FIXED_SLOTS if deterministic else None)
        self._stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        self._alike = {task}
        self._steps: Steps | None = None
        self._slots: Slots | None = None
        self._waiting: deque[Job] = deque()
        self._done: deque[Ticket] = deque()
        self._work: Work | None = None
        self._begun: Ticket | None = None  # what `train` will be asked for
        self._overlaps = self._stream is not None  # the device trains while the host does something else
        self._free = 0  # bytes of the device that a server may still use before they are counted again
        way = plain(task, self.predict, self.precision)
        self._evaluator = (
            GraphEvaluator(task, self.test, way, self.precision, self.choices)
            if self._stream is not None and isinstance(self.test, Samples)
            else None
        )
        try:
            compute = self.precision.compute(self.trainer.w.dtype)
            stacked = stack(task.model, task.trial()[0], self.precision, self.device)
        except Unstackable as reason:
            self.why = self._alone(str(reason))
        else:
            stacked.frame.dot, stacked.frame.choices = self.precision.dot, self.choices
            stacked.frame.measures = not deterministic and self.device.type == "cuda"
            self._work = Work(stacked, task, self.trainer.data, compute)
            self._schedules = Schedules(self.device, stacked.drops)
            self.why = stacked.why + self._reading()
            if self._evaluator is not None and not deterministic:
                self._evaluator.other = single(self._work)

    def _reading(self) -> str:
        """What reading costs where samples are read for each batch; empty where they are in memory."""
        data = self.trainer.data
        if isinstance(data, Samples):
            return ""
        count, began = min(32, len(data)), time.perf_counter()
        data.read(slice(0, count))
        return f"; samples are read batch by batch, {1e3 * (time.perf_counter() - began) / count:.2g} ms each"

    def _alone(self, reason: str) -> str:
        """Train one client after another, on a GPU by captured graphs if possible; `why` says how and why."""
        if self.precision.name == "bfloat16":
            raise UserError(f"run.precision = 'bfloat16' needs a model that stacks, and here {reason}; use 'float32'.")
        how = "one client after another"
        if self.device.type == "cuda":
            try:
                with self.precision():
                    capture(self.trainer)
                how += ", batches as captured graphs"
            except Unstackable as further:
                self._evaluator = None  # it would capture, too
                reason += f"; it cannot be captured: {further}"
        return f"{how}: {reason}{self._reading()}"

    def start(self) -> Tensor:
        """The model before training, on the device that the servers use."""
        return self.task.start().to(self.home)

    @property
    def stacks(self) -> bool:
        """Whether clients really train side by side; `why` says why not."""
        return self._work is not None

    def evaluate(self, x: Tensor) -> Scores:
        """On the whole test set."""
        if self._evaluator is None:
            return super().evaluate(x)
        try:
            return self._evaluator(x)
        except torch.OutOfMemoryError:
            raise
        except Exception:  # the model waits for the device, which breaks a capture
            end_capture()
            self._evaluator = None
            return super().evaluate(x)

    def begin(self, briefs: Briefs) -> None:
        """On a GPU: start what `train` will be asked for next, so that it trains while the last round is evaluated.

        A cohort that is not asked for after all is trained in vain.
        """
        if self._overlaps and self._work is not None:
            self._begun = self.submit(self.task, briefs)
            with self._working():
                while self._idles():
                    self._advance()

    def train(self, briefs: Briefs) -> Reports:
        """One report per client."""
        begun, self._begun = self._begun, None
        ticket = begun if begun is not None and begun.briefs is briefs else self.submit(self.task, briefs)
        while self.collect() is not ticket:
            pass
        if self._work is not None:
            self._schedules.foresee(Draw.of(self.task, briefs))
        return ticket.reports()

    def train_many(self, cohorts: Sequence[tuple[Task, Briefs]]) -> list[Reports]:
        """The reports of several runs' cohorts, trained together; the runs share model and data, not partitions."""
        tickets = [self.submit(task, briefs) for task, briefs in cohorts]
        done: set[int] = set()
        while not all(id(ticket) in done for ticket in tickets):
            done.add(id(self.collect()))
        return [ticket.reports() for ticket in tickets]

    def submit(self, task: Task, briefs: Briefs) -> Ticket:
        """Queue a cohort; its clients take slots as they become free."""
        self.check(task)
        ticket = Ticket.of(task, briefs)
        if self._work is None:
            self.trainer.task = task  # of the same model and data
            ticket.answer = one_by_one(self.trainer, briefs, self.precision)
        else:
            ticket.prepare(self._schedules(Draw.of(task, briefs)), self.device)
            if self._stream is not None:
                self._stream.wait_stream(torch.cuda.current_stream(self.device))
            if briefs.measure:
                with self._working():
                    self._measure(ticket)
            self._waiting.extend(sorted(ticket.jobs, key=lambda job: -job.total))
        if not ticket.jobs:
            self._done.append(ticket)
        return ticket

    def collect(self) -> Ticket:
        """Train until a cohort is complete; cohorts submitted in the meantime share the slots.

        Some work stays queued on the device for the time until the caller returns.
        """
        with self._working():
            while not self._done or self._idles():
                if not self._training():
                    raise UserError("no cohort is in training: submit one before collecting.")
                self._advance()
        ticket = self._done.popleft()
        if ticket.ready is not None:
            torch.cuda.current_stream(self.device).wait_event(ticket.ready)
        self._make_room(len(ticket.briefs))
        return ticket

    def _make_room(self, clients: int) -> None:
        """Before a server processes this many reports: halve the slots if it would run out of memory.

        Its next cohort may be twice as large, as FedCL's are. Asking for the memory takes longer than a small round's
        arithmetic: what was free is counted down, and asked for again when it may be used up.
        """
        wanted = 2 * SERVER_VECTORS * clients * self.task.layout.size * self.trainer.w.element_size()
        if self._slots is None or self._asked == 1 or self._fixed or self.home.type != "cuda":
            return
        self._free -= wanted
        if self._free < wanted:
            self._free = available(self.device)
        if self._free < wanted:
            with self._working():
                self._shrink()

    def _shrink(self) -> None:
        self._limit = self._asked // 2
        self._close()

    def _training(self) -> bool:
        return bool(self._waiting) or (self._slots is not None and any(self._slots.jobs))

    def _idles(self) -> bool:
        """Whether the device would finish its queue before the caller returns, although there is more to do."""
        waits = self._overlaps and self._training()
        return waits and self._steps is not None and self._steps.queued() < AHEAD

    def check(self, task: Task) -> None:
        """Refuse a task whose clients cannot train together with those of the engine's own task."""
        if task in self._alike:
            return
        alike = {
            "model": repr(task.model) == repr(self.task.model) and task.layout == self.task.layout,
            "frozen part of the model": task.base_hash == self.task.base_hash,
            "data set": task.dataset.train is self.task.dataset.train,
            "loss": task.loss is self.task.loss,
            "augmentation": task.augment == self.task.augment,
        }
        for what, same in alike.items():
            if not same:
                raise UserError(f"A task with another {what} cannot share this engine: give it an engine of its own.")
        self._alike.add(task)

    @contextmanager
    def _working(self) -> Iterator[None]:
        """On the engine's own stream and in its precision; the caller's work runs concurrently."""
        with self.precision(), torch.cuda.stream(self._stream) if self._stream else nullcontext():
            yield

    def _measure(self, ticket: Ticket) -> None:
        """What the briefs request about the model before training."""
        briefs = ticket.briefs
        for row, brief in enumerate(briefs.each() if briefs.measure & {FISHER, FISHER_SAMPLED} else ()):
            mine = upload(ticket.jobs[row].mine.astype(np.int64), self.device)
            ticket.fishers.append(self.trainer.fisher(brief.start.to(self.device), mine, brief))
        if briefs.measure.intersection(BEFORE) and ticket.jobs:
            assert self._work is not None
            start = briefs.start.to(self.device).expand(len(briefs), -1)
            rows = self._work.stack.frame.layout.pack(start)
            for name in briefs.measure.intersection(BEFORE):
                ticket.scores[name] = scores(self._work, rows, [job.mine for job in ticket.jobs], name)
        for name in briefs.measure.intersection(AFTER):
            ticket.scores[name] = torch.empty(len(briefs), dtype=torch.float64, device=self.device)

    def _advance(self) -> None:
        """Train until something changes; if memory runs out, start again with half as many slots."""
        try:
            self._ready().advance(self._retire)
        except torch.OutOfMemoryError as error:
            if self._fixed:
                raise UserError(
                    f"run.slots = {self._asked} do not fit into memory, and a deterministic run needs all: set fewer."
                ) from error
            if self._asked == 1:
                raise
            self._shrink()
        except UserError:
            raise
        except Exception as error:  # what the trial did not show, such as an operation that fails at this batch size
            self._give_up(error)

    def _give_up(self, error: Exception) -> None:
        """Train the cohorts in the queue, and all later ones, one client after another."""
        self._close()
        waiting = list(dict.fromkeys(job.ticket for job in self._waiting))
        self._waiting.clear()
        self._work = None
        if self._evaluator is not None:
            self._evaluator.other = None
        self.why = self._alone(f"a training step of many clients failed ({line(error)})")
        warnings.warn(f"Clients train {self.why}.", stacklevel=2)
        for ticket in waiting:
            self.trainer.task = ticket.task
            ticket.answer, ticket.jobs = one_by_one(self.trainer, ticket.briefs, self.precision), []
            self._done.append(ticket)

    def _ready(self) -> Slots:
        """Slots for all clients that train or wait, as far as memory allows; replacing slots restarts their clients."""
        assert self._work is not None
        held = self._slots
        length = max((job.length for job in self._waiting), default=0)
        if held is not None:
            wanted = len(self._waiting) + len(held.jobs) - held.jobs.count(None)
            grows = wanted > held.state.slots and (self._limit is None or held.state.slots < self._limit)
            if not grows and length <= held.state.length:
                return held
            length = max(length, held.state.length)
            self._close()
        length = 1 << (length - 1).bit_length()
        dtype = self.trainer.w.dtype
        if self._limit is None:
            kind = joint(self._waiting)
            self._limit = affordable(self._work, kind, length, dtype, self.device, self._reserved)
        count = min(self._limit, next(size for size in widths(1 << 16) if size >= len(self._waiting)))
        self._asked, self._free = self._limit if self._fixed else count, 0
        state = State(self._work.stack.frame.layout, self._asked, length, dtype, self.device)
        self._steps = Steps(self._work, state)
        self._slots = Slots(state, self._waiting, self._steps, fixed=self._fixed)
        return self._slots

    def _close(self) -> None:
        """Free the slots' memory; their clients go to the head of the queue."""
        if self._slots is not None:
            self._waiting.extendleft(reversed([job for job in self._slots.jobs if job is not None]))
            self._slots = None
        if self._work is not None:
            self._work.stack.frame.close()
        if self.device.type == "cuda":
            self._steps = None
            gc.collect()
            torch.cuda.empty_cache()

    def _retire(self, cohorts: dict[Ticket, list[Job]]) -> None:
        """Move finished clients' results to their tickets."""
        assert self._slots is not None
        assert self._work is not None
        state, layout = self._slots.state, self._work.stack.frame.layout
        at_once = max(1, PASS // layout.width)
        for ticket, mine in cohorts.items():
            mine.sort(key=attrgetter("row"))
            for begin in range(0, len(mine), at_once):
                part = mine[begin : begin + at_once]
                here = places([job.slot for job in part], self.device)
                rows = places([job.row for job in part], self.device)
                w = state.w[here]
                ticket.take(rows, layout, w, state.numbers[:, here])
                for name in ticket.briefs.measure.intersection(AFTER):
                    ticket.scores[name][rows] = scores(self._work, w, [job.mine for job in part], name)
            if not ticket.left:
                ticket.ready = self._stream.record_event() if self._stream is not None else None
                self._done.append(ticket)
