"""Budgets: cohort sizes by hand; no run asks for more than its total, in clients and in the bytes
of the metrics.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from problems import task
from reference import Network

from kairosfl.core.fields import Briefs, Reports
from kairosfl.core.recipe import Recipe
from kairosfl.core.round import drive, rounds
from kairosfl.core.rule import Memory, Plan
from kairosfl.core.run import Run, Setup
from kairosfl.core.streams import stream
from kairosfl.core.table import Table
from kairosfl.detectors import FGN, Signals
from kairosfl.engines.batched import Batched
from kairosfl.engines.loop import Loop
from kairosfl.errors import UserError
from kairosfl.rules import Average, Budget, FedCL, parse
from kairosfl.runs import experiment
from kairosfl.runs.config import resolve
from kairosfl.runs.files import read_lines
from kairosfl.runs.prepare import build_task
from kairosfl.testing import check_rule


def sizes(
    rule: Budget,
    number: int,
    *,
    cohort: int = 10,
    clients: int = 100,
    critical: int = 0,
    averaged: bool = False,
) -> list[int]:
    """The cohort of every round, when the first `critical` rounds are critical."""
    how = SimpleNamespace(
        rounds=number, cohort=cohort, population=clients, rules=(Average(),) if averaged else ()
    )
    memory = Memory(rule.server(how), {}, Table({}))  # type: ignore[arg-type]
    out = []
    for t in range(number):
        now = SimpleNamespace(**vars(how), number=t, signals=Signals(critical=t < critical))
        now.stream = lambda purpose, t=t: stream(0, purpose, t)
        out.append(rule.size(memory, now))  # type: ignore[arg-type]
        memory = memory.replace(state=memory.state | {"clients": memory.state["clients"] + out[-1]})
    return out


def test_evenly() -> None:
    assert sizes(Budget(share=0.4), 240) == [4] * 240
    assert sizes(Budget(share=1.0), 50) == [10] * 50
    found = sizes(Budget(share=0.45), 100)
    assert found == [4, 5] * 50
    assert sum(sizes(Budget(share=0.33), 100)) == 330


@pytest.mark.parametrize(
    "text",
    [
        "budget(share=0.5)",
        "budget(share=0.5, by='detector')",
        "budget(megabytes=0.02)",
        "fedcl(budget=0.5)",
    ],
)
def test_clients_that_do_not_report_are_paid_for(text: str) -> None:
    """An engine that leaves them out altogether, where half of the cohort is silent in every round."""

    class Half(Loop):
        def train(self, briefs: Briefs) -> Reports:
            return super().train(briefs).take(torch.arange((len(briefs) + 1) // 2))

    job = task(Network())
    number = len(job.clients)
    setup = Setup(
        parse(text),
        Recipe(rounds=10, cohort=number, lr=0.1),
        number,
        job.layout,
        detectors=(FGN(),),
    )
    runs = list(drive(rounds(Run.start(job.start(), setup, seed=0), setup), Half(job)))
    asked, state = sum(run.record.asked for run in runs), runs[-1].states[0]
    assert asked == int(state.get("clients", state.get("spent")))
    assert asked <= 10 * number // 2 or int(state["bytes"]) <= 20_000
    assert all(
        len(run.record.reports.failed) + len(run.record.reports) == run.record.asked for run in runs
    )


def test_by_plan() -> None:
    """Relative sizes over equal parts; the total is the share, whatever the plan's own scale."""
    plan = (10.0, 1.0, 1.0, 10.0)
    for factor in (1.0, 7.0):
        found = sizes(Budget(share=0.55, plan=tuple(factor * part for part in plan)), 40)
        assert found == [10] * 10 + [1] * 20 + [10] * 10
    found = sizes(Budget(share=0.4, plan=(3, 1)), 60)
    assert sum(found) == 240
    assert found == [6] * 30 + [2] * 30
    # Where the plan asks for less than one client, it gets one, and the others share what is left.
    found = sizes(Budget(share=0.2, plan=plan), 40)
    assert found == [3] * 10 + [1] * 20 + [3] * 10
    assert Budget(share=0.4, plan=(3, 1)).largest_cohort(10, 100) == 10
    assert Budget(share=1.0, plan=(9, 1)).largest_cohort(10, 100) == 18
    assert max(sizes(Budget(share=1.0, plan=(9, 1)), 20)) == 18
    assert max(sizes(Budget(share=1.0, plan=(9, 1)), 20, clients=12)) == 12


def test_by_detector() -> None:
    """Ten while critical and in the final tenth, the rest evenly in between; averaged, there is no
    final part.
    """
    rule = Budget(share=0.4, by="detector")
    found = sizes(rule, 240, critical=40)
    assert found[:40] == [10] * 40
    assert set(found[40:216]) == {1, 2}
    assert found[216:] == [10] * 24
    assert sum(found) == 960
    averaged = sizes(rule, 240, critical=40, averaged=True)
    assert set(averaged[40:]) <= {2, 3}
    assert sum(averaged) in (959, 960)


