"""What the core promises rules: stale runs, single writers, receive, result, idle rounds, verdicts,
and mass.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any, ClassVar

import pytest
import torch
from test_round import LAYOUT, Puppet
from torch import Tensor

from kairosfl.core.fields import Briefs, Report, Reports
from kairosfl.core.mass import mass
from kairosfl.core.recipe import Recipe
from kairosfl.core.round import drive, result, rounds, verdicts
from kairosfl.core.rule import Algorithm, Memory, Plan, Rule, State
from kairosfl.core.run import Round, Run, Setup, upcoming
from kairosfl.core.traits import Traits
from kairosfl.detectors import FGN, Detector
from kairosfl.errors import UserError
from kairosfl.rules import parse

ROUNDS = 6


def made(
    algorithm: str | Rule | Algorithm, detectors: tuple[Detector, ...] = (FGN(),), **recipe: Any
) -> Setup:
    rules = parse(algorithm) if isinstance(algorithm, str) else algorithm
    whole = Algorithm((rules,)) if isinstance(rules, Rule) else rules
    return Setup(
        whole, Recipe(**{"rounds": ROUNDS, "cohort": 5, "lr": 0.5, **recipe}), 5, LAYOUT, detectors
    )


def begin(setup: Setup) -> Run:
    return Run.start(torch.zeros(2, dtype=torch.float64), setup, seed=1)


def go(setup: Setup, run: Run | None = None, engine: Any = None) -> Iterator[Run]:
    return drive(rounds(run or begin(setup), setup), engine or Puppet())


# A run whose rows a later round has written is not continued as if nothing had happened.

ROWS = ["scaffold", "vrlsgd + fedcl", "fedaware(project=false)", "moon(mu=0)", "pa3fed"]


@pytest.mark.parametrize("text", ROWS)
def test_a_stale_run_is_refused(text: str) -> None:
    setup = made(text, cohort=3)
    early, *_ = go(setup)
    with pytest.raises(
        UserError,
        match=r"client rows of this run, after round 1, were overwritten .* run\.snapshot\(",
    ):
        next(go(setup, early))
    with pytest.raises(UserError, match="after round 1"):
        early.snapshot()


@pytest.mark.parametrize("text", ROWS)
def test_a_snapshot_continues_to_the_same_bits(text: str) -> None:
    setup = made(text, cohort=3)
    straight = list(go(setup))
    course = go(setup)
    kept = [next(course).snapshot(), next(course).snapshot()]
    *_, end = course
    assert torch.equal(end.x, straight[-1].x)
    for early in kept:
        for again in (early.snapshot(), early):  # the first leaves the second's rows alone
            later = list(go(setup, again))
            assert [run.round for run in later] == list(range(early.round + 1, ROUNDS + 1))
            assert all(
                torch.equal(one.x, other.x)
                for one, other in zip(later, straight[early.round :], strict=True)
            )


def test_the_latest_run_continues_and_then_is_stale_itself() -> None:
    setup = made("scaffold")
    course = go(setup)
    run = [next(course) for _ in range(3)][-1]
    *_, end = go(setup, run)
    assert torch.equal(end.x, list(go(setup))[-1].x)
    with pytest.raises(UserError, match="after round 3"):
        next(go(setup, run))


def test_of_two_runs_that_go_on_from_one_the_slower_is_refused() -> None:
    """Both were briefed before either wrote: the second is told when it is about to write."""
    setup = made("scaffold")
    run = next(go(setup))
    one, other = rounds(run, setup), rounds(run, setup)
    (_, briefs), (_, same) = next(one), next(other)
    assert briefs is not None
    assert same is not None
    one.send(Puppet().train(briefs))
    with pytest.raises(UserError, match="overwritten by a later round"):
        other.send(Puppet().train(same))


@pytest.mark.parametrize(
    "text", ["fedavg", "fedavgm", "fedadam", "fedmut", "fednova(momentum=0.5)", "fedcl", "fedcm"]
)
def test_without_rows_any_run_may_be_continued(text: str) -> None:
    setup = made(text)
    straight = list(go(setup))
    for run in straight[:-1]:
        *_, end = go(setup, run)
        assert torch.equal(end.x, straight[-1].x)


def test_a_round_in_which_nobody_answers_writes_no_rows() -> None:
    setup = made("scaffold")
    course = go(setup, engine=Puppet(change=lambda reports, round: reports if round == 0 else []))
    first, *_ = [next(course) for _ in range(3)]
    first.check_fresh()


@dataclass(frozen=True, kw_only=True)
class Counting(Detector):
    """Critical while a client is new; it keeps a row per client."""

    def server(self, now: Round) -> State:
        return {"rounds": torch.tensor(0)}

    def client(self, now: Round) -> State:
        return {"turns": torch.tensor(0.0)}

    def value(self, memory: Memory, now: Round) -> float:
        return float(memory.rows["turns"].min())

    def decide(self, value: float, memory: Memory, now: Round) -> tuple[bool, Memory]:
        after = {"rounds": memory.state["rounds"] + 1}
        return value == 0, memory.replace(state=after, rows={"turns": memory.rows["turns"] + 1})


def test_a_detectors_rows_are_stored_and_make_a_run_stale_too() -> None:
    setup = made("fedavgm", detectors=(FGN(), Counting()))
    early, *later = go(setup)
    assert [run.record.values[1] for run in (early, *later)] == list(range(ROUNDS))  # type: ignore[union-attr]
    assert int(later[-1].states[2]["rounds"]) == ROUNDS  # rules first, then detectors
    assert later[-1].tables[2].rows(torch.arange(5))["turns"].tolist() == [ROUNDS] * 5
    with pytest.raises(UserError, match="overwritten"):
        next(go(setup, early))


# Two rules that set what only one may.


@dataclass(frozen=True, kw_only=True)
class Sets(Rule):
    """Sets fields of the brief."""

    values: ClassVar[dict[str, Any]] = {}

    def brief(self, briefs: Briefs, memory: Memory, now: Round) -> Briefs:
        return replace(briefs, **{name: made(briefs) for name, made in self.values.items()})


class StopsEarly(Sets):
    values: ClassVar[dict[str, Any]] = {
        "stop_below": lambda briefs: torch.full((len(briefs),), 0.5).double()
    }


class StopsLate(Sets):
    values: ClassVar[dict[str, Any]] = {
        "stop_below": lambda briefs: torch.full((len(briefs),), 0.9).double()
    }


class StartsHere(Sets):
    values: ClassVar[dict[str, Any]] = {"start": lambda briefs: briefs.start + 1}


class StartsThere(Sets):
    values: ClassVar[dict[str, Any]] = {"start": lambda briefs: briefs.start + 2}


class Adam(Sets):
    values: ClassVar[dict[str, Any]] = {"optimizer": lambda briefs: "adamw"}


class Radius(Sets):
    values: ClassVar[dict[str, Any]] = {"radius": lambda briefs: briefs.radius + 0.1}


class MoreRadius(Sets):
    values: ClassVar[dict[str, Any]] = {"radius": lambda briefs: briefs.radius + 0.2}


class Pulls(Sets):
    values: ClassVar[dict[str, Any]] = {"pull": lambda briefs: briefs.pull + 0.5}


class Pushes(Rule):
    def brief(self, briefs: Briefs, memory: Memory, now: Round) -> Briefs:
        return briefs.pushed(torch.ones(2, dtype=torch.float64))


@pytest.mark.parametrize(
    ("one", "other", "field"),
    [
        (StopsEarly(), StopsLate(), "stop_below"),
        (StopsLate(), StopsEarly(), "stop_below"),
        (StartsHere(), StartsThere(), "start"),
        (Radius(), MoreRadius(), "radius"),
    ],
)
def test_two_rules_that_set_one_field_are_refused_with_both_names(
    one: Rule, other: Rule, field: str
) -> None:
    setup = made(one + other)
    with pytest.raises(UserError) as caught:
        next(rounds(begin(setup), setup))
    assert str(caught.value) == (
        f"{one.name()} and {other.name()} cannot be combined: both set {field} of the brief, and only one rule may; "
        "leave one of them out."
    )


def test_rules_of_the_library_are_no_exception() -> None:
    setup = made(parse("alt") + StopsLate())
    with pytest.raises(
        UserError, match=r"alt and \S*StopsLate cannot be combined: both set stop_below"
    ):
        next(rounds(begin(setup), setup))
    setup = made(StartsHere() + parse("fedmut"))
    next(rounds(begin(setup), setup))  # in its first round FedMut starts everyone from x
    with pytest.raises(
        UserError, match=r"StartsHere and fedmut cannot be combined: both set start"
    ):
        list(go(setup))


def test_rules_that_add_compose() -> None:
    setup = made(Pulls() + Pushes() + parse("feddyn(alpha=0.25)") + parse("fedprox(mu=1)"))
    _, briefs = next(rounds(begin(setup), setup))
    assert briefs is not None
    assert briefs.pull.tolist() == [1.75] * 5
    assert briefs.push is not None
    assert torch.equal(briefs.push, torch.ones(5, 2, dtype=torch.float64))
    fields = [rule.brief(briefs, Memory({}, {}, None), None) for rule in (StopsEarly(), Radius())]  # type: ignore[arg-type]
    assert [f.stop_below is not None for f in fields] == [True, False]
    next(go(made(StopsEarly() + Radius())))  # one writer each


# Receive: what it returns is what everything later sees.

LONGEST = 0.5


@dataclass(frozen=True, kw_only=True)
class Clips(Rule):
    """No update is longer than this."""

    longest: float = LONGEST

    def receive(self, reports: Reports, memory: Memory, now: Round) -> Reports:
        factor = (self.longest / reports.delta.norm(dim=1)).clamp(max=1)
        return replace(
            reports, delta=reports.delta * factor[:, None], grad_sq=reports.grad_sq * factor**2
        )


@dataclass(frozen=True, kw_only=True)
class Looks(Rule):
    """Notes the lengths of the updates that every hook sees."""

    seen: ClassVar[dict[str, list[float]]] = {}

    def _look(self, hook: str, reports: Reports) -> None:
        self.seen[hook] = reports.delta.norm(dim=1).tolist()

    def receive(self, reports: Reports, memory: Memory, now: Round) -> Reports:
        self._look("receive", reports)
        assert now.reports is reports
        return reports

    def weigh(self, factors: Tensor, memory: Memory, now: Round) -> Tensor:
        self._look("weigh", now.reports)
        return factors

    def combine(self, direction: Tensor, memory: Memory, now: Round) -> Tensor:
        self._look("combine", now.reports)
        return direction

    def observe(self, memory: Memory, now: Round) -> Memory:
        self._look("observe", now.reports)
        return memory

    def step(self, direction: Tensor, memory: Memory, now: Round) -> tuple[Tensor, Memory]:
        self._look("step", now.reports)
        return direction, memory


def test_everything_after_receive_sees_what_it_returned() -> None:
    Looks.seen.clear()
    setup = made(Clips() + Looks(), rounds=1)
    (run,) = go(setup)
    (raw,) = go(made("fedavg", rounds=1))
    assert run.record is not None
    assert raw.record is not None
    assert run.record.reports is not None
    assert raw.record.reports is not None
    before, after = raw.record.reports, run.record.reports
    assert before.delta.norm(dim=1).min() > LONGEST
    assert after.delta.norm(dim=1).tolist() == pytest.approx([LONGEST] * 5)
    assert Looks.seen == {hook: pytest.approx([LONGEST] * 5) for hook in Looks.seen}
    assert set(Looks.seen) == {"receive", "weigh", "combine", "observe", "step"}
    # the mean, the detector and the measures of diversity too
    torch.testing.assert_close(run.x, run.record.weights @ after.delta)
    factor = LONGEST / before.delta.norm(dim=1)
    expected = float((before.n.double() / before.n.sum()) @ (0.5 * before.grad_sq * factor**2))
    assert run.signals.fgn == pytest.approx(expected)
    mean = after.delta.mean(0)
    assert run.signals.elud == pytest.approx(float(LONGEST / mean.norm()))
    units = after.delta / LONGEST
    cosines = (units @ units.T)[~torch.eye(5, dtype=torch.bool)]
    assert run.signals.coherence == pytest.approx(float(cosines.mean()))


def test_rules_receive_in_the_order_in_which_they_are_written() -> None:
    Looks.seen.clear()
    (_,) = go(made(Looks() + Clips(), rounds=1))
    assert min(Looks.seen["receive"]) > LONGEST
    assert Looks.seen["weigh"] == pytest.approx([LONGEST] * 5)


def test_rows_are_those_of_the_reporters_when_reports_are_received() -> None:
    seen = []

    class Rows(Rule):
        def client(self, now: Round) -> State:
            return {"turns": torch.tensor(0.0)}

        def receive(self, reports: Reports, memory: Memory, now: Round) -> Reports:
            seen.append((now.briefs.ids.tolist(), memory.rows["turns"].tolist()))
            return reports

        def observe(self, memory: Memory, now: Round) -> Memory:
            return memory.replace(rows={"turns": memory.rows["turns"] + 1})

    list(
        go(
            made(Rows(), rounds=2),
            engine=Puppet(change=lambda reports, round: reports[: 3 + round]),
        )
    )
    assert seen == [([0, 1, 2], [0, 0, 0]), ([0, 1, 2, 3], [1, 1, 1, 0])]


# Result: the vector to evaluate, not the one that is trained on.


@dataclass(frozen=True, kw_only=True)
class Averages(Rule):
    """The mean of the models of all rounds."""

    def traits(self) -> Traits:
        return Traits(when="late")

    def server(self, now: Round) -> State:
        return {"sum": torch.zeros_like(now.x), "count": torch.tensor(0)}

    def step(self, direction: Tensor, memory: Memory, now: Round) -> tuple[Tensor, Memory]:
        after = {"sum": memory.state["sum"] + now.x + direction, "count": memory.state["count"] + 1}
        return direction, memory.replace(state=after)

    def result(self, x: Tensor, memory: Memory, now: Round) -> Tensor:
        return memory.state["sum"] / memory.state["count"] if memory.state["count"] else x


class Doubles(Rule):
    def result(self, x: Tensor, memory: Memory, now: Round) -> Tensor:
        return 2 * x


def test_the_result_is_what_the_rules_make_of_the_model() -> None:
    setup = made(Averages())
    start, runs, plain = begin(setup), list(go(setup)), list(go(made("fedavg")))
    assert result(start, setup) is start.x
    for run, same in zip(runs, plain, strict=True):
        assert torch.equal(run.x, same.x)  # training goes on from the model itself
        mean = torch.stack([earlier.x for earlier in runs[: run.round]]).mean(0)
        torch.testing.assert_close(result(run, setup), mean)
    assert result(plain[-1], made("fedavg")) is plain[-1].x


def test_results_are_made_in_the_order_of_the_steps() -> None:
    for algorithm in (Averages() + Doubles(), Doubles() + Averages()):
        setup = made(algorithm)
        *_, run = go(setup)
        alone = result(next(iter([*go(made(Averages()))][-1:])), made(Averages()))
        torch.testing.assert_close(
            result(run, setup), alone
        )  # Averages comes last, whatever it is given
    setup = made(Doubles())
    *_, run = go(setup)
    assert torch.equal(result(run, setup), 2 * run.x)


# Rounds in which nobody answers.


@dataclass(frozen=True, kw_only=True)
class Accounts(Rule):
    """Counts rounds, also those without a report, and moves the model by one in every one of them."""

    notes: ClassVar[list[tuple[int, int, int]]] = []

    def traits(self) -> Traits:
        return Traits(idle=True)

    def server(self, now: Round) -> State:
        return {"rounds": torch.tensor(0)}

    def client(self, now: Round) -> State:
        return {"turns": torch.tensor(0.0)}

    def observe(self, memory: Memory, now: Round) -> Memory:
        self.notes.append((now.number, len(now.reports), len(now.weights)))
        return memory.replace(
            state={"rounds": memory.state["rounds"] + 1}, rows={"turns": memory.rows["turns"] + 1}
        )

    def step(self, direction: Tensor, memory: Memory, now: Round) -> tuple[Tensor, Memory]:
        assert memory.rows == {}  # of nobody, as in every round
        return direction + 1, memory


class Sleeps(Accounts):
    def traits(self) -> Traits:
        return Traits()


def idling(rule: Rule) -> list[Run]:
    Accounts.notes.clear()
    return list(
        go(
            made(rule),
            engine=Puppet(change=lambda reports, round: [] if round in (1, 2) else reports),
        )
    )


def test_a_rule_that_asks_for_it_sees_idle_rounds() -> None:
    runs = idling(Accounts())
    assert [int(run.states[0]["rounds"]) for run in runs] == [1, 2, 3, 4, 5, 6]
    assert Accounts.notes[1:3] == [(1, 0, 0), (2, 0, 0)]
    for run, before in zip(runs[1:3], runs, strict=False):
        assert torch.equal(run.x, before.x + 1)
        assert run.writes == runs[0].writes
    assert [run.idle for run in runs] == [0, 1, 2, 0, 0, 0]
    assert runs[-1].tables[0].rows(torch.arange(5))["turns"].tolist() == [4] * 5


def test_other_rules_do_not_see_them() -> None:
    runs = idling(Sleeps())
    assert [int(run.states[0]["rounds"]) for run in runs] == [1, 1, 1, 2, 3, 4]
    assert all(run.x is runs[0].x for run in runs[1:3])
    assert [number for number, _, _ in Accounts.notes] == [0, 3, 4, 5]


# Verdicts.


@dataclass(frozen=True, kw_only=True)
class Judges(Rule):
    never: bool = True

    def server(self, now: Round) -> State:
        return {"acted": torch.tensor(0)}

    def observe(self, memory: Memory, now: Round) -> Memory:
        return memory if self.never else memory.replace(state={"acted": memory.state["acted"] + 1})

    def verdict(self, memory: Memory, now: Round) -> str | None:
        return None if memory.state["acted"] else f"it never acted in {now.number} rounds"


def test_rules_say_what_the_user_should_know() -> None:
    setup = made(Judges() + parse("fedavgm"))
    *_, run = go(setup)
    assert verdicts(run, setup) == ["it never acted in 6 rounds"]
    setup = made(Judges(never=False) + parse("fedavgm"))
    *_, run = go(setup)
    assert verdicts(run, setup) == []


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "alt",
            "alt never stopped a client: train.epochs = 1 leaves nothing to stop, so this run equals one without it",
        ),
        ("fedavgm(beta=0)", "fedavgm(beta=0) is fedavg"),
        ("fedcl(floor=1.0)", "fedcl never changed the size of the cohort"),
        ("fedmut(alpha=0)", "fedmut(alpha=0) mutates nothing"),
        ("fedprox(mu=0)", "fedprox(mu=0) has no effect"),
        ("fedsam(rho=0)", "fedsam(rho=0) has no effect"),
        ("moon(mu=0)", "moon(mu=0) has no effect"),
        ("pa3fed(beta=0, always=true)", "pa3fed changed no client's weight by more than 0 %"),
        ("vrlsgd(rate=0)", "vrlsgd(rate=0) has no effect"),
    ],
)
def test_rules_of_the_library_that_did_nothing_say_so(text: str, said: str) -> None:
    setup = made(text)
    *_, run = go(setup)
    (found,) = verdicts(run, setup)
    assert found.startswith(said)
    name = text.partition("(")[0]
    acting = made(
        "pa3fed(always=true)" if name == "pa3fed" else name, cohort=3, epochs=2
    )  # clients stop after one
    *_, run = go(acting, engine=Puppet(change=_improving))
    assert verdicts(run, acting) == []


def _improving(reports: list[Report], round: int) -> list[Report]:
    return [
        replace(report, score_after=report.score_after / (1 + round * report.client))
        for report in reports
    ]


OPTIMIZERS = ["fedavgm", "fedadagrad", "fedadam", "fedyogi", "fedams"]


@pytest.mark.parametrize(("one", "other"), list(combinations(OPTIMIZERS, 2)))
def test_two_server_optimizers_are_refused(one: str, other: str) -> None:
    for first, second in ((one, other), (other, one)):
        with pytest.raises(
            UserError, match=rf"{first} and {second} cannot be combined: both are server optimizers"
        ):
            parse(f"{first} + fedcl + {second}")


@pytest.mark.parametrize("other", OPTIMIZERS[1:])
def test_mutants_and_adaptive_server_steps_are_refused(other: str) -> None:
    for text in (f"fedmut + {other}", f"{other} + fedmut"):
        with pytest.raises(UserError, match=r"cannot be combined: an adaptive server step"):
            parse(text)
    parse("fedmut + fedavgm")


# Mean gradients, which only sgd defines.


@dataclass(frozen=True, kw_only=True)
class Mine(Rule):
    """Somebody's rule that divides by the mass."""

    def traits(self) -> Traits:
        return Traits(needs=frozenset({"mass"}))

    def combine(self, direction: Tensor, memory: Memory, now: Round) -> Tensor:
        return direction / now.reports.mass.mean()


