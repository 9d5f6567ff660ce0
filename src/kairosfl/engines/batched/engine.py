"""Engine `batched`: clients of one run or of many trained side by side, on a GPU or, for tiny
models, a CPU.
"""

from __future__ import annotations

import gc
import time
import warnings
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import chain
from operator import attrgetter
from weakref import finalize

import torch
from torch import Tensor

from kairosfl.client.trainer import Trainer
from kairosfl.core.fields import AFTER, SQUARED_LOSS, Briefs, Reports
from kairosfl.engines.batched.ahead import Luck, averages, guessed, identical
from kairosfl.engines.batched.captured import capture, end_capture
from kairosfl.engines.batched.evaluator import GraphEvaluator, plain, single
from kairosfl.engines.batched.graphs import Steps
from kairosfl.engines.batched.jobs import Job, Ticket, check_alike, cohorts, joint
from kairosfl.engines.batched.layers import Unstackable, line
from kairosfl.engines.batched.memory import SERVER_VECTORS, affordable, home
from kairosfl.engines.batched.schedule import Draw, Schedules
from kairosfl.engines.batched.scoring import PASS, measure, measured_only, scores
from kairosfl.engines.batched.slots import Slots, widths
from kairosfl.engines.batched.stack import stack
from kairosfl.engines.batched.state import State, places
from kairosfl.engines.batched.step import Work
from kairosfl.engines.choices import Cache
from kairosfl.engines.evaluate import Evaluator, Scores
from kairosfl.engines.loop import one_by_one
from kairosfl.engines.memory import available
from kairosfl.engines.precision import Precision
from kairosfl.errors import UserError
from kairosfl.tasks.dataset import Samples
from kairosfl.tasks.streamed import reading
from kairosfl.tasks.task import Task

FIXED_SLOTS = 16  # used if results must not depend on which other clients train
# What briefs ask beyond plain training that is stacked; for the rest see `Briefs.alone`.
STACKED = frozenset({"max_steps", "still", "own", "own_epochs", SQUARED_LOSS, "epochs = 0"})
AHEAD = 0.02  # seconds of work left queued on the device while the caller is busy


