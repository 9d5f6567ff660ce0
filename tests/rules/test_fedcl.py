"""FedCL against the reference: cohort sizes by hand, and whole courses with the cohorts they lead
to.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import SimpleNamespace

import numpy as np
import pytest
import reference
from problems import Flaky, recipe, task
from reference import Cohort, Network, Quadratic, Setting, fgn, train

from kairosfl.core.round import drive, rounds
from kairosfl.core.rule import Algorithm, Memory
from kairosfl.core.run import Run, Setup
from kairosfl.core.streams import stream
from kairosfl.core.table import Table
from kairosfl.detectors import FGN, Signals
from kairosfl.engines.loop import Loop
from kairosfl.errors import UserError
from kairosfl.rules import FedCL, FedProx, parse


def sizes(
    rule: FedCL, critical: list[bool], *, clients: int, cohort: int, seed: int = 0
) -> list[int]:
    """The cohort of every round, for a detector that says this."""
    memory, out = Memory(rule.server(None), {}, Table({})), []  # type: ignore[arg-type]
    for number, flag in enumerate(critical):
        out.append(int(memory.state["size"]) or cohort)
        now = SimpleNamespace(
            number=number,
            population=clients,
            cohort=cohort,
            signals=Signals(critical=flag),
            stream=lambda purpose, number=number: stream(seed, purpose, number),
        )
        memory = rule.observe(memory, now)  # type: ignore[arg-type]
    return out


def test_it_doubles_to_everyone_and_halves_to_half_the_start() -> None:
    periods = [True] * 5 + [False] * 6 + [True] * 2
    assert sizes(FedCL(), periods, clients=100, cohort=10) == [
        10,
        20,
        40,
        80,
        100,
        100,
        50,
        25,
        13,
        7,
        5,
        5,
        10,
    ]


def test_an_odd_start_and_a_cohort_of_one() -> None:
    assert sizes(FedCL(), [False] * 4, clients=100, cohort=5) == [5, 3, 2, 2]
    assert sizes(FedCL(), [False, False, True, True, True], clients=3, cohort=1) == [1, 1, 1, 2, 3]


def test_the_released_bounds() -> None:
    """Cap 0.75 of all, floor at the start, no doubling once the cap was reached, a decision every
    second round.
    """
    periods = [True] * 8 + [False] * 8 + [True] * 4
    expected = [16, 32, 32, 64, 64, 96, 96, 96, 96, 48, 48, 24, 24, 16, 16, 16, 16, 16, 16, 16]
    assert sizes(FedCL.released(), periods, clients=128, cohort=16) == expected


def test_the_largest_cohort_is_known_beforehand() -> None:
    assert FedCL().largest_cohort(cohort=16, population=128) == 128
    assert FedCL.released().largest_cohort(cohort=16, population=128) == 96
    assert FedCL(cap=0.1).largest_cohort(cohort=16, population=128) == 16
    assert (FedProx() + FedCL.released()).largest_cohort(cohort=16, population=128) == 96
    assert Algorithm().largest_cohort(cohort=16, population=128) == 16


def test_the_released_schedule_for_a_steady_gradient_norm() -> None:
    """What the authors' detector makes of a constant norm: about twenty rounds of critical period."""
    detector = FGN.released()
    memory, periods = Memory(detector.server(None), {}, Table({})), []  # type: ignore[arg-type]
    for number in range(30):
        critical, memory = detector.decide(1.0, memory, SimpleNamespace(number=number))  # type: ignore[arg-type]
        periods.append(critical)
    expected = [16, 32, 32, 64, 64, *[96] * 16, 48, 48, 24, 24, *[16] * 5]
    assert sizes(FedCL.released(), periods, clients=128, cohort=16) == expected


def test_parts_are_not_lost_to_binary_fractions() -> None:
    assert sizes(FedCL(cap=0.29), [True] * 4, clients=100, cohort=10)[-1] == 29


def test_the_random_baselines() -> None:
    draws = [stream(3, "fedcl", number).random() for number in range(40)]
    expected, size = [], 10
    for draw in draws:
        expected.append(size)
        if draw < 0.3:
            size = min(2 * size, 100)
        elif draw < 0.6:
            size = max(size - size // 2, 5)
    assert sizes(FedCL.random(), [False] * 40, clients=100, cohort=10, seed=3) == expected
    assert sizes(FedCL(increase=1.0), [False] * 5, clients=100, cohort=10) == [10, 20, 40, 80, 100]
    assert sizes(FedCL(decrease=1.0), [True] * 4, clients=100, cohort=10) == [10, 5, 5, 5]


@dataclass
class Course:
    xs: list[np.ndarray]
    cohorts: list[list[int]]


def by_the_paper(
    problem: reference.Problem,
    setting: Setting,
    number: int,
    start: int,
    lost: list[tuple[int, ...]],
) -> Course:
    """Algorithm 2 with Eq. 2 on consecutive rounds; the core's stream draws the cohort."""
    x, size, norm, out = problem.x, start, None, Course([], [])
    for t in range(number):
        drawn = stream(setting.seed, "select", t).choice(len(problem.n), size=size, replace=False)
        asked = sorted(int(i) for i in drawn)
        ids = [i for i in asked if i not in lost[t]]
        out.cohorts.append(asked)
        if ids:
            locals_ = [train(problem, setting, t, i, x) for i in ids]
            now = fgn(problem, setting, t, ids, locals_)
            critical = norm is None or (now - norm) / norm >= 0.01
            norm = now
            size = (
                min(2 * size, len(problem.n)) if critical else max(size - size // 2, start // 2, 1)
            )
            x = reference.shares(problem, ids, "samples") @ np.array([local.w for local in locals_])
        out.xs.append(x)
    return out


@pytest.mark.parametrize(
    "problem",
    [Quadratic(sizes=(4, 7, 10, 2, 8, 3, 5, 6, 9)), Network(sizes=(4, 7, 10, 2, 8, 3, 5, 6, 9))],
)
def test_eight_rounds_with_a_lost_client_and_a_lost_round(problem: reference.Problem) -> None:
    setting, number = Setting(gamma=1.0), 8
    lost: list[tuple[int, ...]] = [()] * number
    asked = by_the_paper(problem, setting, number, 3, lost).cohorts
    lost[2], lost[4] = (asked[2][0],), tuple(range(9))
    want = by_the_paper(problem, setting, number, 3, lost)
    job, rule = task(problem), parse("fedcl")
    engine = Flaky(Loop(job), lost)
    plan = replace(recipe(setting, (Cohort((0, 1, 2)),)), rounds=number)
    setup = Setup(rule, plan, 9, job.layout, detectors=(FGN(),))
    runs = list(drive(rounds(Run.start(job.start(), setup, seed=setting.seed), setup), engine))
    assert [run.record.asked for run in runs] == [len(cohort) for cohort in want.cohorts]
    assert len({run.record.asked for run in runs}) > 2, (
        "the cohort never changes, the setting shows nothing"
    )
    np.testing.assert_allclose([run.x.numpy() for run in runs], want.xs, rtol=0, atol=1e-12)


def test_nonsense_is_refused() -> None:
    with pytest.raises(UserError, match="it is a fraction of all clients"):
        FedCL(cap=1.5)
    with pytest.raises(UserError, match="increase and decrease must sum to at most 1"):
        FedCL(increase=0.6, decrease=0.6)
