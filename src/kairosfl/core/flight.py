"""Orders that clients were sent and that have not ended: state of a run, in the order of landing.

An order's start is fixed when it is sent, and its report is needed when it lands. So orders are
trained together, as many as wait, whichever versions of the model they refer to.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from kairosfl.core.fields import Briefs, Reports, fields
from kairosfl.core.rule import State, changed

Sent = Mapping[int, State]  # what the `brief` of a rule with this number returned for later


@dataclass(frozen=True, eq=False)
class Batch:
    """Orders that were sent at one instant.

    Args:
        briefs: What they say.
        sent: Rows that rules want back with the reports.
    """

    briefs: Briefs
    sent: Sent

    def take(self, rows: Tensor) -> Batch:
        """Some of the orders, by their row numbers."""
        sent = {rule: _rows(state, rows) for rule, state in self.sent.items()}
        return Batch(self.briefs.take(rows), sent)


@dataclass(frozen=True, eq=False)
class Order:
    """One client's order. A client has one at most, and is at work until it ends.

    Args:
        client: Who was asked.
        round: Rounds that were done then: the version of the model.
        began: When it was sent.
        due: When it ends; where `sure` is False, the earliest instant that is possible.
        sure: Whether that is known: with a stop rule it is not before the client has trained.
        fault: Why it ends without an answer; empty: with one.
        counts: Whether the server still waits for it.
        batch: What it was sent with; None where nobody needs its report any more.
        row: Its row there.
        answer: The reports of those it was trained with; None before.
        place: Its row there; -1: the engine has no report of it.
    """

    client: int
    round: int
    began: float
    due: float
    sure: bool = True
    fault: str = ""
    counts: bool = True
    batch: Batch | None = None
    row: int = 0
    answer: Reports | None = None
    place: int = -1

    @property
    def key(self) -> tuple[float, int]:
        """The total order of landing."""
        return self.due, self.client

    @property
    def waits(self) -> bool:
        """Whether it can be trained, and was not yet."""
        return self.batch is not None and self.answer is None and not self.fault

    @property
    def unable(self) -> bool:
        """Whether its client could not train: it answers in time, but with nothing."""
        return self.answer is not None and self.place < 0

    def brief(self) -> Briefs:
        """What its client was told, as a cohort of one."""
        assert self.batch is not None
        return self.batch.briefs.take(torch.tensor([self.row]))


@dataclass(frozen=True, eq=False)
class Flight:
    """The orders in flight, in the order of landing."""

    orders: tuple[Order, ...] = field(default=())

    def __len__(self) -> int:
        return len(self.orders)

    def compact(self) -> Flight:
        """The same orders without the memory of those that ended, where these are the most."""
        orders = list(self.orders)
        for members in _members(orders, "batch"):
            batch = orders[members[0]].batch
            assert batch is not None
            if 2 * len(members) <= len(batch.briefs):
                rows = sorted(orders[i].row for i in members)
                smaller = batch.take(torch.tensor(rows))
                for i in members:
                    orders[i] = changed(orders[i], batch=smaller, row=rows.index(orders[i].row))
        for members in _members(orders, "answer"):
            answer = orders[members[0]].answer
            assert answer is not None
            if 2 * len(members) <= len(answer):
                places = sorted(orders[i].place for i in members if orders[i].place >= 0)
                fewer = answer.take(torch.tensor(places, dtype=torch.int64))
                for i in members:
                    place = places.index(orders[i].place) if orders[i].place >= 0 else -1
                    orders[i] = changed(orders[i], answer=fewer, place=place)
        return Flight(tuple(orders))


def _members(orders: Sequence[Order], what: str) -> list[list[int]]:
    """The numbers of the orders that share a batch, or an answer."""
    members: dict[int, list[int]] = {}
    for number, order in enumerate(orders):
        shared = getattr(order, what)
        if shared is not None:
            members.setdefault(id(shared), []).append(number)
    return list(members.values())


# --- cohorts of orders ---


def batches(orders: Sequence[Order]) -> Iterator[tuple[Batch, list[Order]]]:
    """The orders by what they were sent with, in the order in which that is first met."""
    members: dict[int, tuple[Batch, list[Order]]] = {}
    for order in orders:
        assert order.batch is not None
        members.setdefault(id(order.batch), (order.batch, []))[1].append(order)
    yield from members.values()


def together(orders: Sequence[Order]) -> list[list[Order]]:
    """The orders in as few cohorts as can train in one pass each."""
    cohorts: dict[Any, list[Order]] = {}
    for batch, members in batches(orders):
        cohorts.setdefault(_form(batch.briefs), []).extend(members)
    return list(cohorts.values())


def briefs_of(orders: Sequence[Order]) -> Briefs:
    """What the clients of these orders were told, as one cohort."""
    parts = []
    for batch, members in batches(orders):
        rows = sorted(order.row for order in members)
        whole = rows == list(range(len(batch.briefs)))
        parts.append(batch.briefs if whole else batch.briefs.take(torch.tensor(rows)))
    return parts[0] if len(parts) == 1 else Briefs.join(parts)


def _form(briefs: Briefs) -> tuple[Any, ...]:
    """What orders must have in common to train in one pass: all but the numbers and vectors."""
    form: list[Any] = []
    for entry in fields(Briefs):
        value = getattr(briefs, entry.name)
        if entry.shape in ("set", "base"):
            form.append(id(value))
        elif isinstance(value, Tensor) or entry.local:
            form.append(entry.local or entry.name)
        else:
            form.append(value)
    return tuple(form)


def reports_of(orders: Sequence[Order], x: Tensor) -> Reports:
    """The reports of these orders that have one, as one cohort; x is the model."""
    members: dict[int, tuple[Reports, list[int]]] = {}
    for order in orders:
        if order.answer is not None and order.place >= 0:
            entry = members.setdefault(id(order.answer), (order.answer, []))
            entry[1].append(order.place)
    parts = []
    for answer, places in members.values():
        places.sort()
        whole = places == list(range(len(answer)))
        parts.append(answer if whole else answer.take(torch.tensor(places)))
    if not parts:
        return Reports.stack([], x.new_empty(0, x.shape[-1]))
    parts = [changed(part, failed=()) for part in parts]
    return parts[0] if len(parts) == 1 else Reports.join(parts)


def sent_with(orders: Sequence[Order]) -> Sent:
    """What rules want back with the reports of these orders, in the order of the clients' ids."""
    ordered = sorted(orders, key=lambda order: order.client)
    sent: dict[int, State] = {}
    for rule in sorted({rule for order in ordered for rule in _batch(order).sent}):
        rows = [_rows(_batch(order).sent.get(rule, {}), order.row) for order in ordered]
        names = {name: row[name] for row in rows for name in row}
        sent[rule] = {
            name: torch.stack([row.get(name, torch.zeros_like(like)) for row in rows])
            for name, like in names.items()
        }
    return sent


