"""A round: select → brief → train → receive → weigh → combine → observe → step.

All stages stand here, in their order, so that a round is read from top to bottom in one file.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import permutations
from typing import TYPE_CHECKING, Any
from weakref import ref

import numpy as np
import torch
from torch import Tensor

from kairosfl.core.clock import message_bytes, samples_of
from kairosfl.core.fields import NUMBER_BYTES, Briefs, Reports, fields
from kairosfl.core.flight import (
    Batch,
    Order,
    Sent,
    briefs_of,
    reports_of,
    sent_with,
    together,
)
from kairosfl.core.mass import mass
from kairosfl.core.measures import Measures, measured, readings
from kairosfl.core.rule import (
    Finished,
    Memory,
    Plan,
    Round,
    Rule,
    Signals,
    State,
    acts,
    changed,
)
from kairosfl.core.run import ENTRIES, Record, Run, Setup, Timing, upcoming
from kairosfl.core.streams import drawn
from kairosfl.core.waiting import Costs, Waiting, size_asked
from kairosfl.errors import UserError

if TYPE_CHECKING:
    from typing import Protocol

    class Trains(Protocol):
        """What `drive` needs of an engine."""

        def train(self, briefs: Briefs) -> Reports: ...


ONE_WRITER = tuple(entry.name for entry in fields(Briefs) if entry.writers == "one")

Rounds = Generator[tuple[Run, Briefs | None], Reports, None]


def rounds(run: Run, setup: Setup) -> Rounds:
    """A run as a coroutine: yields the run and the next cohort's briefs, is sent reports; briefs of
    None end it.

    A cohort whose briefs have `epochs = 0` only measures: the same run is yielded again after it.

    Args:
        run: Where to begin: `Run.start(...)`, or a run that was interrupted.
        setup: What stays the same throughout the run.
    """
    while run.round < setup.recipe.rounds:
        run.check_fresh()
        now = upcoming(run, setup)
        measured_seconds = 0.0
        try:
            plan = planned(run, setup, now)
            if plan.first is not None:
                measuring = measure(run, setup, now, plan)
                seconds = torch.zeros(len(measuring), dtype=torch.float64)
                if setup.fleet is not None:
                    measuring, seconds = timed(run, setup, now, measuring)
                answers = yield run, measuring
                now = changed(
                    now,
                    first=answered(measuring, answers),
                    time=now.time + max(seconds.tolist(), default=0.0),
                )
                measured_seconds = float(seconds.sum())
                plan = planned(run, setup, now)
            if setup.fleet is None:
                now, ids = select(run, setup, now, plan)
            else:
                now = changed(now, size=plan.size)
        except Finished as reason:
            if not run.round:
                raise UserError(str(reason)) from None
            run = changed(run, finished=str(reason))
            break
        if setup.fleet is not None:
            run = yield from on_the_clock(run, setup, now, plan, measured_seconds)
            continue
        briefs, sent = brief(run, setup, now, ids, plan)
        reports = yield run, briefs
        run.check_fresh()
        run = conclude(run, setup, now, briefs, reports, sent)
    yield run, None


def on_the_clock(
    run: Run, setup: Setup, now: Round, plan: Plan, measured_seconds: float = 0.0
) -> Generator[tuple[Run, Briefs], Reports, Run]:
    """One round in which the server waits as the plan says; yields the run as it was before it.

    What is yielded is trained together: everybody whose report is needed, and those in flight. An
    empty cohort says that no report is needed. `measured_seconds` is what devices spent on
    measuring before the round was planned.
    """
    fleet, sizes = setup.fleet, setup.sizes
    assert fleet is not None
    assert sizes is not None

    def send(ids: Tensor) -> Batch:
        briefs, sent = brief(run, setup, now, ids)
        return Batch(changed(briefs, next_lr=None), sent)

    waiting = Waiting(
        fleet,
        sizes,
        setup.layout,
        run.x.element_size(),
        plan,
        now,
        run.flight,
        send,
        keeps=bool(setup.keeps),
    )

    # --- wait and train ---
    passes: list[int] = []
    while True:
        untrained = waiting.advance()
        if waiting.over and not untrained:
            break
        for orders in together(untrained):
            briefs = briefs_of(orders)
            reports = yield run, briefs
            run.check_fresh()
            passes.append(len(briefs))
            waiting.trained(orders, reports)
    if not passes:
        yield run, _nobody(run, setup)
        run.check_fresh()

    # --- land ---
    landed = [order for order in waiting.landed if not order.fault]
    lost = waiting.lost + [(order, order.fault) for order in waiting.landed if order.fault]
    ended = [*landed, *(order for order, _ in lost)]
    briefs = briefs_of(ended) if ended else _nobody(run, setup)
    failed = tuple(sorted((order.client, reason) for order, reason in lost))
    reports = changed(reports_of(landed, run.x), failed=failed)
    _stored_kept(run, setup, reports_of(waiting.finished, run.x))
    landing = Landing({order.client: order for order in landed}, waiting.costs)
    after = conclude(run, setup, now, briefs, reports, sent_with(ended), landing)
    record = after.record
    assert record is not None
    counted = set(record.ids.tolist())
    refused = [order for order in waiting.landed if order.client not in counted]
    in_vain = sum(order.due - order.began for order in refused)
    sent_in = [landing.orders[client].round for client in record.ids.tolist()]
    timing = Timing(
        seconds=waiting.time - run.time,
        device_seconds=measured_seconds + waiting.costs.device_seconds,
        wasted_seconds=waiting.costs.wasted_seconds + in_vain,
        together=float(np.mean(passes)) if passes else math.nan,
        took=landing.took(record.ids),
        ages=now.number - torch.tensor(sent_in, dtype=torch.int64),
    )
    record = changed(record, clock=timing)
    return changed(after, time=waiting.time, flight=waiting.flight(), record=record)


@dataclass(frozen=True)
class Landing:
    """What a clock says about the orders that ended in a round.

    Args:
        orders: Those that landed, by client.
        costs: What the round cost.
    """

    orders: Mapping[int, Order]
    costs: Costs

    def took(self, ids: Tensor) -> Tensor:
        """The seconds from sending to landing of these clients, `[m]`."""
        landed = [self.orders[client] for client in ids.tolist()]
        seconds = [order.due - order.began for order in landed]
        return torch.tensor(seconds, dtype=torch.float64)


def _nobody(run: Run, setup: Setup) -> Briefs:
    """The briefs of an empty cohort."""
    none = torch.empty(0, dtype=torch.int64)
    terms = setup.recipe.told(run.round) | {"round": run.round}
    return Briefs(seed=run.seed, ids=none, start=run.x, **terms)


def result(run: Run, setup: Setup) -> Tensor:
    """The vector to evaluate, export and deploy.

    Args:
        run: A run between two rounds.
        setup: What it was started with.
    """
    x, now = run.x, upcoming(run, setup)
    for i in setup.algorithm.order:
        x = setup.algorithm.rules[i].result(x, run.memory(i), now)
    return x


def personal(run: Run, setup: Setup, ids: Tensor) -> Tensor:
    """The vectors with which these clients are evaluated: the result, `[d]`, or one for each, `[m,
    d]`.

    Args:
        run: A run between two rounds.
        setup: What it was started with.
        ids: Client ids, ascending.
    """
    x, now = result(run, setup), upcoming(run, setup)
    acting = [i for i in setup.algorithm.order if acts(setup.algorithm.rules[i], "personal")]
    if not acting:
        return x
    kept = _kept(run, ids, run.x)
    for i in acting:
        if setup.devices and setup.algorithm.traits[i].keeps:
            continue  # what clients keep is not here
        memory = replace(run.memory(i, run.tables[i].rows(ids)), kept=kept)
        x = setup.algorithm.rules[i].personal(x, ids, memory, now)
    return x


def models(run: Run, setup: Setup, ids: Tensor) -> Tensor:
    """The whole models of these clients, `[m, d + e]`: what `personal` says, then the own part that
    each of them keeps; the initial one of a client that has not trained yet.

    Args:
        run: A run between two rounds.
        setup: What it was started with.
        ids: Client ids, ascending.
    """
    shared = personal(run, setup, ids).expand(len(ids), -1)
    if not setup.layout.own:
        return shared
    own = run.kept.rows(ids)["own"]
    return torch.cat([shared, own.to(shared)], 1)


def verdicts(run: Run, setup: Setup) -> list[str]:
    """What the rules report about their effect in this run."""
    now, rules = upcoming(run, setup), setup.algorithm.rules
    of_rules = [rule.verdict(run.memory(i), now) for i, rule in enumerate(rules)]
    of_pairs = [rule.note_with(other) for rule, other in permutations(rules, 2)]
    return [sentence for sentence in (*of_rules, *of_pairs) if sentence]


def recorded(run: Run, setup: Setup) -> dict[str, float]:
    """The numbers that the rules record after this round."""
    now = upcoming(run, setup)
    numbers: dict[str, float] = {}
    for i, rule in enumerate(setup.algorithm.rules):
        numbers |= rule.record(run.memory(i), now)
    return numbers


# --- select ---


def planned(run: Run, setup: Setup, now: Round) -> Plan:
    """Stage 1: what the rules plan for the round."""
    plan = Plan(now.cohort, **(setup.waits or {}))
    for i in setup.algorithm.order:
        plan = setup.algorithm.rules[i].select(plan, run.memory(i), now)
    words = plan.waiting()
    if words and setup.waits is None and setup.fleet is None:
        listed = ", ".join(f"{word} = {getattr(plan, word)!r}" for word in words)
        raise UserError(
            f"{setup.algorithm} plans how to wait for clients ({listed}), which needs devices or a clock; "
            "leave the rule out, or deploy the run."
        )
    if setup.fleet is not None:
        _check_asynchronous(setup, plan)
    return plan


def _check_asynchronous(setup: Setup, plan: Plan) -> None:
    """Refuse rules that are wrong for answers to an older round's orders."""
    if plan.late != "keep":
        return
    for rule, traits in zip(setup.algorithm.rules, setup.algorithm.traits, strict=True):
        if not traits.late:
            raise UserError(
                f"{rule.name()} cannot be used while late answers are kept: it would take an answer to an older "
                "round's order for one to this round's; leave it out, or drop late answers."
            )
        if acts(rule, "rebase"):
            raise UserError(
                f"{rule.name()} cannot be used while late answers are kept: it moves the frozen weights, and those "
                "answers belong to older ones; leave it out, or drop late answers."
            )


