"""How the server waits, against cases worked out by hand and against a plain list of events."""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from fleets import CLIENTS, ENGINES, SIZES, landings, lognormal, runs_of, setup_of, task, waits

from kairosfl.core.clock import Fleet
from kairosfl.core.rule import Algorithm, Memory, Plan, Rule
from kairosfl.core.run import Round, Run
from kairosfl.core.traits import Traits
from kairosfl.errors import UserError
from kairosfl.rules.scaffold import SCAFFOLD


def fixed(*seconds: float, **changes: Any) -> Fleet:
    """Devices that take so many seconds for an order whatever it is; the others take the last."""
    latency = np.array([*seconds, *[seconds[-1]] * (CLIENTS - len(seconds))])
    return Fleet(CLIENTS, **{"seconds": 0.0, "latency": latency, **changes})


@dataclass(frozen=True)
class Online:
    """Each client is online in one span of time."""

    since: np.ndarray
    until: np.ndarray

    def next_online(self, clients: np.ndarray, time: float) -> np.ndarray:
        begin = np.maximum(self.since[clients], time)
        return np.where(begin < self.until[clients], begin, math.inf)

    def online_until(self, clients: np.ndarray, time: float) -> np.ndarray:
        return self.until[clients].copy()


def online(spans: dict[int, tuple[float, float]]) -> Online:
    since, until = np.zeros(CLIENTS), np.full(CLIENTS, math.inf)
    for client, (begin, end) in spans.items():
        since[client], until[client] = begin, end
    return Online(since, until)


@dataclass(frozen=True, kw_only=True)
class InOrder(Rule):
    """Prefers these clients in every round, in this order; how the server waits is given, too."""

    ids: tuple[int, ...] = tuple(range(CLIENTS))
    words: tuple[tuple[str, Any], ...] = ()

    def traits(self) -> Traits:
        return Traits(late=True)

    def select(self, plan: Plan, memory: Memory, now: Round) -> Plan:
        turned = np.roll(np.array(self.ids), -now.number)
        return replace(plan, **{"ids": turned, **dict(self.words)})


def asking(*ids: int, **words: Any) -> Algorithm:
    return Algorithm((InOrder(ids=ids, words=tuple(words.items())),))


@dataclass(frozen=True, kw_only=True)
class Keeps(Rule):
    """Its clients keep a second vector; the round ends at a deadline."""

    deadline: float

    def traits(self) -> Traits:
        return Traits(keeps=frozenset({"second"}))

    def select(self, plan: Plan, memory: Memory, now: Round) -> Plan:
        return replace(plan, deadline=self.deadline)


# --- without a clock, and as if there were none ---


@pytest.mark.parametrize("engine", list(ENGINES))
def test_equal_devices_train_as_without_a_clock_to_the_bit(engine: str) -> None:
    equal = fixed(3.0)
    plain = runs_of(Algorithm(), None, engine)
    buffered = waits(size=4, concurrency=4, late="keep")
    for algorithm in (Algorithm(), buffered, waits(deadline=3.0), waits(patience=4.0)):
        timed = runs_of(algorithm, equal, engine)
        for one, other in zip(plain, timed, strict=True):
            assert torch.equal(one.x, other.x)
            assert one.record is not None
            assert other.record is not None
            assert one.record.ids.tolist() == other.record.ids.tolist()
            assert one.record.bytes_down == other.record.bytes_down
            assert one.record.bytes_up == other.record.bytes_up
            assert one.record.samples == other.record.samples
        assert [run.time for run in timed] == [3.0 * run.round for run in timed]


def test_a_synchronous_round_lasts_as_long_as_its_slowest_client() -> None:
    fleet = lognormal()
    plain, timed = runs_of(Algorithm(), None), runs_of(Algorithm(), fleet)
    moment = 0.0
    for one, other in zip(plain, timed, strict=True):
        assert torch.equal(one.x, other.x)
        assert one.record is not None
        ids = one.record.ids.numpy()
        moment += float((np.asarray(fleet.seconds)[ids] * 2 * SIZES[ids]).max())
        assert other.time == pytest.approx(moment)


# --- the words of the plan, by hand ---


