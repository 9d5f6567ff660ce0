"""Federated learning on two screens: select → brief → train → weigh → combine → observe → step."""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol
from weakref import ref

import numpy as np
import torch
from torch import Tensor

from kairosfl.core.briefs import Briefs, Plan, Reports, column, mass
from kairosfl.core.recipe import Recipe
from kairosfl.core.rule import Algorithm, Rule, State
from kairosfl.core.streams import stream
from kairosfl.core.table import Table
from kairosfl.detectors import FGN, Detector, Signals, coherence, elud, squared_norms
from kairosfl.errors import UserError
from kairosfl.tasks.vector import Layout


@dataclass(frozen=True)
class Record:
    """What happened in one round, for metrics and pictures; no part of the state."""

    ids: Tensor
    weights: Tensor
    reports: Reports | None
    rejected: tuple[tuple[int, str], ...]
    asked: int
    lr: float
    vectors_down: int
    consensus: float = float("nan")
    values: tuple[float, ...] = ()


@dataclass(frozen=True)
class Run:
    """All the state there is. Saving it is a checkpoint; loading it resumes bit for bit."""

    seed: int
    round: int  # rounds done
    x: Tensor
    slots: tuple[State, ...]  # a server slot per rule
    tables: tuple[Table, ...]  # a table of client rows per rule, written in place
    detectors: tuple[State, ...]
    signals: Signals = field(default_factory=Signals)
    idle: int = 0  # rounds in a row without a good report
    record: Record | None = None

    @classmethod
    def start(
        cls,
        x: Tensor,
        algorithm: Algorithm,
        *,
        clients: int,
        seed: int,
        detectors: tuple[Detector, ...] = (FGN(),),
    ) -> Run:
        """A run before its first round."""
        return cls(
            seed=seed,
            round=0,
            x=x,
            slots=tuple(rule.server(x, clients) for rule in algorithm.rules),
            tables=tuple(Table(rule.client(x)) for rule in algorithm.rules),
            detectors=tuple(detector.start() for detector in detectors),
        )


@dataclass(frozen=True)
class Round:
    """What a rule may know about the round it acts in."""

    number: int
    rounds: int
    clients: int
    cohort: int
    x: Tensor
    lr: float
    layout: Layout
    signals: Signals  # the last round's until the clients have trained, then this round's
    rules: tuple[Rule, ...]
    seed: int

    def stream(self, purpose: str, client: int = 0) -> np.random.Generator:
        """Random numbers for this purpose in this round."""
        return stream(self.seed, purpose, self.number, client)


Course = Generator[tuple[Run, Briefs | None], Reports, None]


def rounds(
    run: Run,
    algorithm: Algorithm,
    recipe: Recipe,
    *,
    clients: int,
    layout: Layout,
    detectors: tuple[Detector, ...] = (FGN(),),
) -> Course:
    """A run as a coroutine: yields the run and the next cohort's briefs, is sent reports; no briefs: it is over."""
    if recipe.cohort > clients:
        raise UserError(f"train.cohort = {recipe.cohort} is more than the {clients} clients there are; lower it.")
    while run.round < recipe.rounds:
        now = Round(
            number=run.round,
            rounds=recipe.rounds,
            clients=clients,
            cohort=recipe.cohort,
            x=run.x,
            lr=recipe.lr_at(run.round),
            layout=layout,
            signals=run.signals,
            rules=algorithm.rules,
            seed=run.seed,
        )
        briefs = brief(run, algorithm, recipe, detectors, now, select(run, algorithm, now))
        reports = yield run, briefs
        run = conclude(run, algorithm, detectors, now, briefs, reports)
    yield run, None


def select(run: Run, algorithm: Algorithm, now: Round) -> Tensor:
    """Stage 1: the ids of this round's cohort, ascending."""
    plan = Plan(now.cohort)
    for i in algorithm.order():
        plan = algorithm.rules[i].select(plan, run.slots[i], now)
    if plan.ids is not None:
        return torch.from_numpy(np.unique(plan.ids).astype(np.int64))
    pool = now.clients if plan.eligible is None else plan.eligible
    available = now.clients if plan.eligible is None else len(plan.eligible)
    chosen = now.stream("select").choice(pool, size=min(plan.size, available), replace=False)
    return torch.from_numpy(np.sort(chosen).astype(np.int64))