def measure(run: Run, setup: Setup, now: Round, plan: Plan) -> Briefs:
    """The briefs of the clients that are measured before the round is planned."""
    ids = torch.from_numpy(np.unique(np.asarray(plan.first)).astype(np.int64))
    terms = setup.recipe.told(now.number) | {
        "round": now.number,
        "epochs": 0,
        "measure": plan.measure,
    }
    briefs = Briefs(seed=run.seed, ids=ids, start=run.x, base=run.base, **terms)
    return _with_kept(run, setup, briefs)


def timed(run: Run, setup: Setup, now: Round, briefs: Briefs) -> tuple[Briefs, Tensor]:
    """Those of these briefs whose clients are free and stay online, and the seconds of each."""
    fleet, sizes = setup.fleet, setup.sizes
    assert fleet is not None
    assert sizes is not None
    ids = briefs.ids.numpy()
    rounds_done = briefs.round.numpy()
    seconds = fleet.takes(
        run.seed,
        rounds_done,
        ids,
        samples_of(briefs, sizes[ids]),
        *message_bytes(briefs, setup.layout, run.x.element_size()),
    )
    at_work = {order.client for order in run.flight.orders}
    free = np.array([client not in at_work for client in ids.tolist()], dtype=bool)
    online = fleet.availability.next_online(ids, now.time) <= now.time
    stays = fleet.ends(run.seed, rounds_done, ids, now.time, seconds) == math.inf
    rows = torch.from_numpy(np.flatnonzero(free & online & stays & np.isfinite(seconds)))
    return briefs.take(rows), torch.from_numpy(seconds)[rows]


