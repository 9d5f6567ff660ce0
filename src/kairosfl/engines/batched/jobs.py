"""Jobs: one client's brief made ready for a slot, and tickets: a cohort's jobs and what has come back of them."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from functools import cache

import numpy as np
import torch
from torch import Tensor

from kairosfl.briefs import SCORE_AFTER, SCORE_BEFORE, Brief, Briefs, Report, Reports
from kairosfl.engines.batched.state import Kind, Real, Sum, Whole
from kairosfl.local import batches
from kairosfl.streams import key
from kairosfl.tasks.task import Task


@dataclass(eq=False)
class Ticket:
    """A cohort on its way through the slots."""

    task: Task
    briefs: Briefs
    delta: Tensor  # [m, d], filled as clients finish
    sums: Tensor  # [m, sums] float64 on the engine's device
    wholes: Tensor  # [m, wholes] int64
    fisher: list[float | None]
    left: int  # clients that have not finished
    scores: dict[str, Tensor] = field(default_factory=dict)  # [m] float64
    fisher_seconds: float = 0.0
    jobs: list[Job] = field(default_factory=list)
    ready: torch.cuda.Event | None = None  # when the device has filled all this
    answer: Reports | None = None  # from the loop, where the model cannot be stacked
    began: float = field(default_factory=time.perf_counter)

    @classmethod
    def of(cls, task: Task, briefs: Briefs, device: torch.device) -> Ticket:
        """Before training."""
        m, start = len(briefs), briefs.start
        return cls(
            task,
            briefs,
            delta=torch.empty(m, start.shape[-1], dtype=start.dtype, device=start.device),
            sums=torch.empty(m, len(Sum), dtype=torch.float64, device=device),
            wholes=torch.empty(m, len(Whole), dtype=torch.int64, device=device),
            fisher=[None] * m,
            left=m,
        )

    def take(self, rows: Tensor | slice, weights: Tensor, sums: Tensor, wholes: Tensor) -> None:
        """The results of some of its clients, or of all in their order."""
        start = self.briefs.start
        there = rows if isinstance(rows, slice) else rows.to(start.device)
        self.delta[there] = weights.to(start) - (start if start.ndim == 1 else start[there])
        self.sums[rows], self.wholes[rows] = sums, wholes

    def reports(self) -> Reports:
        """What the cohort answers; waits for the device."""
        if self.answer is not None:
            return self.answer
        sums, wholes = self.sums.cpu().numpy(), self.wholes.cpu().numpy()
        scores = {name: values.cpu().tolist() for name, values in self.scores.items()}
        seconds = (time.perf_counter() - self.began) / max(1, len(self.jobs))
        reports = []
        for row, job in enumerate(self.jobs):
            steps, samples = int(wholes[row, Whole.POSITION]), int(wholes[row, Whole.SAMPLES])
            full, part = divmod(steps, job.batches)
            reports.append(
                Report(
                    client=job.client,
                    n=len(job.mine),
                    steps=steps,
                    epochs=full + part / job.batches,
                    delta=self.delta[row],
                    loss=float(sums[row, Sum.LOSS]) / samples,
                    grad_sq=float(sums[row, Sum.GRAD_SQ]),
                    seconds=seconds,
                    similarity=float(sums[row, Sum.SIMILARITY]) if job.stops else None,
                    score_before=scores[SCORE_BEFORE][row] if SCORE_BEFORE in scores else None,
                    score_after=scores[SCORE_AFTER][row] if SCORE_AFTER in scores else None,
                    fisher=self.fisher[row],
                )
            )
        return replace(Reports.stack(reports, self.delta), fisher_seconds=self.fisher_seconds)


@dataclass(eq=False)
class Job:
    """One client: its numbers, and the order of its samples for all epochs."""

    ticket: Ticket
    row: int  # in the ticket
    client: int
    mine: np.ndarray  # its samples
    batch: int
    batches: int  # in an epoch
    total: int  # steps
    order: np.ndarray
    reals: list[float]
    wholes: list[int]
    stops: bool
    at_once: bool
    kind: Kind  # what its step needs
    done: int = 0  # steps launched
    limit: int = 0  # steps to launch, as far as the host knows

    @classmethod
    def of(cls, ticket: Ticket, row: int, brief: Brief, mine: np.ndarray) -> Job:
        """From a brief and the client's sample numbers."""
        n = len(mine)
        size = min(brief.batch_size, n)
        end = n - n % size if brief.drop_last else n
        epochs = list(batches(brief, n))
        order = mine[np.concatenate([batch for epoch in epochs for batch in epoch])].astype(np.int64)
        stops, count = brief.stop_below is not None, len(epochs[0])
        augmented = key(brief.seed, "augment", brief.round) % 2**63 if ticket.task.augment else 0
        reals = [0.0] * len(Real)
        reals[Real.LR], reals[Real.MOMENTUM], reals[Real.DECAY] = brief.lr, brief.momentum, brief.weight_decay
        reals[Real.CLIP], reals[Real.SCALE], reals[Real.PULL] = brief.clip, brief.scale, brief.pull
        reals[Real.MU], reals[Real.TEMPERATURE] = brief.contrast, brief.temperature
        reals[Real.THRESHOLD] = -2.0 if brief.stop_below is None else brief.stop_below
        wholes = [0] * len(Whole)
        wholes[Whole.TOTAL], wholes[Whole.SIZE], wholes[Whole.END] = count * brief.epochs, size, end
        wholes[Whole.BATCHES], wholes[Whole.CLIENT], wholes[Whole.CROPS] = count, brief.client, augmented
        wholes[Whole.DROPS] = key(brief.seed, "dropout", brief.round, brief.client) % 2**63
        wholes[Whole.STOPS], wholes[Whole.LEAST] = int(stops), int(brief.stop_statistic == "min")
        wholes[Whole.AT_ONCE] = int(brief.stop_per == "batch")
        return cls(
            ticket=ticket,
            row=row,
            client=brief.client,
            mine=mine,
            batch=brief.batch_size,
            batches=count,
            total=count * brief.epochs,
            order=order,
            reals=reals,
            wholes=wholes,
            stops=stops,
            at_once=brief.stop_per == "batch",
            kind=_kind(
                brief.batch_size,
                brief.clip < float("inf"),
                brief.pull != 0,
                brief.push is not None,
                brief.momentum != 0,
                stops,
                brief.stop_reference is not None,
                brief.contrast != 0,
            ),
        )


@cache
def _kind(batch: int, *flags: bool) -> Kind:
    return Kind(1, batch, *flags)
