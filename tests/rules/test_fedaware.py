"""FedAWARE against numpy and a non-negative least-squares solver, and the identities it must keep."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from problems import Flaky, course, follow, recipe, task
from reference import COHORTS, Cohort, Network, Problem, Quadratic, Setting, fedavg, shares, train
from scipy.optimize import nnls

from kairosfl.core.fields import Briefs, Reports
from kairosfl.core.recipe import Recipe
from kairosfl.core.round import drive, recorded, rounds
from kairosfl.core.rule import Algorithm
from kairosfl.core.run import Run, Setup
from kairosfl.detectors import FGN
from kairosfl.engines.loop import Loop
from kairosfl.errors import UserError
from kairosfl.rules import FedAvgM, FedAWARE, FedCL, parse
from kairosfl.rules import fedaware as module
from kairosfl.runs.checkpoint import Checkpoints

PROBLEMS = pytest.mark.parametrize(
    "problem", [Quadratic(), Network()], ids=["quadratic", "network"]
)
EVERYONE = (Cohort((0, 1, 2, 3, 4)),) * 4
ALONE = "project=false"  # the rule that picks the tests' cohorts counts as a base method


def nearest(vectors: np.ndarray) -> np.ndarray:
    """λ of the least-norm point between these rows, from the vectors themselves."""
    found, _ = nnls(
        np.vstack([vectors.T, np.ones(len(vectors))]), np.append(np.zeros(vectors.shape[1]), 1.0)
    )
    return found / found.sum()


@dataclass
class Expected:
    """FedAWARE in numpy: moving averages of every client seen, and the model after every round."""

    course: list[np.ndarray] = field(default_factory=list)
    weights: list[dict[int, float]] = field(default_factory=list)
    averages: dict[int, np.ndarray] = field(default_factory=dict)


def unit(vector: np.ndarray) -> np.ndarray:
    return vector / np.linalg.norm(vector)


def aware(
    problem: Problem,
    cohorts: Sequence[Cohort],
    *,
    alpha: float = 0.5,
    lr: float = 1.0,
    normalise: bool = True,
    solve: Callable[[np.ndarray], np.ndarray] = nearest,
    base: Callable[[np.ndarray], np.ndarray] | None = None,
    kept: slice = slice(None),
) -> Expected:
    """`base` makes a direction of the mean update, which is then projected; `kept` are the numbers
    that are stored.
    """
    setting, x, out = Setting(), problem.x, Expected()
    for t, cohort in enumerate(cohorts):
        if ids := cohort.reported:
            updates = {i: train(problem, setting, t, i, x).w - x for i in ids}
            for i, g in updates.items():
                out.averages[i] = (1 - alpha) * out.averages.get(i, 0.0) + alpha * g[kept]
            seen = sorted(out.averages)
            length = unit if normalise else np.asarray
            vectors = np.array([length(out.averages[i]) for i in seen])
            weights = dict(zip(seen, solve(vectors), strict=True))
            if kept == slice(None):
                d = np.array(list(weights.values())) @ vectors
            else:
                total = sum(weights[i] for i in ids)
                d = sum(weights[i] / total * length(updates[i]) for i in ids)
            if base is not None:
                direction = base(shares(problem, ids, "samples") @ np.array(list(updates.values())))
                d = (direction @ d) / (d @ d) * d if d @ d > 1e-10 else direction
            x = x + lr * d
            out.weights.append(weights)
        out.course.append(x)
    return out


@PROBLEMS
@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("", {}),
        ("alpha=0.3, lr=0.2, ", {"alpha": 0.3, "lr": 0.2}),
        ("normalise=false, ", {"normalise": False}),
        ("alpha=1.0, normalise=false, ", {"alpha": 1.0, "normalise": False}),
    ],
)
def test_six_rounds(problem: Problem, text: str, options: dict[str, float]) -> None:
    expected = aware(problem, COHORTS, **options)
    runs = follow(problem, Setting(), COHORTS, f"fedaware({text}{ALONE})")
    np.testing.assert_allclose([run.x.numpy() for run in runs], expected.course, rtol=0, atol=3e-6)
    end = runs[-1]
    assert sorted(end.tables[1].ids) == [0, 1, 2, 3, 4]
    stored = end.tables[1].rows(torch.arange(5))["average"].numpy()
    np.testing.assert_allclose(stored, [expected.averages[i] for i in range(5)], rtol=0, atol=3e-6)


def test_lambda_is_kept_by_slot() -> None:
    runs = follow(Network(), Setting(), COHORTS, f"fedaware({ALONE})")
    expected = iter(aware(Network(), COHORTS).weights)
    for run, cohort in zip(runs, COHORTS, strict=True):
        if cohort.reported:
            found = dict(
                zip(runs[-1].tables[1].ids, run.states[1]["lambda"].tolist(), strict=False)
            )
            assert found == pytest.approx(
                next(expected), abs=1e-5
            )  # unseen clients have no part in it
            assert sum(found.values()) == pytest.approx(1, abs=1e-12)


@PROBLEMS
def test_projection_of_server_momentum(problem: Problem) -> None:
    velocity = np.zeros_like(problem.x)

    def momentum(mean: np.ndarray) -> np.ndarray:
        nonlocal velocity
        velocity = 0.7 * velocity + mean
        return velocity

    expected = aware(problem, COHORTS, base=momentum)
    found = course(problem, Setting(), COHORTS, "fedavgm(beta=0.7) + fedaware")
    np.testing.assert_allclose(found, expected.course, rtol=0, atol=1e-5)


@PROBLEMS
def test_projection_of_the_plain_mean(problem: Problem) -> None:
    expected = aware(problem, COHORTS, base=lambda mean: mean, lr=0.5)
    found = course(problem, Setting(), COHORTS, "fedaware(project=true, lr=0.5)")
    np.testing.assert_allclose(found, expected.course, rtol=0, atol=1e-5)


def test_the_base_direction_stays_where_there_is_nothing_to_project_on() -> None:
    run = given([[1, 0, 2, 0], [-3, 0, -6, 0]], "fedaware(project=true)")
    np.testing.assert_allclose(
        run.x, [-1, 0, -2, 0], atol=1e-6
    )  # the plain mean, not some direction of rounding


def test_it_steps_last_and_projects_beside_base_methods_alone() -> None:
    job = task(Network())

    def end(algorithm: Algorithm) -> torch.Tensor:
        setup = Setup(algorithm, Recipe(rounds=3, cohort=4), 5, job.layout, detectors=(FGN(),))
        *_, run = drive(rounds(Run.start(job.start(), setup, seed=7), setup), Loop(job))
        return run.x

    forced, free = FedAWARE(project=True), FedAWARE(project=False)
    assert torch.equal(end(FedAvgM() + FedAWARE()), end(forced + FedAvgM()))
    assert torch.equal(end(FedCL() + FedAWARE()), end(FedCL() + free))
    assert torch.equal(end(Algorithm((FedAWARE(),))), end(Algorithm((free,))))
    assert not torch.equal(end(Algorithm((forced,))), end(Algorithm((free,))))


def test_of_one_client_it_takes_the_unit_update() -> None:
    problem, setting = Network(), Setting()
    cohorts, x = (Cohort((2,)),) * 3, problem.x
    found = course(problem, setting, cohorts, f"fedaware(alpha=1.0, lr=0.25, {ALONE})")
    for t in range(3):
        x = x + 0.25 * unit(train(problem, setting, t, 2, x).w - x)
        np.testing.assert_allclose(found[t], x, rtol=0, atol=1e-6)


def test_of_equal_updates_it_takes_that_update() -> None:
    problem, setting = Quadratic(sizes=(3, 3, 3)), Setting(batch=3)
    problem.A, problem.b = [problem.A[0]] * 3, [problem.b[0]] * 3
    cohorts = (Cohort((0, 1, 2)),) * 3
    runs = follow(problem, setting, cohorts, f"fedaware(normalise=false, alpha=1.0, {ALONE})")
    np.testing.assert_allclose(
        [run.x for run in runs], fedavg(problem, setting, cohorts), rtol=0, atol=1e-6
    )
    np.testing.assert_allclose(runs[-1].states[1]["lambda"], [1 / 3] * 3, rtol=1e-6)


def test_no_client_disagrees_with_its_direction() -> None:
    """⟨u_i, d⟩ ≥ ⟨d, d⟩ for every client: what the min-norm point is for."""
    runs = follow(Network(), Setting(), COHORTS, f"fedaware({ALONE})")
    step = (runs[-1].x - runs[-2].x).numpy()
    averages = runs[-1].tables[1].rows(torch.arange(5))["average"].numpy()
    assert min(unit(m) @ step for m in averages) >= step @ step - 1e-6


def test_moving_averages_alone() -> None:
    problem = Network()
    seen: set[int] = set()
    answered = iter([cohort.reported for cohort in COHORTS if cohort.reported])

    def by_samples(vectors: np.ndarray) -> np.ndarray:
        seen.update(next(answered))
        return shares(problem, sorted(seen), "samples")

    expected = aware(problem, COHORTS, normalise=False, solve=by_samples)
    found = course(
        problem, Setting(), COHORTS, f"fedaware(adaptive=false, normalise=false, {ALONE})"
    )
    np.testing.assert_allclose(found, expected.course, rtol=0, atol=3e-6)


@PROBLEMS
@pytest.mark.parametrize("normalise", [True, False])
def test_a_ridge_draws_lambda_towards_uniform(problem: Problem, normalise: bool) -> None:
    """min ‖Σ λ_i v_i‖² + r ‖λ − uniform‖² is the least-norm point of the rows (v_i, √r e_i), up to
    a constant.
    """

    def ridged(vectors: np.ndarray) -> np.ndarray:
        root = (0.2 * (vectors**2).sum(1).mean()) ** 0.5
        return nearest(np.hstack([vectors, root * np.eye(len(vectors))]))

    expected = aware(problem, COHORTS, lr=0.1, normalise=normalise, solve=ridged)
    text = f"fedaware(ridge=0.2, lr=0.1, normalise={normalise}, {ALONE})"
    np.testing.assert_allclose(
        course(problem, Setting(), COHORTS, text), expected.course, rtol=0, atol=3e-6
    )


def test_a_large_ridge_is_the_plain_mean_and_none_is_the_exact_point() -> None:
    def uniform(vectors: np.ndarray) -> np.ndarray:
        return np.full(len(vectors), 1 / len(vectors))

    plain = aware(Network(), COHORTS, lr=0.1, solve=uniform)
    found = course(Network(), Setting(), COHORTS, f"fedaware(ridge=1e7, lr=0.1, {ALONE})")
    np.testing.assert_allclose(found, plain.course, rtol=0, atol=1e-5)
    none, zero = (
        course(Network(), Setting(), COHORTS, f"fedaware({text}{ALONE})")
        for text in ("", "ridge=0, ")
    )
    np.testing.assert_array_equal(none, zero)


@pytest.mark.parametrize("solver", ["active_set", "frank_wolfe"])
def test_solvers_agree_to_their_precision(solver: str) -> None:
    expected = aware(Network(), COHORTS, lr=0.1)
    found = course(Network(), Setting(), COHORTS, f"fedaware(solver='{solver}', lr=0.1, {ALONE})")
    np.testing.assert_allclose(
        found, expected.course, rtol=0, atol={"active_set": 1e-6, "frank_wolfe": 2e-3}[solver]
    )


def test_layers_weigh_the_full_updates_of_the_reporters() -> None:
    problem = Network()
    expected = aware(
        problem, COHORTS, kept=slice(-15, None)
    )  # the last two tensors: W2 of 12 numbers, b2 of 3
    runs = follow(problem, Setting(), COHORTS, f"fedaware(layers=2, {ALONE})")
    np.testing.assert_allclose([run.x.numpy() for run in runs], expected.course, rtol=0, atol=3e-6)
    assert runs[-1].tables[1].rows(torch.arange(5))["average"].shape == (5, 15)
    assert set(runs[-1].states[1]) == {"gram", "lambda"}  # the updates do not stay in the state


def test_all_layers_at_alpha_one_are_the_plain_rule() -> None:
    plain = course(Network(), Setting(), EVERYONE, f"fedaware(alpha=1.0, {ALONE})")
    layered = course(Network(), Setting(), EVERYONE, f"fedaware(alpha=1.0, layers=4, {ALONE})")
    np.testing.assert_allclose(layered, plain, rtol=0, atol=1e-6)


def test_a_cluster_for_every_client_is_the_plain_rule() -> None:
    plain = course(Network(), Setting(), COHORTS, f"fedaware({ALONE})")
    clustered = course(Network(), Setting(), COHORTS, f"fedaware(clusters=5, {ALONE})")
    np.testing.assert_allclose(clustered, plain, rtol=0, atol=1e-7)


def test_two_clusters() -> None:
    problem, setting, x = Network(), Setting(), Network().x
    cluster: dict[int, int] = {}
    averages: list[np.ndarray] = []
    expected = []
    for t, cohort in enumerate(COHORTS):
        if ids := cohort.reported:
            updates = {i: train(problem, setting, t, i, x).w - x for i in ids}
            centres = list(averages)
            for i in ids:
                if i not in cluster and len(centres) < 2:
                    cluster[i] = len(centres)
                    centres.append(updates[i])
                elif i not in cluster:
                    cluster[i] = int(np.argmax([unit(c) @ updates[i] for c in centres]))
            averages += [np.zeros_like(x)] * (len(centres) - len(averages))
            for c in {cluster[i] for i in ids}:
                mean = np.mean([updates[i] for i in ids if cluster[i] == c], 0)
                averages[c] = 0.5 * averages[c] + 0.5 * mean
            vectors = np.array([unit(m) for m in averages])
            x = x + nearest(vectors) @ vectors
        expected.append(x)
    runs = follow(problem, setting, COHORTS, f"fedaware(clusters=2, {ALONE})")
    np.testing.assert_allclose([run.x.numpy() for run in runs], expected, rtol=0, atol=3e-6)
    slot, table = runs[-1].states[1], runs[-1].tables[1]
    assert slot["averages"].shape == (2, len(x))
    assert slot["gram"].shape == (2, 2)
    assert (
        dict(zip(table.ids, table.rows(torch.tensor(table.ids))["cluster"].tolist(), strict=True))
        == cluster
    )
    assert len(slot["lambda"]) == 5  # a cluster's weight is spread over its clients
    assert slot["lambda"].sum() == pytest.approx(1)


def test_rows_in_bfloat16() -> None:
    exact = follow(Network(), Setting(), COHORTS, f"fedaware({ALONE})")
    coarse = follow(Network(), Setting(), COHORTS, f"fedaware(dtype='bfloat16', {ALONE})")
    rows = coarse[-1].tables[1].rows(torch.arange(5))["average"]
    assert rows.dtype == torch.bfloat16
    assert not torch.equal(coarse[0].x, exact[0].x)
    np.testing.assert_allclose(coarse[0].x, exact[0].x, rtol=0, atol=4e-3)


def test_rows_on_the_cpu_are_the_same_rows() -> None:
    runs = [
        course(Network(), Setting(), COHORTS, f"fedaware(store='{store}', {ALONE})")
        for store in ("device", "cpu")
    ]
    assert np.array_equal(*runs)


def test_the_gram_matrix_is_that_of_the_rows_and_only_changed_rows_are_multiplied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    multiplied = []

    def watched(rows: torch.Tensor, blocks: list[torch.Tensor]) -> np.ndarray:
        multiplied.append(len(rows))
        return products(rows, blocks)

    products = module.products
    monkeypatch.setattr(module, "products", watched)
    end = follow(Network(), Setting(), COHORTS, f"fedaware({ALONE})")[-1]
    assert multiplied == [len(cohort.reported) for cohort in COHORTS if cohort.reported]
    rows = end.tables[1].rows(torch.tensor(end.tables[1].ids))["average"].double().numpy()
    gram = end.states[1]["gram"].numpy()
    np.testing.assert_allclose(gram, rows @ rows.T, rtol=1e-5, atol=1e-9)
    assert np.array_equal(gram, gram.T)


def test_products_and_sums_over_many_blocks_and_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "NARROW", 7)
    monkeypatch.setattr(module, "WIDE", 11)
    draw = np.random.default_rng(0)
    whole = draw.normal(size=(10, 50))
    blocks = [torch.from_numpy(part).float() for part in np.split(whole, [4, 8])]
    np.testing.assert_allclose(module.products(blocks[1], blocks), whole[4:8] @ whole.T, atol=1e-4)
    weights = draw.random(10)
    np.testing.assert_allclose(module.weighted_sum(weights, blocks), weights @ whole, atol=1e-5)


@pytest.mark.parametrize("together", [1, 2, 3, 16])
def test_blocks_of_one_row_are_multiplied_together(
    together: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "TOGETHER", together)
    whole = np.random.default_rng(0).normal(size=(7, 50))
    blocks = [torch.from_numpy(row).float() for row in whole[:, None]]
    groups = [len(group) for group in module.grouped(blocks)]
    assert groups == {1: [1] * 7, 2: [2, 2, 2, 1], 3: [3, 3, 1], 16: [7]}[together]
    np.testing.assert_allclose(
        module.products(torch.cat(blocks[2:5]), blocks), whole[2:5] @ whole.T, atol=1e-4
    )
    weights = np.arange(1.0, 8.0)
    np.testing.assert_allclose(module.weighted_sum(weights, blocks), weights @ whole, atol=1e-4)


# Exploration chooses the cohorts itself, so these runs have no rule that picks them.


class Broken(Loop):
    """Client 3 always reports what cannot be used."""

    def train(self, briefs: Briefs) -> Reports:
        reports = super().train(briefs)
        return replace(reports, loss=torch.where(reports.ids == 3, float("nan"), reports.loss))


def explored(
    engine_lost: Sequence[tuple[int, ...]],
    text: str,
    rounds_: int,
    cohort: int = 2,
    loop: type[Loop] = Loop,
) -> list[Run]:
    job = task(Network())
    engine = Flaky(loop(job), engine_lost)
    setup = Setup(
        parse(text),
        replace(recipe(Setting(), COHORTS), rounds=rounds_, cohort=cohort),
        5,
        job.layout,
        detectors=(FGN(),),
    )
    return list(drive(rounds(Run.start(job.start(), setup, seed=7), setup), engine))


def test_exploration_visits_everyone_and_averages_until_then() -> None:
    runs = explored([()] * 3, "fedaware(explore=true)", 3)
    cohorts = [Cohort(tuple(run.record.ids.tolist())) for run in runs]
    assert [len(cohort.asked) for cohort in cohorts] == [2] * 3
    assert len({*cohorts[0].asked, *cohorts[1].asked}) == 4  # nobody twice while others wait
    assert {i for cohort in cohorts[:3] for i in cohort.asked} == set(range(5))
    np.testing.assert_allclose(
        [run.x for run in runs[:2]], fedavg(Network(), Setting(), cohorts[:2]), atol=1e-12
    )
    assert len(runs[1].states[0]["lambda"]) == 0
    # The round in which the last client is met is AWARE's, with the averages of all rounds.
    before = runs[1].x.numpy()
    averages = dict(
        zip(
            runs[2].tables[0].ids, torch.cat(list(runs[2].tables[0].column("average"))), strict=True
        )
    )
    vectors = np.array([unit(averages[i].double().numpy()) for i in range(5)])
    np.testing.assert_allclose(runs[2].x.numpy() - before, nearest(vectors) @ vectors, atol=3e-6)


@pytest.mark.parametrize(("lost", "loop"), [((3,), Loop), ((), Broken)])
def test_a_client_of_no_use_does_not_hold_up_exploration(
    lost: tuple[int, ...], loop: type[Loop]
) -> None:
    runs = explored([lost] * 6, "fedaware(explore=true)", 6, loop=loop)
    assert runs[-1].states[0]["seen"].all()
    assert sorted(runs[-1].tables[0].ids) == [0, 1, 2, 4]
    assert len(runs[-1].states[0]["lambda"]) == 4


@pytest.mark.parametrize(("cohort", "dead"), [(2, (3, 4)), (1, (4,)), (3, (0, 1, 2, 4))])
def test_as_many_dead_clients_as_a_cohort_do_not_hold_it_up(
    cohort: int, dead: tuple[int, ...]
) -> None:
    runs = explored([dead] * 12, "fedaware(explore=true)", 12, cohort=cohort)
    assert runs[-1].states[0]["seen"].all()
    assert runs[-1].idle < 5


@pytest.mark.parametrize(
    "text", ["fedcl + fedaware(explore=true)", "fedaware(explore=true) + fedcl"]
)
def test_exploration_beside_a_growing_cohort(text: str) -> None:
    runs = explored([()] * 4, text, 4)
    assert next(
        state["seen"] for state in runs[1].states if "seen" in state
    ).all()  # 2 clients, then 4, of 5
    assert [run.record.asked for run in runs] == [2, 4, *(run.record.asked for run in runs[2:])]


@pytest.mark.parametrize(
    "options",
    [
        "",
        "explore=true",
        "layers=2",
        "clusters=2",
        "dtype='bfloat16'",
        "adaptive=false",
        "normalise=false",
    ],
)
def test_resumes_to_the_bit(options: str, tmp_path: Path) -> None:
    job, how = task(Network()), replace(recipe(Setting(), COHORTS), rounds=6, cohort=2)
    setup = Setup(parse(f"fedaware({options})"), how, 5, job.layout, detectors=(FGN(),))

    def go(run: Run) -> Iterator[Run]:
        return drive(rounds(run, setup), Loop(job))

    def blank() -> Run:
        return Run.start(job.start(), setup, seed=7)

    checkpoints = Checkpoints(tmp_path)
    runs = []
    for run in go(blank()):
        runs.append(run)
        if run.round == 3:
            checkpoints.save(run, {})
    loaded, _ = Checkpoints(tmp_path).load(blank())
    again = list(go(loaded))
    assert [run.round for run in again] == [4, 5, 6]
    for one, other in zip(runs[3:], again, strict=True):
        assert torch.equal(one.x, other.x)
        assert all(
            torch.equal(value, other.states[0][name]) for name, value in one.states[0].items()
        )


class Given:
    """An engine that answers with given updates."""

    def __init__(self, updates: list[list[float]]) -> None:
        self.updates = torch.tensor(updates, dtype=torch.float32)

    def train(self, briefs: Briefs) -> Reports:
        m = len(briefs)
        ones = torch.ones(m, dtype=torch.float64)
        return Reports(
            ids=briefs.ids,
            n=torch.ones(m, dtype=torch.int64),
            steps=torch.ones(m, dtype=torch.int64),
            epochs=ones,
            delta=self.updates[briefs.ids],
            loss=ones,
            grad_sq=ones,
            seconds=ones,
        )


def given(updates: list[list[float]], text: str) -> Run:
    count, layout = len(updates), task(Quadratic()).layout  # three numbers, then one
    setup = Setup(parse(text), Recipe(rounds=1, cohort=count), count, layout, detectors=(FGN(),))
    *_, run = drive(
        rounds(Run.start(torch.zeros(len(updates[0])), setup, seed=0), setup), Given(updates)
    )
    return run


def test_by_hand() -> None:
    # Units (1,0,0,0), (0,1,0,0), (−0.6,0.8,0,0): the first and third are nearest to the origin, in
    # the middle of both (0.2, 0.4); the second is on the far side of the plane through it.
    run = given([[2, 0, 0, 0], [0, 5, 0, 0], [-3, 4, 0, 0]], "fedaware")
    np.testing.assert_allclose(run.states[0]["lambda"], [0.5, 0, 0.5], atol=1e-7)
    np.testing.assert_allclose(run.x, [0.2, 0.4, 0, 0], atol=1e-7)
    # Raw: halves (1,0), (0,2.5), (−1.5,2). Between the first and third: 1 − 2.5 s, 2 s, shortest at
    # s = 2.5 / 10.25.
    s = 2.5 / 10.25
    run = given([[2, 0, 0, 0], [0, 5, 0, 0], [-3, 4, 0, 0]], "fedaware(normalise=false)")
    np.testing.assert_allclose(run.states[0]["lambda"], [1 - s, 0, s], atol=1e-7)
    np.testing.assert_allclose(run.x, [1 - 2.5 * s, 2 * s, 0, 0], atol=1e-7)


@pytest.mark.parametrize("text", ["fedaware", "fedaware(normalise=false)", "fedaware(clusters=2)"])
def test_diversity_and_distance_to_uniform_weights(text: str) -> None:
    """Definition 4.1 and the χ² of Corollary 4.1, from the vectors."""
    updates = np.array([[4.0, 0.0, 1.0, 0.0], [0.0, 2.0, 1.0, 0.5], [3.0, -1.0, 0.5, 1.0]])
    run = given(updates.tolist(), text)
    mine = run.states[0]["lambda"].numpy()
    clusters = [0, 1, 0] if "clusters" in text else [0, 1, 2]
    averages = np.stack(
        [0.5 * updates[np.equal(clusters, each)].mean(0) for each in sorted(set(clusters))]
    )
    shares = np.bincount(clusters, mine)
    if "normalise" not in text:
        averages /= np.linalg.norm(averages, axis=1, keepdims=True)
    diversity = np.sqrt(shares @ (averages**2).sum(1) / np.sum((shares @ averages) ** 2))
    setup = Setup(
        parse(text), Recipe(rounds=1, cohort=3), 3, task(Quadratic()).layout, detectors=(FGN(),)
    )
    found = recorded(run, setup)
    assert found["lud"] == pytest.approx(diversity, rel=1e-6)
    assert found["chi_square"] == pytest.approx(np.sum((1 / 3 - mine) ** 2 / (1 / 3)), rel=1e-12)


def test_an_update_of_length_zero_is_left_out() -> None:
    run = given([[0, 0, 0, 0], [3, 0, 0, 0], [0, 0, 4, 0]], "fedaware")
    np.testing.assert_allclose(run.states[0]["lambda"], [0, 0.5, 0.5])
    np.testing.assert_allclose(run.x, [0.5, 0, 0.5, 0], rtol=1e-6)
    for text in (
        "fedaware",
        "fedaware(project=true)",
        "fedaware(layers=1)",
        "fedaware(clusters=2)",
    ):
        assert torch.equal(given([[0, 0, 0, 0]] * 3, text).x, torch.zeros(4))


def test_opposite_updates_do_not_move_the_model() -> None:
    np.testing.assert_allclose(
        given([[1, 0, 2, 0], [-3, 0, -6, 0]], "fedaware").x, np.zeros(4), atol=1e-7
    )


def test_reporters_that_lambda_passes_over_count_alike() -> None:
    shared = FedAWARE(layers=1)._over_reporters(
        torch.zeros(2, dtype=torch.float64), torch.tensor([[2.0, 0], [0, 4.0]])
    )
    np.testing.assert_allclose(shared, [0.5, 0.5])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("feddyn + fedaware", "feddyn does not follow the global gradient descent rule"),
        ("fedaware(alpha=0)", "alpha = 0 is not allowed"),
        ("fedaware(solver='simplex')", "use 'active_set' or 'frank_wolfe'"),
        ("fedaware(project='yes')", "use true, false, or none"),
        ("fedaware(ridge=-1)", "use 0 for the shortest mean or more"),
        ("fedaware(ridge=0.1, solver='frank_wolfe')", "use solver='active_set', or 0"),
        ("fedaware(layers=-1)", "layers = -1"),
        ("fedaware(dtype='float16')", "use 'float32' or 'bfloat16'"),
        ("fedaware(store='disk')", "use 'device' or 'cpu'"),
    ],
)
def test_refusals(text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        parse(text)


def test_layers_beyond_the_model_are_refused() -> None:
    with pytest.raises(UserError, match="layers = 3 is not allowed; the model has 2 tensors"):
        given([[1, 0, 0, 0]], "fedaware(layers=3)")
