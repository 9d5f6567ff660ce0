"""What a hook must return: one function per hook, which says in words what is wrong.

`check_rule` and engine `debug` ask them about every call; a run with another engine does not.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kairosfl.core.fields import MEASURES, Briefs, Field, Reports, fields
from kairosfl.core.rule import Memory, Plan, Round, Rule, about


class Wrong(Exception):
    """What is wrong with a hook's answer: the rest of a sentence that begins with the rule."""


def check_answer(rule: Rule, hook: str, arguments: tuple[Any, ...], answer: Any) -> None:
    """Raise `Wrong` unless the answer of this hook is one that a round can go on with.

    Args:
        rule: Whose hook was called.
        hook: Its name.
        arguments: What it was called with.
        answer: What it returned.
    """
    ANSWERS[hook](rule, answer, *arguments)


def require(holds: bool, fault: str) -> None:
    """Raise `Wrong` with these words unless something holds."""
    if not holds:
        raise Wrong(fault)


def described(value: Any) -> str:
    """A tensor's type and shape, in words; of anything else, what it is."""
    if isinstance(value, Tensor):
        return f"{value.dtype} of shape {list(value.shape)}"
    return f"a {type(value).__name__}"


# --- before training ---


def _server(rule: Rule, state: Any, now: Round) -> None:
    _state(state)


def _select(rule: Rule, plan: Any, before: Plan, memory: Memory, now: Round) -> None:
    require(isinstance(plan, Plan), "does not return a Plan")
    count = plan.size if plan.ids is None else len(plan.ids)
    count = min(count, now.population)
    most = rule.largest_cohort(now.cohort, now.population)
    fault = f"asks for {count} clients, but largest_cohort() returns {most}; override it"
    require(count <= most, fault)
    if plan.first is not None:
        _first(plan, now)


def _first(plan: Plan, now: Round) -> None:
    """Clients that are measured before the round is planned: asked once, for what there is."""
    again = "asks for clients to be measured who have answered already; look at now.measured"
    require(now.measured is None, again)
    ids = np.asarray(plan.first)
    exist = ids.size == 0 or (ids.min() >= 0 and ids.max() < now.population)
    fault = f"asks to measure the clients {ids.tolist()}, and there are {now.population}"
    require(bool(exist), fault)
    unknown = sorted(plan.measure - MEASURES)
    measures = ", ".join(sorted(MEASURES))
    require(not unknown, f"asks clients to measure {unknown}; they can measure {measures}")


def _brief(rule: Rule, answer: Any, before: Briefs, memory: Memory, now: Round) -> None:
    briefs = answer
    if isinstance(answer, tuple):
        require(len(answer) == 2, "does not return Briefs, or Briefs and rows to remember")
        briefs, sent = answer
        _sent(sent, len(before))
    require(isinstance(briefs, Briefs), "does not return Briefs")
    same = torch.equal(briefs.ids, before.ids)
    require(same, "changes who is asked; that is for select")
    for entry in fields(Briefs):
        _field(entry, before, briefs, now)
    _start(before, briefs)
    _keeps(rule, briefs)


def _sent(sent: Any, m: int) -> None:
    """Rows to find again in `memory.sent`."""
    _state(sent)
    for name, rows in sent.items():
        due = rows.ndim > 0 and len(rows) == m
        fault = f"sends {described(rows)} along as {name!r} where {m} rows are expected"
        require(due, fault)


def _field(entry: Field, before: Briefs, briefs: Briefs, now: Round) -> None:
    """One field of the briefs."""
    name, value, m = entry.name, getattr(briefs, entry.name), len(before)
    if entry.writers == "core":
        same = value is getattr(before, name)
        require(same, f"changes {name}, which only the core may")
    elif value is None:
        return
    elif entry.shape == "vector":
        fits = value.shape in (now.x.shape, (m, *now.x.shape)) and value.dtype == now.x.dtype
        require(fits, f"gives a {name} whose shape or type differs from x")
        if value is not getattr(before, name):
            require(_finite(value), f"gives a {name} that is not finite")
    elif entry.shape == "set":
        fits = value.ndim == 2 and value.shape[1:] == now.x.shape and len(value) > 0
        require(fits, f"gives {described(value)} as {name}, not several models [k, d]")
    elif entry.shape == "each":
        fits = isinstance(value, Tensor) and value.shape == (m,)
        require(fits, f"gives {described(value)} as {name} of {m} clients")
    elif name == "still":
        numbers = range(len(now.layout.names))
        fits = value <= set(numbers) and len(value) < len(numbers)
        fault = f"keeps the tensors {sorted(value)} still; some of {list(numbers)} must move"
        require(fits, fault)


def _start(before: Briefs, briefs: Briefs) -> None:
    """Where clients start is written once; the core works out the rest."""
    names = ("start", "offset")
    places = [name for name in names if getattr(briefs, name) is not getattr(before, name)]
    fault = "writes start and offset; write one of them, and the core works out the other"
    require(len(places) < 2, fault)