def answered(briefs: Briefs, reports: Reports) -> tuple[Briefs, Reports]:
    """The usable answers of clients that only measured, with their briefs."""
    faults = reports.faults(measuring=True)
    rows, positions = [], []
    position = {client: row for row, client in enumerate(briefs.ids.tolist())}
    for row, client in enumerate(reports.ids.tolist()):
        if row not in faults and client in position:
            rows.append(row)
            positions.append(position.pop(client))
    order = np.argsort(positions)
    asked = briefs.take(torch.tensor(positions, dtype=torch.int64)[order])
    return asked, reports.without_kept().take(torch.tensor(rows, dtype=torch.int64)[order])


def select(run: Run, setup: Setup, now: Round, plan: Plan) -> tuple[Round, Tensor]:
    """The round with the size that was planned, and the ids of the clients that are asked,
    ascending.
    """
    now = changed(now, size=plan.size)
    asked = size_asked(plan)
    if plan.ids is not None:
        ids = np.unique(plan.ids)
    elif plan.eligible is None:
        ids = drawn(run.seed, now.number, now.population, asked)
    else:
        count = min(asked, len(plan.eligible))
        ids = np.sort(now.stream("select").choice(plan.eligible, size=count, replace=False))
    return now, torch.from_numpy(ids.astype(np.int64))