class Batched(Evaluator):
    """Trains as `Loop` does, many clients at a time. `why` says how the model is run.

    The servers have room for the vectors of `room` clients; `home` is the host if one cohort's
    vectors are more than the device should hold.

    Args:
        task: What is learnt.
        device: Where clients train.
        precision: "float32", "tf32" or "bfloat16"; by default "tf32" on a GPU.
        slots: How many clients train at the same time, by default as many as memory allows.
        deterministic: Whether that number is fixed, so that a client's result does not depend, to
            the bit, on which other clients train at the same time.
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
        self._usual = sum(cohorts)
        self._fixed = deterministic
        self._limit = slots or (FIXED_SLOTS if deterministic else None)
        self._stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        if (
            self._stream is not None
        ):  # or memory would be used again while a cohort that nobody asked for still trains
            finalize(self, self._stream.synchronize)
        self._alike = {task}
        self._steps: Steps | None = None
        self._slots: Slots | None = None
        self._asked = 0  # slots that were asked for when they were last made
        self._waiting: deque[Job] = deque()
        self._done: deque[Ticket] = deque()
        self._work: Work | None = None
        self._begun: Ticket | None = None  # what `train` will, or may, be asked for next
        self._luck = Luck()  # of guesses what that is
        self._overlaps = (
            self._stream is not None
        )  # the device trains while the host does something else
        self._free = (
            0  # bytes of the device that a server may still use before they are counted again
        )
        way = plain(task, self.predict, self.precision)
        self._evaluator = (
            GraphEvaluator(task, self.test, way, self.precision, self.choices)
            if self._stream is not None and isinstance(self.test, Samples)
            else None
        )
        try:
            compute = self.precision.compute(self.trainer.w.dtype)
            inputs, _ = task.trial()
            stacked = stack(task.model, inputs, self.precision, self.device, task.own_names)
        except Unstackable as reason:
            self.why = self._alone(str(reason))
        else:
            stacked.frame.dot = self.precision.dot
            stacked.frame.choices = self.choices
            stacked.frame.measures = not deterministic and self.device.type == "cuda"
            self._work = Work(stacked, task, self.trainer.data, compute)
            self._schedules = Schedules(self.device, stacked.drops)
            self.why = stacked.why + reading(self.trainer.data)
            if self._evaluator is not None and not deterministic and not task.own:
                self._evaluator.other = single(self._work)

    def _alone(self, reason: str) -> str:
        """Train one client after another, on a GPU by captured graphs if possible; `why` says how
        and why.
        """
        if self.precision.name == "bfloat16":
            raise UserError(
                f"run.precision = 'bfloat16' needs a model that stacks, and here {reason}; use 'float32'."
            )
        how = "one client after another"
        if self.device.type == "cuda":
            try:
                with self.precision():
                    capture(self.trainer)
                how += ", batches as captured graphs"
            except Unstackable as further:
                self._evaluator = None  # it would capture, too
                reason += f"; it cannot be captured: {further}"
        return f"{how}: {reason}{reading(self.trainer.data)}"

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
        """On a GPU: start what `train` will be asked for next, so that it trains while the last
        round is evaluated.

        A cohort that is not asked for after all is trained in vain.
        """
        if self._overlaps and self._work is not None:
            self._begun = self._claim(briefs) or self.submit(self.task, briefs)
            with self._working():
                while self._idles():
                    self._advance()

    def train(self, briefs: Briefs) -> Reports:
        """One report per client."""
        ticket = self._claim(briefs) or self.submit(self.task, briefs)
        while self.collect() is not ticket:
            pass
        if self._work is not None and ticket.answer is None:
            self._look_ahead(ticket)
        return ticket.reports()

    def _look_ahead(self, ticket: Ticket) -> None:
        """While this cohort trains: put the next one's samples in order and, where rounds are
        short, begin with it.

        The device is then busy while the server works. A cohort that turns out to be another is
        trained in vain.
        """
        briefs, delta, steps = ticket.briefs, ticket.delta, self._steps
        coming = self._schedules.foresee(Draw.of(self.task, briefs))
        if coming is None or steps is None or self._training() or steps.expected(coming[1]) > AHEAD:
            return
        if not (
            self._overlaps
            and self._luck
            and self._schedules.luck.hit
            and averages(briefs, delta, self.device)
        ):
            return
        try:
            with torch.cuda.stream(self._stream) if self._stream else nullcontext():
                told = guessed(briefs, ticket.n, delta, coming[0].clients)
            if self._stream is not None:
                torch.cuda.current_stream(self.device).wait_stream(self._stream)
            self._begun = self.submit(self.task, told)
        except torch.OutOfMemoryError:
            self._overlaps = False
        with self._working():
            while self._waiting or (self._slots is not None and self._slots.active()):
                self._advance()

    def _claim(self, briefs: Briefs) -> Ticket | None:
        """The cohort that was begun, if it is this one."""
        begun = self._begun
        if begun is None:
            return None
        if begun.briefs is not briefs:
            if not self._luck(identical(begun.briefs, briefs)):
                return None
            begun.briefs, begun.began = briefs, time.perf_counter()
        self._begun = None
        return begun

    def _abandon(self) -> None:
        """Free the slots of a cohort that was begun in vain."""
        begun, self._begun = self._begun, None
        if begun is not None:
            with self._working():
                while begun not in self._done:
                    self._advance()
            self._done.remove(begun)
            self._await(
                begun
            )  # or its memory would be used again while the device still writes to it

    def _await(self, ticket: Ticket) -> None:
        """What the caller launches from now on follows the end of this cohort's training."""
        if ticket.ready is not None:
            torch.cuda.current_stream(self.device).wait_event(ticket.ready)

    def train_many(self, cohorts: Sequence[tuple[Task, Briefs]]) -> list[Reports]:
        """The reports of several runs' cohorts, trained together; the runs share model and data,
        not partitions.
        """
        tickets = [self.submit(task, briefs) for task, briefs in cohorts]
        done: set[int] = set()
        while not all(id(ticket) in done for ticket in tickets):
            done.add(id(self.collect()))
        return [ticket.reports() for ticket in tickets]

    def submit(self, task: Task, briefs: Briefs) -> Ticket:
        """Queue a cohort; its clients take slots as they become free."""
        self.check(task)
        briefs.check(task.layout)
        self._abandon()
        ticket = Ticket.of(task, briefs)
        apart = tuple(name for name in briefs.alone if name not in STACKED)
        if self._work is None or apart:
            if self._work is not None:
                self._say_apart(apart)
            self.trainer.task = task  # of the same model and data
            ticket.answer = one_by_one(self.trainer, briefs, self.precision)
        elif briefs.measures_only():
            samples = [task.clients[client] for client in briefs.ids.tolist()]
            if self._stream is not None:
                self._stream.wait_stream(torch.cuda.current_stream(self.device))
            with self._working():
                ticket.answer = measured_only(self._work, self.trainer, briefs, samples)
        else:
            ticket.prepare(self._schedules(Draw.of(task, briefs)), self.device)
            first = ticket.opening(self._schedules, self.device)
            # From here on the engine's stream sees what was uploaded for both.
            if self._stream is not None:
                self._stream.wait_stream(torch.cuda.current_stream(self.device))
            if briefs.measure:
                with self._working():
                    samples = [job.mine for job in ticket.jobs]
                    ticket.before = measure(self._work, self.trainer, briefs, samples)
                    ticket.make_room_for_scores(self.device)
            self._enqueue(first)
        if not ticket.jobs:
            self._done.append(ticket)
        return ticket

    def _enqueue(self, ticket: Ticket) -> None:
        """Let its clients wait for slots, those with most steps first."""
        self._waiting.extend(sorted(ticket.jobs, key=lambda job: -job.total))

    def _say_apart(self, apart: tuple[str, ...]) -> None:
        """Let `why` say which briefs are followed one client after another although the model
        stacks.
        """
        if self.precision.name == "bfloat16":
            raise UserError(
                f"run.precision = 'bfloat16' needs clients that are stacked, and briefs with {', '.join(apart)} are "
                "followed one client after another; use 'tf32' or 'float32'."
            )
        sentence = f"; one client after another where a brief has {', '.join(apart)}"
        if sentence not in self.why:
            self.why += sentence

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
        self._begun = None if ticket is self._begun else self._begun
        self._await(ticket)
        self._make_room(len(ticket.briefs))
        return ticket

    def _make_room(self, clients: int) -> None:
        """Before a server processes this many reports: halve the slots if it would run out of
        memory.

        Its next cohort may be twice as large, as FedCL's are. Asking for the memory takes longer
        than a small round's arithmetic: what was free is counted down, and asked for again when it
        may be used up.
        """
        wanted = (
            2 * SERVER_VECTORS * clients * self.task.layout.size * self.trainer.w.element_size()
        )
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
        """Whether the device would finish its queue before the caller returns, although there is
        more to do.
        """
        waits = self._overlaps and self._training()
        return waits and self._steps is not None and self._steps.queued() < AHEAD

    def check(self, task: Task) -> None:
        """Refuse a task whose clients cannot train together with those of the engine's own task."""
        if task not in self._alike:
            check_alike(task, self.task)
            self._alike.add(task)

    @contextmanager
    def _working(self) -> Iterator[None]:
        """On the engine's own stream and in its precision; the caller's work runs concurrently."""
        with self.precision(), torch.cuda.stream(self._stream) if self._stream else nullcontext():
            yield

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
        waiting = list(dict.fromkeys(job.ticket.then or job.ticket for job in self._waiting))
        self._waiting.clear()
        self._work = None
        if self._evaluator is not None:
            self._evaluator.other = None
        self.why = self._alone(f"a training step of many clients failed ({line(error)})")
        warnings.warn(f"Clients train {self.why}.", stacklevel=2)
        for ticket in waiting:
            self.trainer.task = ticket.task
            ticket.answer, ticket.jobs = one_by_one(self.trainer, ticket.briefs, self.precision), []
            self._complete(ticket)

    def _complete(self, ticket: Ticket) -> None:
        if ticket.then is not None:
            self._enqueue(ticket.hand_over())
            return
        ticket.ready = self._stream.record_event() if self._stream is not None else None
        self._done.append(ticket)

    def _ready(self) -> Slots:
        """Slots for all clients that train or wait, as far as memory allows; replacing slots
        restarts their clients.
        """
        assert self._work is not None
        held = self._slots
        length = max((job.length for job in self._waiting), default=0)
        if held is not None:
            wanted = len(self._waiting) + len(held.jobs) - held.jobs.count(None)
            grows = wanted > held.state.slots and (
                self._limit is None or held.state.slots < self._limit
            )
            if not grows and length <= held.state.length:
                return held
            length = max(length, held.state.length)
            self._close()
        length = 1 << (length - 1).bit_length()
        dtype = self.trainer.w.dtype
        if self._limit is None:
            later = (ticket.then for ticket in cohorts(self._waiting) if ticket.then is not None)
            kind = joint(chain(self._waiting, *(ticket.jobs for ticket in later)))
            self._limit = affordable(self._work, kind, length, dtype, self.device, self._reserved)
        count = min(
            self._limit, next(size for size in widths(1 << 16) if size >= len(self._waiting))
        )
        self._asked, self._free = self._limit if self._fixed else count, 0
        state = State(self._work.stack.frame.layout, self._asked, length, dtype, self.device)
        self._steps = Steps(self._work, state)
        self._slots = Slots(state, self._waiting, self._steps, fixed=self._fixed, usual=self._usual)
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

    def _retire(self, ticket: Ticket, mine: list[Job]) -> None:
        """Move finished clients' results to their ticket."""
        assert self._slots is not None
        assert self._work is not None
        state, layout = self._slots.state, self._work.stack.frame.layout
        at_once = max(1, PASS // layout.width)
        mine.sort(key=attrgetter("row"))
        for begin in range(0, len(mine), at_once):
            part = mine[begin : begin + at_once]
            here = places([job.slot for job in part], self.device)
            rows = places([job.row for job in part], self.device)
            w = state.w[here]
            ticket.take(rows, layout, w, state.numbers[:, here])
            for name in ticket.briefs.measure.intersection(AFTER):
                ticket.after[name][rows] = scores(self._work, w, [job.mine for job in part], name)
        if ticket.finish(len(mine)):
            self._complete(ticket)
