"""Federated learning on two screens: select → brief → train → receive → weigh → combine → observe → step."""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator, Sequence
from typing import TYPE_CHECKING, Any
from weakref import ref

import numpy as np
import torch
from torch import Tensor

from kairosfl.core.fields import Briefs, Reports, fields
from kairosfl.core.mass import mass
from kairosfl.core.rule import Finished, Memory, Plan, Rule, acts
from kairosfl.core.run import Record, Round, Run, Setup, changed
from kairosfl.core.streams import drawn
from kairosfl.detectors import Measures, Signals, measured, readings
from kairosfl.errors import UserError

if TYPE_CHECKING:
    from kairosfl.engines.protocol import Engine

ONE_WRITER = tuple(entry.name for entry in fields(Briefs) if entry.writers == "one")


Rounds = Generator[tuple[Run, Briefs | None], Reports, None]


def rounds(run: Run, setup: Setup) -> Rounds:
    """A run as a coroutine: yields the run and the next cohort's briefs, is sent reports; briefs of None end it.

    Args:
        run: Where to begin: `Run.start(...)`, or a run that was interrupted.
        setup: What stays the same throughout the run.
    """
    while run.round < setup.recipe.rounds:
        run.check_fresh()
        now = Round.of(run, setup)
        try:
            now, ids = select(run, setup, now)
        except Finished as reason:
            if not run.round:
                raise UserError(str(reason)) from None
            run = changed(run, finished=str(reason))
            break
        briefs = brief(run, setup, now, ids)
        reports = yield run, briefs
        run.check_fresh()
        run = conclude(run, setup, now, briefs, reports)
    yield run, None


def result(run: Run, setup: Setup) -> Tensor:
    """The vector to evaluate, export and deploy.

    Args:
        run: A run between two rounds.
        setup: What it was started with.
    """
    x, now = run.x, Round.of(run, setup)
    for i in setup.algorithm.order():
        x = setup.algorithm.rules[i].result(x, run.memory(i), now)
    return x


def verdicts(run: Run, setup: Setup) -> list[str]:
    """What the rules report about their effect in this run."""
    now = Round.of(run, setup)
    said = (rule.verdict(run.memory(i), now) for i, rule in enumerate(setup.algorithm.rules))
    return [each for each in said if each]


def recorded(run: Run, setup: Setup) -> dict[str, float]:
    """The numbers that the rules record after this round."""
    now = Round.of(run, setup)
    rules = enumerate(setup.algorithm.rules)
    return {name: value for i, rule in rules for name, value in rule.record(run.memory(i), now).items()}


def select(run: Run, setup: Setup, now: Round) -> tuple[Round, Tensor]:
    """Stage 1: the round with the size of its cohort, and the cohort's ids, ascending."""
    plan = Plan(now.cohort)
    for i in setup.algorithm.order():
        plan = setup.algorithm.rules[i].select(plan, run.memory(i), now)
    now = changed(now, size=plan.size)
    if plan.ids is not None:
        ids = np.unique(plan.ids)
    elif plan.eligible is None:
        ids = drawn(run.seed, now.number, now.population, plan.size)
    else:
        count = min(plan.size, len(plan.eligible))
        ids = np.sort(now.stream("select").choice(plan.eligible, size=count, replace=False))
    return now, torch.from_numpy(ids.astype(np.int64))


def brief(run: Run, setup: Setup, now: Round, ids: Tensor) -> Briefs:
    """Stage 2: what the cohort is told."""
    given = setup.recipe.told(now.number) | {"next_lr": setup.recipe.lr_at(now.number + 1)}
    briefs = Briefs(seed=run.seed, round=now.number, ids=ids, start=run.x, **given)
    for detector in setup.detectors:
        briefs = briefs.measured(detector.measure) if detector.measure else briefs
    writer: dict[str, Rule] = {}
    for i, rule in enumerate(setup.algorithm.rules):
        told = rule.brief(briefs, run.memory(i, run.tables[i].rows(ids)), now)
        for name in ONE_WRITER:
            if getattr(told, name) is not getattr(briefs, name):
                other = writer.setdefault(name, rule)
                if other is not rule:
                    raise UserError(
                        f"{other.name()} and {rule.name()} cannot be combined: both set {name} of the brief, and only "
                        "one rule may; leave one of them out."
                    )
        briefs = told
    setup.algorithm.check_mass(briefs.optimizer)
    return briefs