# --- brief ---


def brief(
    run: Run, setup: Setup, now: Round, ids: Tensor, plan: Plan | None = None
) -> tuple[Briefs, Sent]:
    """Stage 2: what the cohort is told, and what rules want to find again when it reports."""
    terms = setup.recipe.told(now.number)
    terms |= {"round": now.number, "next_lr": setup.recipe.lr_at(now.number + 1)}
    briefs = Briefs(seed=run.seed, ids=ids, start=run.x, base=run.base, **terms)
    if setup.waits is not None:
        briefs = changed(briefs, plan=plan)
    for detector in setup.detectors:
        if detector.measure:
            briefs = briefs.measured(detector.measure)

    writer: dict[str, Rule] = {}
    sent: dict[int, State] = {}
    for i, rule in enumerate(setup.algorithm.rules):
        answer = rule.brief(briefs, run.memory(i, run.tables[i].rows(ids)), now)
        if isinstance(answer, tuple):
            after, sent[i] = answer
        else:
            after = answer
        after = _placed(briefs, after, run.x)
        for name in ONE_WRITER:
            if getattr(after, name) is not getattr(briefs, name):
                other = writer.setdefault(name, rule)
                if other is not rule:
                    raise UserError(
                        f"{other.name()} and {rule.name()} cannot be combined: both set {name} of the brief, and only "
                        "one rule may; leave one of them out."
                    )
        briefs = after
    setup.algorithm.check_mass(briefs.optimizer)
    return _with_kept(run, setup, briefs), sent


def _placed(before: Briefs, after: Briefs, x: Tensor) -> Briefs:
    """The briefs with start = version + offset, whichever of them a rule wrote; the version is x
    unless a rule says that clients hold another one.
    """
    version = x if after.version is None else after.version
    if after.version is not before.version:
        start = version if after.offset is None else version + after.offset
        return changed(after, start=start)
    if after.start is not before.start:
        return changed(after, version=version, offset=after.start - version)
    if after.offset is not before.offset and after.offset is not None:
        return changed(after, version=version, start=version + after.offset)
    return after


def _with_kept(run: Run, setup: Setup, briefs: Briefs) -> Briefs:
    """The briefs with what the clients keep, and which of their reports was the last that counted."""
    if not setup.keeps:
        return briefs
    terms: dict[str, Any] = dict(_kept(run, briefs.ids, briefs.start))
    terms["counted"] = run.counted.rows(briefs.ids)["round"]
    return replace(briefs, **terms)


def _kept(run: Run, ids: Tensor, start: Tensor) -> State:
    """What these clients keep; `start` is the model that they are sent, `[d]` or `[m, d]`."""
    rows = run.kept.rows(ids)
    new = [row for row, client in enumerate(ids.tolist()) if client not in run.kept.slot]
    for name in rows:
        if new and ENTRIES[name].first == "model":  # the one that the client is sent first
            rows[name][new] = start if start.ndim == 1 else start[new]
    return rows