REASON = "it needs the clients' mean gradients, which only 'sgd' defines; use 'sgd', or leave the rule out."


@pytest.mark.parametrize("name", ["scaffold", "vrlsgd", "fednova", "fedcm", "mine"])
def test_rules_that_need_mean_gradients_refuse_adamw(name: str) -> None:
    algorithm = Algorithm((Mine(),)) if name == "mine" else parse(name)
    with pytest.raises(UserError) as caught:
        made(algorithm, optimizer="adamw")
    named = algorithm.rules[0].name()
    assert str(caught.value) == f"{named} cannot be used with train.optimizer = 'adamw': {REASON}"


@pytest.mark.parametrize("name", ["scaffold", "vrlsgd", "fednova", "fedcm", "mine"])
@pytest.mark.parametrize("first", [True, False])
def test_also_when_a_rule_sets_adamw_in_its_brief(name: str, first: bool) -> None:
    needing = Algorithm((Mine(),)) if name == "mine" else parse(name)
    setup = made(Adam() + needing if first else needing + Adam())
    with pytest.raises(UserError) as caught:
        next(rounds(begin(setup), setup))
    assert str(caught.value).startswith(f"{needing.rules[0].name()} cannot be used with ")
    assert "'adamw'" in str(caught.value)
    assert str(caught.value).endswith(REASON)