def _batch(order: Order) -> Batch:
    assert order.batch is not None
    return order.batch


def _rows(state: State, rows: Tensor | int) -> State:
    """These rows of what a rule wants back."""
    taken = {}
    for name, value in state.items():
        taken[name] = value[rows.to(value.device)] if isinstance(rows, Tensor) else value[rows]
    return taken


# --- storing ---


class _Store:
    """Tensors by number, each one once however many orders refer to it."""

    def __init__(self, x: Tensor) -> None:
        self._numbers = {id(x): -1}
        self.tensors: list[Tensor] = []

    def put(self, tensor: Tensor) -> int:
        """The number of this tensor; −1: the model itself."""
        if id(tensor) not in self._numbers:
            self._numbers[id(tensor)] = len(self.tensors)
            self.tensors.append(tensor)
        return self._numbers[id(tensor)]

    def cohort(self, cohort: Briefs | Reports) -> dict[str, Any]:
        """A cohort as numbers of tensors and plain values."""
        arrays, others = cohort.tensors()
        others.pop("plan", None)  # where there is a clock, no engine waits
        plain = {
            name: sorted(value) if isinstance(value, frozenset) else value
            for name, value in others.items()
        }
        return {"tensors": {name: self.put(value) for name, value in arrays.items()}, "is": plain}