def brief(
    run: Run, algorithm: Algorithm, recipe: Recipe, detectors: tuple[Detector, ...], now: Round, ids: Tensor
) -> Briefs:
    """Stage 2: what the cohort is told."""
    m = len(ids)
    briefs = Briefs(
        seed=run.seed,
        round=now.number,
        ids=ids,
        start=run.x,
        lr=column(now.lr, m),
        momentum=column(recipe.momentum, m),
        weight_decay=column(recipe.weight_decay, m),
        clip=column(recipe.clip or float("inf"), m),
        batch_size=column(recipe.batch_size, m, torch.int64),
        epochs=column(recipe.epochs, m, torch.int64),
        scale=column(1.0, m),
        pull=column(0.0, m),
        drop_last=recipe.drop_last,
        measure=frozenset(detector.measure for detector in detectors if detector.measure),
    )
    for rule, slot, table in zip(algorithm.rules, run.slots, run.tables, strict=True):
        briefs = rule.brief(briefs, slot, table.rows(ids), now)
    return briefs


def accept(briefs: Briefs, reports: Reports) -> tuple[Briefs, Reports, Tensor, tuple[tuple[int, str], ...]]:
    """The good reports with their briefs, in client order, their squared norms, and why the others were rejected."""
    rejected = list(reports.failed)
    d = briefs.start.shape[-1]
    if reports.delta.shape != (len(reports), d):
        shape = tuple(reports.delta.shape[1:])
        rejected += [(int(i), f"its update has the shape {shape}, not ({d},)") for i in reports.ids]
        nobody = torch.empty(0, dtype=torch.int64)
        return briefs.take(nobody), reports.take(nobody), torch.empty(0), tuple(rejected)
    position = {client: row for row, client in enumerate(briefs.ids.tolist())}
    squares = squared_norms(reports.delta) if len(reports) else torch.empty(0)
    faults = _faults(reports, squares)
    good: dict[int, int] = {}
    for row, client in enumerate(reports.ids.tolist()):
        reason = (
            "it was not asked" if client not in position else "it reported twice" if client in good else faults.get(row)
        )
        if reason:
            rejected.append((client, reason))
        else:
            good[client] = row
    order = sorted(good)
    rows = torch.tensor([good[client] for client in order], dtype=torch.int64)
    asked = torch.tensor([position[client] for client in order], dtype=torch.int64)
    rejected.sort()
    lost = tuple((client, reason) for client, reason in rejected if client in position and client not in good)
    reports = replace(reports, failed=lost)
    if len(order) < len(reports) or not torch.equal(rows, torch.arange(len(reports))):
        reports, squares = reports.take(rows), squares[rows]
    if len(order) < len(briefs):
        briefs = briefs.take(asked)
    return briefs, reports, squares, tuple(rejected)


def _faults(reports: Reports, squares: Tensor) -> dict[int, str]:
    """Rows of reports that cannot be used and why; every column comes to the host once."""

    def host(column: Tensor) -> np.ndarray:
        return column.cpu().numpy()

    wrong = {
        "it has no samples": host(reports.n) <= 0,
        "it did no step": host(reports.steps) <= 0,
        "it trained no part of an epoch": host(reports.epochs) <= 0,
        "its update is not finite": ~np.isfinite(host(squares)),
    }
    for name in ("epochs", "loss", "grad_sq", "score_before", "score_after", "fisher"):
        value = getattr(reports, name)
        if value is not None:
            wrong[f"its {name} is not finite"] = ~np.isfinite(host(value))
    faults: dict[int, str] = {}
    for reason, rows in wrong.items():
        for row in np.flatnonzero(rows).tolist():
            faults.setdefault(row, reason)
    return faults


