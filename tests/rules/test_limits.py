"""Limits against numpy, and that nothing a single client claims takes more than its share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from problems import course
from reference import COHORTS, Network, Problem, Quadratic, Setting, train
from torch import Tensor

from kairosfl.core.fields import Briefs, Reports
from kairosfl.core.recipe import Recipe
from kairosfl.core.round import drive, rounds
from kairosfl.core.rule import Memory, Rule
from kairosfl.core.run import Round, Run, Setup
from kairosfl.detectors import FGN
from kairosfl.errors import UserError
from kairosfl.rules import parse
from kairosfl.rules.limits import capped
from kairosfl.tasks.vector import layout_of


def cap(values: Sequence[float], share: float) -> np.ndarray:
    """min(v, T) for the largest T with T ≤ share · Σ min(v, T), by bisection."""
    v = np.asarray(values, dtype=float)
    low, high = 0.0, float(v.max())
    for _ in range(200):
        t = (low + high) / 2
        low, high = (t, high) if t <= share * np.minimum(v, t).sum() else (low, t)
    return np.minimum(v, high)


@pytest.mark.parametrize("share", [0.15, 0.2, 0.3])
def test_a_cap_is_a_share_of_what_is_left(share: float) -> None:
    for seed in range(5):
        values = np.random.default_rng(seed).pareto(0.7, 10) + 1
        found = capped(torch.from_numpy(values), share).numpy()
        np.testing.assert_allclose(found, cap(values, share), rtol=1e-9)
        assert found.max() / found.sum() <= share * (1 + 1e-9)


def test_one_absurd_value_does_not_hide_the_others() -> None:
    values = torch.full((10,), 1e-130, dtype=torch.float64)
    values[3] = 1e7
    found = capped(values, 0.2)
    np.testing.assert_allclose(found / found.sum(), [*[0.8 / 9] * 3, 0.2, *[0.8 / 9] * 6])


def test_a_cohort_below_the_cap_is_left_alone() -> None:
    values = torch.tensor([3.0, 4.0, 5.0])
    assert capped(values, 2 / 3) is values


@pytest.mark.parametrize("problem", [Quadratic(), Network()], ids=["quadratic", "network"])
def test_six_rounds(problem: Problem) -> None:
    x, expected = problem.x, []
    for t, cohort in enumerate(COHORTS):
        if ids := cohort.reported:
            updates = np.array([train(problem, Setting(), t, i, x).w - x for i in ids])
            lengths = np.linalg.norm(updates, axis=1)
            updates *= np.minimum(1, 1.1 * np.median(lengths) / lengths)[:, None]
            n = np.round(cap(problem.n[list(ids)], 1.3 / len(ids)))
            p = cap(n, 1.3 / len(ids))
            x = x + p / p.sum() @ updates
        expected.append(x)
    found = course(problem, Setting(), COHORTS, "limits(weight=1.3, norm=1.1)")
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    "text", ["limits(weight=0, norm=0, numbers=0)", "limits(weight=99, norm=1e9, numbers=1e9)"]
)
def test_without_limits_it_is_fedavg_to_the_bit(text: str) -> None:
    plain = course(Network(), Setting(), COHORTS, "fedavg")
    assert np.array_equal(course(Network(), Setting(), COHORTS, text), plain)


@dataclass
class Claims:
    """Ten clients with equal updates; client 3 says what it likes."""

    changes: dict[str, Tensor | float]

    def train(self, briefs: Briefs) -> Reports:
        m = len(briefs)
        ones = torch.ones(m, dtype=torch.float64)
        reports = Reports(
            ids=briefs.ids,
            n=(60 * ones).long(),
            steps=(4 * ones).long(),
            epochs=ones,
            delta=torch.ones(m, 3),
            loss=ones,
            grad_sq=ones,
            seconds=ones,
            score_after=ones,
        )
        for name, value in self.changes.items():
            column = getattr(reports, name).clone()
            column[3] = value * (briefs.newest + 1)
            reports = replace(reports, **{name: column})
        return reports


@dataclass(frozen=True, kw_only=True)
class Seen(Rule):
    """Keeps what the round made of client 3."""

    def server(self, now: Round) -> dict[str, Tensor]:
        return {"weight": torch.tensor(0.0, dtype=torch.float64), "most": torch.tensor(0.0)}

    def observe(self, memory: Memory, now: Round) -> Memory:
        return memory.replace(
            state={"weight": now.weights[3], "most": now.reports.delta.norm(dim=1).max()}
        )


def claimed(text: str, **changes: float) -> Run:
    setup = Setup(
        parse(text) + Seen(),
        Recipe(rounds=4, cohort=10),
        10,
        layout_of(torch.nn.Linear(2, 1)),
        detectors=(FGN(),),
    )
    *_, run = drive(rounds(Run.start(torch.zeros(3), setup, seed=0), setup), Claims(changes))
    return run


@pytest.mark.parametrize(
    ("rules", "changes"),
    [
        ("fedavg", {"n": 10_000_000}),
        ("pa3fed(always=True)", {"score_after": -1e5}),
        ("pa3fed(always=True)", {"n": 10_000_000, "score_after": -1e5}),
        ("pa3fed(always=True, score='loss')", {"score_after": 1e6}),
    ],
)
def test_no_claim_takes_more_than_one_and_a_half_equal_shares(
    rules: str, changes: dict[str, float]
) -> None:
    assert float(claimed(rules, **changes).states[-2]["weight"]) > 0.99
    assert 0.149 < float(claimed(f"{rules} + limits", **changes).states[-2]["weight"]) < 0.15 + 1e-9


def test_a_long_update_is_as_long_as_the_others() -> None:
    assert float(claimed("fedavg + limits(norm=2)", delta=1e4).states[-2]["most"]) == pytest.approx(
        2 * 3**0.5
    )


def test_few_claimed_steps_do_not_make_a_large_gradient() -> None:
    """With FedNova −Δ / mass counts: an ordinary update in one step of forty would be forty times
    as steep.
    """
    honest, lying = (
        claimed("fednova + limits(weight=0, norm=2)", **changes)
        for changes in ({}, {"steps": 0.25})
    )
    assert float(lying.x.norm()) < 1.3 * float(honest.x.norm())


def test_a_detector_hears_no_absurd_number() -> None:
    assert claimed("fedcl", grad_sq=1e30).signals.fgn > 1e27
    assert claimed("fedcl + limits", grad_sq=1e30).signals.fgn < 10


def test_it_comes_after_every_rule_that_weighs() -> None:
    with pytest.raises(
        UserError, match="limits must be written after pa3fed, whose weights it limits; put it last"
    ):
        claimed("limits + pa3fed(always=True)")


def test_a_limit_below_one_is_refused() -> None:
    with pytest.raises(
        UserError, match=r"limits: norm = 0\.5 is not allowed; use 1 or more, or 0 for no limit"
    ):
        parse("limits(norm=0.5)")
