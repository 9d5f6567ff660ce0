"""A rule that forwards every call to another rule and checks arguments and results against the
contract.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kairosfl.core.fields import MEASURES, Briefs, Field, Reports, fields
from kairosfl.core.rule import Algorithm, Memory, Plan, Rule, State, about
from kairosfl.core.run import Round
from kairosfl.core.table import Table
from kairosfl.core.traits import Traits

COHORT = 4  # of the federation in which the rule is watched


@dataclass(frozen=True, kw_only=True, eq=False)
class Watched(Rule):
    """Forwards every call to a rule and checks arguments and results."""

    rule: Rule
    calls: list[tuple[str, tuple[Any, ...], Any]] = field(default_factory=list)

    def traits(self) -> Traits:
        return about(self.rule)

    def largest_cohort(self, cohort: int, population: int) -> int:
        return self.rule.largest_cohort(cohort, population)

    def replay(self) -> None:
        """Repeat every call, the last one first: a rule that keeps nothing on itself gives the same
        results.
        """
        for hook, arguments, answer in reversed(self.calls):
            self._ask_again(hook, arguments, answer)

    def _ask_again(self, hook: str, arguments: tuple[Any, ...], answer: Any) -> None:
        same = still(getattr(self.rule, hook)(*arguments)) == answer
        self.require(
            same,
            hook,
            "returns something else when called again with the same arguments; take random numbers from now.stream "
            "and keep nothing outside the state",
        )

    def server(self, now: Round) -> State:
        state: State = self._call("server", now)
        self._check_state("server", state)
        return state

    def client(self, now: Round) -> State:
        row: State = self._call("client", now)
        self._check_state("client", row)
        return row

    def select(self, plan: Plan, memory: Memory, now: Round) -> Plan:
        chosen: Plan = self._call("select", plan, memory, now)
        self.require(isinstance(chosen, Plan), "select", "does not return a Plan")
        asked = min(chosen.size if chosen.ids is None else len(chosen.ids), now.population)
        most = self.rule.largest_cohort(now.cohort, now.population)
        self.require(
            asked <= most,
            "select",
            f"asks for {asked} clients, but largest_cohort() returns {most}; override it",
        )
        if chosen.first is not None:
            self._check_first(chosen, now)
        return chosen

    def _check_first(self, plan: Plan, now: Round) -> None:
        """Clients that are measured before the round is planned: asked once, for what there is."""
        again = "asks for clients to be measured who have answered already; look at now.measured"
        self.require(now.measured is None, "select", again)
        ids = np.asarray(plan.first)
        known = ids.size == 0 or (ids.min() >= 0 and ids.max() < now.population)
        there = f"asks to measure the clients {ids.tolist()}, and there are {now.population}"
        self.require(bool(known), "select", there)
        unknown = sorted(plan.measure - MEASURES)
        listed = ", ".join(sorted(MEASURES))
        self.require(
            not unknown, "select", f"asks clients to measure {unknown}; they can measure {listed}"
        )

    def brief(self, briefs: Briefs, memory: Memory, now: Round) -> Briefs | tuple[Briefs, State]:
        answer: Any = self._call("brief", briefs, memory, now)
        told = answer
        if isinstance(answer, tuple):
            fits = len(answer) == 2
            self.require(fits, "brief", "does not return Briefs, or Briefs and rows to remember")
            told, sent = answer
            self._check_sent(sent, len(briefs))
        self.require(isinstance(told, Briefs), "brief", "does not return Briefs")
        self.require(
            torch.equal(told.ids, briefs.ids), "brief", "changes who is asked; that is for select"
        )
        for entry in fields(Briefs):
            self._check_told(entry, briefs, told, now)
        self._check_start(briefs, told)
        self._check_keeps(told)
        return answer  # type: ignore[no-any-return]

    def _check_sent(self, sent: Any, m: int) -> None:
        """Rows to find again in `memory.sent`."""
        self._check_state("brief", sent)
        for name, value in sent.items():
            due = value.ndim > 0 and len(value) == m
            self.require(
                due, "brief", f"sends {_shape(value)} along as {name!r} where {m} rows are expected"
            )

    def _check_told(self, entry: Field, briefs: Briefs, told: Briefs, now: Round) -> None:
        """One field of the briefs."""
        value, m = getattr(told, entry.name), len(briefs)
        if entry.writers == "core":
            kept = value is getattr(briefs, entry.name)
            self.require(kept, "brief", f"changes {entry.name}, which only the core may")
        elif value is None:
            return
        elif entry.shape == "vector":
            fits = value.shape in (now.x.shape, (m, *now.x.shape)) and value.dtype == now.x.dtype
            self.require(fits, "brief", f"gives a {entry.name} whose shape or type differs from x")
        elif entry.shape == "set":
            fits = value.ndim == 2 and value.shape[1:] == now.x.shape and len(value) > 0
            self.require(
                fits, "brief", f"gives {_shape(value)} as {entry.name}, not several models [k, d]"
            )
        elif entry.shape == "each":
            fits = isinstance(value, Tensor) and value.shape == (m,)
            self.require(fits, "brief", f"gives {_shape(value)} as {entry.name} of {m} clients")
        elif entry.name == "still":
            numbers = range(len(now.layout.names))
            fits = value <= set(numbers) and len(value) < len(numbers)
            self.require(
                fits,
                "brief",
                f"keeps the tensors {sorted(value)} still; some of {list(numbers)} must move",
            )

    def _check_start(self, briefs: Briefs, told: Briefs) -> None:
        """Where clients start is written once; the core works out the rest."""
        places = [
            name for name in ("start", "offset") if getattr(told, name) is not getattr(briefs, name)
        ]
        self.require(
            len(places) < 2,
            "brief",
            "writes start and offset; write one of them, and the core works out the other",
        )

    def _check_keeps(self, told: Briefs) -> None:
        """What clients are told to keep is what the trait `keeps` says."""
        used = set()
        if told.second_lr is not None:
            used.add("second")
        if told.mixed:
            used.add("mix")
        missing = sorted(used - self._keeps)
        self.require(
            not missing,
            "brief",
            f"asks clients to keep {' and '.join(missing)}; declare it by the trait keeps",
        )

    @property
    def _keeps(self) -> frozenset[str]:
        return frozenset(about(self.rule).keeps)

    def receive(self, reports: Reports, memory: Memory, now: Round) -> Reports:
        found: Reports = self._call("receive", reports, memory, now)
        self.require(isinstance(found, Reports), "receive", "does not return Reports")
        self.require(
            torch.equal(found.ids, reports.ids),
            "receive",
            "changes who reported; set a weight to 0 in weigh",
        )
        fits = found.delta.shape == reports.delta.shape and found.delta.dtype == reports.delta.dtype
        self.require(
            fits,
            "receive",
            f"returns updates as {_shape(found.delta)}, not {_shape(reports.delta)}",
        )
        return found

    def weigh(self, factors: Tensor, memory: Memory, now: Round) -> Tensor:
        found: Tensor = self._call("weigh", factors, memory, now)
        m = len(now.reports)
        shaped = isinstance(found, Tensor) and found.shape == (m,)
        self.require(
            shaped,
            "weigh",
            f"returns {_shape(found)} where one number for each of {m} reporters is expected",
        )
        fine = bool(
            torch.isfinite(found).all() and (found >= 0).all() and (found.sum() > 0 or not m)
        )
        self.require(fine, "weigh", f"returns factors that are not weights: {found.tolist()}")
        for order, swapped in self._orders(m):
            again = self.rule.weigh(factors[order], *self._rearranged(memory, now, order))
            self.require(_close(again, found[order]), "weigh", swapped)
        return found

    def combine(self, direction: Tensor, memory: Memory, now: Round) -> Tensor:
        found: Tensor = self._call("combine", direction, memory, now)
        self._check_direction("combine", found, direction)
        for order, swapped in self._orders(len(now.reports)):
            again = self.rule.combine(direction, *self._rearranged(memory, now, order))
            self.require(_close(again, found), "combine", swapped)
        return found

    def observe(self, memory: Memory, now: Round) -> Memory:
        after: Memory = self._call("observe", memory, now)
        self.require(
            isinstance(after, Memory),
            "observe",
            "does not return a Memory; use memory.replace(...)",
        )
        m = len(now.reports)
        self._check_state("observe", after.state)
        self._check_state("observe", after.rows)
        for name, value in after.rows.items():
            known = name in memory.rows
            self.require(
                known, "observe", f"writes {name!r} into a row, but client() has no such name"
            )
            due = value.ndim > 0 and len(value) == m
            self.require(
                due, "observe", f"writes {_shape(value)} into {name!r} where {m} rows are expected"
            )
        for order, swapped in self._orders(m):
            again = self.rule.observe(*self._rearranged(memory, now, order))
            same = all(
                _close(again.state[name], value) or _close(again.state[name], value[order])
                for name, value in after.state.items()
            )
            same = same and all(
                _close(again.rows[name], value[order]) for name, value in after.rows.items()
            )
            self.require(same, "observe", swapped)
        return after

    def step(self, direction: Tensor, memory: Memory, now: Round) -> tuple[Tensor, Memory]:
        found = self._call("step", direction, memory, now)
        self.require(
            isinstance(found, tuple) and len(found) == 2,
            "step",
            "does not return (direction, memory)",
        )
        moved, after = found
        self._check_direction("step", moved, direction)
        self.require(
            isinstance(after, Memory), "step", "does not return a Memory; use memory.replace(...)"
        )
        self._check_state("step", after.state)
        self.require(not after.rows, "step", "writes rows; only observe may")
        return moved, after

    def result(self, x: Tensor, memory: Memory, now: Round) -> Tensor:
        found: Tensor = self._call("result", x, memory, now)
        self._check_direction("result", found, x)
        return found

    def personal(self, x: Tensor, ids: Tensor, memory: Memory, now: Round) -> Tensor:
        vectors: Tensor = self._call("personal", x, ids, memory, now)
        shapes = (now.x.shape, (len(ids), *now.x.shape))
        fits = isinstance(vectors, Tensor) and vectors.shape in shapes and vectors.dtype == x.dtype
        self.require(
            fits,
            "personal",
            f"returns {_shape(vectors)} where {_shape(x)} or one of them for each of {len(ids)} "
            "clients is expected",
        )
        finite = bool(torch.isfinite(vectors).all())
        self.require(finite, "personal", "returns a vector that is not finite")
        every = vectors.expand(len(ids), -1)
        for order, swapped in self._orders(len(ids)):
            rows = {name: entry[order] for name, entry in memory.rows.items()}
            asked_again = self.rule.personal(
                x if x.ndim == 1 else x[order], ids[order], memory.replace(rows=rows), now
            )
            same = _close(asked_again.expand(len(ids), -1), every[order])
            self.require(same, "personal", swapped)
        return vectors

    def record(self, memory: Memory, now: Round) -> dict[str, float]:
        found: dict[str, float] = self._call("record", memory, now)
        fits = all(isinstance(k, str) and isinstance(v, int | float) for k, v in found.items())
        self.require(fits, "record", "does not return numbers by name")
        return found

    def verdict(self, memory: Memory, now: Round) -> str | None:
        said: str | None = self._call("verdict", memory, now)
        self.require(
            said is None or isinstance(said, str), "verdict", "does not return a sentence or None"
        )
        return said

    def _call(self, hook: str, *arguments: Any) -> Any:
        """The rule's result; its arguments must be unchanged after the call."""
        given = tuple(self._alone(argument) for argument in arguments)
        before, kept, own = still(given), copy.deepcopy(given), still(vars(self.rule))
        try:
            answer = getattr(self.rule, hook)(*given)
        except Exception as error:
            fault = f"fails in {hook}{self._when(given)}, {cause(error)}"
            raise AssertionError(sentence(self.rule, fault)) from error
        self.require(
            still(given) == before,
            hook,
            "changes its arguments in place; return new tensors instead",
        )
        kept_out = still(vars(self.rule)) == own
        self.require(
            kept_out,
            hook,
            "keeps something on itself; return it in the state, which checkpoints save",
        )
        self.calls.append((hook, kept, still(answer)))
        self._ask_again(*self.calls[-1])
        return answer

    def _alone(self, argument: Any) -> Any:
        """A round in which the rule itself takes part, not the one that watches it."""
        return (
            replace(argument, algorithm=Algorithm((self.rule,)))
            if isinstance(argument, Round)
            else argument
        )

    def _when(self, arguments: tuple[Any, ...]) -> str:
        reports = arguments[-1].reports
        few = isinstance(reports, Reports) and len(reports) < COHORT
        return f" when only {len(reports)} of {COHORT} clients report" if few else ""

    def _rearranged(self, memory: Memory, now: Round, order: Tensor) -> tuple[Memory, Round]:
        """The same cohort in another order: rows, briefs, reports, weights and factors."""
        rows = {name: entry[order] for name, entry in memory.rows.items()}
        changes: dict[str, Any] = {
            "briefs": now.briefs.take(order),
            "reports": now.reports.take(order),
        }
        if isinstance(now.took, Tensor):
            changes["took"] = now.took[order]
        if isinstance(now.weights, Tensor):
            changes["weights"] = now.weights[order]
        if isinstance(now.factors, Tensor):
            changes["factors"] = now.factors[order]
        sent = {name: entry[order] for name, entry in memory.sent.items()}
        return replace(memory, rows=rows, sent=sent), replace(
            now, algorithm=Algorithm((self.rule,)), **changes
        )

    def _orders(self, m: int) -> Iterator[tuple[Tensor, str]]:
        for shift in {1, m - 1} if m > 1 else ():
            yield torch.arange(m).roll(shift), "depends on the order of the clients"

    def _check_state(self, hook: str, state: Any) -> None:
        fits = isinstance(state, dict) and all(
            isinstance(k, str) and isinstance(v, Tensor) for k, v in state.items()
        )
        self.require(fits, hook, "returns a state that is not a dictionary of tensors")

    def _check_direction(self, hook: str, found: Any, given: Tensor) -> None:
        fits = (
            isinstance(found, Tensor) and found.shape == given.shape and found.dtype == given.dtype
        )
        self.require(fits, hook, f"returns {_shape(found)} where the direction is {_shape(given)}")
        self.require(
            bool(torch.isfinite(found).all()), hook, "returns a direction that is not finite"
        )

    def require(self, holds: bool, hook: str, fault: str) -> None:
        require(holds, self.rule, f"in {hook} {fault}")