def _moved(x: Tensor, direction: Tensor, slots: Sequence[State]) -> Tensor:
    """x + direction, in the direction's own memory unless a rule keeps it: a model may be most of what there is."""
    place = direction.untyped_storage().data_ptr()
    kept = any(value.untyped_storage().data_ptr() == place for slot in slots for value in slot.values())
    return x + direction if kept or direction.dtype != x.dtype else direction.add_(x)


def conclude(
    run: Run,
    algorithm: Algorithm,
    detectors: tuple[Detector, ...],
    now: Round,
    briefs: Briefs,
    reports: Reports,
) -> Run:
    """Stages 4 to 7: weigh, combine, observe, step. With no good report the model stays as it was."""
    asked, vectors = len(briefs), briefs.vectors_down()
    briefs, reports, squares, rejected = accept(briefs, reports)
    if not len(reports):
        record = Record(reports.ids, torch.empty(0), None, rejected, asked, now.lr, vectors)
        return replace(run, round=run.round + 1, idle=run.idle + 1, record=record)
    if briefs.start.ndim == 2:  # clients started elsewhere than from x: count their way from x
        reports = replace(reports, delta=reports.delta + (briefs.start - run.x))
        squares = squared_norms(reports.delta)
    reports = replace(reports, mass=mass(briefs, reports))

    values = tuple(detector.value(briefs, reports) for detector in detectors)
    decided = [d.decide(s, v, now.number) for d, s, v in zip(detectors, run.detectors, values, strict=True)]
    named = {detector.name(): value for detector, value in zip(detectors, values, strict=True)}
    diversity, agreement = torch.stack([elud(reports.delta, squares), coherence(reports.delta, squares)]).tolist()
    signals = Signals(
        critical=decided[0][0],
        fgn=named.get("fgn", float("nan")),
        fisher=named.get("fedfim", float("nan")),
        elud=diversity,
        coherence=agreement,
    )
    now = replace(now, signals=signals)

    rows = [table.rows(reports.ids) for table in run.tables]
    slots = list(run.slots)
    factors = algorithm.counts(reports)
    for i, rule in enumerate(algorithm.rules):
        factors = rule.weigh(factors, slots[i], rows[i], briefs, reports, now)
    weights = factors / factors.sum()
    direction = weights.to(reports.delta) @ reports.delta
    mean = ref(direction)  # to know it again, not to hold it when a rule replaces it
    for i, rule in enumerate(algorithm.rules):
        direction = rule.combine(direction, slots[i], rows[i], weights, briefs, reports, now)
    for i, rule in enumerate(algorithm.rules):
        slots[i], written = rule.observe(slots[i], rows[i], weights, briefs, reports, now)
        if written:
            run.tables[i].write(reports.ids, written)
    length = direction.norm()
    for i in algorithm.order():
        direction, slots[i] = algorithm.rules[i].step(direction, slots[i], run.tables[i], now)
    x = _moved(run.x, direction, slots) if direction is mean() else run.x + direction
    consensus, finite = torch.stack([length.double(), x.sum().double()]).tolist()
    if not math.isfinite(finite):
        raise UserError(
            f"After round {run.round + 1} the model is not finite, though every update that counts is: the step of "
            f"{algorithm} is too long; lower its lr, or train.lr."
        )
    record = Record(reports.ids, weights, reports, rejected, asked, now.lr, vectors, consensus, values)
    return replace(
        run,
        round=run.round + 1,
        x=x,
        slots=tuple(slots),
        detectors=tuple(state for _, state in decided),
        signals=signals,
        idle=0,
        record=record,
    )


class Engine(Protocol):
    """Turns briefs into reports and evaluates a vector: the only part that touches data or devices."""

    def train(self, briefs: Briefs) -> Reports:
        """One report per client that could train; the others stand in `failed`."""
        ...


def drive(course: Course, engine: Engine) -> Iterator[Run]:
    """One run on one engine: the run after every round."""
    run, briefs = next(course)
    while briefs is not None:
        run, briefs = course.send(engine.train(briefs))
        yield run
