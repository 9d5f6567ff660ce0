"""A rule that passes every call on to another, and holds what went in and what came out against the contract."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kairosfl.core.briefs import Briefs, Cohort, Plan, Reports
from kairosfl.core.round import Round
from kairosfl.core.rule import Rule, State
from kairosfl.core.table import Table

COHORT = 4  # of the federation in which the rule is watched


@dataclass(frozen=True, kw_only=True, eq=False)
class Watched(Rule):
    """Passes every call on to a rule, and looks at what went in and what came out."""

    rule: Rule
    calls: list[tuple[str, tuple[Any, ...], Any]] = field(default_factory=list)

    @property
    def base_weights(self) -> str | None:
        return self.rule.base_weights

    def largest(self, cohort: int, clients: int) -> int:
        return self.rule.largest(cohort, clients)

    def replay(self) -> None:
        """Ask every question again, the last one first: a rule without a memory of its own gives the same answers."""
        for hook, arguments, answer in reversed(self.calls):
            self._ask_again(hook, arguments, answer)

    def _ask_again(self, hook: str, arguments: tuple[Any, ...], answer: Any) -> None:
        same = _still(getattr(self.rule, hook)(*arguments)) == answer
        self.require(
            same,
            hook,
            "answers the same question differently when it is asked again; take random numbers from round.stream and "
            "keep nothing outside the state",
        )

    def server(self, x: Tensor, clients: int) -> State:
        state: State = self._call("server", x, clients)
        self._check_state("server", state)
        return state

    def client(self, x: Tensor) -> State:
        row: State = self._call("client", x)
        self._check_state("client", row)
        return row

    def select(self, plan: Plan, state: State, round: Round) -> Plan:
        chosen: Plan = self._call("select", plan, state, round)
        self.require(isinstance(chosen, Plan), "select", "does not return a Plan")
        asked = min(chosen.size if chosen.ids is None else len(chosen.ids), round.clients)
        most = self.rule.largest(round.cohort, round.clients)
        self.require(
            asked <= most, "select", f"asks for {asked} clients, and largest() says {most} at most; override it"
        )
        return chosen

    def brief(self, briefs: Briefs, state: State, rows: State, round: Round) -> Briefs:
        told: Briefs = self._call("brief", briefs, state, rows, round)
        self.require(isinstance(told, Briefs), "brief", "does not return Briefs")
        self.require(torch.equal(told.ids, briefs.ids), "brief", "changes who is asked; that is for select")
        for name in ("start", "push"):
            value = getattr(told, name)
            if value is not None:
                fits = value.shape in (round.x.shape, (len(briefs), *round.x.shape)) and value.dtype == round.x.dtype
                self.require(fits, "brief", f"gives a {name} of another shape or type than x has")
        return told

    def weigh(
        self, factors: Tensor, state: State, rows: State, briefs: Briefs, reports: Reports, round: Round
    ) -> Tensor:
        asked = (factors, state, rows, briefs, reports, round)
        found: Tensor = self._call("weigh", *asked)
        m = len(reports)
        shaped = isinstance(found, Tensor) and found.shape == (m,)
        self.require(shaped, "weigh", f"returns {_shape(found)} where one number for each of {m} reporters is due")
        fine = bool(torch.isfinite(found).all() and (found >= 0).all() and found.sum() > 0)
        self.require(fine, "weigh", f"returns factors that are no weights: {found.tolist()}")
        for order, swapped in self._orders(m):
            again = self.rule.weigh(*_rearranged(asked, order, m))
            self.require(_close(again, found[order]), "weigh", swapped)
        return found

    def combine(
        self,
        direction: Tensor,
        state: State,
        rows: State,
        weights: Tensor,
        briefs: Briefs,
        reports: Reports,
        round: Round,
    ) -> Tensor:
        asked = (direction, state, rows, weights, briefs, reports, round)
        found: Tensor = self._call("combine", *asked)
        self._check_direction("combine", found, direction)
        for order, swapped in self._orders(len(reports)):
            again = self.rule.combine(*_rearranged(asked, order, len(reports)))
            self.require(_close(again, found), "combine", swapped)
        return found

    def observe(
        self, state: State, rows: State, weights: Tensor, briefs: Briefs, reports: Reports, round: Round
    ) -> tuple[State, State]:
        asked = (state, rows, weights, briefs, reports, round)
        found = self._call("observe", *asked)
        self.require(isinstance(found, tuple) and len(found) == 2, "observe", "does not return (state, rows)")
        after, written = found
        m = len(reports)
        self._check_state("observe", after)
        self._check_state("observe", written)
        for name, value in written.items():
            self.require(name in rows, "observe", f"writes {name!r} into a row, and client() has no such name")
            due = value.ndim > 0 and len(value) == m
            self.require(due, "observe", f"writes {_shape(value)} into {name!r} where a row for each of {m} is due")
        for order, swapped in self._orders(m):
            again, rewritten = self.rule.observe(*_rearranged(asked, order, m))
            same = all(_close(again[name], value) or _close(again[name], value[order]) for name, value in after.items())
            same = same and all(_close(rewritten[name], value[order]) for name, value in written.items())
            self.require(same, "observe", swapped)
        return after, written

    def step(self, direction: Tensor, state: State, table: Table, round: Round) -> tuple[Tensor, State]:
        found = self._call("step", direction, state, table, round)
        self.require(isinstance(found, tuple) and len(found) == 2, "step", "does not return (direction, state)")
        moved, after = found
        self._check_direction("step", moved, direction)
        self._check_state("step", after)
        return moved, after

    def _call(self, hook: str, *arguments: Any) -> Any:
        """The rule's answer, with its arguments as they were before the call."""
        given = tuple(replace(a, rules=(self.rule,)) if isinstance(a, Round) else a for a in arguments)
        before, kept, own = _still(given), copy.deepcopy(given), _still(vars(self.rule))
        try:
            answer = getattr(self.rule, hook)(*given)
        except Exception as error:
            fault = f"fails in {hook}{self._when(given)}, {cause(error)}"
            raise AssertionError(sentence(self.rule, fault)) from error
        self.require(_still(given) == before, hook, "changes its arguments in place; return new tensors instead")
        kept_out = _still(vars(self.rule)) == own
        self.require(kept_out, hook, "keeps something on itself; return it in the state, which checkpoints save")
        self.calls.append((hook, kept, _still(answer)))
        self._ask_again(*self.calls[-1])
        return answer

    def _when(self, arguments: tuple[Any, ...]) -> str:
        counts = [len(a) for a in arguments if isinstance(a, Reports)]
        return f" when only {counts[0]} of {COHORT} clients report" if counts and counts[0] < COHORT else ""

    def _orders(self, m: int) -> Iterator[tuple[Tensor, str]]:
        for shift in {1, m - 1} if m > 1 else ():
            yield torch.arange(m).roll(shift), "depends on the order in which the clients stand"

    def _check_state(self, hook: str, state: Any) -> None:
        fits = isinstance(state, dict) and all(isinstance(k, str) and isinstance(v, Tensor) for k, v in state.items())
        self.require(fits, hook, "returns a state that is no dictionary of tensors")

    def _check_direction(self, hook: str, found: Any, given: Tensor) -> None:
        fits = isinstance(found, Tensor) and found.shape == given.shape and found.dtype == given.dtype
        self.require(fits, hook, f"returns {_shape(found)} where the direction is {_shape(given)}")
        self.require(bool(torch.isfinite(found).all()), hook, "returns a direction that is not finite")

    def require(self, holds: bool, hook: str, fault: str) -> None:
        require(holds, self.rule, f"in {hook} {fault}")


