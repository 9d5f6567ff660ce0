"""The stages, reports that are rejected, idle rounds, and the order of arrival."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import Tensor

from kairosfl.core.fields import Briefs, Report, Reports
from kairosfl.core.layout import Entry, Layout
from kairosfl.core.recipe import Recipe
from kairosfl.core.round import accept, drive, recorded, rounds
from kairosfl.core.rule import Algorithm, Finished, Memory, Plan, Rule, State
from kairosfl.core.run import Round, Run, Setup
from kairosfl.core.traits import Traits
from kairosfl.detectors import FGN, Detector, FedFIM
from kairosfl.errors import UserError
from kairosfl.rules import parse

LAYOUT = Layout((Entry("w", (2,), 0),))
N = {0: 1, 1: 3, 2: 4, 3: 2, 4: 5}


def report(client: int, round: int, delta: Tensor, **changes: Any) -> Report:
    made = Report(
        client=client,
        n=N[client],
        steps=2,
        epochs=1.0,
        delta=delta,
        loss=1.0 + client,
        grad_sq=float(2 + client + round),
        seconds=0.1,
        score_before=1.0,
        score_after=0.5 + client / 10,
        fisher=float(client + 1),
    )
    return replace(made, **changes)


@dataclass
class Puppet:
    """An engine that answers with updates that depend on round and client, or with whatever is
    given for them.
    """

    change: Callable[[list[Report], int], list[Report]] = lambda reports, round: reports
    failed: Callable[[int], tuple[tuple[int, str], ...]] = lambda round: ()
    dtype: torch.dtype = torch.float64

    def train(self, briefs: Briefs) -> Reports:
        made = [report(i, briefs.newest, self.delta(briefs.newest, i)) for i in briefs.ids.tolist()]
        made = self.change(made, briefs.newest)
        delta = (
            torch.stack([r.delta for r in made]) if made else torch.empty(0, 2, dtype=self.dtype)
        )
        return Reports.stack(made, delta, self.failed(briefs.newest))

    def delta(self, round: int, client: int) -> Tensor:
        return torch.tensor([0.1 * (client + 1), 0.7 - 0.3 * round * client], dtype=self.dtype)


def follow(
    algorithm: str | Algorithm,
    engine: Puppet,
    number: int = 3,
    cohort: int = 5,
    run: Run | None = None,
    detectors: tuple[Detector, ...] = (FGN(),),
) -> list[Run]:
    made = parse(algorithm) if isinstance(algorithm, str) else algorithm
    recipe = Recipe(rounds=number, cohort=cohort, lr=0.5, schedule="exponential", gamma=0.5)
    setup = Setup(made, recipe, 5, LAYOUT, detectors)
    run = run or Run.start(torch.zeros(2, dtype=engine.dtype), setup, seed=1)
    return list(drive(rounds(run, setup), engine))


@dataclass(frozen=True, kw_only=True)
class Diary(Rule):
    """Writes down when its hooks are called and what they see."""

    label: str = "a"
    pages: ClassVar[list[tuple[str, str, Any]]] = []

    def _note(self, hook: str, seen: Any = None) -> None:
        self.pages.append((self.label, hook, seen))

    def select(self, plan: Plan, memory: Memory, now: Round) -> Plan:
        self._note("select", now.signals.fgn)
        return plan

    def brief(self, briefs: Briefs, memory: Memory, now: Round) -> Briefs:
        self._note("brief", len(briefs))
        return briefs

    def receive(self, reports: Reports, memory: Memory, now: Round) -> Reports:
        self._note("receive", len(reports))
        return reports

    def weigh(self, factors: Tensor, memory: Memory, now: Round) -> Tensor:
        self._note("weigh", factors.tolist())
        return factors * 2

    def combine(self, direction: Tensor, memory: Memory, now: Round) -> Tensor:
        self._note("combine", direction.tolist())
        return direction * 3

    def observe(self, memory: Memory, now: Round) -> Memory:
        self._note("observe", now.signals.fgn)
        return memory

    def step(self, direction: Tensor, memory: Memory, now: Round) -> tuple[Tensor, Memory]:
        self._note("step", direction.tolist())
        return direction + 1, memory


class Second(Diary):
    pass


class Final(Diary):
    def traits(self) -> Traits:
        return Traits(when="last")


def test_the_stages_in_order_and_the_last_rule_selects_and_steps_last() -> None:
    Diary.pages.clear()
    engine = Puppet(change=lambda reports, round: reports[:2])
    runs = follow(Final(label="z") + Diary(label="a") + Second(label="b"), engine, number=1)
    hooks = [hook for _, hook, _ in Diary.pages]
    stages = ("select", "brief", "receive", "weigh", "combine", "observe", "step")
    assert hooks == [stage for stage in stages for _ in range(3)]
    written, last = ["z", "a", "b"], ["a", "b", "z"]
    assert [label for label, _, _ in Diary.pages] == last + written * 5 + last
    # Two reporters of 1 and 3 samples with updates (0.1, 0.7) and (0.2, 0.7): the mean is (0.175,
    # 0.7).
    seen = {(label, hook): value for label, hook, value in Diary.pages}
    assert (seen[("z", "brief")], seen[("z", "receive")]) == (5, 2)
    assert seen[("z", "weigh")] == [1.0, 3.0]
    assert seen[("b", "weigh")] == [
        4.0,
        12.0,
    ]  # factors multiply, and the core divides by their sum
    assert seen[("z", "combine")] == pytest.approx([0.175, 0.7])
    assert seen[("a", "step")] == pytest.approx([27 * 0.175, 27 * 0.7])
    assert runs[0].x.tolist() == pytest.approx([27 * 0.175 + 3, 27 * 0.7 + 3])
    assert runs[0].record.weights.tolist() == [0.25, 0.75]


def test_signals_are_last_rounds_until_the_clients_have_trained() -> None:
    Diary.pages.clear()
    runs = follow(Algorithm((Diary(),)), Puppet(), number=2)
    selects = [seen for _, hook, seen in Diary.pages if hook == "select"]
    observes = [seen for _, hook, seen in Diary.pages if hook == "observe"]
    assert np.isnan(selects[0])
    assert selects[1] == observes[0] == runs[0].signals.fgn
    # lr 0.5 times the mean of 2 + client by samples 1, 3, 4, 2, 5 out of 15
    assert observes[0] == pytest.approx(0.5 * (2 * 1 + 3 * 3 + 4 * 4 + 5 * 2 + 6 * 5) / 15)


def test_fedavg_by_hand() -> None:
    """Clients of 1, 3, 4, 2, 5 samples; the first number of client i is 0.1 (i + 1) in every round."""
    runs = follow("fedavg", Puppet())
    mean = (1 * 0.1 + 3 * 0.2 + 4 * 0.3 + 2 * 0.4 + 5 * 0.5) / 15
    assert [float(run.x[0]) for run in runs] == pytest.approx([mean, 2 * mean, 3 * mean])
    drift = 0.3 * (3 * 1 + 4 * 2 + 2 * 3 + 5 * 4) / 15
    assert [float(run.x[1]) for run in runs] == pytest.approx([0.7, 1.4 - drift, 2.1 - 3 * drift])
    assert [run.round for run in runs] == [1, 2, 3]
    assert [run.record.lr for run in runs] == [0.5, 0.25, 0.125]


@dataclass(frozen=True)
class Bursting(Rule):
    """Steps out of what numbers can hold in its second round."""

    def step(self, direction: Tensor, memory: Memory, now: Round) -> tuple[Tensor, Memory]:
        return direction * (1e400 if now.number else 1), memory


def test_a_step_of_the_server_that_is_not_finite_is_not_blamed_on_the_clients() -> None:
    with pytest.raises(
        UserError,
        match=r"After round 2 the model is not finite, .* step of \S*Bursting is too long",
    ):
        follow(Algorithm((Bursting(),)), Puppet())


def test_uniform_weights_when_a_rule_asks_for_them() -> None:
    assert follow("scaffold", Puppet())[0].record.weights.tolist() == [0.2] * 5
    assert follow("fedprox + fedmut(alpha=0)", Puppet())[0].record.weights.tolist() == [0.2] * 5
    assert follow("fedprox", Puppet())[0].record.weights.tolist() == pytest.approx(
        [n / 15 for n in N.values()]
    )


BAD = {
    "its number of samples is 0": {"n": 0},
    "its number of steps is 0": {"steps": 0},
    "its number of epochs is 0": {"epochs": 0.0},
    "its update is not finite": {"delta": torch.tensor([float("nan"), 1.0], dtype=torch.float64)},
    "its number of epochs is inf": {"epochs": float("inf")},
    "its loss is inf": {"loss": float("inf")},
    "its grad_sq is nan": {"grad_sq": float("nan")},
    "its score_before is nan": {"score_before": float("nan")},
    "its score_after is inf": {"score_after": float("inf")},
    "its fisher is nan": {"fisher": float("nan")},
}


@pytest.mark.parametrize(("reason", "changes"), BAD.items(), ids=list(BAD))
def test_a_bad_report_is_rejected_and_the_others_count(
    reason: str, changes: dict[str, Any]
) -> None:
    def spoil(reports: list[Report], round: int) -> list[Report]:
        return [replace(r, **changes) if (r.client, round) == (2, 1) else r for r in reports]

    def lose(reports: list[Report], round: int) -> list[Report]:
        return [r for r in reports if (r.client, round) != (2, 1)]

    bad, without = follow("fedavgm", Puppet(change=spoil)), follow("fedavgm", Puppet(change=lose))
    assert bad[1].record.rejected == ((2, reason),)
    assert bad[1].record.ids.tolist() == [0, 1, 3, 4]
    assert bad[1].record.asked == 5
    for one, other in zip(bad, without, strict=True):
        assert torch.equal(one.x, other.x)


def test_an_infinite_update_is_rejected_in_float32_too() -> None:
    """Its square overflows: so does what would be made of it."""
    engine = Puppet(dtype=torch.float32)
    engine.change = lambda reports, round: [
        replace(r, delta=torch.full((2,), 1e30)) if r.client == 0 else r for r in reports
    ]
    assert follow("fedavg", engine)[0].record.rejected == ((0, "its update is not finite"),)


def test_strangers_and_doubles_are_rejected() -> None:
    def meddle(reports: list[Report], round: int) -> list[Report]:
        return [
            *reports,
            replace(reports[0], delta=reports[0].delta * 100),
            replace(reports[0], client=17),
        ]

    meddled, honest = follow("fedavg", Puppet(change=meddle)), follow("fedavg", Puppet())
    assert meddled[0].record.rejected == ((0, "it reported twice"), (17, "it was not asked"))
    assert torch.equal(meddled[-1].x, honest[-1].x)


def test_updates_of_the_wrong_length_are_rejected() -> None:
    engine = Puppet(
        change=lambda rs, t: [replace(r, delta=torch.ones(3, dtype=torch.float64)) for r in rs]
    )
    run = follow("fedavg", engine, number=1)[0]
    assert run.record.rejected[0] == (
        0,
        "the updates of the round have the shape (5, 3), not (5, 2)",
    )
    assert len(run.record.rejected) == 5
    assert run.idle == 1


def test_what_the_engine_says_about_failures_is_kept() -> None:
    engine = Puppet(
        change=lambda reports, round: reports[1:], failed=lambda round: ((0, "out of memory"),)
    )
    assert follow("fedavg", engine)[0].record.rejected == ((0, "out of memory"),)


@pytest.mark.parametrize(
    "text", ["fedavg", "scaffold", "fedadam", "feddyn", "fedmut", "moon(mu=0)", "fedcl + pa3fed"]
)
def test_an_idle_round_leaves_everything_as_it_was(text: str) -> None:
    engine = Puppet(change=lambda reports, round: [] if round in (1, 2) else reports)
    runs = follow(text, engine, number=5)
    assert [run.idle for run in runs] == [0, 1, 2, 0, 0]
    assert [run.round for run in runs] == [1, 2, 3, 4, 5]
    for run in runs[1:3]:
        assert run.x is runs[0].x
        assert all(one is other for one, other in zip(run.states, runs[0].states, strict=True))
        assert run.tables is runs[0].tables
        assert run.writes == runs[0].writes
        assert run.signals is runs[0].signals
        assert run.record.reports is None
    assert not torch.equal(runs[3].x, runs[0].x)


def test_a_first_round_without_reports_is_survived() -> None:
    runs = follow(
        "fedmut + scaffold",
        Puppet(change=lambda reports, round: [] if round == 0 else reports),
        number=4,
    )
    assert torch.equal(runs[0].x, torch.zeros(2, dtype=torch.float64))
    assert torch.isfinite(runs[-1].x).all()


@pytest.mark.parametrize(
    "text", ["fedavg", "vrlsgd + pa3fed", "scaffold + fedcl", "fednova + fedavgm", "feddyn"]
)
def test_the_order_of_arrival_does_not_change_a_bit(text: str) -> None:
    rng = np.random.default_rng(0)
    shuffled = Puppet(
        change=lambda rs, t: [rs[k] for k in rng.permutation(len(rs))], dtype=torch.float32
    )
    straight = Puppet(dtype=torch.float32)
    for one, other in zip(follow(text, straight, 4), follow(text, shuffled, 4), strict=True):
        assert torch.equal(one.x, other.x)
        assert torch.equal(one.record.weights, other.record.weights)
        assert other.record.ids.tolist() == sorted(other.record.ids.tolist())


def test_accept_puts_briefs_and_reports_side_by_side() -> None:
    held: list[Briefs] = []

    def keep(briefs: Briefs) -> Reports:
        held.append(briefs)
        return Puppet.train(engine, briefs)

    engine = Puppet(change=lambda reports, round: [reports[4], reports[1]])
    engine.train = keep  # type: ignore[method-assign]
    follow("scaffold", engine, number=1)
    briefs, reports, seen, rejected = accept(held[0], Puppet.train(engine, held[0]))
    assert briefs.ids.tolist() == reports.ids.tolist() == [1, 4]
    assert briefs.push.shape == (2, 2)
    assert seen.squares.tolist() == pytest.approx([0.2**2 + 0.7**2, 0.5**2 + 0.7**2])
    assert (
        rejected == reports.failed == tuple((client, "it did not report") for client in (0, 2, 3))
    )


@dataclass(frozen=True, kw_only=True)
class Choose(Rule):
    ids: tuple[int, ...] = ()
    eligible: tuple[int, ...] = ()
    size: int = 5

    def select(self, plan: Plan, memory: Memory, now: Round) -> Plan:
        return Plan(
            self.size,
            eligible=np.array(self.eligible) if self.eligible else None,
            ids=np.array(self.ids) if self.ids else None,
        )


def test_who_trains() -> None:
    assert follow(Algorithm((Choose(ids=(4, 1, 1)),)), Puppet(), number=1)[
        0
    ].record.ids.tolist() == [1, 4]
    pool = follow(Algorithm((Choose(eligible=(0, 2, 3), size=2),)), Puppet(), number=6)
    assert {len(run.record.ids) for run in pool} == {2}
    assert {i for run in pool for i in run.record.ids.tolist()} == {0, 2, 3}
    assert follow(Algorithm((Choose(eligible=(0, 2), size=4),)), Puppet(), number=1)[
        0
    ].record.ids.tolist() == [0, 2]
    drawn = follow("fedavg", Puppet(), number=30, cohort=2)
    assert {i for run in drawn for i in run.record.ids.tolist()} == {0, 1, 2, 3, 4}
    again = follow("fedavg", Puppet(), number=30, cohort=2)
    assert [run.record.ids.tolist() for run in drawn] == [run.record.ids.tolist() for run in again]


def test_a_cohort_larger_than_the_population_is_refused() -> None:
    with pytest.raises(
        UserError, match=r"train\.cohort = 6 is more than the 5 clients available; lower it\."
    ):
        follow("fedavg", Puppet(), cohort=6)


@pytest.mark.parametrize(
    "text", ["fedavg", "scaffold + fedcl + pa3fed", "fedadam", "fedmut", "vrlsgd"]
)
def test_going_on_from_a_run_gives_the_same_bits(text: str) -> None:
    whole = follow(text, Puppet(), number=6)
    half = follow(text, Puppet(), number=3)[-1]
    rest = follow(text, Puppet(), number=6, run=half)
    assert [run.round for run in rest] == [4, 5, 6]
    assert torch.equal(rest[-1].x, whole[-1].x)


def test_clients_that_started_elsewhere_are_counted_from_x() -> None:
    """FedMut's mutants of ±alpha Δ: with as many on each side (rate 0), x moves by the mean of what
    they did.
    """
    four = Puppet()
    mutated = follow("fedmut(alpha=3, rate=0, weights='samples')", four, number=2, cohort=4)
    rows = mutated[1].record.reports
    own = torch.stack([four.delta(1, i) for i in rows.ids.tolist()])
    away = rows.delta - own
    step = mutated[0].x
    assert away.sum(0).tolist() == pytest.approx([0, 0], abs=1e-12)
    for row in away:
        assert row.abs().tolist() == pytest.approx((3 * step).abs().tolist())


def test_the_first_detector_decides_and_all_are_recorded() -> None:
    runs = follow("fedavg", Puppet(), number=2, detectors=(FedFIM(), FGN()))
    trace = (1 * 1 + 2 * 3 + 3 * 4 + 4 * 2 + 5 * 5) / 15
    assert runs[1].record.values[0] == pytest.approx(trace)
    assert runs[1].signals.fedfim == pytest.approx(trace)
    assert runs[1].signals.critical is False  # the trace did not rise
    assert runs[0].signals.critical is True


@dataclass(frozen=True)
class Keeper(Rule):
    """Keeps the direction itself, or a view of it, and passes it on."""

    view: bool

    def server(self, now: Round) -> State:
        return {"kept": torch.zeros_like(now.x)}

    def step(self, direction: Tensor, memory: Memory, now: Round) -> tuple[Tensor, Memory]:
        return direction, memory.replace(state={"kept": direction[1:] if self.view else direction})


@pytest.mark.parametrize("view", [False, True])
def test_a_direction_that_a_rule_keeps_is_not_written_over(view: bool) -> None:
    plain = follow("fedavg", Puppet())
    kept = follow(Keeper(view) + parse("fedavg"), Puppet())
    before = torch.zeros(2, dtype=torch.float64)
    for run, same in zip(kept, plain, strict=True):
        assert torch.equal(run.x, same.x)
        if run.round:
            direction = run.x - before
            torch.testing.assert_close(run.states[0]["kept"], direction[1:] if view else direction)
        before = run.x


@dataclass(frozen=True, kw_only=True)
class Ends(Rule):
    """Ends the run before a round, records how many were done, and may ask for twice the cohort."""

    after: int

    def traits(self) -> Traits:
        return Traits(when="late")

    def largest_cohort(self, cohort: int, population: int) -> int:
        return min(2 * cohort, population)

    def select(self, plan: Plan, memory: Memory, now: Round) -> Plan:
        if now.number == self.after:
            raise Finished("enough")
        return plan

    def record(self, memory: Memory, now: Round) -> dict[str, float]:
        return {"done": float(now.number)}


def test_a_rule_ends_the_run_before_a_round() -> None:
    ended = follow(Algorithm((Ends(after=2),)), Puppet(), number=5)
    plain = follow("fedavg", Puppet(), number=2)
    assert len(ended) == 2
    assert [run.finished for run in ended] == ["", "enough"]
    assert [run.finished for run in plain] == ["", ""]
    assert torch.equal(ended[-1].x, plain[-1].x)
    with pytest.raises(UserError, match=r"^enough$"):
        follow(Algorithm((Ends(after=0),)), Puppet())


def test_rules_record_numbers_after_every_round() -> None:
    algorithm = Algorithm((Ends(after=9),))
    setup = Setup(algorithm, Recipe(rounds=3, cohort=5, lr=0.5), 5, LAYOUT, (FGN(),))
    start = Run.start(torch.zeros(2, dtype=torch.float64), setup, seed=1)
    runs = drive(rounds(start, setup), Puppet())  # type: ignore[arg-type]
    assert [recorded(run, setup) for run in runs] == [{"done": 1.0}, {"done": 2.0}, {"done": 3.0}]


def test_the_largest_cohort_is_that_of_rules_one_after_another() -> None:
    """FedCL may take half of 1,000 clients, and a rule that selects after it twice as many."""
    both = Algorithm((Ends(after=9), *parse("fedcl(cap=0.5)").rules))
    assert both.largest_cohort(10, 1000) == 1000
    assert parse("fedcl(cap=0.5)").largest_cohort(10, 1000) == 500
    assert Algorithm((Ends(after=9),)).largest_cohort(10, 1000) == 20


def test_the_planned_size_is_known_from_brief_on() -> None:
    sizes: list[int] = []

    @dataclass(frozen=True, kw_only=True)
    class Reads(Rule):
        def brief(self, briefs: Briefs, memory: Memory, now: Round) -> Briefs:
            sizes.append(now.size)
            return briefs

        def observe(self, memory: Memory, now: Round) -> Memory:
            sizes.append(now.size)
            return memory

    follow(Algorithm((Reads(),)), Puppet(), number=1, cohort=4)
    assert sizes == [4, 4]
