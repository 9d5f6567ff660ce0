"""The robust rules against numpy, against byzfl where it has the same, and with one another."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
from collections.abc import Callable, Sequence
from itertools import combinations

import numpy as np
import pytest
import torch
from problems import course
from reference import COHORTS, Network, Problem, Quadratic, Setting, shares, train

from kairosfl.core.fields import Reports
from kairosfl.core.recipe import Recipe
from kairosfl.core.round import rounds, verdicts
from kairosfl.core.rule import Algorithm, Memory, Rule
from kairosfl.core.run import Round, Run, Setup
from kairosfl.core.streams import stream
from kairosfl.detectors import FGN
from kairosfl.errors import UserError
from kairosfl.rules import RULES, parse
from kairosfl.rules.robust import Guard, Robust
from kairosfl.tasks.vector import layout_of

Rows = np.ndarray
Combine = Callable[[Rows, Sequence[int], np.ndarray, int], np.ndarray]
GUARDS = sorted(name for name, rule in RULES.items() if issubclass(rule, Guard))


def served(
    problem: Problem, setting: Setting, combine: Combine, weights: str = "uniform"
) -> np.ndarray:
    """FedAvg's clients and a server that combines their updates."""
    x, found = problem.x, []
    for t, cohort in enumerate(COHORTS):
        if ids := cohort.reported:
            updates = np.array([train(problem, setting, t, i, x).w - x for i in ids])
            x = x + combine(updates, ids, shares(problem, ids, weights), t)
        found.append(x)
    return np.array(found)


