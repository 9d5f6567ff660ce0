"""One round on the clock: whom the server asks when, what lands, and when it has waited enough.

The plan is an order of preference. The server goes down it whenever a place is free, skipping who
is offline, who is at work, and whom this round has asked or heard already. Everything that lands at
one instant lands before anybody is asked.
"""

from __future__ import annotations

import math
from bisect import insort
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter

import numpy as np
import torch
from torch import Tensor

from kairosfl.core.clock import Fleet, least_steps, message_bytes, samples_of
from kairosfl.core.fields import Briefs, Reports
from kairosfl.core.flight import Batch, Flight, Order
from kairosfl.core.layout import Layout
from kairosfl.core.rule import Plan, Round, changed

KEY = attrgetter("key")
OFFLINE = "its device went offline before it was done"
BLOCK = 16  # candidates that are drawn at a time, at least
SEVERAL = 1024  # and looked at again, at most


def size_asked(plan: Plan) -> int:
    """How many clients a round asks, unless the plan names them."""
    return math.ceil(plan.size * (1 + plan.over) - 1e-9)


class Preference:
    """The clients whom a round may ask, in the order of preference; drawn as far as it is needed.

    The first ones are those whom the round would ask without a clock.
    """

    def __init__(self, plan: Plan, now: Round) -> None:
        asked, self._population = size_asked(plan), now.population
        self._draw = now.stream("select")
        self._eligible = plan.eligible
        self._exactly = plan.ids is not None
        if plan.ids is not None:
            ids = np.asarray(plan.ids)
            self._next = ids[np.sort(np.unique(ids, return_index=True)[1])]
        elif plan.eligible is None:
            count = min(asked, now.population)
            self._next = self._draw.choice(now.population, size=count, replace=False)
        else:
            count = min(asked, len(plan.eligible))
            self._next = self._draw.choice(plan.eligible, size=count, replace=False)
        self.first = len(self._next)
        self._seen = set(self._next.tolist())
        self._all = self._exactly

    def more(self, count: int) -> np.ndarray:
        """The next candidates, about so many; none: these were all."""
        if not len(self._next):
            self._next = self._drawn(max(count, BLOCK))
        given, self._next = self._next, self._next[:0]
        return given.astype(np.int64)

    def _drawn(self, count: int) -> np.ndarray:
        """Some of those who were not drawn yet, without a list of everybody."""
        if self._all:
            return self._next
        if self._eligible is not None or 2 * (len(self._seen) + count) > self._population:
            return self._remaining()
        drawn: list[int] = []
        while len(drawn) < count:
            for client in self._draw.integers(0, self._population, size=count).tolist():
                if client not in self._seen:
                    self._seen.add(client)
                    drawn.append(client)
        return np.array(drawn)

    def _remaining(self) -> np.ndarray:
        """Everybody who was not drawn yet, in random order."""
        if self._all:
            return np.empty(0, dtype=np.int64)
        self._all = True
        everybody = np.arange(self._population) if self._eligible is None else self._eligible
        seen = np.fromiter(self._seen, dtype=np.int64, count=len(self._seen))
        left: np.ndarray = self._draw.permutation(np.setdiff1d(everybody, seen))
        return left


@dataclass(frozen=True)
class Costs:
    """What the devices did until orders ended in this round.

    Args:
        asked: Orders that were sent.
        bytes_down: Of these orders.
        device_seconds: Of the orders that ended.
        wasted_seconds: Of those among them that do not count.
    """

    asked: int = 0
    bytes_down: int = 0
    device_seconds: float = 0.0
    wasted_seconds: float = 0.0