def test_a_period_that_never_ends_leaves_half_an_even_cohort_to_every_round() -> None:
    """t rounds of ten and 120 − t of an even cohort's half: 10 t + 2 (120 − t) = 480 where t = 30."""
    rule = Budget(share=0.4, by="detector")
    assert sizes(rule, 120, critical=120, averaged=True) == [10] * 30 + [2] * 90
    assert (
        sizes(replace(rule, rest=0.75), 120, critical=120, averaged=True)
        == [10] * 17 + [4] + [3] * 102
    )
    found = sizes(replace(rule, share=0.2, rest=0.0), 120, critical=120, averaged=True)
    assert found == [10] * 13 + [4] + [1] * 106


TABLES = {
    "data": {"clients": 12},
    "model": {"hidden": [16]},
    "train": {"rounds": 20, "cohort": 6, "batch_size": 32},
    "run": {"engine": "loop", "checkpoint_every": 7},
}


@pytest.mark.parametrize(
    ("text", "full"),
    [
        ("budget(share=0.5)", True),
        ("budget(share=0.5, plan=[6, 1, 6])", True),
        ("budget(share=0.5, by='detector') + average", True),
        ("fedprox + budget(share=0.4, by='detector')", True),
        ("fedcl(budget=0.5)", False),
    ],
)
def test_the_metrics_count_no_more_clients_than_the_total(
    tmp_path: Path, text: str, full: bool
) -> None:
    experiment.start(resolve({**TABLES, "algorithm": text}), tmp_path / "run")
    asked = [row["cohort"] for row in read_lines(tmp_path / "run" / "metrics.jsonl")]
    total = int((0.4 if "0.4" in text else 0.5) * 6 * 20)
    assert sum(asked) <= total
    assert min(asked) >= 1
    assert not full or sum(asked) >= 0.95 * total


@pytest.mark.parametrize("algorithm", ["fedavg", "scaffold", "moon + pa3fed", "fedcm"])
def test_the_metrics_count_no_more_bytes_than_the_total(tmp_path: Path, algorithm: str) -> None:
    """Down and up, as the metrics count them; in its state the rule has the same number."""
    text = f"{algorithm} + budget(megabytes=1.2)"
    config = resolve({**TABLES, "algorithm": text})
    experiment.start(config, tmp_path / "run")
    rows = list(read_lines(tmp_path / "run" / "metrics.jsonl"))
    spent = sum(row["bytes_down"] + row["bytes_up"] for row in rows)
    assert spent <= 1.2e6
    assert spent >= (0.95 if algorithm == "fedavg" else 0.5) * 1.2e6
    job = build_task(config)
    setup = Setup(config.algorithm, config.train, 12, job.layout, detectors=(FGN(),))
    blank = Run.start(job.start(), setup, seed=0)
    run, _ = experiment.Checkpoints(tmp_path / "run" / "checkpoint").load(blank)
    assert int(run.states[-2]["bytes"]) == spent
    assert int(run.states[-2]["clients"]) == sum(row["cohort"] for row in rows)


class Losing:
    """An engine that loses every other client, and all of them in the third round."""

    def __init__(self, engine: Loop) -> None:
        self.engine = engine

    def train(self, briefs: Briefs) -> Reports:
        reports = self.engine.train(briefs)
        kept = (
            torch.arange(0 if briefs.newest == 2 else 1, len(reports), 2)
            if briefs.newest != 2
            else torch.arange(0)
        )
        lost = set(reports.ids.tolist()) - set(reports.ids[kept].tolist())
        return Reports(
            **{
                **vars(reports.take(kept)),
                "failed": tuple((client, "lost") for client in sorted(lost)),
            }
        )


@pytest.mark.parametrize("text", ["budget(share=0.5)", "fedcl(budget=0.5)"])
def test_clients_that_were_asked_are_paid_for(text: str) -> None:
    job = task(Network())
    setup = Setup(
        parse(text), Recipe(rounds=12, cohort=4, lr=0.05), 5, job.layout, detectors=(FGN(),)
    )
    runs = list(drive(rounds(Run.start(job.start(), setup, seed=0), setup), Losing(Loop(job))))  # type: ignore[arg-type]
    assert runs[2].idle == 1
    assert sum(run.record.asked for run in runs if run.record) <= 24
    state = runs[-1].states[0]
    assert int(state["clients" if "clients" in state else "spent"]) == sum(
        run.record.asked for run in runs
    )