@dataclass(frozen=True, kw_only=True, eq=False)
class WatchedBase(Watched):
    """A rule that moves the frozen weights, as well."""

    def rebase(self, base: Tensor, memory: Memory, now: Round) -> Tensor:
        moved: Tensor = self._call("rebase", base, memory, now)
        fits = isinstance(moved, Tensor) and moved.shape == base.shape and moved.dtype == base.dtype
        self.require(fits, "rebase", f"returns {_shape(moved)} where the base is {_shape(base)}")
        finite = bool(torch.isfinite(moved).all())
        self.require(finite, "rebase", "returns a base that is not finite")
        for order, swapped in self._orders(len(now.reports)):
            asked_again = self.rule.rebase(base, *self._rearranged(memory, now, order))
            size = float(now.moved.abs().max())  # a base may be a small difference of large numbers
            self.require(_close(asked_again, moved, size), "rebase", swapped)
        return moved


def still(value: Any) -> Any:
    """A value as nested tuples of plain things, equal when all bits are."""
    if isinstance(value, Tensor):
        plain = (
            value.float() if value.dtype == torch.bfloat16 else value
        )  # of which numpy has no type
        return value.dtype, value.shape, plain.numpy(force=True).tobytes()
    if isinstance(value, np.ndarray):
        return str(value.dtype), value.shape, value.tobytes()
    if isinstance(value, Table):
        return (
            "table",
            tuple(value.ids),
            still(value.rows(torch.tensor(value.ids, dtype=torch.int64))),
        )
    if isinstance(value, Algorithm):
        return tuple(rule.name() for rule in value.rules)
    if isinstance(value, Rule):
        return value.name()  # it is in now.rules; what it keeps on itself is checked separately
    if isinstance(value, Mapping):
        return tuple((key, still(entry)) for key, entry in value.items())
    if isinstance(value, list | tuple):
        return tuple(still(entry) for entry in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return type(value).__name__, still(vars(value))
    return repr(value)


def _close(one: Tensor, other: Tensor, size: float = 0.0) -> bool:
    if one.shape != other.shape or not one.is_floating_point():
        return one.shape == other.shape and torch.equal(one, other)
    scale = max(size, float(other.abs().nan_to_num().max()) if other.numel() else 0.0)
    return torch.allclose(one, other, rtol=1e-4, atol=1e-5 * scale, equal_nan=True)


def _shape(value: Any) -> str:
    return (
        f"{value.dtype} of shape {list(value.shape)}"
        if isinstance(value, Tensor)
        else f"a {type(value).__name__}"
    )


def cause(error: Exception) -> str:
    """Its type and the first line of its message."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__} ({lines[0].rstrip('.')})" if lines else type(error).__name__


def sentence(rule: Any, fault: str) -> str:
    name = rule.name() if isinstance(rule, Rule) else type(rule).__name__
    return f"{name} {fault}."


def require(holds: bool, rule: Any, fault: str) -> None:
    if not holds:
        raise AssertionError(sentence(rule.rule if isinstance(rule, Watched) else rule, fault))