def f_of(share: float, reports: int, inputs: int | None = None) -> int:
    return max(min(int(np.ceil(share * reports - 1e-9)), ((inputs or reports) - 1) // 2), 0)


def median(updates: Rows, *_: object) -> np.ndarray:
    return np.median(updates, axis=0)


def trimmed(updates: Rows, *_: object) -> np.ndarray:
    m, f = len(updates), f_of(0.3, len(updates))
    return np.sort(updates, axis=0)[f : m - f].mean(0)


def krum(keep: int) -> Combine:
    def chosen(updates: Rows, *_: object) -> np.ndarray:
        m, f = len(updates), f_of(0.2, len(updates))
        if m < 3:
            return updates.mean(0)
        scores = []
        for i in range(m):
            squares = sorted(((updates[i] - updates[j]) ** 2).sum() for j in range(m) if j != i)
            scores.append(sum(squares[: max(m - f - 2, 1)]))
        return updates[np.argsort(scores, kind="stable")[: keep or m - f]].mean(0)

    return chosen


def geometric(updates: Rows, ids: Sequence[int], p: np.ndarray, t: int) -> np.ndarray:
    z = np.zeros(updates.shape[1])
    for _ in range(5):
        beta = p / np.maximum(np.linalg.norm(updates - z, axis=1), 0.01)
        z = beta @ updates / beta.sum()
    return z


def scaled(vectors: Rows, limit: float) -> Rows:
    lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
    limit = limit or float(np.median(lengths))
    return vectors * np.minimum(1, limit / lengths)


class Centred:
    """It remembers the last centre."""

    def __init__(self, tau: float, iterations: int) -> None:
        self.tau, self.iterations, self.v = tau, iterations, 0.0

    def __call__(self, updates: Rows, ids: Sequence[int], p: np.ndarray, t: int) -> np.ndarray:
        for _ in range(self.iterations):
            self.v = self.v + p @ scaled(updates - self.v, self.tau)
        return np.asarray(self.v)


def mixed(then: Combine) -> Combine:
    def nnm(updates: Rows, ids: Sequence[int], p: np.ndarray, t: int) -> np.ndarray:
        kept = len(updates) - f_of(0.3, len(updates))
        near = [
            np.argsort(np.linalg.norm(updates - row, axis=1), kind="stable")[:kept]
            for row in updates
        ]
        return then(np.array([updates[rows].mean(0) for rows in near]), ids, p, t)

    return nnm


def bucketed(updates: Rows, ids: Sequence[int], p: np.ndarray, t: int) -> np.ndarray:
    drawn = stream(Setting().seed, "bucketing", t).permutation(len(ids)) // 2
    means = [
        updates[drawn == each].mean(0) for each in drawn
    ]  # a bucket counts as often as it has reports
    return np.median(means, axis=0)


def limited(updates: Rows, ids: Sequence[int], p: np.ndarray, t: int) -> np.ndarray:
    return np.asarray(p @ scaled(updates, 0))


EXACT: dict[str, tuple[Callable[[], Combine], str]] = {
    "median": (lambda: median, "uniform"),
    "trimmedmean(share=0.3)": (lambda: trimmed, "uniform"),
    "krum": (lambda: krum(1), "uniform"),
    "krum.multi()": (lambda: krum(0), "uniform"),
    "geometricmedian(nu=0.01, iterations=5)": (lambda: geometric, "samples"),
    "geometricmedian(nu=0.01, iterations=5, weights='uniform')": (lambda: geometric, "uniform"),
    "centeredclipping": (lambda: Centred(0.0, 1), "uniform"),
    "centeredclipping(tau=0.05, iterations=3, weights='samples')": (
        lambda: Centred(0.05, 3),
        "samples",
    ),
    "normclipping": (lambda: limited, "samples"),
    "nnm(share=0.3) + median": (lambda: mixed(median), "uniform"),
    "bucketing + median": (lambda: bucketed, "uniform"),
}


@pytest.mark.parametrize("problem", [Quadratic(), Network()], ids=["quadratic", "network"])
@pytest.mark.parametrize("text", EXACT)
def test_six_rounds(problem: Problem, text: str) -> None:
    make, weights = EXACT[text]
    expected = served(problem, Setting(), make(), weights)
    np.testing.assert_allclose(
        course(problem, Setting(), COHORTS, text), expected, rtol=0, atol=1e-12
    )


@pytest.mark.parametrize(
    "text",
    [
        "bucketing",
        "bucketing(size=5)",
        "normclipping(norm=1e9)",
        "centeredclipping(tau=1e9, weights='samples')",
    ],
)
def test_without_a_robust_rule_or_anything_to_clip_it_is_fedavg(text: str) -> None:
    plain = course(Network(), Setting(), COHORTS, "fedavg")
    np.testing.assert_allclose(
        course(Network(), Setting(), COHORTS, text), plain, rtol=0, atol=1e-13
    )


def test_nothing_trimmed_is_the_uniform_mean() -> None:
    plain = served(Network(), Setting(), lambda updates, *_: updates.mean(0))
    np.testing.assert_allclose(
        course(Network(), Setting(), COHORTS, "trimmedmean(share=0)"), plain, atol=1e-13
    )


class Vectors(Rule):
    """Weighs reports by client id, to tell weighted from plain statistics."""

    def weigh(self, factors: torch.Tensor, memory: Memory, now: Round) -> torch.Tensor:
        return factors * (1.0 + (now.reports.ids % 3))


def aggregate(
    text: str | Algorithm, vectors: Rows, rounds_: int = 1, n: Rows | None = None
) -> np.ndarray:
    """What one round makes of these updates, from x = 0."""
    m, d = vectors.shape
    algorithm = parse(text) if isinstance(text, str) else text
    layout = layout_of(torch.nn.Linear(d, 1, bias=False).double())
    setup = Setup(algorithm, Recipe(rounds=rounds_, cohort=m), m, layout, detectors=(FGN(),))
    ones = torch.ones(m, dtype=torch.int64)
    reports = Reports(
        ids=torch.arange(m),
        n=7 * ones if n is None else torch.from_numpy(n),
        steps=ones,
        epochs=ones.double(),
        delta=torch.from_numpy(vectors),
        loss=ones.double(),
        grad_sq=ones.double(),
        seconds=ones.double(),
    )
    play = rounds(Run.start(torch.zeros(d, dtype=torch.float64), setup, seed=0), setup)
    run, briefs = next(play)
    while briefs is not None:
        run, briefs = play.send(reports)
    return run.x.numpy()


@pytest.mark.parametrize("m", [5, 6])
def test_weights_count_like_copies(m: int) -> None:
    """A report of weight k is k reports of weight one, for the median and for a trimmed mean
    without a remainder.
    """
    vectors = np.random.default_rng(m).standard_normal((m, 8))
    copies = np.repeat(vectors, [1 + i % 3 for i in range(m)], axis=0)
    weighed = Algorithm((Vectors(), *parse("median").rules))
    np.testing.assert_allclose(aggregate(weighed, vectors), np.median(copies, axis=0), atol=1e-14)


@pytest.mark.parametrize(
    "name", sorted(set(GUARDS) & {"median", "trimmedmean", "krum", "geometricmedian"})
)
def test_a_minority_cannot_move_it_far(name: str) -> None:
    """Three of ten reports at 1e6 in the same place; the honest ones lie around one point."""
    rng = np.random.default_rng(0)
    vectors = 1 + 0.1 * rng.standard_normal((10, 40))
    vectors[[1, 4, 8]] = 1e6
    option = "(share=0.3)" if name in ("trimmedmean", "krum") else ""
    assert np.abs(aggregate(name + option, vectors) - 1).max() < 0.4
    assert np.abs(aggregate("fedavg", vectors) - 1).min() > 1e5


def _byzfl(module: str) -> types.ModuleType:
    """A part of byzfl without its package's __init__, which imports torchvision for its benchmark."""
    spec = importlib.util.find_spec("byzfl")
    if spec is None:
        pytest.skip("byzfl is not installed")
    if "byzfl" not in sys.modules:
        package = types.ModuleType("byzfl")
        package.__path__ = list(spec.submodule_search_locations or ())
        package.__spec__ = spec
        sys.modules["byzfl"] = package
    return importlib.import_module(f"byzfl.{module}")


@pytest.mark.parametrize("m", [10, 11])
def test_the_same_as_byzfl(m: int) -> None:
    found = _byzfl("aggregators")
    vectors = np.random.default_rng(m).standard_normal((m, 30))
    vectors[:3] *= -20
    f = int(np.ceil(0.3 * m - 1e-9))
    # byzfl's Krum sums over n − f − 1 neighbours, the paper over n − f − 2: what the paper calls f,
    # it calls f + 1.
    same = {
        "median": found.Median(),
        "trimmedmean(share=0.3)": found.TrMean(f=f),
        "krum(share=0.2)": found.Krum(f=int(np.ceil(0.2 * m - 1e-9)) + 1),
        f"krum(share=0.2, keep={m - f})": found.MultiKrum(f=f)
        if f == int(np.ceil(0.2 * m - 1e-9)) + 1
        else None,
        "geometricmedian(nu=0.1)": found.GeometricMedian(nu=0.1, T=3),
        "centeredclipping(tau=2.0, iterations=4)": found.CenteredClipping(L=4, tau=2.0),
        "normclipping(norm=2.0)": lambda rows: found.Average()(found.Clipping(c=2.0)(rows.copy())),
        "nnm(share=0.3) + median": lambda rows: found.Median()(found.NNM(f=f)(rows)),
        "nnm(share=0.3) + trimmedmean(share=0.3)": lambda rows: found.TrMean(f=f)(
            found.NNM(f=f)(rows)
        ),
    }
    for text, theirs in same.items():
        if theirs is not None:
            np.testing.assert_allclose(
                aggregate(text, vectors), theirs(vectors), atol=1e-12, err_msg=text
            )


def test_a_bucket_counts_once_in_krum() -> None:
    """Of buckets of two, Krum sees five vectors, not pairs at distance zero."""
    vectors = np.random.default_rng(3).standard_normal((10, 6))
    drawn = stream(0, "bucketing", 0).permutation(10) // 2
    means = np.array([vectors[drawn == each].mean(0) for each in range(5)])
    f = min(int(np.ceil(0.2 * 10)), 2)
    scores = [np.sort(((means - row) ** 2).sum(1))[1 : 1 + 5 - f - 2].sum() for row in means]
    np.testing.assert_allclose(
        aggregate("bucketing + krum", vectors), means[np.argmin(scores)], atol=1e-14
    )


ROBUST = sorted(name for name, rule in RULES.items() if issubclass(rule, Robust))


@pytest.mark.parametrize(("one", "other"), [*combinations(ROBUST, 2)])
def test_two_means_are_refused(one: str, other: str) -> None:
    with pytest.raises(
        UserError, match=f"^{one} and {other} cannot be combined: both replace the mean"
    ):
        parse(f"{one} + {other}")


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("median + fedaware", "fedaware steps along the updates that it remembers of every client"),
        ("fednova + median", "fednova corrects the weighted mean, which median replaces"),
        ("fedmut + krum", "start on opposite sides of the model"),
        (
            "scaffold + nnm",
            "scaffold remembers every client's own update, which nnm mixes with others'",
        ),
        ("bucketing + nnm", "both mix the updates"),
        ("normclipping + centeredclipping", "both clip the same updates"),
    ],
)
def test_what_makes_no_sense_is_refused(text: str, why: str) -> None:
    with pytest.raises(UserError, match=why):
        parse(text)


def test_what_no_rule_protects_is_said() -> None:
    def said(text: str) -> list[str]:
        setup = Setup(
            parse(text),
            Recipe(rounds=1, cohort=1),
            1,
            layout_of(torch.nn.Linear(2, 1)),
            detectors=(FGN(),),
        )
        return verdicts(Run.start(torch.zeros(3), setup, seed=0), setup)

    for text in ("scaffold + median", "scaffold + limits", "scaffold + centeredclipping + limits"):
        assert said(text) == [
            "scaffold learns from what every single client reported in all rounds, which no rule bounds: one lying "
            "client can ruin the run; without it, the direction is protected"
        ]
    assert said("fedcm + median + limits") == []


@pytest.mark.parametrize(
    "text",
    [
        "trimmedmean(share=0.5)",
        "krum(share=-0.1)",
        "krum(keep=-1)",
        "geometricmedian(nu=0)",
        "bucketing(size=0)",
    ],
)
def test_impossible_options_are_refused(text: str) -> None:
    with pytest.raises(UserError, match="is not allowed; use"):
        parse(text)