def test_the_first_of_more_that_are_asked() -> None:
    """Of five that are asked, the three fastest count; the others work on and cannot be asked."""
    fleet = fixed(1.0, 2.0, 3.0, 40.0, 5.0)
    first, second, third = runs_of(
        asking(0, 1, 2, 3, 4, size=3, over=0.6), fleet, number=3, cohort=3
    )
    assert landings([first]) == [(3.0, [0, 1, 2])]
    # The second round asks 1, 2 and 0; clients 3 and 4 are at work until 40 and 5.
    assert landings([second]) == [(6.0, [0, 1, 2])]
    assert second.record is not None
    assert second.record.asked == 3
    # Client 4 was done at 5: its order was of no use, and it is asked again in the third.
    assert second.record.clock is not None
    assert second.record.clock.device_seconds == 1 + 2 + 3 + 5
    assert second.record.clock.wasted_seconds == 5
    assert landings([third]) == [(9.0, [0, 1, 2])]
    assert [order.client for order in third.flight.orders] == [4, 3]
    assert [order.due for order in third.flight.orders] == [11.0, 40.0]


def test_a_deadline_ends_the_round_with_what_has_landed() -> None:
    fleet = fixed(1.0, 2.0, 7.0)
    dropped = runs_of(asking(0, 1, 2, deadline=5.0), fleet, number=3, cohort=3)
    # Client 2 is at work until 7: the second round does not ask it and ends with the others.
    assert landings(dropped) == [(5.0, [0, 1]), (7.0, [0, 1]), (12.0, [0, 1])]
    kept = runs_of(asking(0, 1, 2, deadline=5.0, late="keep"), fleet, number=3, cohort=3)
    assert landings(kept) == [(5.0, [0, 1]), (7.0, [0, 1, 2]), (12.0, [0, 1])]
    ages = [run.record.clock.age for run in kept if run.record and run.record.clock]
    assert ages == [0.0, pytest.approx(1 / 3), 0.0]


def test_too_few_answers_at_the_deadline_do_not_count() -> None:
    fleet = fixed(1.0, 9.0, 9.0)
    (run,) = runs_of(asking(0, 1, 2, deadline=5.0, quorum=0.5), fleet, number=1, cohort=3)
    assert landings([run]) == [(5.0, [])]
    assert torch.equal(run.x, task().start())
    assert run.record is not None
    assert run.record.rejected == ((0, "only 1 of 3 answers came, below the quorum"),)
    (run,) = runs_of(asking(0, 1, 2, deadline=5.0, quorum=0.3), fleet, number=1, cohort=3)
    assert landings([run]) == [(5.0, [0])]


def test_an_order_is_given_up_and_its_place_is_free() -> None:
    fleet = fixed(1.0, 30.0, 2.0, 2.5)
    (run,) = runs_of(asking(0, 1, 2, 3, size=2, concurrency=2, patience=4.0), fleet, number=1)
    # 0 and 1 at 0; 0 lands at 1, and 2 is asked; it lands at 3 and fills the round.
    assert landings([run]) == [(3.0, [0, 2])]
    (run,) = runs_of(asking(0, 1, 2, size=3, concurrency=2, patience=4.0), fleet, number=1)
    # Now three answers are wanted: 1 is given up at 4, nobody else can be asked.
    assert landings([run]) == [(4.0, [0, 2])]
    assert run.record is not None
    assert run.record.rejected == ((1, "no answer within 4 s"),)
    assert [(order.client, order.counts) for order in run.flight.orders] == [(1, False)]


def test_a_device_that_never_answers_holds_its_place_no_longer_than_the_patience_lasts() -> None:
    fleet = fixed(math.inf, 1.0)
    (run,) = runs_of(asking(0, 1, 2, 3, size=3, concurrency=1, patience=10.0), fleet, number=1)
    assert landings([run]) == [(13.0, [1, 2, 3])]
    runs = runs_of(asking(0, 1, 2, 3, size=4), fleet, number=3)
    assert landings(runs)[0] == (1.0, [1, 2, 3])  # the round ends: nothing else will happen


