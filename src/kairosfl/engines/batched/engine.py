"""Engine `batched`: clients of one run or of many trained side by side, on a GPU or, for tiny models, a CPU."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import reduce
from operator import or_

import torch
from torch import Tensor

from kairosfl.briefs import SCORE_AFTER, SCORE_BEFORE, Briefs, Reports
from kairosfl.engines.batched.graphs import Steps
from kairosfl.engines.batched.jobs import Job, Ticket
from kairosfl.engines.batched.layers import Unstackable
from kairosfl.engines.batched.memory import affordable
from kairosfl.engines.batched.precision import Precision
from kairosfl.engines.batched.scoring import scores
from kairosfl.engines.batched.slots import Slots
from kairosfl.engines.batched.stack import stack
from kairosfl.engines.batched.state import State, Sum, Whole, upload
from kairosfl.engines.batched.step import Work
from kairosfl.engines.evaluate import Evaluator
from kairosfl.engines.loop import Loop
from kairosfl.errors import UserError
from kairosfl.local import Trainer
from kairosfl.tasks.task import Task

FIXED_SLOTS = 16  # where the result must not depend on who else trains
PASS = 1 << 28  # numbers moved out of the slots at once


class Batched(Evaluator):
    """Follows briefs as `local.py` does, many clients at a time. `why` says how the model is run.

    `slots` clients train at once, by default as many as memory allows. `deterministic` fixes that number and never
    shrinks it, so that a client's result does not depend, to the bit, on who trains beside it.
    """

    def __init__(
        self,
        task: Task,
        device: torch.device | str = "cpu",
        *,
        precision: str | None = None,
        slots: int | None = None,
        deterministic: bool = False,
    ) -> None:
        if slots is not None and slots < 1:
            raise UserError(f"run.slots = {slots} must be 1 or more.")
        self.trainer = Trainer(task, torch.device(device))
        super().__init__(task, self.trainer.device, self.trainer.predict)
        self.precision = Precision.of(precision, self.device)
        self.deterministic = deterministic
        self.most = slots or (FIXED_SLOTS if deterministic else None)
        self._stream = torch.cuda.Stream(self.device) if self.device.type == "cuda" else None
        self._slots: Slots | None = None
        self._waiting: deque[Job] = deque()
        self._done: deque[Ticket] = deque()
        self._work: Work | None = None
        self._loop: Loop | None = None
        try:
            trial = self.trainer._inputs(torch.arange(min(4, len(task.dataset.train)), device=self.device)).cpu()
            compute = self.precision.compute(self.trainer.w.dtype)
            stacked = stack(task.model, trial)
            self._work = Work(stacked, task, self.trainer.inputs, self.trainer.targets, compute)
            self.why = stacked.why
        except Unstackable as reason:
            self._loop = Loop(task, self.device)
            self.why = f"one client after another: {reason}"

    def start(self) -> Tensor:
        """The model before training, on this engine's device."""
        return self.task.start().to(self.device)

    def train(self, briefs: Briefs) -> Reports:
        """One report per client."""
        return self.train_many([(self.task, briefs)])[0]

    def train_many(self, cohorts: Sequence[tuple[Task, Briefs]]) -> list[Reports]:
        """The reports of several runs' cohorts, trained together; the runs share model and data, not partitions."""
        tickets = [self.submit(task, briefs) for task, briefs in cohorts]
        while any(ticket.left for ticket in tickets):
            self.collect()
        return [ticket.reports() for ticket in tickets]

    def submit(self, task: Task, briefs: Briefs) -> Ticket:
        """Queue a cohort; its clients take slots as they become free."""
        self.check(task)
        m = len(briefs)
        delta = torch.empty(m, briefs.start.shape[-1], dtype=briefs.start.dtype, device=briefs.start.device)
        ticket = Ticket(
            task,
            briefs,
            delta,
            sums=torch.empty(m, len(Sum), dtype=torch.float64, device=self.device),
            wholes=torch.empty(m, len(Whole), dtype=torch.int64, device=self.device),
            scores={},
            fisher=[None] * m,
            left=m,
        )
        if self._loop is not None:
            ticket.answer = Loop.train(self._looping(task), briefs)
            ticket.left = 0
            self._done.append(ticket)
            return ticket
        ...