@pytest.mark.parametrize(
    ("rule", "sizes"),
    [
        (FedCL(budget=1.0, rest=0.0), [4, 8, 8, 8, 8, 6, 1, 1, 1, 1, 1, 1]),
        (FedCL(budget=1.0, rest=0.5), [4, 8, 8, 8, 6, 2, 2, 2, 2, 2, 2, 2]),
        (FedCL(budget=1.0, rest=1.0), [4] * 12),
        (FedCL(budget=0.75), [4, 8, 8, 4, 1, 2, 1, 2, 1, 2, 1, 2]),  # 1.5 for every later round
    ],
)
def test_fedcl_leaves_a_rest_to_later_rounds(rule: FedCL, sizes: list[int]) -> None:
    """It would ask 8 clients from the second round on; an even cohort has 4, or 3 with three
    quarters of them.
    """
    found: list[int] = []
    for number in range(12):
        state = {"size": torch.tensor(8 if number else 0), "spent": torch.tensor(sum(found))}
        now: Any = SimpleNamespace(number=number, rounds=12, cohort=4)
        found.append(rule.select(Plan(4), Memory(state, {}, Table({})), now).size)
    assert found == sizes
    assert sum(found) == rule.budget * 48


def test_fedcl_always_asks_a_client() -> None:
    """Also in a run that was begun with a smaller rest, of which there is nothing left."""
    state = {"size": torch.tensor(8), "spent": torch.tensor(42)}
    now: Any = SimpleNamespace(number=6, rounds=12, cohort=4)
    assert FedCL(budget=1.0).select(Plan(4), Memory(state, {}, Table({})), now).size == 1


def test_the_whole_budget_evenly_is_fedavg_to_the_bit() -> None:
    job = task(Network())
    ends = []
    for text in ("fedavg", "budget(share=1)", "fedcl(cap=0.1, floor=1, budget=1)"):
        setup = Setup(
            parse(text), Recipe(rounds=6, cohort=3, lr=0.1), 5, job.layout, detectors=(FGN(),)
        )
        *_, run = drive(rounds(Run.start(job.start(), setup, seed=0), setup), Loop(job))
        ends.append(run.x)
    assert torch.equal(ends[0], ends[1])
    assert torch.equal(ends[0], ends[2])


def test_every_engine_selects_the_same_cohorts() -> None:
    job = task(Network())
    setup = Setup(
        parse("budget(share=0.6, plan=[3, 1])"),
        Recipe(rounds=8, cohort=4, lr=0.1),
        5,
        job.layout,
        detectors=(FGN(),),
    )
    asked = []
    for engine in (Loop(job), Batched(job)):
        runs = list(drive(rounds(Run.start(job.start(), setup, seed=0), setup), engine))
        asked.append([run.record.ids.tolist() for run in runs])
    assert asked[0] == asked[1]
    assert sum(map(len, asked[0])) == int(0.6 * 4 * 8)


@pytest.mark.parametrize(
    "rule",
    [Budget(), Budget(plan=(3, 1), share=0.5), Budget(by="detector", share=0.6), FedCL(budget=0.8)],
)
def test_the_contract(rule: Budget | FedCL) -> None:
    check_rule(rule)


def test_an_explored_cohort_is_cut() -> None:
    memory = Memory({"clients": torch.tensor(0), "bytes": torch.tensor(0)}, {}, Table({}))
    now = SimpleNamespace(
        number=0, rounds=10, cohort=4, population=20, rules=(), stream=lambda p: stream(0, p)
    )
    chosen = Budget(share=0.5).select(Plan(4, ids=np.arange(9)), memory, now)  # type: ignore[arg-type]
    assert chosen.ids is not None
    assert len(chosen.ids) == 2
    assert set(chosen.ids) <= set(range(9))


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("budget(share=0)", "share = 0 is not allowed"),
        ("budget(plan=[1, 0])", "list numbers above 0"),
        ("budget(plan=3)", "list numbers above 0"),
        ("budget(by='luck')", "use 'plan' or 'detector'"),
        ("budget(by='detector', plan=[1, 2])", "leave it out"),
        ("budget + fedcl", r"use fedcl\(budget=\.\.\.\)"),
        ("budget + fedaware(explore=True)", "use explore = false"),
        ("fedcl(budget=-1)", "budget = -1"),
        ("fedcl(budget=1, rest=2)", "rest = 2"),
        ("fedcl(rest=0.1)", "rest = 0.1 is not allowed; it needs a budget"),
        ("fedcl(budget=1) + fedaware(explore=True)", "use explore = false, or no budget"),
    ],
)
def test_nonsense_is_refused(text: str, why: str) -> None:
    with pytest.raises(UserError, match=why):
        parse(text)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (
            "budget(share=0.1)",
            "12 clients for 20 rounds, less than one a round; use a share 1.67 times as large or more",
        ),
        ("budget(megabytes=0.01)", "megabytes = 0.01 may be less than one client a round costs"),
        (
            "fedcl(budget=0.1)",
            "12 clients for 20 rounds, less than one a round; use a budget 1.67 times as large or more",
        ),
    ],
)
def test_a_budget_of_less_than_a_client_a_round_is_refused_before_training(
    tmp_path: Path, text: str, why: str
) -> None:
    with pytest.raises(UserError, match=why):
        experiment.start(resolve({**TABLES, "algorithm": text}), tmp_path / "run")