def stored(flight: Flight, x: Tensor) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """A flight as tensors by name and a note for JSON; x is the model of the run."""
    store = _Store(x)
    sent_with = list({id(o.batch): o.batch for o in flight.orders if o.batch}.values())
    answers = list({id(o.answer): o.answer for o in flight.orders if o.answer is not None}.values())
    note: dict[str, Any] = {"batches": [], "answers": [], "faults": []}
    for batch in sent_with:
        entry = store.cohort(batch.briefs)
        entry["sent"] = {
            str(rule): {name: store.put(value) for name, value in state.items()}
            for rule, state in batch.sent.items()
        }
        note["batches"].append(entry)
    note["answers"] = [store.cohort(answer) for answer in answers]

    # --- the orders as two tables ---
    note["faults"] = [order.fault for order in flight.orders]
    batch_numbers = {id(batch): number for number, batch in enumerate(sent_with)}
    answer_numbers = {id(answer): number for number, answer in enumerate(answers)}
    wholes = [
        (
            order.client,
            order.round,
            order.sure,
            order.counts,
            batch_numbers.get(id(order.batch), -1),
            order.row,
            answer_numbers.get(id(order.answer), -1),
            order.place,
        )
        for order in flight.orders
    ]
    times = [(order.began, order.due) for order in flight.orders]
    tensors = {f"flight.{number}": value for number, value in enumerate(store.tensors)}
    if wholes:
        tensors["flight.orders"] = torch.tensor(wholes, dtype=torch.int64)
        tensors["flight.times"] = torch.tensor(times, dtype=torch.float64)
    return tensors, note


def restored(tensors: Mapping[str, Tensor], note: Mapping[str, Any], x: Tensor) -> Flight:
    """The flight of which `stored` gave these; x is the model of the run."""
    if "flight.orders" not in tensors:
        return Flight()
    placed: dict[int, Tensor] = {-1: x}

    def tensor(number: int) -> Tensor:
        if number not in placed:
            value = tensors[f"flight.{number}"]
            vectors = value.ndim > 0 and value.shape[-1] == len(x) and value.dtype == x.dtype
            placed[number] = value.to(x.device) if vectors else value
        return placed[number]

    def cohort(kind: Any, entry: Mapping[str, Any]) -> Any:
        arrays = {name: tensor(number) for name, number in entry["tensors"].items()}
        others: dict[str, Any] = {}
        kinds = {listed.name: listed.kind for listed in fields(kind)}
        for name, value in entry["is"].items():
            if kinds[name] is tuple:
                others[name] = tuple((client, reason) for client, reason in value)
            else:
                others[name] = frozenset(value) if kinds[name] is frozenset else value
        return kind.from_tensors(arrays, others)

    sent_with = [
        Batch(
            briefs=cohort(Briefs, entry),
            sent={
                int(rule): {name: tensor(number) for name, number in state.items()}
                for rule, state in entry["sent"].items()
            },
        )
        for entry in note["batches"]
    ]
    answers = [cohort(Reports, entry) for entry in note["answers"]]
    wholes, times = tensors["flight.orders"].tolist(), tensors["flight.times"].tolist()
    orders = []
    for row, (began, due), fault in zip(wholes, times, note["faults"], strict=True):
        client, number, sure, counts, batch, brief_row, answer, place = row
        orders.append(
            Order(
                client=client,
                round=number,
                began=began,
                due=due,
                sure=bool(sure),
                fault=fault,
                counts=bool(counts),
                batch=sent_with[batch] if batch >= 0 else None,
                row=brief_row,
                answer=answers[answer] if answer >= 0 else None,
                place=place,
            )
        )
    return Flight(tuple(orders))
