"""A rule that forwards every call to another one, and checks it against the contract."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kairosfl.core.answers import Wrong, check_answer
from kairosfl.core.fields import Briefs, Reports
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
        """Repeat every call, the last one first.

        A rule that keeps nothing on itself gives the same results.
        """
        for hook, arguments, answer in reversed(self.calls):
            self._ask_again(hook, arguments, answer)

    def _ask_again(self, hook: str, arguments: tuple[Any, ...], answer: Any) -> None:
        same = still(getattr(self.rule, hook)(*arguments)) == answer
        self.require(
            same,
            hook,
            "returns something else when called again with the same arguments; take random numbers "
            "from now.stream and keep nothing outside the state",
        )

    def server(self, now: Round) -> State:
        state: State = self._call("server", now)
        return state

    def client(self, now: Round) -> State:
        row: State = self._call("client", now)
        return row

    def select(self, plan: Plan, memory: Memory, now: Round) -> Plan:
        chosen: Plan = self._call("select", plan, memory, now)
        return chosen

    def brief(self, briefs: Briefs, memory: Memory, now: Round) -> Briefs | tuple[Briefs, State]:
        answer: Briefs | tuple[Briefs, State] = self._call("brief", briefs, memory, now)
        return answer

    def receive(self, reports: Reports, memory: Memory, now: Round) -> Reports:
        received: Reports = self._call("receive", reports, memory, now)
        return received

    def weigh(self, factors: Tensor, memory: Memory, now: Round) -> Tensor:
        weighed: Tensor = self._call("weigh", factors, memory, now)
        for order, swapped in self._orders(len(now.reports)):
            again = self.rule.weigh(factors[order], *self._rearranged(memory, now, order))
            self.require(_close(again, weighed[order]), "weigh", swapped)
        return weighed

    def combine(self, direction: Tensor, memory: Memory, now: Round) -> Tensor:
        combined: Tensor = self._call("combine", direction, memory, now)
        for order, swapped in self._orders(len(now.reports)):
            again = self.rule.combine(direction, *self._rearranged(memory, now, order))
            self.require(_close(again, combined), "combine", swapped)
        return combined

    def observe(self, memory: Memory, now: Round) -> Memory:
        after: Memory = self._call("observe", memory, now)
        for order, swapped in self._orders(len(now.reports)):
            again = self.rule.observe(*self._rearranged(memory, now, order))
            for name, rows in after.rows.items():
                self.require(_close(again.rows[name], rows[order]), "observe", swapped)
            for name, value in after.state.items():  # which may hold one entry per reporter
                state = again.state[name]
                same = _close(state, value) or _close(state, value[order])
                self.require(same, "observe", swapped)
        return after

    def step(self, direction: Tensor, memory: Memory, now: Round) -> tuple[Tensor, Memory]:
        moved: tuple[Tensor, Memory] = self._call("step", direction, memory, now)
        return moved

    def result(self, x: Tensor, memory: Memory, now: Round) -> Tensor:
        outcome: Tensor = self._call("result", x, memory, now)
        return outcome

    def personal(self, x: Tensor, ids: Tensor, memory: Memory, now: Round) -> Tensor:
        vectors: Tensor = self._call("personal", x, ids, memory, now)
        every = vectors.expand(len(ids), -1)
        for order, swapped in self._orders(len(ids)):
            vector = x if x.ndim == 1 else x[order]
            rows = _taken(memory.rows, order)
            kept = _taken(memory.kept, order)
            theirs = replace(memory, rows=rows, kept=kept)
            asked_again = self.rule.personal(vector, ids[order], theirs, now)
            same = _close(asked_again.expand(len(ids), -1), every[order])
            self.require(same, "personal", swapped)
        return vectors

    def record(self, memory: Memory, now: Round) -> dict[str, float]:
        numbers: dict[str, float] = self._call("record", memory, now)
        return numbers

    def verdict(self, memory: Memory, now: Round) -> str | None:
        remark: str | None = self._call("verdict", memory, now)
        return remark

    def _call(self, hook: str, *arguments: Any) -> Any:
        """The rule's answer, checked; its arguments must be unchanged after the call."""
        alone = tuple(self._alone(argument) for argument in arguments)
        before, kept, own = still(alone), copy.deepcopy(alone), still(vars(self.rule))
        try:
            answer = getattr(self.rule, hook)(*alone)
        except Exception as error:
            fault = f"fails in {hook}{self._when(alone)}, {cause(error)}"
            raise AssertionError(sentence(self.rule, fault)) from error
        self.require(
            still(alone) == before,
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
        try:
            check_answer(self.rule, hook, arguments, answer)
        except Wrong as fault:
            self.require(False, hook, str(fault))
        return answer

    def _alone(self, argument: Any) -> Any:
        """A round in which the rule itself takes part, not the one that watches it."""
        if isinstance(argument, Round):
            return replace(argument, algorithm=Algorithm((self.rule,)))
        return argument

    def _when(self, arguments: tuple[Any, ...]) -> str:
        reports = arguments[-1].reports
        if isinstance(reports, Reports) and len(reports) < COHORT:
            return f" when only {len(reports)} of {COHORT} clients report"
        return ""

    def _rearranged(self, memory: Memory, now: Round, order: Tensor) -> tuple[Memory, Round]:
        """The same cohort in another order: rows, briefs, reports, weights and factors."""
        changes: dict[str, Any] = {
            "briefs": now.briefs.take(order),
            "reports": now.reports.take(order),
        }
        for name in ("took", "weights", "factors"):
            numbers = getattr(now, name)
            if isinstance(numbers, Tensor):  # which this round has already
                changes[name] = numbers[order]
        rearranged = replace(now, algorithm=Algorithm((self.rule,)), **changes)
        rows, sent = _taken(memory.rows, order), _taken(memory.sent, order)
        return replace(memory, rows=rows, sent=sent), rearranged

    def _orders(self, m: int) -> Iterator[tuple[Tensor, str]]:
        if m < 2:
            return
        for shift in {1, m - 1}:
            yield torch.arange(m).roll(shift), "depends on the order of the clients"

    def require(self, holds: bool, hook: str, fault: str) -> None:
        require(holds, self.rule, f"in {hook} {fault}")


@dataclass(frozen=True, kw_only=True, eq=False)
class WatchedBase(Watched):
    """A rule that moves the frozen weights, as well."""

    def rebase(self, base: Tensor, memory: Memory, now: Round) -> Tensor:
        moved: Tensor = self._call("rebase", base, memory, now)
        for order, swapped in self._orders(len(now.reports)):
            asked_again = self.rule.rebase(base, *self._rearranged(memory, now, order))
            size = float(now.moved.abs().max())  # a base may be a small difference of large numbers
            self.require(_close(asked_again, moved, size), "rebase", swapped)
        return moved


def still(value: Any) -> Any:
    """A value as nested tuples of plain things, equal when all bits are."""
    if isinstance(value, Tensor):
        plain = value
        if value.dtype == torch.bfloat16:  # of which numpy has no type
            plain = value.float()
        return value.dtype, value.shape, plain.numpy(force=True).tobytes()
    if isinstance(value, np.ndarray):
        return str(value.dtype), value.shape, value.tobytes()
    if isinstance(value, Table):
        ids = torch.tensor(value.ids, dtype=torch.int64)
        return "table", tuple(value.ids), still(value.rows(ids))
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


def _taken(rows: State, order: Tensor) -> State:
    """The rows of the same clients in another order."""
    return {name: column[order] for name, column in rows.items()}


def _close(one: Tensor, other: Tensor, size: float = 0.0) -> bool:
    if one.shape != other.shape or not one.is_floating_point():
        return one.shape == other.shape and torch.equal(one, other)
    scale = size
    if other.numel():
        scale = max(size, float(other.abs().nan_to_num().max()))
    return torch.allclose(one, other, rtol=1e-4, atol=1e-5 * scale, equal_nan=True)


def cause(error: Exception) -> str:
    """Its type and the first line of its message."""
    kind = type(error).__name__
    lines = str(error).strip().splitlines()
    if not lines:
        return kind
    return f"{kind} ({lines[0].rstrip('.')})"


def sentence(rule: Any, fault: str) -> str:
    name = rule.name() if isinstance(rule, Rule) else type(rule).__name__
    return f"{name} {fault}."


def require(holds: bool, rule: Any, fault: str) -> None:
    if not holds:
        raise AssertionError(sentence(rule.rule if isinstance(rule, Watched) else rule, fault))