def _stored_kept(run: Run, setup: Setup, reports: Reports) -> Reports:
    """The reports without what the clients keep, which is stored: also where the report will be
    rejected.
    """
    if not setup.keeps:
        return reports
    rows = {name: getattr(reports, name) for name in setup.keeps}
    rows = {name: value for name, value in rows.items() if value is not None}
    if rows and len(reports):
        run.kept.write(reports.ids, rows)
    return reports.without_kept()


# --- receive ---


def accept(
    briefs: Briefs, reports: Reports
) -> tuple[Briefs, Reports, Measures, tuple[tuple[int, str], ...]]:
    """The usable reports with their briefs, in client order, what they measure, and why the others
    were rejected.
    """
    rejected = list(reports.failed)
    d = briefs.start.shape[-1]
    if reports.delta.shape != (len(reports), d):
        shapes = f"{tuple(reports.delta.shape)}, not {(len(reports), d)}"
        rejected += [
            (int(i), f"the updates of the round have the shape {shapes}") for i in reports.ids
        ]
        reports = changed(
            reports.take(torch.empty(0, dtype=torch.int64)), delta=briefs.start.new_empty(0, d)
        )
    measuring = readings(reports.delta)  # on the device, while the host checks the numbers
    faults = reports.faults()
    if briefs.candidates is not None and reports.choice is not None:
        for row in np.flatnonzero(reports.choice.numpy() >= len(briefs.candidates)).tolist():
            faults.setdefault(row, f"its choice is {int(reports.choice[row])}")
    seen = Measures.of(measuring)
    for row in np.flatnonzero(~np.isfinite(seen.squares)).tolist():
        faults.setdefault(row, "its update is not finite")
    if not faults and not rejected and torch.equal(reports.ids, briefs.ids):  # as nearly always
        return briefs, reports, seen, ()
    position = {client: row for row, client in enumerate(briefs.ids.tolist())}
    good: dict[int, int] = {}
    for row, client in enumerate(reports.ids.tolist()):
        reason = faults.get(row)
        if client not in position:
            reason = "it was not asked"
        elif client in good:
            reason = "it reported twice"
        if reason:
            rejected.append((client, reason))
        else:
            good[client] = row
    answered = {*good, *(client for client, _ in rejected)}
    rejected += [(client, "it did not report") for client in position if client not in answered]
    order = sorted(good)
    rows = torch.tensor([good[client] for client in order], dtype=torch.int64)
    asked = torch.tensor([position[client] for client in order], dtype=torch.int64)
    rejected.sort()
    lost = {
        client: reason for client, reason in rejected if client in position and client not in good
    }
    reports = changed(reports, failed=tuple(lost.items()))
    if len(order) < len(reports) or not torch.equal(rows, torch.arange(len(reports))):
        reports = reports.take(rows)
        seen = measured(reports.delta)
    if len(order) < len(briefs):
        briefs = briefs.take(asked)
    return briefs, reports, seen, tuple(rejected)


# --- weigh, combine, observe, step ---


