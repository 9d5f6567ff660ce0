"""A public contract checker: `check_rule(rule)` says in one sentence what a rule gets wrong.

It trains a tiny federation in which one client fails, then all of them, and some clients take part
for the first time late, and checks every call of every hook against what the round, the engines and
the checkpoints rely on.
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

from kairosfl.core.clock import Fleet
from kairosfl.core.fields import Briefs, Reports
from kairosfl.core.recipe import Recipe
from kairosfl.core.round import (
    brief,
    conclude,
    drive,
    personal,
    recorded,
    result,
    rounds,
    verdicts,
)
from kairosfl.core.rule import Algorithm, Rule, about, acts
from kairosfl.core.run import ENTRIES, Run, Setup, changed, upcoming
from kairosfl.core.spec import parse
from kairosfl.core.traits import SECRET, Traits
from kairosfl.detectors import FGN
from kairosfl.engines.batched import Batched
from kairosfl.engines.loop import Loop
from kairosfl.engines.protocol import Engine
from kairosfl.rules import RULES
from kairosfl.rules import parse as parse_algorithm
from kairosfl.runs.checkpoint import Checkpoints
from kairosfl.summed import closed_to
from kairosfl.tasks.dataset import DataSet, Samples
from kairosfl.tasks.population import Population
from kairosfl.tasks.task import Task
from kairosfl.watched import COHORT, Watched, WatchedBase, cause, require, sentence, still

SIZES = (3, 9, 5, 12, 4, 7, 8)
RECIPE = Recipe(
    rounds=6, cohort=COHORT, epochs=2, batch_size=4, lr=0.1, momentum=0.5, weight_decay=0.01
)
IDLE = 3  # the round in which no client reports; in the round before, the first client does not
RESUMED = 3

# The engines on which a rule is checked, each created from a task.
ENGINES: dict[str, Callable[[Task], Engine]] = {
    "loop": Loop,
    "batched": partial(Batched, deterministic=True),
}


def check_rule(rule: Rule, *, engines: Mapping[str, Callable[[Task], Engine]] = ENGINES) -> None:
    """Raise an AssertionError of one sentence for the first thing that this rule gets wrong.

    Checks its form (a frozen dataclass that prints as the text it is parsed from), every hook (it
    changes none of its arguments, returns the same for the same arguments, does not depend on the
    order of the clients, and returns finite tensors of the right shape and type), its state
    (tensors that survive a checkpoint; rows of reporters alone), rounds in which some or all
    clients fail, its traits (that it says what it acts on, and needs only sums if it says so),
    answers to older rounds' orders where it has the trait `late`, what its clients keep, and that a
    resumed run is the same to the bit on every engine.

    Args:
        rule: The rule, with the options to check.
        engines: The engines on which it must train the same model, by name.
    """
    _check_form(rule)
    _check_keeps(rule)
    moves_base = acts(rule, "rebase")
    pristine, job = copy.deepcopy(rule), _task(torch.float32, rule)
    watched = WatchedBase(rule=rule) if moves_base else Watched(rule=rule)
    once = Once(Loop(job))
    _last(_course(watched, job, Losing(once)))
    watched.replay()
    _check_late(rule, job)
    straight, shuffled = (
        _last(_course(rule, job, Losing(once, shuffle))) for shuffle in (False, True)
    )
    require(
        torch.equal(straight.x, shuffled.x),
        rule,
        "gives a different model if the reports arrive in another order",
    )
    longer = _last(
        _course(rule, job, Losing(once), recipe=replace(RECIPE, rounds=2 * RECIPE.rounds))
    )
    require(
        about(rule).horizon or torch.equal(straight.x, longer.x),
        rule,
        "behaves differently when the run has more rounds in total; "
        "declare it by the trait horizon",
    )
    _check_needs(rule, job, once, straight)
    if about(rule).sums:
        _last(_course(closed_to(rule), job, Losing(once)))
    job = _task(torch.float64, rule)
    reference = _last(_course(rule, job, Losing(Loop(job)))).x
    for name, make in engines.items():
        _check_engine(rule, pristine, name, make, job, reference)


def _check_needs(rule: Rule, job: Task, engine: Engine, straight: Run) -> None:
    """That a rule which acts on what clients measure says so; one that says by attributes what it
    is, as until 0.2, cannot.
    """
    traits = about(rule)
    old = type(rule).traits is Rule.traits and traits != Traits()
    if old or traits.measures:
        return
    other = _last(_course(rule, job, Losing(Mismeasuring(engine))))
    require(
        torch.equal(straight.x, other.x),
        rule,
        "acts on what clients measure on their data; say by the trait needs which field of their "
        f"reports it is, as in needs={{'loss'}}; one of {', '.join(sorted(SECRET))}",
    )


def _check_engine(
    rule: Rule,
    pristine: Rule,
    name: str,
    make: Callable[[Task], Engine],
    job: Task,
    reference: Tensor,
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        checkpoints = Checkpoints(Path(folder))
        course = _course(rule, job, Losing(make(job)))
        for _ in range(RESUMED):
            run = next(course)
        try:
            checkpoints.save(run, {})
        except Exception as error:
            raise AssertionError(
                sentence(rule, f"has a state that cannot be saved, {cause(error)}")
            ) from error
        run = _last(course)
        blank = Run.start(job.start(), _setup(pristine, job), seed=0)
        loaded, _ = checkpoints.load(blank)
    resumed = _last(_course(copy.deepcopy(pristine), job, Losing(make(job)), loaded))
    moved = [run.base, resumed.base]
    require(
        torch.equal(run.x, resumed.x) and still(moved[0]) == still(moved[1]),
        rule,
        f"gives a different model on engine {name!r} when the run is resumed from a checkpoint; "
        "it keeps something outside its state",
    )
    require(
        torch.allclose(run.x, reference, rtol=1e-5, atol=1e-7),
        rule,
        f"gives a different model on engine {name!r} than on 'loop'",
    )


HOOKS = (
    *(
        "server",
        "client",
        "select",
        "brief",
        "receive",
        "weigh",
        "combine",
        "observe",
        "step",
        "rebase",
        "result",
        "personal",
    ),
    *("record", "verdict", "traits", "reads", "reads_rounds", "largest_cohort", "conflicts_with"),
)


def _check_form(rule: Rule) -> None:
    require(isinstance(rule, Rule), rule, "is not derived from kairosfl.Rule")
    frozen = dataclasses.is_dataclass(rule) and type(rule).__dataclass_params__.frozen
    require(
        frozen,
        rule,
        "is not a frozen dataclass; write @dataclass(frozen=True, kw_only=True) above its class",
    )
    for name in vars(type(rule)):
        near = difflib.get_close_matches(name, HOOKS, 1, 0.75)
        lost = (
            bool(near)
            and name not in HOOKS
            and not name.startswith("_")
            and callable(getattr(type(rule), name))
        )
        require(
            not lost,
            rule,
            f"has a method {name!r}, which is never called; did you mean {''.join(near)!r}?",
        )
    try:
        text = str(rule)
        if RULES.get(rule.name()) is type(rule) or _importable(type(rule)):
            read: Any = parse_algorithm(text).rules
        else:
            read = parse("rule", text, {rule.name(): type(rule)})
    except Exception as error:
        raise AssertionError(
            sentence(rule, f"cannot be written as text and read back, {cause(error)}")
        ) from error
    require(
        read == (rule,),
        rule,
        f"prints as {text!r} and reads back as another rule; keep to numbers and words",
    )


def _check_keeps(rule: Rule) -> None:
    """What its clients keep are fields that the list marks as kept."""
    kept = {name for name, entry in ENTRIES.items() if entry.kept}
    unknown = sorted(about(rule).keeps - kept)
    listed = ", ".join(sorted(kept))
    require(
        not unknown,
        rule,
        f"has the trait keeps with {', '.join(unknown)}, which no field of the list is; "
        f"clients can keep {listed}",
    )


def _check_late(rule: Rule, job: Task) -> None:
    """One that is right for answers to older orders takes cohorts of several versions."""
    if not about(rule).late or acts(rule, "rebase"):
        return
    setup, engine = _setup(rule, job), Loop(job)
    run = Run.start(job.start(), setup, seed=0)
    waiting: dict[int, tuple[Briefs, Any]] = {}
    try:
        for landing in ((0, 1), (2, 3), (0, 2), (1, 3)):
            now = changed(upcoming(run, setup), size=len(landing))
            for client in {*range(COHORT)} - waiting.keys():
                waiting[client] = brief(run, setup, now, torch.tensor([client]))
            orders = [waiting.pop(client) for client in landing]
            briefs = Briefs.join([order for order, _ in orders])
            run = conclude(run, setup, now, briefs, engine.train(briefs), _sent_along(orders))
    except AssertionError:
        raise
    except Exception as error:
        fault = f"fails when orders of several versions land together, {cause(error)}"
        raise AssertionError(sentence(rule, fault)) from error


def _sent_along(orders: list[tuple[Briefs, Any]]) -> dict[int, dict[str, Tensor]]:
    """What `brief` returned to remember, of several orders in the order of their clients."""
    return {
        number: {name: torch.cat([sent[number][name] for _, sent in orders]) for name in rows}
        for number, rows in orders[0][1].items()
    }


def _importable(cls: type) -> bool:
    return getattr(sys.modules.get(cls.__module__), cls.__name__, None) is cls


@dataclass
class Once:
    """An engine that trains equal briefs once: all runs of a good rule ask for the same."""

    engine: Engine
    known: dict[Any, Reports] = field(default_factory=dict)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def train(self, briefs: Briefs) -> Reports:
        """The reports, trained now or remembered."""
        order = still(briefs)
        if order not in self.known:
            self.known[order] = self.engine.train(briefs)
        return self.known[order]


@dataclass
class Mismeasuring:
    """An engine whose clients report less of all that tells about their data, each otherwise."""

    engine: Engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def train(self, briefs: Briefs) -> Reports:
        """The reports with other measurements."""
        reports: Reports = self.engine.train(briefs)
        smaller = {}
        for name in SECRET:
            measured = getattr(reports, name)
            if measured is not None:
                smaller[name] = (measured / (2 + reports.ids % 3)).to(measured.dtype)
        return replace(reports, **smaller)


@dataclass
class Losing:
    """An engine that loses a client in one round and all clients in the next, and may shuffle the
    reports.
    """

    engine: Engine
    shuffle: bool = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self.engine, name)

    def train(self, briefs: Briefs) -> Reports:
        """The reports that arrive."""
        reports: Reports = self.engine.train(briefs)
        ids = reports.ids.tolist()
        number = briefs.newest
        lost = set[int]()
        if number == IDLE:
            lost = set(ids)
        elif number == IDLE - 1:
            lost = set(ids[:1])
        kept = [row for row, client in enumerate(ids) if client not in lost]
        order = torch.tensor(kept[::-1] if self.shuffle else kept, dtype=torch.int64)
        return replace(
            reports.take(order), failed=tuple((client, "it was lost") for client in sorted(lost))
        )


def _setup(rule: Rule, job: Task, recipe: Recipe = RECIPE) -> Setup:
    fleet = None
    if about(rule).clock:  # devices of which some are much slower than the others
        fleet = Fleet(len(SIZES), seconds=2.0 ** np.arange(len(SIZES)))
    return Setup(
        Algorithm((rule,)),
        recipe,
        len(SIZES),
        job.layout,
        (FGN(),),
        own=job.own_start(),
        sizes=np.array(SIZES),
        waits={},
        fleet=fleet,
    )


def _course(
    rule: Rule, job: Task, engine: Engine, run: Run | None = None, recipe: Recipe = RECIPE
) -> Iterator[Run]:
    """The run after every round, each one checked."""
    setup = _setup(rule, job, recipe)
    run = run or Run.start(job.start(), setup, seed=0)
    reporters = {client for table in run.tables for client in table.ids}
    course = drive(rounds(run, setup), engine)
    while run.round < RECIPE.rounds:
        try:
            run = next(course)
        except AssertionError:
            raise
        except Exception as error:
            fault = f"fails in round {run.round + 1}, {cause(error)}"
            raise AssertionError(sentence(rule, fault)) from error
        outcome = result(run, setup)
        recorded(run, setup)
        personal(run, setup, torch.arange(len(SIZES)))
        require(
            bool(torch.isfinite(outcome).all()),
            rule,
            f"makes a model that is not finite in round {run.round}",
        )
        if run.record:
            reporters.update(run.record.ids.tolist())
        rows = {client for table in run.tables for client in table.ids}
        require(rows <= reporters, rule, "holds rows of clients that never reported")
        yield run
    verdicts(run, setup)


def _last(course: Iterator[Run]) -> Run:
    *_, run = course
    return run


class Adapted(nn.Module):
    """A frozen linear layer with a low-rank pair beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-0.5, 0.5, 30).view(5, 6), requires_grad=False)
        self.a = nn.Parameter(torch.empty(2, 6))
        self.b = nn.Parameter(torch.empty(5, 2))

    def forward(self, inputs: Tensor) -> Tensor:
        outputs: Tensor = inputs @ (self.weight + self.b @ self.a).T
        return outputs


