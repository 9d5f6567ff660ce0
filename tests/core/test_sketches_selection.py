"""Guided selection sketched against the contract: Oort, TiFL, and power of choice, which measures
first.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch
from sketches import course, trained
from test_visits import ENGINES, LR, SIZES, START, engines, loss, samples_of, task

from kairosfl.core.fields import Briefs, Reports
from kairosfl.core.recipe import Recipe
from kairosfl.core.round import answered, brief, measure, planned, select
from kairosfl.core.rule import Algorithm, Memory, Plan, Round, Rule, State, changed
from kairosfl.core.run import Run, Setup, upcoming
from kairosfl.core.streams import stream
from kairosfl.core.traits import Traits

N = len(SIZES)
SECONDS = np.array([1.0, 9.0, 4.0])


@dataclass(frozen=True, kw_only=True)
class Oort(Rule):
    """Clients that have much to learn from, and are quick, come first; some are drawn that have not
    been seen.
    """

    explore: float = 0.5
    quick: float = 0.5
    penalty: float = 2.0

    def server(self, now: Round) -> State:
        unknown = torch.full((now.population,), torch.nan, dtype=torch.float64)
        return {"utility": unknown, "seconds": unknown, "seen": unknown}

    def select(self, plan: Plan, memory: Memory, now: Round) -> Plan:
        utility, seconds, seen = (
            memory.state[name].numpy() for name in ("utility", "seconds", "seen")
        )
        tried, fresh = np.flatnonzero(~np.isnan(utility)), np.flatnonzero(np.isnan(utility))
        again = min(len(tried), plan.size - min(len(fresh), int(self.explore * plan.size)))
        score = utility[tried]
        if len(tried):
            score = (score - score.min()) / max(float(np.ptp(score)), 1e-4)
            score = score + np.sqrt(0.1 * np.log(now.number) / seen[tried])
            pace = np.quantile(seconds[tried], self.quick) / seconds[tried]
            score = score * np.minimum(pace, 1) ** self.penalty
        best = tried[np.argsort(-score, kind="stable")[:again]]
        new = now.stream("oort").choice(fresh, plan.size - again, replace=False)
        return replace(plan, ids=np.append(best, new))

    def brief(self, briefs: Briefs, memory: Memory, now: Round) -> Briefs:
        return briefs.measured("squared_loss")

    def observe(self, memory: Memory, now: Round) -> Memory:
        ids, state = now.reports.ids, {name: row.clone() for name, row in memory.state.items()}
        state["utility"][ids] = now.reports.n * now.reports.squared_loss.sqrt()
        state["seconds"][ids] = now.took
        state["seen"][ids] = now.number + 1.0
        return memory.replace(state=state)


class Federation:
    """Stages by hand: of a round that has a clock, what the clients took is in `now.took`."""

    def __init__(self, rule: Rule, engine: str, size: int) -> None:
        self.rule, self.job = rule, task()
        how = Recipe(rounds=9, cohort=size, batch_size=8, lr=LR)
        self.setup = Setup(Algorithm((rule,)), how, N, self.job.layout)
        self.engine = ENGINES[engine](self.job)
        self.run = Run.start(self.job.start(), self.setup, seed=0)

    def round(self) -> tuple[list[int], Reports]:
        """Who took part, and what they reported."""
        run, setup = self.run, self.setup
        now = upcoming(run, setup)
        plan = planned(run, setup, now)
        if plan.first is not None:
            asked = measure(run, setup, now, plan)
            now = changed(now, first=answered(asked, self.engine.train(asked)))
            plan = planned(run, setup, now)
        now, ids = select(run, setup, now, plan)
        briefs, _ = brief(run, setup, now, ids)
        reports = self.engine.train(briefs)
        took = torch.from_numpy(SECONDS)[ids]
        now = changed(now, briefs=briefs, reports=reports, took=took)
        after = self.rule.observe(run.memory(0), now)
        x = run.x + reports.delta.mean(0)
        self.run = changed(run, round=run.round + 1, x=x, states=(after.state,))
        return ids.tolist(), reports


@engines
def test_oort(engine: str) -> None:
    course, x = Federation(Oort(), engine, 2), START
    utility, seen = dict[int, float](), dict[int, int]()
    for number in range(5):
        fresh = [client for client in range(N) if client not in utility]
        again = min(len(utility), 2 - min(len(fresh), 1))
        scores = dict[int, float]()
        for client in utility:
            lowest, highest = min(utility.values()), max(utility.values())
            quick = np.quantile([SECONDS[other] for other in utility], 0.5)
            scores[client] = (utility[client] - lowest) / max(highest - lowest, 1e-4)
            scores[client] += np.sqrt(0.1 * np.log(number) / seen[client])
            if SECONDS[client] > quick:
                scores[client] *= (quick / SECONDS[client]) ** 2
        best = sorted(scores, key=lambda client: (-scores[client], client))[:again]
        new = stream(0, "oort", number).choice(fresh, 2 - again, replace=False)
        chosen = sorted([*best, *new])
        ids, _ = course.round()
        assert ids == chosen
        for client in chosen:
            a, y = samples_of(client)
            losses = ((a @ x[:2] + 0.1) * x[2] - y) ** 2
            utility[client] = len(y) * float(np.sqrt(np.mean(losses**2)))
            seen[client] = number + 1
        x = x + np.mean([trained(x, client) - x for client in chosen], 0)
    assert len(utility) == N


@dataclass(frozen=True, kw_only=True)
class TiFL(Rule):
    """Cohorts of one tier of equally quick clients; tiers on which the model does badly are drawn
    more often, each at most `credits` times.
    """

    tiers: int = 3
    credits: int = 2

    def server(self, now: Round) -> State:
        unknown = torch.full((now.population,), torch.nan, dtype=torch.float64)
        return {"seconds": unknown, "credits": torch.full((self.tiers,), self.credits)}

    def select(self, plan: Plan, memory: Memory, now: Round) -> Plan:
        unknown = np.flatnonzero(memory.state["seconds"].isnan().numpy())
        if len(unknown):
            return replace(plan, ids=unknown[: plan.size])
        if now.measured is None:
            return replace(
                plan, first=np.arange(now.population), measure=frozenset({"score_before"})
            )
        losses = now.measured.score_before.numpy()
        tiers = self._tiers(memory)
        worst_last = np.argsort([losses[tier].mean() for tier in tiers], kind="stable")
        chances = np.empty(self.tiers)
        chances[worst_last] = np.arange(1.0, self.tiers + 1)
        chances *= memory.state["credits"].numpy() > 0
        draws = now.stream("tifl")
        tier = tiers[draws.choice(self.tiers, p=chances / chances.sum())]
        return replace(plan, ids=draws.choice(tier, min(plan.size, len(tier)), replace=False))

    def observe(self, memory: Memory, now: Round) -> Memory:
        seconds, credits = memory.state["seconds"].clone(), memory.state["credits"].clone()
        if not seconds.isnan().any():
            client = int(now.briefs.ids[0])
            credits[[client in tier for tier in self._tiers(memory)].index(True)] -= 1
        seconds[now.reports.ids] = now.took
        return memory.replace(state={"seconds": seconds, "credits": credits})

    def _tiers(self, memory: Memory) -> list[np.ndarray]:
        order = np.argsort(memory.state["seconds"].numpy(), kind="stable")
        return np.array_split(order, self.tiers)


@engines
def test_tifl(engine: str) -> None:
    course, x, credits = Federation(TiFL(), engine, 2), START, [2, 2, 2]
    tiers = [0, 2, 1]  # one client each, from the quickest to the slowest
    for number in range(6):
        if number < 2:
            chosen = [0, 1] if number == 0 else [2]
        else:
            losses = [loss(x, client) for client in tiers]
            chances = np.array([1.0 + sum(other < own for other in losses) for own in losses])
            chances *= np.array(credits) > 0
            drawn = stream(0, "tifl", number).choice(3, p=chances / chances.sum())
            credits[drawn] -= 1
            chosen = [tiers[drawn]]
        ids, _ = course.round()
        assert ids == chosen
        x = x + np.mean([trained(x, client) - x for client in chosen], 0)
    assert course.run.states[0]["credits"].tolist() == credits


@dataclass(frozen=True, kw_only=True)
class PowerOfChoice(Rule):
    """Of `candidates` clients that measure the model, the ones on which it does worst train."""

    candidates: int = 3

    def traits(self) -> Traits:
        return Traits(needs={"score_before"})

    def select(self, plan: Plan, memory: Memory, now: Round) -> Plan:
        if now.measured is None:
            drawn = now.stream("choice").choice(now.population, self.candidates, replace=False)
            return replace(plan, first=drawn, measure=frozenset({"score_before"}))
        worst = torch.argsort(now.measured.score_before, descending=True, stable=True)
        return replace(plan, ids=now.measured.ids[worst[: plan.size]].numpy())


@engines
def test_power_of_choice(engine: str) -> None:
    x = START

    class Two(PowerOfChoice):
        def select(self, plan: Plan, memory: Memory, now: Round) -> Plan:
            return super().select(replace(plan, size=2), memory, now)

    for run in course(Two(), engine):
        worst = sorted(np.argsort([-loss(x, client) for client in range(N)])[:2].tolist())
        assert run.record.ids.tolist() == worst
        shares = np.array(SIZES)[worst] / np.array(SIZES)[worst].sum()
        x = x + shares @ [trained(x, client) - x for client in worst]
        np.testing.assert_allclose(run.x, x, atol=1e-14)