def test_answers_that_are_too_old_do_not_count_and_are_not_trained() -> None:
    fleet = fixed(1.0, 3.5, 1.0)
    words = {"size": 1, "concurrency": 2, "late": "keep"}
    runs = runs_of(asking(0, 1, 2, **words), fleet, number=6)
    # 0 and 1 are asked at 0. 0 lands at 1; round 1 asks 2 (1 is at work), and so on.
    assert (3.5, [1]) in landings(runs)
    landed = next(run for run in runs if run.time == 3.5)
    assert landed.record is not None
    assert landed.record.clock is not None
    assert landed.record.clock.age == 3
    runs = runs_of(asking(0, 1, 2, **words, max_age=2), fleet, number=6)
    reasons = [reason for run in runs if run.record for reason in run.record.rejected]
    assert reasons == [(1, "its order is 3 rounds old, and max_age = 2")]


def test_what_lands_at_one_instant_lands_before_anybody_is_asked() -> None:
    runs = runs_of(waits(size=2, concurrency=6, late="keep"), fixed(5.0), number=7)
    assert [run.time for run in runs] == [5.0, 5.0, 5.0, 10.0, 10.0, 10.0, 15.0]
    asked = [run.record.asked for run in runs if run.record]
    assert asked == [6, 0, 0, 6, 0, 0, 6]
    ages = [run.record.clock.age for run in runs if run.record and run.record.clock]
    assert ages == [0.0, 1.0, 2.0, 0.0, 1.0, 2.0, 0.0]
    together = [run.record.clock.together for run in runs if run.record and run.record.clock]
    assert together[0] == together[3] == 6


def test_a_client_does_as_many_steps_as_fit_before_the_deadline() -> None:
    """In 20 seconds; their samples, in batches of 4, take 1, 2.2 and 9 seconds each."""
    speeds = np.array([1.0, 2.2, 9.0])
    fleet = Fleet(CLIENTS, seconds=np.concatenate([speeds, np.ones(CLIENTS - 3)]))
    algorithm = asking(0, 1, 2, deadline=20.0, partial=True)
    (run,) = runs_of(algorithm, fleet, number=1, epochs=9)
    assert run.record is not None
    reports = run.record.reports
    assert reports is not None
    # Client 0 takes 4 s a step. The steps of client 1 are of 4, 4 and 1 samples: 19.8 s. One step
    # of client 2 takes 36 s.
    assert dict(zip(reports.ids.tolist(), reports.steps.tolist(), strict=True)) == {0: 5, 1: 3}
    assert run.time == 20.0


# --- who can be asked ---


def test_who_is_offline_is_skipped_and_the_next_in_order_is_asked() -> None:
    fleet = fixed(2.0, availability=online({0: (5.0, 99.0), 2: (7.0, 99.0)}))
    runs = runs_of(asking(0, 1, 2, 3, size=2, concurrency=2), fleet, number=1)
    assert landings(runs) == [(2.0, [1, 3])]


def test_a_device_that_goes_offline_ends_its_order_and_another_is_asked() -> None:
    fleet = fixed(2.0, 4.0, 3.0, availability=online({1: (0.0, 1.5)}))
    (run,) = runs_of(asking(0, 1, size=2), fleet, number=1)
    assert landings([run]) == [(2.0, [0])]
    assert run.record is not None
    assert run.record.rejected == ((1, "its device went offline before it was done"),)
    assert run.record.clock is not None
    assert run.record.clock.wasted_seconds == 1.5
    (run,) = runs_of(waits(size=2), replace(fleet, availability=fleet.availability), number=1)
    assert run.record is not None
    assert len(run.record.ids) == 2


def test_when_nobody_is_online_the_clock_goes_to_when_somebody_is() -> None:
    spans = {client: (100.0 + 3 * client, 1000.0) for client in range(CLIENTS)}
    runs = runs_of(waits(size=2), fixed(2.0, availability=online(spans)), number=2)
    # Client 0 comes at 100 and lands at 102, before client 1 comes at 103.
    assert landings(runs) == [(102.0, [0]), (105.0, [0, 1])]
    # A deadline runs from the first order on, and so does not pass while everybody is away.
    runs = runs_of(waits(size=2, deadline=5.0), fixed(2.0, availability=online(spans)), number=1)
    assert landings(runs) == [(102.0, [0])]