def test_other_rules_train_with_adamw_and_mass_is_not_defined() -> None:
    *_, run = go(made("fedprox + fedavgm + fedcl + pa3fed + fedmut", optimizer="adamw"))
    assert run.record is not None
    assert run.record.reports is not None
    assert run.record.reports.mass.isnan().all()
    (run,) = go(made(Adam(), rounds=1))
    assert run.record is not None
    assert run.record.reports is not None
    assert run.record.reports.mass.isnan().all()


def test_mass_of_plain_sgd_is_steps_times_lr() -> None:
    briefs = Briefs(seed=0, round=0, ids=torch.arange(2), start=torch.zeros(1), lr=0.5)
    assert mass(briefs, torch.tensor([3, 4])).tolist() == [1.5, 2.0]
    heavy = replace(briefs, momentum=torch.full((2,), 0.5).double())
    assert mass(heavy, torch.tensor([1, 2])).tolist() == pytest.approx([0.5, 0.5 * (1 + 1.5)])
    assert mass(replace(briefs, optimizer="adamw"), torch.tensor([3, 4])).isnan().all()


# What a round does not have yet.


@dataclass(frozen=True, kw_only=True)
class Hasty(Rule):
    """Asks before there is an answer."""

    hook: str = "brief"
    what: str = "reports"

    def select(self, plan: Plan, memory: Memory, now: Round) -> Plan:
        if self.hook == "select":
            getattr(now, self.what).ids  # noqa: B018
        return plan

    def brief(self, briefs: Briefs, memory: Memory, now: Round) -> Briefs:
        if self.hook == "brief":
            getattr(now, self.what).ids  # noqa: B018
        return briefs

    def weigh(self, factors: Tensor, memory: Memory, now: Round) -> Tensor:
        if self.hook == "weigh":
            getattr(now, self.what).sum()
        return factors


@pytest.mark.parametrize(
    ("hook", "what", "name"),
    [
        ("select", "reports", "ids"),
        ("select", "briefs", "ids"),
        ("brief", "reports", "ids"),
        ("weigh", "weights", "sum"),
    ],
)
def test_what_a_round_does_not_have_yet_says_so(hook: str, what: str, name: str) -> None:
    with pytest.raises(
        AttributeError,
        match=rf"{name!r} is not available: this round does not have its .*{what}.* yet",
    ):
        next(go(made(Hasty(hook=hook, what=what))))


def test_it_also_says_so_when_it_is_printed() -> None:
    setup = made("fedavg")
    assert "reports=not yet" in repr(upcoming(begin(setup), setup))


def test_a_cohort_beyond_the_population_is_refused_before_the_run() -> None:
    with pytest.raises(UserError, match=r"train\.cohort = 6 is more than the 5 clients"):
        made("fedavg", cohort=6)
