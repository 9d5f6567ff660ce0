"""What a run sends, before it has begun: bytes up and down, by what its rules tell clients.

The briefs of one client are made as in a round, once as of a client that never took part and once
as of one that did. Rules that choose cohorts are priced at their largest one until a run with the
same rules has ended, then at somewhat more than that run sent; cohorts drawn by Poisson sampling at
three standard deviations above what is expected.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from kairosfl.core.fields import NUMBER_BYTES, Briefs, Reports
from kairosfl.core.round import brief
from kairosfl.core.rule import Algorithm, about, acts
from kairosfl.core.run import Run, upcoming
from kairosfl.runs.config import RunConfig
from kairosfl.runs.prepare import setup_of
from kairosfl.tasks.task import Task

MORE = 1.25  # times what others with the same rules sent
DEVIATIONS = 3  # of a Poisson cohort


@dataclass(frozen=True)
class Price:
    """The bytes of a run; `varies` says that its rules choose the size of the cohort."""

    vectors: float  # the models alone, with the planned cohort
    most: float
    varies: bool

    def after(self, shares: Sequence[float]) -> float:
        """The price once runs with the same rules have sent these shares of theirs."""
        if not shares:
            return self.most
        if self.varies:
            return self.most * min(MORE * max(shares), max(1.0, *shares))
        return self.most * max(1.0, *shares)


def price(config: RunConfig, task: Task) -> Price:
    """What a run of this configuration sends."""
    clients = len(task.clients)
    rounds = config.train.rounds
    cohort = config.train.cohort
    chosen = Algorithm(tuple(rule for rule in config.algorithm.rules if not about(rule).private))
    orders = float(rounds * chosen.largest_cohort(cohort, clients))
    if config.algorithm.any("private"):
        largest = rounds * config.algorithm.largest_cohort(cohort, clients)
        orders = min(orders + DEVIATIONS * math.sqrt(orders), largest)
    varies = any(acts(rule, "select") for rule in chosen.rules)
    vectors, sent = _of_one_client(config, task)
    return Price(rounds * cohort * vectors, orders * sent, varies)


def of_round(briefs: Briefs) -> float:
    """What a cohort sends in a round when all of its clients report."""
    vector = briefs.start.shape[-1] * briefs.start.element_size()
    return len(briefs) * _sent(briefs, vector)


def _sent(briefs: Briefs, vector: int) -> float:
    down = briefs.vectors_down() * vector + briefs.numbers() * NUMBER_BYTES
    up = vector + len(Reports.NUMBERS) * NUMBER_BYTES  # a few of which are often left out
    return down + up


def _of_one_client(config: RunConfig, task: Task) -> tuple[float, float]:
    """What one client receives and reports in a round at most: the models alone, and all of it."""
    setup = setup_of(config, task)
    run = Run.start(task.start(), setup, seed=config.seed)
    now = replace(upcoming(run, setup), size=config.train.cohort)
    client = torch.tensor([0])
    new, _ = brief(run, setup, now, client)
    for table in run.tables:
        rows = table.rows(client)
        flags = {}  # such as whether it took part
        for name, row in rows.items():
            if row.dtype == torch.bool:
                flags[name] = torch.ones_like(row)
        if flags:
            table.write(client, {**rows, **flags})
    seen, _ = brief(run, setup, now, client)
    vector = run.x.numel() * run.x.element_size()
    models = 1 + max(new.vectors_down(), seen.vectors_down())
    return models * vector, max(_sent(new, vector), _sent(seen, vector))
