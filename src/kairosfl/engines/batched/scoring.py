"""What briefs request about models: losses or accuracies of many, each on its own client's samples;
Fisher traces.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from kairosfl.client.trainer import Trainer, scored
from kairosfl.core.fields import AFTER, BEFORE, FISHER, FISHER_SAMPLED
from kairosfl.engines.batched.jobs import Ticket
from kairosfl.engines.batched.state import upload
from kairosfl.engines.batched.step import Work

SAMPLES = 2048  # per batch, over all clients


def measure(work: Work, trainer: Trainer, ticket: Ticket) -> None:
    """What a cohort's briefs request about the model before training; makes room for what they
    request after it.
    """
    briefs, device = ticket.briefs, trainer.device
    for row, brief in enumerate(briefs.each() if briefs.measure & {FISHER, FISHER_SAMPLED} else ()):
        mine = upload(ticket.jobs[row].mine.astype(np.int64), device)
        ticket.fishers.append(trainer.fisher(brief.start.to(device), mine, brief))
    if briefs.measure.intersection(BEFORE) and ticket.jobs:
        start = briefs.start.to(device).expand(len(briefs), -1)
        rows = work.stack.frame.layout.pack(start)
        for name in briefs.measure.intersection(BEFORE):
            ticket.scores[name] = scores(work, rows, [job.mine for job in ticket.jobs], name)
    for name in briefs.measure.intersection(AFTER):
        ticket.scores[name] = torch.empty(len(briefs), dtype=torch.float64, device=device)


@torch.no_grad()
def scores(work: Work, rows: Tensor, samples: Sequence[np.ndarray], name: str) -> Tensor:
    """`[m]` float64 for weights `[m, width]`; `name` is the measurement."""
    of = scored(work.task, name)
    sizes = np.array([len(each) for each in samples])
    order = np.argsort(-sizes, kind="stable")  # the clients with samples left are then a prefix
    m, chunk = len(rows), max(1, SAMPLES // len(rows))
    numbers = np.zeros((m, -(-int(sizes.max()) // chunk) * chunk), dtype=np.int64)
    for row, client in enumerate(order):
        numbers[row, : sizes[client]] = samples[client]
    device = rows.device
    back = upload(order, device)
    counts, places = upload(sizes[order], device), upload(numbers, device)
    sorted_rows = rows[back]
    total = torch.zeros(m, dtype=torch.float64, device=device)
    for begin in range(0, numbers.shape[1], chunk):
        a = int((sizes > begin).sum())
        here = places[:a, begin : begin + chunk]
        flat = here.flatten()
        work.stack.frame.open(sorted_rows[:a])
        inputs, targets = work.prepared(flat)
        outputs = work.stack(inputs).to(rows.dtype)
        values = of(outputs, targets).double().view(here.shape)
        real = torch.arange(begin, begin + chunk, device=device) < counts[:a, None]
        total[:a] += torch.where(real, values, 0.0).sum(1)
    result = torch.empty_like(total)
    result[back] = total / counts
    return result