def _rearranged(arguments: tuple[Any, ...], order: Tensor, m: int) -> tuple[Any, ...]:
    """The same cohort in another order: rows, factors, weights, briefs and reports."""

    def rearranged(value: Any, position: int) -> Any:
        if isinstance(value, Cohort):
            return value.take(order)
        if isinstance(value, Tensor):
            return value[order] if value.shape == (m,) and value.dtype == torch.float64 else value
        if isinstance(value, dict) and position == rows:
            return {name: entry[order] for name, entry in value.items()}
        return value

    rows = max(i for i, value in enumerate(arguments) if isinstance(value, dict))  # the state comes before the rows
    return tuple(rearranged(value, i) for i, value in enumerate(arguments))


def _still(value: Any) -> Any:
    """A value as nested tuples of plain things, equal when all bits are."""
    if isinstance(value, Tensor):
        flat = value.detach().cpu().contiguous().reshape(-1)
        return str(value.dtype), tuple(value.shape), flat.view(torch.uint8).numpy().tobytes() if len(flat) else b""
    if isinstance(value, np.ndarray):
        return str(value.dtype), value.shape, value.tobytes()
    if isinstance(value, Table):
        return "table", tuple(value.ids), _still(value.rows(torch.tensor(value.ids, dtype=torch.int64)))
    if isinstance(value, Rule):
        return value.name()  # stands in round.rules; what it keeps on itself is looked at apart
    if isinstance(value, Mapping):
        return tuple((key, _still(entry)) for key, entry in value.items())
    if isinstance(value, list | tuple):
        return tuple(_still(entry) for entry in value)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return type(value).__name__, _still(vars(value))
    return repr(value)


def _close(one: Tensor, other: Tensor) -> bool:
    if one.shape != other.shape or not one.is_floating_point():
        return one.shape == other.shape and torch.equal(one, other)
    scale = float(other.abs().nan_to_num().max()) if other.numel() else 0.0
    return torch.allclose(one, other, rtol=1e-4, atol=1e-5 * scale, equal_nan=True)


def _shape(value: Any) -> str:
    return f"{value.dtype} of shape {list(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"


def cause(error: Exception) -> str:
    """Its kind and the first line of what it says."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__} ({lines[0].rstrip('.')})" if lines else type(error).__name__


def sentence(rule: Any, fault: str) -> str:
    name = rule.name() if isinstance(rule, Rule) else type(rule).__name__
    return f"{name} {fault}."


def require(holds: bool, rule: Any, fault: str) -> None:
    if not holds:
        raise AssertionError(sentence(rule.rule if isinstance(rule, Watched) else rule, fault))
