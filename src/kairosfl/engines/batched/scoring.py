"""What briefs request about models: losses or accuracies of many, each on its own client's samples;
Fisher traces.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from kairosfl.client.trainer import Fisher, Trainer, scored
from kairosfl.core.fields import BEFORE, FISHER, FISHER_SAMPLED, Briefs, Reports
from kairosfl.engines.batched.state import upload
from kairosfl.engines.batched.step import Work

SAMPLES = 2048  # per batch, over all clients
PASS = 1 << 28  # numbers of models that are looked at together


class Measured(NamedTuple):
    """What the clients of a cohort measured before training."""

    scores: dict[str, Tensor]  # [m] float64, on the engine's device
    fishers: list[Fisher]  # of each client, if requested

    def reported(self) -> dict[str, Tensor]:
        """Their fields of the reports, on the host."""
        columns = {name: values.cpu() for name, values in self.scores.items()}
        for name in self.fishers[0].reported() if self.fishers else ():
            numbers = [fisher.reported()[name] for fisher in self.fishers]
            columns[name] = torch.from_numpy(np.array(numbers))
        return columns


def measure(
    work: Work, trainer: Trainer, briefs: Briefs, samples: Sequence[np.ndarray]
) -> Measured:
    """What a cohort's briefs request about the model before training.

    Args:
        work: The stacked model and its data.
        trainer: The plain one, for what is not measured side by side.
        briefs: What the clients are told.
        samples: Each client's, as numbers of training samples.
    """
    fishers: list[Fisher] = []
    device = trainer.device
    if briefs.measure & {FISHER, FISHER_SAMPLED}:
        for brief, mine in zip(briefs.each(), samples, strict=True):
            start = trainer.joined(brief.start.to(device), brief)
            fishers.append(trainer.fisher(start, upload(mine.astype(np.int64), device), brief))
    asked = briefs.measure.intersection(BEFORE)
    if not asked or not samples:
        return Measured({}, fishers)

    layout = work.stack.frame.layout
    at_once = max(1, PASS // layout.width)
    parts: dict[str, list[Tensor]] = {name: [] for name in asked}
    for begin in range(0, len(samples), at_once):
        some = samples[begin : begin + at_once]
        these = slice(begin, begin + len(some))
        start = briefs.start if briefs.start.ndim == 1 else briefs.start[these]
        start = start.to(device).expand(len(some), -1)
        if layout.own:
            assert briefs.own is not None
            start = torch.cat([start, briefs.own[these].to(start)], 1)
        rows = layout.pack(start)
        for name in asked:
            parts[name].append(scores(work, rows, some, name))
    return Measured({name: torch.cat(values) for name, values in parts.items()}, fishers)


def measured_only(
    work: Work, trainer: Trainer, briefs: Briefs, samples: Sequence[np.ndarray]
) -> Reports:
    """The reports of clients that do not train; waits for the device."""
    began, m = time.perf_counter(), len(briefs)
    columns: dict[str, Any] = {**measure(work, trainer, briefs, samples).reported()}
    nothing = torch.zeros(m, dtype=torch.float64)
    seconds = (time.perf_counter() - began) / max(1, m)
    return Reports(
        ids=briefs.ids,
        n=torch.tensor([len(mine) for mine in samples], dtype=torch.int64),
        steps=torch.zeros(m, dtype=torch.int64),
        epochs=nothing,
        delta=briefs.start.new_empty(m, 0),
        loss=nothing,
        grad_sq=nothing,
        seconds=torch.full((m,), seconds, dtype=torch.float64),
        **columns,
    )


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