def test_a_device_that_never_answers_does_not_keep_others_from_being_asked() -> None:
    spans = dict.fromkeys(range(1, CLIENTS), (7.0, math.inf))
    fleet = fixed(math.inf, 2.0, availability=online(spans))
    words = {"size": 1, "concurrency": 2, "late": "keep"}
    # Client 0 is at work for ever, and one place is free until the others come at 7.
    assert landings(runs_of(waits(**words), fleet, number=3))[0][0] == 9.0


def test_devices_that_are_done_with_dropped_orders_are_asked_in_the_next_round() -> None:
    words = {"size": 6, "over": 1.0}
    runs = runs_of(waits(**words), fixed(2.0), number=3)  # all twelve, of whom six are dropped
    assert [run.record.asked for run in runs if run.record] == [CLIENTS] * 3
    # Everybody is late, and done at 7: there the second round begins, and its deadline.
    runs = runs_of(waits(size=CLIENTS, deadline=5.0), fixed(7.0), number=3)
    assert [run.time for run in runs] == [5.0, 12.0, 19.0]
    # Where clients keep something, that is stored at the end of a round before they are asked.
    runs = runs_of(Algorithm((Keeps(deadline=5.0),)), fixed(7.0), number=4, cohort=CLIENTS)
    assert [run.time for run in runs] == [5.0, 7.0, 12.0, 14.0]


def test_an_answer_at_the_instant_at_which_its_patience_ends_lands() -> None:
    words = {"size": 1, "concurrency": 2, "late": "keep", "patience": 5.0}
    runs = runs_of(waits(**words), fixed(5.0), number=2)
    assert [run.time for run in runs] == [5.0, 5.0]
    assert not any(run.record.rejected for run in runs if run.record)


@pytest.mark.parametrize(
    "words",
    [{}, {"late": "keep", "concurrency": 9}, {"deadline": 5.0}, {"over": 9.0}, {"size": 99}],
)
def test_no_run_hangs(words: dict[str, Any]) -> None:
    """Dead devices, more asked than exist, nobody online ever: every round ends."""
    dead = online(dict.fromkeys(range(CLIENTS), (0.0, -1.0)))
    dying = online({client: (0.0, 1.0 + client) for client in range(CLIENTS)})
    stuck = fixed(math.inf)
    for fleet in (
        fixed(2.0, availability=dead),
        fixed(2.5, availability=dying),
        stuck,
        fixed(1.0, dropout=1.0),
    ):
        runs = runs_of(waits(**words), fleet, number=4)
        assert len(runs) == 4
        assert all(math.isfinite(run.time) for run in runs)
    many = runs_of(waits(**{**words, "size": 99}), fixed(2.0), number=2)
    assert many[0].record is not None
    assert len(many[0].record.ids) == CLIENTS


# --- against a plain list of events ---


def events(
    durations: np.ndarray, size: int, concurrency: int, number: int
) -> list[tuple[float, list[int], list[int]]]:
    """Time, clients and ages of every buffer: a heap, written from the definition."""
    heap: list[tuple[float, int, int]] = []
    moment = 0.0
    rounds_done = []
    for version in range(number):
        order = np.roll(np.arange(CLIENTS), -version).tolist()
        buffer: list[tuple[int, int]] = []
        asked: set[int] = set()
        while True:
            while heap and heap[0][0] <= moment and len(buffer) < size:
                _, client, sent = heapq.heappop(heap)
                buffer.append((client, version - sent))
            if len(buffer) == size:
                break
            for client in order:
                at_work = {member for _, member, _ in heap}
                busy = at_work | asked | {member for member, _ in buffer}
                if len(heap) < concurrency and client not in busy:
                    asked.add(client)
                    heapq.heappush(heap, (moment + durations[client], client, version))
            moment = heap[0][0]
        buffer.sort()
        rounds_done.append((moment, [c for c, _ in buffer], [age for _, age in buffer]))
    return rounds_done