def conclude(
    run: Run,
    setup: Setup,
    now: Round,
    briefs: Briefs,
    reports: Reports,
    sent: Sent | None = None,
    landing: Landing | None = None,
) -> Run:
    """Stages 4 to 8: receive, weigh, combine, observe, step. Without a usable report the model does
    not change.
    """
    algorithm, rules = setup.algorithm, setup.algorithm.rules
    record = _begun(run, setup, now, briefs, landing)

    # --- receive ---
    asked = briefs.ids.tolist() if sent or landing is not None else []
    positions = {client: row for row, client in enumerate(asked)}
    reports = _stored_kept(run, setup, reports)
    briefs, reports, seen, rejected = accept(briefs, reports)
    if briefs.offset is not None and len(
        reports
    ):  # measure from the version, not from where the client was placed
        assert briefs.version is not None
        reports = changed(reports, delta=reports.delta + (briefs.start - briefs.version))
        seen = measured(reports.delta)
    reports = changed(reports, mass=mass(briefs, reports.steps))
    took = torch.full((len(reports),), torch.nan, dtype=torch.float64)
    if landing is not None:
        took = landing.took(reports.ids)
    now = changed(now, briefs=briefs, reports=reports, took=took)
    memories = [
        changed(
            run.memory(i, table.rows(reports.ids)), sent=_taken(sent, i, reports.ids, positions)
        )
        for i, table in enumerate(run.tables)
    ]
    for i, rule in enumerate(rules):
        now = changed(now, reports=rule.receive(now.reports, memories[i], now))
    if now.reports.delta is not reports.delta:
        seen = measured(now.reports.delta)
    reports = now.reports
    work = reports.work(briefs)
    trained = int(work.samples(reports.steps.numpy()).sum())
    record = changed(record, ids=reports.ids, rejected=rejected, samples=trained, work=work)
    if setup.keeps and len(reports):
        run.counted.write(reports.ids, {"round": briefs.round})
    if not len(reports) and not algorithm.any("private"):
        return _idle(run, setup, now, memories, record)
    now, values = _detected(setup, now, memories, seen)

    # --- weigh ---
    weights = _weighed(now.counts(), memories, now)
    now = changed(now, weights=weights / weights.sum())
    if algorithm.any("weighs"):
        now = changed(now, factors=_weighed(torch.ones_like(weights), memories, now))

    # --- combine ---
    direction = now.weights.to(reports.delta, non_blocking=True) @ reports.delta
    mean = ref(direction)  # to recognise it without keeping it alive when a rule replaces it
    for i, rule in enumerate(rules):
        direction = rule.combine(direction, memories[i], now)

    # --- observe ---
    for i, rule in enumerate(rules):
        _, memories[i] = _stored((None, rule.observe(memories[i], now)), memories[i], reports.ids)

    # --- step ---
    length = torch.linalg.vector_norm(direction)
    for i in algorithm.order:
        direction, memories[i] = rules[i].step(direction, memories[i], now)
    x = _moved(run.x, direction, memories) if direction is mean() else run.x + direction
    consensus, finite = torch.stack([length, x.sum()]).tolist()
    if not math.isfinite(finite):
        raise UserError(
            f"After round {run.round + 1} the model is not finite, although every accepted update is: the step of "
            f"{setup.algorithm} is too long; lower its lr, or train.lr."
        )
    base = _rebased(run, setup, changed(now, moved=x), memories)
    up = reports.all_bytes(briefs, setup.layout, run.x.element_size())
    record = changed(
        record,
        weights=now.weights,
        reports=reports,
        consensus=consensus,
        values=values,
        bytes_up=record.bytes_up + up,
    )
    idle = 0 if len(reports) or not record.asked else run.idle + 1
    return _after(run, memories, x=x, base=base, signals=now.signals, idle=idle, record=record)


def _weighed(factors: Tensor, memories: Sequence[Memory], now: Round) -> Tensor:
    """What the rules make of these weights, one after another."""
    for rule, memory in zip(now.rules, memories, strict=False):  # the detectors' memories follow
        factors = rule.weigh(factors, memory, now)
    return factors


def _begun(
    run: Run, setup: Setup, now: Round, briefs: Briefs, landing: Landing | None = None
) -> Record:
    """The record of a round whose clients were sent their briefs, with what measuring beforehand
    has cost.
    """
    size = run.x.element_size()
    asked, down, up = len(briefs), briefs.all_bytes(setup.layout, size), 0
    if landing is not None:
        asked, down = landing.costs.asked, landing.costs.bytes_down
    if now.first is not None:
        measured_briefs, answers = now.first
        down += measured_briefs.all_bytes(setup.layout, size)
        up += len(answers) * answers.numbers() * NUMBER_BYTES
    none = torch.empty(0)
    return Record(none.long(), none, None, (), asked, now.lr, down, up, first=now.first)


