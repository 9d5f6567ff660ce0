"""A public contract checker: `check_rule(rule)` says in one sentence what anyone's rule gets wrong.

It trains a tiny federation in which a client fails, then everyone, and clients are seen for the first time late, and
holds every call of every hook against what the round, the engines and the checkpoints rely on.
"""

from __future__ import annotations

import copy
import dataclasses
import difflib
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from kairosfl.briefs import Briefs, Cohort, Plan, Reports
from kairosfl.engines.batched import Batched
from kairosfl.engines.loop import Loop
from kairosfl.recipe import Recipe
from kairosfl.round import Engine, Round, Run, drive, rounds
from kairosfl.rule import Algorithm, Rule, State
from kairosfl.rules import RULES
from kairosfl.rules import parse as parse_algorithm
from kairosfl.runs.checkpoint import Checkpoints
from kairosfl.spec import parse
from kairosfl.table import Table
from kairosfl.tasks.dataset import DataSet, Samples
from kairosfl.tasks.population import Population
from kairosfl.tasks.task import Task

SIZES = (3, 9, 5, 12, 4, 7, 8)
RECIPE = Recipe(rounds=6, cohort=4, epochs=2, batch_size=4, lr=0.1, momentum=0.5, weight_decay=0.01)
IDLE = 3  # the round in which nobody reports; in the round before, the first client does not
RESUMED = 3

# Every engine on which a rule is checked, made from a task.
ENGINES: dict[str, Callable[[Task], Engine]] = {"loop": Loop, "batched": partial(Batched, deterministic=True)}


def check_rule(rule: Rule, *, engines: Mapping[str, Callable[[Task], Engine]] = ENGINES) -> None:
    """Raise an AssertionError of one sentence for the first thing that this rule gets wrong.

    Checked are its form (a frozen dataclass that prints as the text it is parsed from), every hook (it changes none of
    its arguments, answers the same question in the same way, does not depend on the order of the clients, and returns
    finite tensors of the right shape and type), its state (tensors that survive a checkpoint; rows of reporters
    alone), rounds in which some or all clients fail, and that a resumed run is the same to the bit on every engine.
    """
    _check_form(rule)
    pristine, job = copy.deepcopy(rule), _task(torch.float32)
    watched = _Watched(rule=rule)
    _last(_course(watched, job, Losing(Loop(job))))
    watched.replay()
    straight, shuffled = (
        _last(_course(rule, job, engine)) for engine in (Losing(Loop(job)), Losing(Loop(job), shuffle=True))
    )
    _require(torch.equal(straight.x, shuffled.x), rule, "gives another model when the reports arrive in another order")
    job = _task(torch.float64)
    reference = _last(_course(rule, job, Losing(Loop(job)))).x
    for name, make in engines.items():
        _check_engine(rule, pristine, name, make, job, reference)