class Waiting:
    """The server in one round, between two of its steps.

    Args:
        fleet: The clients' devices.
        sizes: Samples of every client.
        layout: Of the model.
        itemsize: Bytes of one of its numbers.
        plan: How the server waits.
        now: The round.
        flight: The orders of earlier rounds.
        send: Briefs these clients, whose ids ascend.
        keeps: Whether clients keep anything: their training then matters although it is late.
    """

    def __init__(
        self,
        fleet: Fleet,
        sizes: np.ndarray,
        layout: Layout,
        itemsize: int,
        plan: Plan,
        now: Round,
        flight: Flight,
        send: Callable[[Tensor], Batch],
        *,
        keeps: bool,
    ) -> None:
        self.fleet, self.sizes, self.plan = fleet, sizes, plan
        self._layout, self._itemsize = layout, itemsize
        self._number, self._seed, self._send, self._keeps = now.number, now.seed, send, keeps
        self.time, self.costs, self.over = now.time, Costs(), False
        self.orders = list(flight.orders)  # by when they end
        self.landed: list[Order] = []
        self.lost: list[tuple[Order, str]] = []  # ended without an answer that counts, and why
        self.finished: list[Order] = []  # late ones of which clients keep something

        # --- whom it may ask ---
        self._choice = Preference(plan, now)
        self._passed = np.empty(0, dtype=np.int64)  # candidates who could not be asked so far
        self._closed: set[int] = set()  # clients whom this round has asked or heard

        # --- how long it waits ---
        self._asked = size_asked(plan)
        self._wanted = plan.size
        if plan.ids is not None and not plan.concurrency:
            self._asked = self._choice.first
            self._wanted = plan.size if plan.over else self._asked
        self._end = math.inf  # the deadline runs from the first order on
        if self._at_work():
            self._begin()

    # --- the round ---

    def advance(self) -> list[Order]:
        """Go on until the round is over, or until the orders that are returned must be trained."""
        while not self.over:
            unsure = self._land()
            if unsure:
                return self._untrained()
            self._give_up()
            if len(self.landed) >= self._wanted or self.time >= self._end:
                break
            if self._ask():
                continue
            moment = self._next()
            if moment == math.inf:  # nothing is in flight, and nobody can be asked
                break
            self.time = moment
        if not self.over:
            self._conclude()
        return self._needed()

    def trained(self, orders: Sequence[Order], reports: Reports) -> None:
        """Note the reports of these orders."""
        places = {client: place for place, client in enumerate(reports.ids.tolist())}
        faults = dict(reports.failed)
        for order in orders:
            place = places.get(order.client, -1)
            fault = faults.get(order.client, "it did not report") if place < 0 else ""
            after = changed(order, answer=reports, place=place, fault=fault)
            if not order.sure:
                after = self._timed(after)
            self._replace(order, after)

    def flight(self) -> Flight:
        """The orders that are still in flight."""
        return Flight(tuple(self.orders)).compact()

    # --- landing ---

    def _land(self) -> bool:
        """End the orders that are due, as many as the round takes; whether one must be trained to
        know.
        """
        while self.orders and self.orders[0].due <= self.time:
            order = self.orders[0]
            if not order.sure:
                return True
            if order.counts and len(self.landed) >= self._wanted:
                return False
            self.orders.pop(0)
            if order.counts or self._keeps or self.costs.asked:
                # A device that is done with a dropped order is left for the next round, where it
                # begins with the others. What it keeps is stored at the end of this one.
                self._closed.add(order.client)
            reason = self._reason(order)
            if reason:
                self.lost.append((order, reason))
            elif order.counts:
                self.landed.append(order)
            if self._keeps and not order.fault and (reason or not order.counts):
                self.finished.append(order)
            seconds = order.due - order.began
            useless = seconds if reason or not order.counts else 0.0
            self._spend(device_seconds=seconds, wasted_seconds=useless)
        return False

    def _reason(self, order: Order) -> str:
        """Why a finished order gives no answer; empty if it does, or if nobody waits for it."""
        if not order.counts:
            return ""
        if order.fault and not order.unable:
            return order.fault
        age = self._number - order.round
        if age > self.plan.max_age:
            return f"its order is {age} rounds old, and max_age = {self.plan.max_age:g}"
        return ""

    def _give_up(self) -> None:
        """Stop waiting for orders that take longer than the plan's patience."""
        for order in tuple(self.orders):  # discarding one changes them
            waited_for = order.counts and order.due > self.time
            if waited_for and order.began + self.plan.patience <= self.time:
                self.lost.append((order, f"no answer within {self.plan.patience:g} s"))
                self._discard(order)

    def _discard(self, order: Order) -> None:
        """The answer no longer counts. The device works on, and is at work until it is done."""
        needed = self._keeps or not order.sure
        batch, answer = (order.batch, order.answer) if needed else (None, None)
        self._closed.add(order.client)
        self._replace(order, changed(order, counts=False, batch=batch, answer=answer))

    def _conclude(self) -> None:
        """The end of the round: late answers are dropped or kept, and too few do not count."""
        self.over = True
        if self.plan.late == "drop":
            for order in [o for o in self.orders if o.counts]:
                self._discard(order)
        quorum = self.plan.quorum
        if quorum is not None and len(self.landed) < quorum * self.plan.size:
            reason = f"only {len(self.landed)} of {self.plan.size} answers came, below the quorum"
            self.lost += [(order, reason) for order in self.landed]
            if self._keeps:
                self.finished += self.landed
            seconds = sum(order.due - order.began for order in self.landed)
            self._spend(wasted_seconds=seconds)
            self.landed = []

    # --- asking ---

    def _at_work(self) -> int:
        return sum(order.counts for order in self.orders)

    def _places(self) -> int:
        """How many clients may be asked now."""
        if self.plan.concurrency:
            return self.plan.concurrency - self._at_work()
        return self._asked - len(self.landed) - self._at_work()

    def _ask(self) -> bool:
        """Fill the free places; whether anybody was asked."""
        places = self._places()
        if places <= 0:
            return False
        chosen: list[int] = []
        skipped = []
        before, self._passed = self._passed, self._passed[:0]
        while len(chosen) < places:
            wanted = places - len(chosen)
            candidates, before = before[:SEVERAL], before[SEVERAL:]
            if not len(candidates):
                candidates = self._choice.more(wanted)
            if not len(candidates):
                break
            able = np.flatnonzero(self._able(candidates))[:wanted]
            chosen += candidates[able].tolist()
            skipped.append(np.delete(candidates, able))
        self._passed = np.concatenate([*skipped, before])
        if chosen:
            self._order(sorted(chosen))
        return bool(chosen)

    def _able(self, candidates: np.ndarray) -> np.ndarray:
        """Which of them can be asked now."""
        away = self._closed.union(order.client for order in self.orders)
        free = np.array([client not in away for client in candidates.tolist()])
        online = self.fleet.availability.next_online(candidates, self.time) <= self.time
        able: np.ndarray = free & online
        return able

    def _order(self, clients: list[int]) -> None:
        """Send these clients their orders."""
        if self._end == math.inf:
            self._begin()
        batch = self._send(torch.tensor(clients))
        batch = self._shortened(batch)
        briefs, ids = batch.briefs, np.array(clients)
        least = least_steps(briefs, self.sizes[ids])
        seconds = self._seconds(briefs, least)
        if least is None:
            ends = self.fleet.ends(self._seed, self._rounds(briefs), ids, self.time, seconds)
        else:  # whether a device drops out is known with its end
            until = self.fleet.availability.online_until(ids, self.time)
            ends = np.where(until < self.time + seconds, until, math.inf)
        ends = np.maximum(ends, self.time)
        for row, client in enumerate(clients):
            fails = bool(ends[row] < math.inf)
            order = Order(
                client=client,
                round=self._number,
                began=self.time,
                due=float(ends[row]) if fails else self.time + float(seconds[row]),
                sure=fails or least is None,
                fault=OFFLINE if fails else "",
                batch=batch,
                row=row,
            )
            insort(self.orders, order, key=KEY)
        self._closed.update(clients)
        down = briefs.all_bytes(self._layout, self._itemsize)
        self._spend(asked=len(briefs), bytes_down=down)

    def _begin(self) -> None:
        self._end = self.time + self.plan.deadline

    def _next(self) -> float:
        """The next instant at which something happens; infinite: never."""
        waited_for = [order for order in self.orders if order.counts]
        if self.landed and not waited_for:
            return math.inf
        moments = []
        if waited_for:
            sent_first = min(order.began for order in waited_for)
            moments += [waited_for[0].due, sent_first + self.plan.patience]
        if self._places() > 0:
            moments.append(self._somebody_free())
        moment = min(moments, default=math.inf)
        if waited_for or moment < math.inf:  # nobody waits for a deadline alone
            moment = min(moment, self._end)
        return moment

    def _somebody_free(self) -> float:
        """The next instant at which one of those who could not be asked is online or done."""
        done = {order.client: order.due for order in self.orders}
        candidates = [client for client in self._passed.tolist() if client not in self._closed]
        moments = []
        if not self.costs.asked:
            moments += [done[client] for client in candidates if client in done]
        idle = [client for client in candidates if client not in done]
        if idle:
            online = self.fleet.availability.next_online(np.array(idle), self.time)
            moments.append(float(online.min()))
        return min(moments, default=math.inf)

    # --- how long it takes ---

    def _seconds(self, briefs: Briefs, steps: np.ndarray | None = None) -> np.ndarray:
        """What these orders take, by the steps that the clients do."""
        ids = briefs.ids.numpy()
        return self.fleet.takes(
            self._seed,
            self._rounds(briefs),
            ids,
            samples_of(briefs, self.sizes[ids], steps),
            *message_bytes(briefs, self._layout, self._itemsize),
        )

    def _rounds(self, briefs: Briefs) -> np.ndarray:
        rounds: np.ndarray = briefs.round.numpy()
        return rounds

    def _timed(self, order: Order) -> Order:
        """The order with its true end, once its client has trained."""
        briefs = order.brief()
        assert order.answer is not None
        steps = None if order.place < 0 else order.answer.steps[order.place].numpy()[None]
        seconds = self._seconds(briefs, steps)
        ids = briefs.ids.numpy()
        ends = self.fleet.ends(self._seed, self._rounds(briefs), ids, order.began, seconds)
        if ends[0] < math.inf:  # never before the server heard of it
            return changed(order, due=max(self.time, float(ends[0])), sure=True, fault=OFFLINE)
        return changed(order, due=order.began + float(seconds[0]), sure=True)

    def _shortened(self, batch: Batch) -> Batch:
        """The orders with as many steps as their devices do until the deadline, at least one."""
        briefs = batch.briefs
        budget = self._end - self.time
        if not self.plan.partial or budget == math.inf:
            return batch
        most = briefs.work(self.sizes[briefs.ids.numpy()]).steps
        few, many = np.ones_like(most), most.copy()  # the answer is at least `few`
        while (few < many).any():
            middle = (few + many + 1) // 2
            fits = self._seconds(briefs, middle) <= budget
            few, many = np.where(fits, middle, few), np.where(fits, many, middle - 1)
        if (few == most).all():
            return batch
        briefs = changed(briefs, max_steps=torch.from_numpy(few.astype(np.int64)))
        return Batch(briefs, batch.sent)

    # --- training ---

    def _untrained(self) -> list[Order]:
        """The orders in flight whose reports may still count, or tell when they end."""
        return [order for order in self.orders if order.waits and self._counts(order)]

    def _counts(self, order: Order) -> bool:
        young = self._number - order.round <= self.plan.max_age
        return (order.counts and young) or self._keeps or not order.sure

    def _needed(self) -> list[Order]:
        """What must be trained before the server's step, with all that can be trained beside it."""
        needed = [order for order in (*self.landed, *self.finished) if order.waits]
        if needed and self.plan.late == "keep":
            needed += self._untrained()
        return needed

    # --- notes ---

    def _replace(self, order: Order, after: Order) -> None:
        """Put another order in this one's place, wherever it stands."""
        for ended in (self.landed, self.finished):
            ended[:] = [after if member is order else member for member in ended]
        where = next((i for i, member in enumerate(self.orders) if member is order), None)
        if where is not None:
            del self.orders[where]
            insort(self.orders, after, key=KEY)

    def _spend(self, **amounts: float) -> None:
        before = vars(self.costs)
        self.costs = changed(
            self.costs, **{name: before[name] + amount for name, amount in amounts.items()}
        )
