"""check_rule passes every rule of the library and catches a deliberately wrong rule of each kind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from kairosfl.core.fields import Briefs, Reports
from kairosfl.core.rule import Memory, Plan, Rule, State, about
from kairosfl.core.run import Round
from kairosfl.core.traits import Traits
from kairosfl.engines.loop import Loop
from kairosfl.rules import RULES, parse
from kairosfl.testing import ENGINES, check_rule


@pytest.mark.parametrize("name", sorted(RULES))
def test_every_rule_passes_on_every_engine(name: str) -> None:
    check_rule(parse(name).rules[0])


@pytest.mark.parametrize(
    "text",
    [
        "alt(reference='previous', statistic='min', per='batch', a=0.9, b=0.09)",
        "fedadam(bias_correction=True)",
        "fedams(option=2, bias_correction=True)",
        "fedavgm(nesterov=True)",
        "fedcl.released()",
        "fedcl.random()",
        "fedcm(weights='samples')",
        "feddyn(weights='samples', alpha=0.3)",
        "fedmut(weights='samples')",
        "fednova(momentum=0.5)",
        "pa3fed(at='before', score='loss', always=True)",
        "scaffold(weights='samples')",
    ],
)
def test_options_pass(text: str) -> None:
    check_rule(parse(text).rules[0], engines={"loop": Loop})


def test_engines_can_be_named() -> None:
    """An engine that trains otherwise is told apart from the loop."""

    class Lazy(Loop):
        def train(self, briefs: Briefs) -> Reports:
            return super().train(replace(briefs, epochs=torch.ones_like(briefs.epochs)))

    assert "loop" in ENGINES
    with pytest.raises(
        AssertionError, match="fedprox gives a different model on engine 'lazy' than on 'loop'"
    ):
        check_rule(parse("fedprox").rules[0], engines={"lazy": Lazy})


@dataclass(frozen=True, kw_only=True)
class Good(Rule):
    """A momentum that remembers how often each client reported: as a user would write it."""

    beta: float = 0.5

    def server(self, now: Round) -> State:
        return {"velocity": torch.zeros_like(now.x)}

    def client(self, now: Round) -> State:
        return {"turns": torch.tensor(0.0)}

    def weigh(self, factors: Tensor, memory: Memory, now: Round) -> Tensor:
        return factors / (1 + memory.rows["turns"])

    def observe(self, memory: Memory, now: Round) -> Memory:
        return memory.replace(rows={"turns": memory.rows["turns"] + 1})

    def step(self, direction: Tensor, memory: Memory, now: Round) -> tuple[Tensor, Memory]:
        velocity = self.beta * memory.state["velocity"] + direction
        return velocity, memory.replace(state={"velocity": velocity})


class ChangesItsState(Good):
    def step(self, direction: Tensor, memory: Memory, now: Round) -> tuple[Tensor, Memory]:
        memory.state["velocity"].mul_(self.beta).add_(direction)
        return memory.state["velocity"].clone(), memory


class ChangesTheReports(Good):
    def observe(self, memory: Memory, now: Round) -> Memory:
        now.reports.delta.mul_(2)
        return memory


class ChangesTheTable(Good):
    def step(self, direction: Tensor, memory: Memory, now: Round) -> tuple[Tensor, Memory]:
        memory.table.write(torch.tensor([0]), {"turns": torch.tensor([9.0])})
        return direction, memory


@dataclass(frozen=True, kw_only=True)
class KeepsALog(Good):
    seen: list[int] = field(default_factory=list, compare=False)

    def __str__(self) -> str:
        return self.name()

    def step(self, direction: Tensor, memory: Memory, now: Round) -> tuple[Tensor, Memory]:
        self.seen.append(now.number)
        return direction, memory


class KeepsAnAttribute(Good):
    def step(self, direction: Tensor, memory: Memory, now: Round) -> tuple[Tensor, Memory]:
        object.__setattr__(self, "velocity", self.beta * getattr(self, "velocity", 0.0) + direction)
        return self.velocity, memory  # type: ignore[attr-defined]


class KeepsAGlobal(Good):
    count = 0

    def step(self, direction: Tensor, memory: Memory, now: Round) -> tuple[Tensor, Memory]:
        type(self).count += 1
        return direction / self.count, memory


class DrawsFreely(Good):
    def weigh(self, factors: Tensor, memory: Memory, now: Round) -> Tensor:
        return factors * np.random.default_rng().uniform(1, 2)


class CountsOnEveryone(Good):
    def weigh(self, factors: Tensor, memory: Memory, now: Round) -> Tensor:
        return torch.ones(now.cohort, dtype=torch.float64)


class FailsWhenSomeoneFails(Good):
    def weigh(self, factors: Tensor, memory: Memory, now: Round) -> Tensor:
        return factors * torch.ones(now.cohort)


class WritesForEveryone(Good):
    def observe(self, memory: Memory, now: Round) -> Memory:
        return memory.replace(rows={"turns": torch.ones(now.population)})


class WritesAnUnknownName(Good):
    def observe(self, memory: Memory, now: Round) -> Memory:
        return memory.replace(rows={"tunrs": memory.rows["turns"] + 1})


class PrefersTheFirst(Good):
    def weigh(self, factors: Tensor, memory: Memory, now: Round) -> Tensor:
        return factors * torch.tensor([2.0] + [1.0] * (len(factors) - 1))


class CombinesByPosition(Good):
    def combine(self, direction: Tensor, memory: Memory, now: Round) -> Tensor:
        return now.reports.delta[0].clone()


class ObservesByPosition(Good):
    def observe(self, memory: Memory, now: Round) -> Memory:
        return memory.replace(rows={"turns": torch.arange(float(len(memory.rows["turns"])))})


class RemembersANumber(Good):
    def server(self, now: Round) -> State:
        return {"count": 0}  # type: ignore[dict-item]


class RemembersAList(Good):
    def observe(self, memory: Memory, now: Round) -> Memory:
        return memory.replace(state=[memory.state])  # type: ignore[arg-type]


class SharesMemory(Good):
    def step(self, direction: Tensor, memory: Memory, now: Round) -> tuple[Tensor, Memory]:
        return direction, memory.replace(state={"one": direction, "other": direction})


class Explodes(Good):
    def step(self, direction: Tensor, memory: Memory, now: Round) -> tuple[Tensor, Memory]:
        return direction / 0, memory


class WeighsByNothing(Good):
    def weigh(self, factors: Tensor, memory: Memory, now: Round) -> Tensor:
        return factors * 0


class Widens(Good):
    def combine(self, direction: Tensor, memory: Memory, now: Round) -> Tensor:
        return direction.double()


class ReturnsOneThing(Good):
    def step(self, direction: Tensor, memory: Memory, now: Round) -> tuple[Tensor, Memory]:
        return direction  # type: ignore[return-value]


class SelectsIds(Good):
    def select(self, plan: Plan, memory: Memory, now: Round) -> Plan:
        return [0, 1]  # type: ignore[return-value]


class SelectsEveryone(Good):
    def select(self, plan: Plan, memory: Memory, now: Round) -> Plan:
        return replace(plan, size=now.population)


class AsksOthers(Good):
    def brief(self, briefs: Briefs, memory: Memory, now: Round) -> Briefs:
        return replace(briefs, ids=briefs.ids.flip(0))


class PushesTheWrongWay(Good):
    def brief(self, briefs: Briefs, memory: Memory, now: Round) -> Briefs:
        return briefs.pushed(torch.zeros(3))


class ChangesTheSeed(Good):
    def brief(self, briefs: Briefs, memory: Memory, now: Round) -> Briefs:
        return replace(briefs, seed=briefs.seed + 1)


class TellsEveryoneAtOnce(Good):
    def brief(self, briefs: Briefs, memory: Memory, now: Round) -> Briefs:
        return replace(briefs, lr=torch.tensor(0.1))


class ReceivesFewer(Good):
    def receive(self, reports: Reports, memory: Memory, now: Round) -> Reports:
        return reports.take(torch.arange(len(reports))[1:])


class ReceivesWider(Good):
    def receive(self, reports: Reports, memory: Memory, now: Round) -> Reports:
        return replace(reports, delta=reports.delta.double())


class ReceivesAnUpdate(Good):
    def receive(self, reports: Reports, memory: Memory, now: Round) -> Reports:
        return reports.delta  # type: ignore[return-value]


class ReturnsTheState(Good):
    def observe(self, memory: Memory, now: Round) -> Memory:
        return memory.state, {}  # type: ignore[return-value]


class WritesRowsInStep(Good):
    def step(self, direction: Tensor, memory: Memory, now: Round) -> tuple[Tensor, Memory]:
        return direction, memory.replace(rows={"turns": torch.ones(len(now.reports))})


class ResultsInLess(Good):
    def result(self, x: Tensor, memory: Memory, now: Round) -> Tensor:
        return x[:2]


class SaysANumber(Good):
    def verdict(self, memory: Memory, now: Round) -> str | None:
        return 3  # type: ignore[return-value]


class AsksTooEarly(Good):
    def brief(self, briefs: Briefs, memory: Memory, now: Round) -> Briefs:
        return replace(briefs, lr=briefs.lr / now.reports.loss)


class FailsWhenIdle(Good):
    def traits(self) -> Traits:
        return Traits(idle=True)

    def observe(self, memory: Memory, now: Round) -> Memory:
        now.reports.loss.max()
        return memory


@dataclass(frozen=True, kw_only=True)
class CannotBePrinted(Good):
    schedule: Callable[[int], float] = float

    def __eq__(self, other: object) -> bool:
        return self is other


@dataclass(frozen=True, kw_only=True)
class PrintsHalf(Good):
    gamma: float = 1.0

    def __str__(self) -> str:
        return self.name()


@dataclass(frozen=True, kw_only=True)
class Misspelt(Good):
    def wiegh(self, factors: Tensor) -> Tensor:
        return factors


@dataclass(kw_only=True)
class NotFrozen(Rule):
    beta: float = 0.5


@dataclass(frozen=True, kw_only=True)
class ForgetsOnResume(Good):
    """Keeps its velocity in a module that a checkpoint does not see, and answers from it only in
    later rounds.
    """

    def server(self, now: Round) -> State:
        HIDDEN.clear()
        return super().server(now)

    def step(self, direction: Tensor, memory: Memory, now: Round) -> tuple[Tensor, Memory]:
        HIDDEN.setdefault(now.number, direction.clone())
        return HIDDEN.get(max(0, now.number - 4), direction).to(direction), memory


HIDDEN: dict[int, Tensor] = {}


class SeesIdleRounds(Good):
    def traits(self) -> Traits:
        return Traits(idle=True)


# What a rule may ask beyond plain training.


class SendsItsMomentum(Good):
    """Corrects by a vector, and finds the one that the clients were sent."""

    def brief(self, briefs: Briefs, memory: Memory, now: Round) -> tuple[Briefs, State]:
        velocity = memory.state["velocity"].expand(len(briefs), -1)
        return briefs.pushed(velocity), {"velocity": velocity}

    def traits(self) -> Traits:
        return Traits(late=True)

    def combine(self, direction: Tensor, memory: Memory, now: Round) -> Tensor:
        return direction + now.weights.to(direction) @ memory.sent["velocity"]


class SendsToOneClient(Good):
    def brief(self, briefs: Briefs, memory: Memory, now: Round) -> Any:
        return briefs, {"velocity": memory.state["velocity"]}


class SendsANumber(Good):
    def brief(self, briefs: Briefs, memory: Memory, now: Round) -> Any:
        return briefs, {"round": now.number}


class SendsThree(Good):
    def brief(self, briefs: Briefs, memory: Memory, now: Round) -> Any:
        return briefs, {}, {}


class CountsOnWhatItSent(SendsItsMomentum):
    def combine(self, direction: Tensor, memory: Memory, now: Round) -> Tensor:
        weights = torch.ones(now.size, dtype=direction.dtype)
        return direction + weights @ memory.sent["velocity"]


class CombinesWhatItSentByPosition(SendsItsMomentum):
    def brief(self, briefs: Briefs, memory: Memory, now: Round) -> tuple[Briefs, State]:
        return briefs, {"velocity": briefs.ids.to(now.x)[:, None] * torch.ones_like(now.x)}

    def combine(self, direction: Tensor, memory: Memory, now: Round) -> Tensor:
        return direction + memory.sent["velocity"][0]


class CountsOnOneVersion(Good):
    def traits(self) -> Traits:
        return Traits(late=True)

    def combine(self, direction: Tensor, memory: Memory, now: Round) -> Tensor:
        return direction - 0.1 * torch.einsum("d,d->d", direction, now.briefs.start)


class Personal(Good):
    """Clients are evaluated with a model that leans towards newcomers."""

    def personal(self, x: Tensor, ids: Tensor, memory: Memory, now: Round) -> Tensor:
        return x + 0.1 * memory.rows["turns"][:, None] * memory.state["velocity"]


class PersonalForHalf(Good):
    def personal(self, x: Tensor, ids: Tensor, memory: Memory, now: Round) -> Tensor:
        return x.expand(len(ids) // 2, -1)


class PersonalNowhere(Good):
    def personal(self, x: Tensor, ids: Tensor, memory: Memory, now: Round) -> Tensor:
        return x / 0


class PersonalByPosition(Good):
    def personal(self, x: Tensor, ids: Tensor, memory: Memory, now: Round) -> Tensor:
        return x + torch.arange(float(len(ids)))[:, None].to(x)


class PersonalChangesTheRun(Good):
    def personal(self, x: Tensor, ids: Tensor, memory: Memory, now: Round) -> Tensor:
        memory.state["velocity"].add_(1)
        return x


class Rebases(Good):
    """What the mean of the products is beyond the product of the means goes into the base."""

    def rebase(self, base: Tensor, memory: Memory, now: Round) -> Tensor:
        base = base.clone()
        for pair in now.layout.pairs:
            products = pair.product(now.trained())
            mean = torch.tensordot(now.weights.to(products), products, 1)
            pair.base.view(base).add_(mean - pair.product(now.moved))
        return base


class RebasesInPlace(Good):
    def rebase(self, base: Tensor, memory: Memory, now: Round) -> Tensor:
        return base.add_(1)


class RebasesLess(Good):
    def rebase(self, base: Tensor, memory: Memory, now: Round) -> Tensor:
        return base[:2]


class RebasesNowhere(Good):
    def rebase(self, base: Tensor, memory: Memory, now: Round) -> Tensor:
        return base / 0


class RebasesByPosition(Good):
    def rebase(self, base: Tensor, memory: Memory, now: Round) -> Tensor:
        return base + now.reports.loss[0].float()


class RebasesFromAGlobal(Good):
    """Adds what it has kept in a module, from a round on in which a resumed run lacks it."""

    def server(self, now: Round) -> State:
        HIDDEN.clear()
        return super().server(now)

    def rebase(self, base: Tensor, memory: Memory, now: Round) -> Tensor:
        HIDDEN.setdefault(now.number, now.x.clone())
        return base + 0.01 * (0 in HIDDEN)


class Measures(Good):
    """Measures everyone before it chooses; in a round in which nobody answers, as planned."""

    def traits(self) -> Traits:
        return Traits(needs={"score_before"})

    def select(self, plan: Plan, memory: Memory, now: Round) -> Plan:
        if now.measured is None:
            return replace(
                plan, first=np.arange(now.population), measure=frozenset({"score_before"})
            )
        order = torch.argsort(now.measured.score_before, descending=True, stable=True)
        chosen = now.measured.ids[order[: plan.size]].numpy()
        return replace(plan, ids=chosen) if len(chosen) else plan


class MeasuresForEver(Good):
    def select(self, plan: Plan, memory: Memory, now: Round) -> Plan:
        return replace(plan, first=np.arange(3), measure=frozenset({"score_before"}))


class MeasuresStrangers(Good):
    def select(self, plan: Plan, memory: Memory, now: Round) -> Plan:
        return replace(plan, first=np.array([0, now.population]))


class MeasuresBeauty(Good):
    def select(self, plan: Plan, memory: Memory, now: Round) -> Plan:
        if now.measured is not None:
            return plan
        return replace(plan, first=np.arange(2), measure=frozenset({"beauty"}))


class Waits(Good):
    """Words about waiting, which mean nothing in the check."""

    def select(self, plan: Plan, memory: Memory, now: Round) -> Plan:
        return replace(plan, concurrency=9, late="keep", max_age=3)


class Ditto(Good):
    """Clients keep a second model."""

    def traits(self) -> Traits:
        return Traits(keeps=frozenset({"second"}))

    def brief(self, briefs: Briefs, memory: Memory, now: Round) -> Briefs:
        return replace(briefs, second_lr=0.1, second_pull=0.5, second_when="batch")


class KeepsInSecret(Ditto):
    def traits(self) -> Traits:
        return Traits()


class KeepsWhatIsNotKept(Ditto):
    def traits(self) -> Traits:
        return Traits(keeps=frozenset({"second", "diary"}))


class Places(Good):
    """Clients start beside the model."""

    def brief(self, briefs: Briefs, memory: Memory, now: Round) -> Briefs:
        return replace(briefs, offset=torch.full_like(now.x, 0.01))


class PlacesTwice(Good):
    def brief(self, briefs: Briefs, memory: Memory, now: Round) -> Briefs:
        beside = torch.full_like(now.x, 0.01)
        return replace(briefs, start=now.x + beside, offset=beside)


class HoldsEverythingStill(Good):
    def brief(self, briefs: Briefs, memory: Memory, now: Round) -> Briefs:
        return replace(briefs, still=frozenset(range(len(now.layout.names))))


class OffersOneVector(Good):
    def brief(self, briefs: Briefs, memory: Memory, now: Round) -> Briefs:
        return replace(briefs, candidates=now.x)


class UsesEveryHook(Good):
    def receive(self, reports: Reports, memory: Memory, now: Round) -> Reports:
        return replace(reports, delta=reports.delta.clamp(-1, 1))

    def result(self, x: Tensor, memory: Memory, now: Round) -> Tensor:
        return x - memory.state["velocity"] / 2

    def verdict(self, memory: Memory, now: Round) -> str | None:
        return f"it remembers {len(memory.table)} clients"


def test_a_users_own_rule_passes() -> None:
    check_rule(Good())
    check_rule(Good(beta=0.9))


@pytest.mark.parametrize(
    "rule",
    [
        SeesIdleRounds(),
        UsesEveryHook(),
        SendsItsMomentum(),
        Personal(),
        Measures(),
        Waits(),
        Places(),
    ],
)
def test_so_do_rules_of_the_other_hooks(rule: Rule) -> None:
    check_rule(rule, engines={"loop": Loop})


@pytest.mark.parametrize("rule", [Rebases(), Ditto()])
def test_a_base_and_what_clients_keep_are_the_same_on_every_engine(rule: Rule) -> None:
    check_rule(rule)


def test_an_engine_that_ignores_the_base_is_told_apart() -> None:
    class Ignores(Loop):
        def train(self, briefs: Briefs) -> Reports:
            return super().train(replace(briefs, base=None))

    with pytest.raises(AssertionError, match="a different model on engine 'other' than on 'loop'"):
        check_rule(Rebases(), engines={"other": Ignores})


def test_an_engine_that_forgets_what_clients_keep_is_told_apart() -> None:
    class Follows(Ditto):
        def brief(self, briefs: Briefs, memory: Memory, now: Round) -> Briefs:
            return replace(super().brief(briefs, memory, now), second_draw=0.5)

    class Forgets(Loop):
        def train(self, briefs: Briefs) -> Reports:
            return replace(super().train(briefs), second=None)

    with pytest.raises(AssertionError, match="a different model on engine 'other' than on 'loop'"):
        check_rule(Follows(), engines={"other": Forgets})


@pytest.mark.parametrize(
    ("rule", "sentence"),
    [
        (
            SendsToOneClient(),
            "in brief sends torch.float32 of shape [53] along as 'velocity' where 4 rows are expected",
        ),
        (SendsANumber(), "in brief returns a state that is not a dictionary of tensors"),
        (SendsThree(), "in brief does not return Briefs, or Briefs and rows to remember"),
        (CountsOnWhatItSent(), "fails in combine when only 3 of 4 clients report, RuntimeError ("),
        (CombinesWhatItSentByPosition(), "in combine depends on the order of the clients"),
        (
            CountsOnOneVersion(),
            "fails when orders of several versions land together, RuntimeError (",
        ),
        (
            PersonalForHalf(),
            "in personal returns torch.float32 of shape [3, 53] where torch.float32 of shape [53] or one",
        ),
        (PersonalNowhere(), "in personal returns a vector that is not finite"),
        (PersonalByPosition(), "in personal depends on the order of the clients"),
        (
            PersonalChangesTheRun(),
            "in personal changes its arguments in place; return new tensors instead",
        ),
        (
            RebasesInPlace(),
            "in rebase changes its arguments in place; return new tensors instead",
        ),
        (
            RebasesLess(),
            "in rebase returns torch.float32 of shape [2] where the base is torch.float32 of shape [30]",
        ),
        (RebasesNowhere(), "in rebase returns a base that is not finite"),
        (RebasesByPosition(), "in rebase depends on the order of the clients"),
        (
            RebasesFromAGlobal(),
            "when the run is resumed from a checkpoint; it keeps something outside its state",
        ),
        (
            MeasuresForEver(),
            "in select asks for clients to be measured who have answered already; look at now.measured",
        ),
        (MeasuresStrangers(), "in select asks to measure the clients [0, 7], and there are 7"),
        (
            MeasuresBeauty(),
            "in select asks clients to measure ['beauty']; they can measure accuracy_",
        ),
        (
            KeepsInSecret(),
            "in brief asks clients to keep second; declare it by the trait keeps",
        ),
        (
            KeepsWhatIsNotKept(),
            "has the trait keeps with diary, which no field of the list is; clients can keep mix, owed",
        ),
        (
            PlacesTwice(),
            "in brief writes start and offset; write one of them, and the core works out the other",
        ),
        (
            HoldsEverythingStill(),
            "in brief keeps the tensors [0, 1, 2, 3] still; some of [0, 1, 2, 3] must move",
        ),
        (
            OffersOneVector(),
            "in brief gives torch.float32 of shape [53] as candidates, not several models [k, d]",
        ),
        (ChangesItsState(), "in step changes its arguments in place; return new tensors instead"),
        (
            ChangesTheReports(),
            "in observe changes its arguments in place; return new tensors instead",
        ),
        (ChangesTheTable(), "in step changes its arguments in place; return new tensors instead"),
        (
            KeepsALog(),
            "in step keeps something on itself; return it in the state, which checkpoints save",
        ),
        (
            KeepsAnAttribute(),
            "in step keeps something on itself; return it in the state, which checkpoints save",
        ),
        (
            KeepsAGlobal(),
            "in step returns something else when called again with the same arguments",
        ),
        (
            DrawsFreely(),
            "in weigh returns something else when called again with the same arguments; take random numbers",
        ),
        (
            CountsOnEveryone(),
            "in weigh returns torch.float64 of shape [4] where one number for each of 3 reporters is",
        ),
        (
            FailsWhenSomeoneFails(),
            "fails in weigh when only 3 of 4 clients report, RuntimeError (The size of tensor a (3)",
        ),
        (
            WritesForEveryone(),
            "in observe writes torch.float32 of shape [7] into 'turns' where 4 rows are expected",
        ),
        (
            WritesAnUnknownName(),
            "in observe writes 'tunrs' into a row, but client() has no such name",
        ),
        (PrefersTheFirst(), "in weigh depends on the order of the clients"),
        (CombinesByPosition(), "in combine depends on the order of the clients"),
        (ObservesByPosition(), "in observe depends on the order of the clients"),
        (RemembersANumber(), "in server returns a state that is not a dictionary of tensors"),
        (RemembersAList(), "in observe returns a state that is not a dictionary of tensors"),
        (
            SharesMemory(),
            "has a state that cannot be saved, RuntimeError (Some tensors share memory",
        ),
        (Explodes(), "in step returns a direction that is not finite"),
        (WeighsByNothing(), "in weigh returns factors that are not weights: [0.0, 0.0, 0.0, 0.0]"),
        (
            Widens(),
            "in combine returns torch.float64 of shape [53] where the direction is torch.float32 of shape [53]",
        ),
        (ReturnsOneThing(), "in step does not return (direction, memory)"),
        (SelectsIds(), "in select does not return a Plan"),
        (
            SelectsEveryone(),
            "in select asks for 7 clients, but largest_cohort() returns 4; override it",
        ),
        (AsksOthers(), "in brief changes who is asked; that is for select"),
        (PushesTheWrongWay(), "in brief gives a push whose shape or type differs from x"),
        (ChangesTheSeed(), "in brief changes seed, which only the core may"),
        (TellsEveryoneAtOnce(), "in brief gives torch.float32 of shape [] as lr of 4 clients"),
        (ReceivesFewer(), "in receive changes who reported; set a weight to 0 in weigh"),
        (
            ReceivesWider(),
            "in receive returns updates as torch.float64 of shape [4, 53], not torch.float32 of shape",
        ),
        (ReceivesAnUpdate(), "in receive does not return Reports"),
        (ReturnsTheState(), "in observe does not return a Memory; use memory.replace(...)"),
        (WritesRowsInStep(), "in step writes rows; only observe may"),
        (
            ResultsInLess(),
            "in result returns torch.float32 of shape [2] where the direction is torch.float32 of shape",
        ),
        (SaysANumber(), "in verdict does not return a sentence or None"),
        (
            AsksTooEarly(),
            "fails in brief, AttributeError ('loss' is not available: this round does not have its",
        ),
        (FailsWhenIdle(), "fails in observe when only 0 of 4 clients report, RuntimeError (max()"),
        (
            CannotBePrinted(schedule=abs),
            "cannot be written as text and read back, UserError (rule =",
        ),
        (
            PrintsHalf(gamma=0.5),
            "prints as 'test_testing.PrintsHalf' and reads back as another rule",
        ),
        (Misspelt(), "has a method 'wiegh', which is never called; did you mean 'weigh'?"),
        (
            NotFrozen(),
            "is not a frozen dataclass; write @dataclass(frozen=True, kw_only=True) above its class",
        ),
        (
            ForgetsOnResume(),
            "when the run is resumed from a checkpoint; it keeps something outside its state",
        ),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, Rule) else "",
)
def test_a_wrong_rule_is_caught(rule: Rule, sentence: str) -> None:
    with pytest.raises(AssertionError) as caught:
        check_rule(rule, engines={"loop": Loop})
    text = str(caught.value)
    assert sentence in text
    assert text.startswith(f"test_testing.{type(rule).__name__} ")
    assert text.endswith(".")
    assert "\n" not in text


def test_no_rule_at_all() -> None:
    with pytest.raises(AssertionError, match=r"str is not derived from kairosfl\.Rule\."):
        check_rule("fedprox")  # type: ignore[arg-type]


# What a rule says about itself.


@pytest.mark.parametrize("text", ["fedcm", "fednova", "normclipping", "limits", "privacy"])
def test_rules_that_need_only_sums_get_no_more(text: str) -> None:
    (rule,) = parse(text).rules
    check_rule(rule)


@pytest.mark.parametrize(
    "text", ["krum", "median", "centeredclipping", "scaffold", "moon", "fedaware", "nnm"]
)
def test_a_rule_that_wrongly_says_that_it_needs_only_sums_is_caught(text: str) -> None:
    (rule,) = parse(text).rules
    cls = type(rule)
    said = replace(about(rule), sums=True)
    claiming = type(cls.__name__, (cls,), {"traits": lambda self: said, "__module__": "mine"})()
    with pytest.raises(AssertionError, match="by the trait sums that weighted sums and norms"):
        check_rule(claiming)


@dataclass(frozen=True, kw_only=True)
class Loud(Rule):
    """Clients with a higher loss count more, and the rule does not say so."""

    def weigh(self, factors: Tensor, memory: Memory, now: Round) -> Tensor:
        return factors * now.reports.loss.square()


@dataclass(frozen=True, kw_only=True)
class LoudAndSaying(Loud):
    def traits(self) -> Traits:
        return Traits(needs={"loss"}, sums=True)


def test_a_rule_that_acts_on_measurements_says_so() -> None:
    with pytest.raises(AssertionError, match=r"acts on what clients measure .*needs=\{'loss'\}"):
        check_rule(Loud())
    check_rule(LoudAndSaying())
