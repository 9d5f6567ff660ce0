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
        moved: tuple[Tensor, Memory] = self._call("step", direction, memory, now)
        return moved

    def result(self, x: Tensor, memory: Memory, now: Round) -> Tensor:
        outcome: Tensor = self._call("result", x, memory, now)
        return outcome

    def personal(self, x: Tensor, ids: Tensor, memory: Memory, now: Round) -> Tensor:
        vectors: Tensor = self._call("personal", x, ids, memory, now)
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
        numbers: dict[str, float] = self._call("record", memory, now)
        return numbers

    def verdict(self, memory: Memory, now: Round) -> str | None:
        remark: str | None = self._call("verdict", memory, now)
        return remark

    def _call(self, hook: str, *arguments: Any) -> Any:
        """The rule's answer, checked; its arguments must be unchanged after the call."""
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
        try:
            check_answer(self.rule, hook, arguments, answer)
        except Wrong as fault:
            self.require(False, hook, str(fault))
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