def _task(dtype: torch.dtype, rule: Rule) -> Task:
    """Seven unequal clients of three classes, and a network with features; where the rule moves
    what is frozen, one with a low-rank pair, and where it trains an own part, one with a head.
    """
    frozen = acts(rule, "rebase")
    rng = np.random.Generator(np.random.Philox(key=0))
    n = sum(SIZES)
    targets = torch.from_numpy(rng.integers(0, 3, n))
    inputs = torch.from_numpy(rng.standard_normal((n, 6))).to(dtype)
    inputs[torch.arange(n), targets] += 2
    samples = Samples(inputs, targets)
    first = Adapted() if frozen else nn.Linear(6, 5)
    model = nn.Sequential(first, nn.Tanh(), nn.Linear(5, 3)).to(dtype)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    start = torch.from_numpy(rng.standard_normal(sum(p.numel() for p in trained)) / 2).to(dtype)
    nn.utils.vector_to_parameters(start, trained)
    clients = Population.from_lists(np.split(np.arange(n), np.cumsum(SIZES)[:-1]))
    pairs = [("0.a", "0.b", "0.weight", 1.0)] if frozen else []
    own = ("2.*",) if "own" in about(rule).keeps else ()
    dataset = DataSet("check", samples, samples, classes=3)
    return Task(model, dataset, clients, pairs=pairs, own=own)