def _keeps(rule: Rule, briefs: Briefs) -> None:
    """What clients are told to keep is what the trait `keeps` says."""
    used = set()
    if briefs.second_lr is not None:
        used.add("second")
    if briefs.mixed:
        used.add("mix")
    missing = " and ".join(sorted(used - about(rule).keeps))
    require(not missing, f"asks clients to keep {missing}; declare it by the trait keeps")


# --- after training ---


def _receive(rule: Rule, reports: Any, before: Reports, memory: Memory, now: Round) -> None:
    require(isinstance(reports, Reports), "does not return Reports")
    same = torch.equal(reports.ids, before.ids)
    require(same, "changes who reported; set a weight to 0 in weigh")
    delta, updates = reports.delta, before.delta
    fits = delta.shape == updates.shape and delta.dtype == updates.dtype
    require(fits, f"returns updates as {described(delta)}, not {described(updates)}")
    if delta is not updates:
        require(_finite(delta), "returns updates that are not finite")


def _weigh(rule: Rule, factors: Any, before: Tensor, memory: Memory, now: Round) -> None:
    m = len(now.reports)
    shaped = isinstance(factors, Tensor) and factors.shape == (m,)
    fault = f"returns {described(factors)} where one number for each of {m} reporters is expected"
    require(shaped, fault)
    are_weights = _finite(factors) and bool((factors >= 0).all())
    if m:
        are_weights = are_weights and bool(factors.sum() > 0)
    require(are_weights, f"returns factors that are not weights: {factors.tolist()}")


def _combine(rule: Rule, direction: Any, before: Tensor, memory: Memory, now: Round) -> None:
    _direction(direction, before)


def _observe(rule: Rule, after: Any, memory: Memory, now: Round) -> None:
    require(isinstance(after, Memory), "does not return a Memory; use memory.replace(...)")
    m = len(now.reports)
    _state(after.state)
    _state(after.rows)
    for name, rows in after.rows.items():
        declared = name in memory.rows
        require(declared, f"writes {name!r} into a row, but client() has no such name")
        due = rows.ndim > 0 and len(rows) == m
        fault = f"writes {described(rows)} into {name!r} where {m} rows are expected"
        require(due, fault)


def _step(rule: Rule, answer: Any, before: Tensor, memory: Memory, now: Round) -> None:
    paired = isinstance(answer, tuple) and len(answer) == 2
    require(paired, "does not return (direction, memory)")
    direction, after = answer
    _direction(direction, before)
    require(isinstance(after, Memory), "does not return a Memory; use memory.replace(...)")
    _state(after.state)
    require(not after.rows, "writes rows; only observe may")


def _rebase(rule: Rule, base: Any, before: Tensor, memory: Memory, now: Round) -> None:
    fits = isinstance(base, Tensor) and base.shape == before.shape and base.dtype == before.dtype
    require(fits, f"returns {described(base)} where the base is {described(before)}")
    require(_finite(base), "returns a base that is not finite")


# --- between rounds ---


def _result(rule: Rule, x: Any, before: Tensor, memory: Memory, now: Round) -> None:
    _direction(x, before)


def _personal(rule: Rule, vectors: Any, x: Tensor, ids: Tensor, memory: Memory, now: Round) -> None:
    shapes = (now.x.shape, (len(ids), *now.x.shape))
    fits = isinstance(vectors, Tensor) and vectors.shape in shapes and vectors.dtype == x.dtype
    fault = (
        f"returns {described(vectors)} where {described(x)} or one of them for each of {len(ids)} "
        "clients is expected"
    )
    require(fits, fault)
    require(_finite(vectors), "returns a vector that is not finite")


def _record(rule: Rule, numbers: Any, memory: Memory, now: Round) -> None:
    fault = "does not return numbers by name"
    require(isinstance(numbers, dict), fault)
    for name, number in numbers.items():
        require(isinstance(name, str) and isinstance(number, int | float), fault)


def _verdict(rule: Rule, sentence: Any, memory: Memory, now: Round) -> None:
    fits = sentence is None or isinstance(sentence, str)
    require(fits, "does not return a sentence or None")


# --- what several hooks return ---


def _state(state: Any) -> None:
    fault = "returns a state that is not a dictionary of tensors"
    require(isinstance(state, dict), fault)
    for name, value in state.items():
        require(isinstance(name, str) and isinstance(value, Tensor), fault)


def _direction(direction: Any, before: Tensor) -> None:
    fault = f"returns {described(direction)} where the direction is {described(before)}"
    require(isinstance(direction, Tensor), fault)
    require(direction.shape == before.shape and direction.dtype == before.dtype, fault)
    fault = f"returns a direction on {direction.device} where the model is on {before.device}"
    require(direction.device == before.device, fault)
    require(_finite(direction), "returns a direction that is not finite")


def _finite(tensor: Tensor) -> bool:
    return bool(torch.isfinite(tensor).all())


# By hook: what is wrong with an answer, given the rule, the answer, and the hook's arguments.
ANSWERS: dict[str, Callable[..., None]] = {
    "server": _server,
    "client": _server,
    "select": _select,
    "brief": _brief,
    "receive": _receive,
    "weigh": _weigh,
    "combine": _combine,
    "observe": _observe,
    "step": _step,
    "rebase": _rebase,
    "result": _result,
    "personal": _personal,
    "record": _record,
    "verdict": _verdict,
}
