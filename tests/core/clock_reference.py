"""A federation on a clock as a plain list of events: written from the words of the documentation
and not from the code, in numpy and loops, so that the two can be compared.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

Numbers = np.ndarray


@dataclass
class Order:
    """What one client was asked. `due` is when its device is done, or fails."""

    client: int
    round: int
    began: float
    due: float
    fails: bool
    start: Numbers
    counts: bool = True  # False: nobody waits for it any more, but its device works on


@dataclass
class Happened:
    """What happened in one round."""

    asked: list[list[int]] = field(default_factory=list)  # at each instant, ascending
    landed: list[Order] = field(default_factory=list)
    rejected: list[tuple[int, str]] = field(default_factory=list)
    device_seconds: float = 0.0
    wasted_seconds: float = 0.0
    time: float = 0.0
    x: Numbers = field(default_factory=lambda: np.zeros(0))
    flight: list[tuple[int, int, float, float, bool]] = field(default_factory=list)


@dataclass
class Federation:
    """What stays the same.

    Args:
        x: The first model.
        sizes: Samples of each client.
        seconds: Of an order, by round and client.
        drops: When a device drops out of an order, by round, client, instant and seconds; infinite
            if it does not.
        next_online: When a client is online, from an instant on.
        online_until: When it goes offline.
        prefers: The order of preference of a round, by its number and plan.
        update: A client's update, by its number, the round and its start; None: it cannot train.
    """

    x: Numbers
    sizes: Numbers
    seconds: Callable[[int, int], float]
    drops: Callable[[int, int, float, float], float]
    next_online: Callable[[int, float], float]
    online_until: Callable[[int, float], float]
    prefers: Callable[[int, dict[str, Any]], list[int]]
    update: Callable[[int, int, Numbers], Numbers | None]


def simulate(world: Federation, plans: list[dict[str, Any]]) -> list[Happened]:
    """What happens in each round."""
    x, time = world.x, 0.0
    orders: list[Order] = []
    rounds: list[Happened] = []
    for number, plan in enumerate(plans):
        time, happened = one_round(world, number, plan, time, x, orders)
        deltas: list[Numbers] = []
        for order in sorted(happened.landed, key=lambda order: order.client):
            delta = world.update(order.client, order.round, order.start)
            if delta is None:
                reject(happened, order, "could not train")
                happened.landed.remove(order)
                happened.wasted_seconds += order.due - order.began
            else:
                deltas.append(delta)
        happened.landed.sort(key=lambda order: order.client)
        if deltas:
            counts = world.sizes[[order.client for order in happened.landed]]
            x = x + counts / counts.sum() @ np.array(deltas)
        happened.x, happened.time = x, time
        happened.rejected.sort()
        orders.sort(key=lambda order: (order.due, order.client))
        happened.flight = [(o.client, o.round, o.began, o.due, o.counts) for o in orders]
        rounds.append(happened)
    return rounds


def reject(happened: Happened, order: Order, reason: str) -> None:
    """Nobody waits for this order any more."""
    order.counts = False
    happened.rejected.append((order.client, reason))


def one_round(
    world: Federation,
    number: int,
    plan: dict[str, Any],
    time: float,
    x: Numbers,
    orders: list[Order],
) -> tuple[float, Happened]:
    """One round; the orders are changed in place."""
    happened = Happened()
    preference = world.prefers(number, plan)
    closed: set[int] = set()  # whom this round has asked, heard, or given up

    deadline = math.inf  # runs from the first order on
    if any(order.counts for order in orders):
        deadline = time + plan["deadline"]

    while True:
        # --- everything that ends at this instant, until the round has what it wants ---
        for order in sorted(orders, key=lambda order: (order.due, order.client)):
            full = len(happened.landed) >= plan["wants"]
            if order.due > time or (order.counts and full):
                break
            orders.remove(order)
            happened.device_seconds += order.due - order.began
            if order.counts or happened.asked:
                closed.add(order.client)
            old = number - order.round > plan["max_age"]
            if order.counts and not order.fails and not old:
                happened.landed.append(order)
                continue
            happened.wasted_seconds += order.due - order.began
            if order.counts:
                reject(happened, order, "offline" if order.fails else "old")

        # --- who is given up ---
        for order in orders:
            given_up = time < order.due and order.began + plan["patience"] <= time
            if order.counts and given_up:
                reject(happened, order, "given up")
                closed.add(order.client)
        if len(happened.landed) >= plan["wants"] or time >= deadline:
            break

        # --- who is asked ---
        waiting = sum(order.counts for order in orders)
        places = plan["asks"] - len(happened.landed) - waiting
        if plan["concurrency"]:
            places = plan["concurrency"] - waiting
        busy = {order.client: order.due for order in orders}
        open_ones = [client for client in preference if client not in closed]
        idle = [client for client in open_ones if client not in busy]
        online = [client for client in idle if world.next_online(client, time) <= time]
        asked = sorted(online[: max(places, 0)])
        for client in asked:
            seconds = world.seconds(number, client)
            until = world.online_until(client, time)
            stops = min(until, world.drops(number, client, time, seconds))
            fails = stops < time + seconds
            due = stops if fails else time + seconds
            orders.append(Order(client, number, time, due, fails, x))
            closed.add(client)
        if asked:
            happened.asked.append(asked)
            deadline = min(deadline, time + plan["deadline"])
            continue

        # --- the next instant at which something happens ---
        instants = [order.due for order in orders if order.counts]
        instants += [order.began + plan["patience"] for order in orders if order.counts]
        if not waiting and happened.landed:
            break
        if places > 0:
            if not happened.asked:
                instants += [busy[client] for client in open_ones if client in busy]
            instants += [world.next_online(client, time) for client in idle]
        if waiting or min(instants, default=math.inf) < math.inf:
            instants.append(deadline)
        if min(instants, default=math.inf) == math.inf:
            break
        time = min(instants)

    # --- the end of the round ---
    if len(happened.landed) < (plan["quorum"] or 0) * plan["size"]:
        for order in happened.landed:
            happened.wasted_seconds += order.due - order.began
            reject(happened, order, "quorum")
        happened.landed = []
    if plan["late"] == "drop":
        for order in orders:
            order.counts = False
    return time, happened