def accept(briefs: Briefs, reports: Reports) -> tuple[Briefs, Reports, Measures, tuple[tuple[int, str], ...]]:
    """The usable reports with their briefs, in client order, what they measure, and why the others were rejected."""
    rejected = list(reports.failed)
    d = briefs.start.shape[-1]
    if reports.delta.shape != (len(reports), d):
        shapes = f"{tuple(reports.delta.shape)}, not {(len(reports), d)}"
        rejected += [(int(i), f"the updates of the round have the shape {shapes}") for i in reports.ids]
        reports = changed(reports.take(torch.empty(0, dtype=torch.int64)), delta=briefs.start.new_empty(0, d))
    measuring = readings(reports.delta)  # on the device, while the host checks the numbers
    faults = reports.faults()
    seen = Measures.of(measuring)
    for row in np.flatnonzero(~np.isfinite(seen.squares)).tolist():
        faults.setdefault(row, "its update is not finite")
    if not faults and not rejected and torch.equal(reports.ids, briefs.ids):  # as nearly always
        return briefs, reports, seen, ()
    position = {client: row for row, client in enumerate(briefs.ids.tolist())}
    good: dict[int, int] = {}
    for row, client in enumerate(reports.ids.tolist()):
        reason = (
            "it was not asked" if client not in position else "it reported twice" if client in good else faults.get(row)
        )
        if reason:
            rejected.append((client, reason))
        else:
            good[client] = row
    told = {*good, *(client for client, _ in rejected)}
    rejected += [(client, "it did not report") for client in position if client not in told]
    order = sorted(good)
    rows = torch.tensor([good[client] for client in order], dtype=torch.int64)
    asked = torch.tensor([position[client] for client in order], dtype=torch.int64)
    rejected.sort()
    lost = {client: reason for client, reason in rejected if client in position and client not in good}
    reports = changed(reports, failed=tuple(lost.items()))
    if len(order) < len(reports) or not torch.equal(rows, torch.arange(len(reports))):
        reports = reports.take(rows)
        seen = measured(reports.delta)
    if len(order) < len(briefs):
        briefs = briefs.take(asked)
    return briefs, reports, seen, tuple(rejected)


def _moved(x: Tensor, direction: Tensor, memories: Sequence[Memory]) -> Tensor:
    """x + direction, in place unless a rule keeps the direction: a model may take up most of the memory."""
    place = direction.untyped_storage().data_ptr()
    values = (value for memory in memories for value in memory.state.values())
    kept = any(value.untyped_storage().data_ptr() == place for value in values)
    return x + direction if kept or direction.dtype != x.dtype else direction.add_(x)