def _check_engine(
    rule: Rule, pristine: Rule, name: str, make: Callable[[Task], Engine], job: Task, reference: Tensor
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        checkpoints = Checkpoints(Path(folder))
        course = _course(rule, job, Losing(make(job)))
        for _ in range(RESUMED):
            run = next(course)
        try:
            checkpoints.save(run, {})
        except Exception as error:
            raise AssertionError(_sentence(rule, f"has a state that cannot be saved, {_cause(error)}")) from error
        run = _last(course)
        blank = Run.start(job.start(), Algorithm((pristine,)), clients=len(SIZES), seed=0)
        loaded, _ = checkpoints.load(blank)
    resumed = _last(_course(copy.deepcopy(pristine), job, Losing(make(job)), loaded))
    _require(
        torch.equal(run.x, resumed.x),
        rule,
        f"gives another model on engine {name!r} when the run is resumed from a checkpoint; it remembers something "
        "outside its state",
    )
    _require(
        torch.allclose(run.x, reference, rtol=1e-5, atol=1e-7),
        rule,
        f"gives another model on engine {name!r} than on 'loop'",
    )


HOOKS = ("server", "client", "select", "brief", "weigh", "combine", "observe", "step", "largest", "beside")


def _check_form(rule: Rule) -> None:
    _require(isinstance(rule, Rule), rule, "is not derived from kairosfl.Rule")
    frozen = dataclasses.is_dataclass(rule) and type(rule).__dataclass_params__.frozen
    _require(frozen, rule, "is not a frozen dataclass; write @dataclass(frozen=True, kw_only=True) above its class")
    for name in vars(type(rule)):
        near = difflib.get_close_matches(name, HOOKS, 1, 0.75)
        lost = bool(near) and name not in HOOKS and not name.startswith("_") and callable(getattr(type(rule), name))
        _require(not lost, rule, f"has a method {name!r}, which nobody calls; did you mean {''.join(near)!r}?")
    try:
        text = str(rule)
        if RULES.get(rule.name()) is type(rule) or _importable(type(rule)):
            read: Any = parse_algorithm(text).rules
        else:
            read = parse("rule", text, {rule.name(): type(rule)})
    except Exception as error:
        raise AssertionError(_sentence(rule, f"cannot be written as text and read back, {_cause(error)}")) from error
    _require(read == (rule,), rule, f"prints as {text!r} and reads back as another rule; keep to numbers and words")


def _importable(cls: type) -> bool:
    return getattr(sys.modules.get(cls.__module__), cls.__name__, None) is cls


@dataclass(frozen=True, kw_only=True, eq=False)
class _Watched(Rule):
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
        self._require(
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
        self._require(isinstance(chosen, Plan), "select", "does not return a Plan")
        asked = min(chosen.size if chosen.ids is None else len(chosen.ids), round.clients)
        most = self.rule.largest(round.cohort, round.clients)
        self._require(
            asked <= most, "select", f"asks for {asked} clients, and largest() says {most} at most; override it"
        )
        return chosen

    def brief(self, briefs: Briefs, state: State, rows: State, round: Round) -> Briefs:
        told: Briefs = self._call("brief", briefs, state, rows, round)
        self._require(isinstance(told, Briefs), "brief", "does not return Briefs")
        self._require(torch.equal(told.ids, briefs.ids), "brief", "changes who is asked; that is for select")
        for name in ("start", "push"):
            value = getattr(told, name)
            if value is not None:
                fits = value.shape in (round.x.shape, (len(briefs), *round.x.shape)) and value.dtype == round.x.dtype
                self._require(fits, "brief", f"gives a {name} of another shape or type than x has")
        return told

    def weigh(
        self, factors: Tensor, state: State, rows: State, briefs: Briefs, reports: Reports, round: Round
    ) -> Tensor:
        asked = (factors, state, rows, briefs, reports, round)
        found: Tensor = self._call("weigh", *asked)
        m = len(reports)
        shaped = isinstance(found, Tensor) and found.shape == (m,)
        self._require(shaped, "weigh", f"returns {_shape(found)} where one number for each of {m} reporters is due")
        fine = bool(torch.isfinite(found).all() and (found >= 0).all() and found.sum() > 0)
        self._require(fine, "weigh", f"returns factors that are no weights: {found.tolist()}")
        for order, swapped in self._orders(m):
            again = self.rule.weigh(*_rearranged(asked, order, m))
            self._require(_close(again, found[order]), "weigh", swapped)
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
            self._require(_close(again, found), "combine", swapped)
        return found

    def observe(
        self, state: State, rows: State, weights: Tensor, briefs: Briefs, reports: Reports, round: Round
    ) -> tuple[State, State]:
        asked = (state, rows, weights, briefs, reports, round)
        found = self._call("observe", *asked)
        self._require(isinstance(found, tuple) and len(found) == 2, "observe", "does not return (state, rows)")
        after, written = found
        m = len(reports)
        self._check_state("observe", after)
        self._check_state("observe", written)
        for name, value in written.items():
            self._require(name in rows, "observe", f"writes {name!r} into a row, and client() has no such name")
            due = value.ndim > 0 and len(value) == m
            self._require(due, "observe", f"writes {_shape(value)} into {name!r} where a row for each of {m} is due")
        for order, swapped in self._orders(m):
            again, rewritten = self.rule.observe(*_rearranged(asked, order, m))
            same = all(_close(again[name], value) or _close(again[name], value[order]) for name, value in after.items())
            same = same and all(_close(rewritten[name], value[order]) for name, value in written.items())
            self._require(same, "observe", swapped)
        return after, written

    def step(self, direction: Tensor, state: State, table: Table, round: Round) -> tuple[Tensor, State]:
        found = self._call("step", direction, state, table, round)
        self._require(isinstance(found, tuple) and len(found) == 2, "step", "does not return (direction, state)")
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
            cause = f"fails in {hook}{self._when(given)}, {_cause(error)}"
            raise AssertionError(_sentence(self.rule, cause)) from error
        self._require(_still(given) == before, hook, "changes its arguments in place; return new tensors instead")
        kept_out = _still(vars(self.rule)) == own
        self._require(kept_out, hook, "keeps something on itself; return it in the state, which checkpoints save")
        self.calls.append((hook, kept, _still(answer)))
        self._ask_again(*self.calls[-1])
        return answer

    def _when(self, arguments: tuple[Any, ...]) -> str:
        counts = [len(a) for a in arguments if isinstance(a, Reports)]
        return (
            f" when only {counts[0]} of {RECIPE.cohort} clients report" if counts and counts[0] < RECIPE.cohort else ""
        )

    def _orders(self, m: int) -> Iterator[tuple[Tensor, str]]:
        for shift in {1, m - 1} if m > 1 else ():
            yield torch.arange(m).roll(shift), "depends on the order in which the clients stand"

    def _check_state(self, hook: str, state: Any) -> None:
        fits = isinstance(state, dict) and all(isinstance(k, str) and isinstance(v, Tensor) for k, v in state.items())
        self._require(fits, hook, "returns a state that is no dictionary of tensors")

    def _check_direction(self, hook: str, found: Any, given: Tensor) -> None:
        fits = isinstance(found, Tensor) and found.shape == given.shape and found.dtype == given.dtype
        self._require(fits, hook, f"returns {_shape(found)} where the direction is {_shape(given)}")
        self._require(bool(torch.isfinite(found).all()), hook, "returns a direction that is not finite")

    def _require(self, holds: bool, hook: str, fault: str) -> None:
        _require(holds, self.rule, f"in {hook} {fault}")


@dataclass
class Losing:
    """An engine that loses a client in one round and everyone in the next, and may shuffle the reports."""

    engine: Engine
    shuffle: bool = False

    def train(self, briefs: Briefs) -> Reports:
        """The reports that arrive."""
        reports = self.engine.train(briefs)
        ids = reports.ids.tolist()
        lost = set(ids if briefs.round == IDLE else ids[:1] if briefs.round == IDLE - 1 else ())
        kept = [row for row, client in enumerate(ids) if client not in lost]
        order = torch.tensor(kept[::-1] if self.shuffle else kept, dtype=torch.int64)
        return replace(reports.take(order), failed=tuple((client, "it was lost") for client in sorted(lost)))


def _course(rule: Rule, job: Task, engine: Engine, run: Run | None = None) -> Iterator[Run]:
    """The run after every round, each looked at."""
    algorithm = Algorithm((rule,))
    run = run or Run.start(job.start(), algorithm, clients=len(SIZES), seed=0)
    reporters = {client for table in run.tables for client in table.ids}
    course = drive(rounds(run, algorithm, RECIPE, clients=len(SIZES), layout=job.layout), engine)
    while run.round < RECIPE.rounds:
        try:
            run = next(course)
        except AssertionError:
            raise
        except Exception as error:
            cause = f"fails in round {run.round + 1}, {_cause(error)}"
            raise AssertionError(_sentence(rule, cause)) from error
        _require(bool(torch.isfinite(run.x).all()), rule, f"makes a model that is not finite in round {run.round}")
        reporters |= set(run.record.ids.tolist()) if run.record else set()
        rows = {client for table in run.tables for client in table.ids}
        _require(rows <= reporters, rule, "holds rows of clients that never reported")
        yield run


def _last(course: Iterator[Run]) -> Run:
    *_, run = course
    return run


def _task(dtype: torch.dtype) -> Task:
    """Seven unequal clients of three classes, and a network with features."""
    rng = np.random.Generator(np.random.Philox(key=0))
    n = sum(SIZES)
    targets = torch.from_numpy(rng.integers(0, 3, n))
    inputs = torch.from_numpy(rng.standard_normal((n, 6))).to(dtype)
    inputs[torch.arange(n), targets] += 2
    samples = Samples(inputs, targets)
    model = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3)).to(dtype)
    start = torch.from_numpy(rng.standard_normal(sum(p.numel() for p in model.parameters())) / 2).to(dtype)
    nn.utils.vector_to_parameters(start, model.parameters())
    clients = Population.from_lists(np.split(np.arange(n), np.cumsum(SIZES)[:-1]))
    return Task(model, DataSet("check", samples, samples, classes=3), clients)


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


def _cause(error: Exception) -> str:
    """Its kind and the first line of what it says."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__} ({lines[0].rstrip('.')})" if lines else type(error).__name__


def _sentence(rule: Any, fault: str) -> str:
    name = rule.name() if isinstance(rule, Rule) else type(rule).__name__
    return f"{name} {fault}."


def _require(holds: bool, rule: Any, fault: str) -> None:
    if not holds:
        raise AssertionError(_sentence(rule.rule if isinstance(rule, _Watched) else rule, fault))