def _taken(sent: Sent | None, rule: int, ids: Tensor, positions: Mapping[int, int]) -> State:
    """What the rule with this number sent along, for the clients that reported."""
    if not sent or rule not in sent:
        return {}
    rows = [positions[client] for client in ids.tolist()]
    if rows == list(range(len(positions))):  # all of them: nothing is copied
        return sent[rule]
    return {name: value[rows] for name, value in sent[rule].items()}


def _detected(
    setup: Setup, now: Round, memories: list[Memory], seen: Measures
) -> tuple[Round, tuple[float, ...]]:
    """The round with its signals, and every detector's value; what detectors remember is stored."""
    values, decisions = [], []
    for i, detector in enumerate(setup.detectors, len(setup.algorithm.rules)):
        if not len(now.reports) and not detector.private:  # it has nothing to measure
            values.append(float("nan"))
            decisions.append(now.signals.critical)
            continue
        values.append(detector.value(memories[i], now))
        answer = detector.decide(values[-1], memories[i], now)
        critical, memories[i] = _stored(answer, memories[i], now.reports.ids)
        decisions.append(critical)
    signals = Signals(
        critical=decisions[0] if decisions else True,
        values=dict(zip(setup.detector_names, values, strict=True)),
        elud=seen.elud,
        coherence=seen.coherence,
    )
    return changed(now, signals=signals), tuple(values)


def _rebased(run: Run, setup: Setup, now: Round, memories: Sequence[Memory]) -> Tensor | None:
    """How far the frozen weights are from the task's after this round; None: no rule has moved
    them.
    """
    base = run.base
    for i in setup.algorithm.order:
        rule = setup.algorithm.rules[i]
        if acts(rule, "rebase"):
            if base is None:
                base = run.x.new_zeros(setup.layout.base_size, dtype=torch.float32)
            base = rule.rebase(base, memories[i], now)
    return base


def _moved(x: Tensor, direction: Tensor, memories: Sequence[Memory]) -> Tensor:
    """x + direction, in place unless a rule keeps the direction: a model may take up most of the
    memory.
    """
    place = direction.untyped_storage().data_ptr()
    values = (value for memory in memories for value in memory.state.values())
    remembered = any(value.untyped_storage().data_ptr() == place for value in values)
    return x + direction if remembered or direction.dtype != x.dtype else direction.add_(x)


def _stored(answer: tuple[Any, Memory], before: Memory, ids: Tensor) -> tuple[Any, Memory]:
    """The memory returned by a hook that may write rows, after storing them; nothing refers to the
    rows any more.
    """
    value, memory = answer
    if memory.rows is not before.rows and memory.rows:
        memory.table.write(ids, memory.rows)
    return value, Memory(memory.state, {}, memory.table, memory.sent)


def _idle(run: Run, setup: Setup, now: Round, memories: list[Memory], record: Record) -> Run:
    """A round without a usable report: only rules with the trait `idle` act."""
    x = run.x
    for i in setup.algorithm.order:
        rule = setup.algorithm.rules[i]
        if setup.algorithm.traits[i].idle:
            now = changed(now, weights=torch.empty(0, dtype=torch.float64))
            seen = rule.observe(memories[i], now).replace(
                rows={}
            )  # without reports there are no rows to store
            direction, memories[i] = rule.step(torch.zeros_like(run.x), seen, now)
            x = x + direction if acts(rule, "step") else x
    return _after(run, memories, x=x, idle=run.idle + 1, record=record)


def _after(run: Run, memories: Sequence[Memory], **changes: Any) -> Run:
    writes = tuple(table.writes for table in run.every_table)
    states = tuple(memory.state for memory in memories)
    return changed(run, round=run.round + 1, states=states, writes=writes, **changes)


def drive(course: Rounds, engine: Trains) -> Iterator[Run]:
    """One run on one engine: the run after every round.

    Args:
        course: The run's rounds, from `rounds`.
        engine: What trains its cohorts.
    """
    begin = getattr(engine, "begin", None)
    run, briefs = next(course)
    while briefs is not None:
        before = run.round
        run, briefs = course.send(engine.train(briefs))
        if begin and briefs is not None:
            begin(briefs)  # it trains while the caller evaluates the run
        if run.round > before or briefs is None:
            yield run