def conclude(run: Run, setup: Setup, now: Round, briefs: Briefs, reports: Reports) -> Run:
    """Stages 4 to 8: receive, weigh, combine, observe, step. Without a usable report the model does not change."""
    rules, detectors = setup.algorithm.rules, setup.detectors
    asked, vectors, numbers = len(briefs), briefs.vectors_down(), briefs.numbers()
    briefs, reports, seen, rejected = accept(briefs, reports)
    if briefs.start.ndim == 2 and len(reports):  # clients did not start from x: measure their updates from x
        reports = changed(reports, delta=reports.delta + (briefs.start - run.x))
        seen = measured(reports.delta)
    reports = changed(reports, mass=mass(briefs, reports.steps))
    now = changed(now, briefs=briefs, reports=reports)
    memories = [run.memory(i, table.rows(reports.ids)) for i, table in enumerate(run.tables)]
    for i, rule in enumerate(rules):
        now = changed(now, reports=rule.receive(now.reports, memories[i], now))
    if now.reports.delta is not reports.delta:
        seen = measured(now.reports.delta)
    reports = now.reports
    record = Record(reports.ids, torch.empty(0), None, rejected, asked, now.lr, vectors, numbers)
    if not len(reports) and not any(rule.private for rule in rules):
        return _idle(run, setup, now, memories, record)

    values, decided = [], []
    for i, detector in enumerate(detectors, len(rules)):
        if not len(reports) and not detector.private:  # it has nothing to measure
            values.append(float("nan"))
            decided.append(now.signals.critical)
            continue
        values.append(detector.value(memories[i], now))
        critical, memories[i] = _stored(detector.decide(values[-1], memories[i], now), memories[i], reports.ids)
        decided.append(critical)
    named = {detector.name(): value for detector, value in zip(detectors, values, strict=True)}
    signals = Signals(
        critical=decided[0],
        fgn=named.get("fgn", named.get("noisedfgn", float("nan"))),
        fisher=named.get("fedfim", float("nan")),
        elud=seen.elud,
        coherence=seen.coherence,
    )
    now = changed(now, signals=signals)

    factors = now.counts()
    for i, rule in enumerate(rules):
        factors = rule.weigh(factors, memories[i], now)
    now = changed(now, weights=factors / factors.sum())
    direction = now.weights.to(reports.delta, non_blocking=True) @ reports.delta
    mean = ref(direction)  # to recognise it without keeping it alive when a rule replaces it
    for i, rule in enumerate(rules):
        direction = rule.combine(direction, memories[i], now)
    for i, rule in enumerate(rules):
        _, memories[i] = _stored((None, rule.observe(memories[i], now)), memories[i], reports.ids)
    length = torch.linalg.vector_norm(direction)
    for i in setup.algorithm.order():
        direction, memories[i] = rules[i].step(direction, memories[i], now)
    x = _moved(run.x, direction, memories) if direction is mean() else run.x + direction
    consensus, finite = torch.stack([length, x.sum()]).tolist()
    if not math.isfinite(finite):
        raise UserError(
            f"After round {run.round + 1} the model is not finite, although every accepted update is: the step of "
            f"{setup.algorithm} is too long; lower its lr, or train.lr."
        )
    record = changed(record, weights=now.weights, reports=reports, consensus=consensus, values=tuple(values))
    return _after(
        run, memories, x=x, signals=signals, idle=0 if len(reports) or not asked else run.idle + 1, record=record
    )


def _stored(answer: tuple[Any, Memory], before: Memory, ids: Tensor) -> tuple[Any, Memory]:
    """The memory returned by a hook that may write rows, after storing them; nothing refers to the rows any more."""
    value, memory = answer
    if memory.rows is not before.rows and memory.rows:
        memory.table.write(ids, memory.rows)
    return value, Memory(memory.state, {}, memory.table)


def _idle(run: Run, setup: Setup, now: Round, memories: list[Memory], record: Record) -> Run:
    """A round without a usable report: only rules with `sees_idle` act."""
    x = run.x
    for i in setup.algorithm.order():
        rule = setup.algorithm.rules[i]
        if rule.sees_idle:
            now = changed(now, weights=torch.empty(0, dtype=torch.float64))
            seen = rule.observe(memories[i], now).replace(rows={})  # without reports there are no rows to store
            direction, memories[i] = rule.step(torch.zeros_like(run.x), seen, now)
            x = x + direction if acts(rule, "step") else x
    return _after(run, memories, x=x, idle=run.idle + 1, record=record)


def _after(run: Run, memories: Sequence[Memory], **changes: Any) -> Run:
    writes = tuple(table.writes for table in run.tables)
    states = tuple(memory.state for memory in memories)
    return changed(run, round=run.round + 1, states=states, writes=writes, **changes)


def drive(course: Rounds, engine: Engine) -> Iterator[Run]:
    """One run on one engine: the run after every round.

    Args:
        course: The run's rounds, from `rounds`.
        engine: What trains its cohorts.
    """
    begin = getattr(engine, "begin", None)
    run, briefs = next(course)
    while briefs is not None:
        run, briefs = course.send(engine.train(briefs))
        if begin and briefs is not None:
            begin(briefs)  # it trains while the caller evaluates the run
        yield run