@pytest.mark.parametrize(("size", "concurrency"), [(1, 5), (2, 6), (3, 4), (5, 5), (4, 9)])
def test_buffers_fill_as_in_a_plain_list_of_events(size: int, concurrency: int) -> None:
    fleet = lognormal()
    durations = np.asarray(fleet.seconds) * 2 * SIZES
    expected = events(durations, size, concurrency, 15)
    assert max(max(ages) for _, _, ages in expected) >= (3 if size < 3 else 1)
    words = {"size": size, "concurrency": concurrency, "late": "keep"}
    for engine in ENGINES:
        runs = runs_of(asking(*range(CLIENTS), **words), fleet, engine, number=15)
        for run, (moment, ids, ages) in zip(runs, expected, strict=True):
            assert run.time == pytest.approx(moment, rel=1e-12)
            assert run.record is not None
            assert run.record.ids.tolist() == ids
            assert run.record.clock is not None
            assert run.record.clock.age == np.mean(ages)


def test_as_many_are_at_work_as_the_rate_of_landings_times_the_time_each_takes() -> None:
    """Little's law, and that the places are always taken."""
    runs = runs_of(waits(size=2, concurrency=5, late="keep"), lognormal(), number=400, epochs=1)
    took = torch.cat([run.record.clock.took for run in runs if run.record and run.record.clock])
    at_work = len(took) / runs[-1].time * float(took.mean())
    assert at_work == pytest.approx(5, rel=0.02)


# --- what is refused ---


@dataclass(frozen=True)
class Hasty(Rule):
    """Says nothing about late answers."""


def test_a_rule_that_may_be_wrong_for_late_answers_is_refused() -> None:
    late = waits(late="keep")
    with pytest.raises(UserError, match=r"Hasty cannot be used while late answers are kept"):
        runs_of(late + Algorithm((Hasty(),)), fixed(1.0), number=1)
    assert runs_of(waits() + Algorithm((Hasty(),)), fixed(1.0), number=1)


def test_a_fleet_of_another_size_is_refused() -> None:
    with pytest.raises(UserError, match=r"Setup\.fleet has 3 devices, but there are 12 clients"):
        setup_of(Algorithm(), Fleet(3))
    with pytest.raises(UserError, match=r"fleet\.seconds has the shape \(2,\), but there are 3"):
        Fleet(3, seconds=np.ones(2))
    with pytest.raises(UserError, match=r"fleet\.latency must be 0 or more for every client"):
        Fleet(3, latency=-1.0)


def test_planning_to_wait_without_a_clock_is_refused() -> None:
    with pytest.raises(UserError, match="needs devices or a clock"):
        runs_of(waits(deadline=5.0), None)


def test_a_snapshot_keeps_the_orders_in_flight() -> None:
    runs = runs_of(waits(size=2, concurrency=6, late="keep"), lognormal(), number=6)
    middle: Run = runs[2].snapshot()
    later = runs_of(waits(size=2, concurrency=6, late="keep"), lognormal(), number=6, run=middle)
    assert torch.equal(later[-1].x, runs[-1].x)


@dataclass(frozen=True, kw_only=True)
class Late(SCAFFOLD):
    """SCAFFOLD, which keeps the c that its clients use."""

    def traits(self) -> Traits:
        return replace(super().traits(), late=True)


def test_scaffold_takes_a_late_answer_with_the_c_that_its_client_used() -> None:
    """c_i⁺ = c_i − c + ḡ, with c as it was when client i was asked."""
    words = {"size": 2, "concurrency": 5, "late": "keep"}
    algorithm = asking(*range(CLIENTS), **words) + Late()
    runs = runs_of(algorithm, lognormal(), number=10, lr=0.05)
    rows: dict[int, torch.Tensor] = {}
    means = [torch.zeros(39)]
    oldest = 0
    for run in runs:
        record = run.record
        assert record is not None
        assert record.reports is not None
        assert record.clock is not None
        oldest = max(oldest, int(record.clock.ages.max()))
        for row, client in enumerate(record.ids.tolist()):
            asked = means[len(means) - 1 - int(record.clock.ages[row])]
            gradient = -record.reports.delta[row] / float(record.reports.mass[row])
            rows[client] = rows.get(client, torch.zeros(39)) - asked + gradient
        means.append(sum(rows.values(), torch.zeros(39)) / CLIENTS)
    assert oldest >= 2
    for client, expected in rows.items():
        stored = runs[-1].tables[1].rows(torch.tensor([client]))["vector"][0]
        assert torch.allclose(stored, expected, atol=1e-6)
