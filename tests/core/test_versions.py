"""Cohorts of several versions of the model, models that clients hold in place of the server's, and
low-rank pairs of unequal ranks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from test_visits import LR, SIZES, START, course, data, engines, slope, squares, task, updates
from torch import Tensor, nn

from kairosfl.core.fields import Briefs, Reports
from kairosfl.core.layout import Layout
from kairosfl.core.mass import mean_gradients
from kairosfl.core.recipe import Recipe
from kairosfl.core.round import accept, conclude, drive, rounds
from kairosfl.core.rule import Algorithm, Memory, Round, Rule
from kairosfl.core.run import Run, Setup, upcoming
from kairosfl.engines.batched import Batched
from kairosfl.engines.loop import Loop
from kairosfl.errors import UserError
from kairosfl.tasks.dataset import DataSet, Samples
from kairosfl.tasks.population import Population
from kairosfl.tasks.task import Task


def briefs(round: int, ids: list[int], start: Tensor, **terms: object) -> Briefs:
    return Briefs(seed=0, round=round, ids=torch.tensor(ids), start=start, lr=LR, **terms)  # type: ignore[arg-type]


def test_orders_of_several_versions_make_one_cohort() -> None:
    old, new = torch.zeros(3), torch.ones(3)
    joined = Briefs.join([briefs(4, [1, 5], new), briefs(2, [3], old)])
    assert joined.ids.tolist() == [1, 3, 5]
    assert joined.round.tolist() == [4, 2, 4]
    assert joined.start.tolist() == [[1.0] * 3, [0.0] * 3, [1.0] * 3]
    assert joined.push is None


def test_what_all_of_them_share_stays_shared() -> None:
    start, push = torch.zeros(3), torch.ones(3)
    one, other = briefs(1, [4], start, push=push), briefs(1, [2], start, push=push)
    joined = Briefs.join([one, other])
    assert joined.start is start
    assert joined.push is push
    assert Briefs.join([one]).ids.tolist() == [4]


def test_what_only_some_were_told_means_the_same_for_the_others() -> None:
    """A joined cohort trains as its parts do: 0 is no push, and NaN no stop rule."""
    start, later = torch.zeros(3), torch.ones(3)
    told = briefs(
        1,
        [2, 6],
        later,
        push=torch.full((3,), 2.0),
        stop_below=0.5,
        stop_reference=torch.full((3,), 9.0),
        max_steps=[3, 4],
        offset=torch.full((3,), 7.0),
        version=torch.full((3,), -6.0),
    )
    joined = Briefs.join([told, briefs(0, [4], start)])
    assert joined.push.tolist() == [[2.0] * 3, [0.0] * 3, [2.0] * 3]
    assert joined.stop_reference.tolist() == [[9.0] * 3, [0.0] * 3, [9.0] * 3]
    assert joined.offset.tolist() == [[7.0] * 3, [0.0] * 3, [7.0] * 3]
    assert joined.version.tolist() == [[-6.0] * 3, [0.0] * 3, [-6.0] * 3]  # its start
    assert joined.max_steps.tolist() == [3, 2**31 - 1, 4]
    assert math.isnan(joined.stop_below[1])
    assert [row.stop_below for row in joined.each()] == [0.5, None, 0.5]


def test_a_measurement_that_only_some_made_is_left_out() -> None:
    ones = torch.ones(1, dtype=torch.float64)
    plain = Reports(
        ids=torch.tensor([3]),
        n=ones.long(),
        steps=ones.long(),
        epochs=ones,
        delta=torch.zeros(1, 3),
        loss=ones,
        grad_sq=ones,
        seconds=ones,
        failed=((8, "lost"),),
    )
    scored = replace(plain, ids=torch.tensor([1]), score_before=ones, failed=((9, "late"),))
    joined = Reports.join([plain, scored])
    assert joined.ids.tolist() == [1, 3]
    assert joined.score_before is None
    assert joined.failed == ((8, "lost"), (9, "late"))
    assert Reports.join([scored]).score_before is ones


@dataclass(frozen=True, kw_only=True)
class Holds(Rule):
    """Clients hold a model of their own, and may be placed beside it."""

    beside: float = 0.0

    def brief(self, briefs: Briefs, memory: Memory, now: Round) -> Briefs:
        held = torch.round(4 * now.x) / 4
        placed = torch.full_like(now.x, self.beside) if self.beside else None
        return replace(briefs, version=held, offset=placed)


@engines
@pytest.mark.parametrize("beside", [0.0, 0.1])
def test_an_update_is_measured_from_the_model_that_the_client_holds(
    engine: str, beside: float
) -> None:
    held = np.round(4 * START) / 4
    begun = held + beside
    (run,) = course(Holds(beside=beside), engine)
    moved = np.array([begun - LR * slope(begun, client) - held for client in range(3)])
    np.testing.assert_allclose(updates(run), moved, atol=1e-14)
    shares = np.array(SIZES) / sum(SIZES)
    np.testing.assert_allclose(run.x, START + shares @ moved, atol=1e-14)


def test_a_placed_client_of_an_old_version_is_measured_from_that_version() -> None:
    """FedMut's clients in a buffer: start − version is added back, not start − x."""
    seen = {}

    @dataclass(frozen=True, kw_only=True)
    class Looks(Rule):
        def observe(self, memory: Memory, now: Round) -> Memory:
            seen.update(trained=now.trained(), gradients=mean_gradients(now))
            return memory

    job = task()
    setup = Setup(Algorithm((Looks(),)), Recipe(rounds=9, cohort=2, lr=LR), 3, job.layout)
    run = replace(Run.start(job.start(), setup, seed=0), round=5)
    placed = torch.full((3,), 0.5, dtype=torch.float64)
    old = briefs(2, [0], run.x + 1 + placed, version=run.x + 1, offset=placed)
    landed = Briefs.join([old, briefs(5, [2], run.x)])
    reports = Loop(job).train(landed)
    own = reports.delta.clone()
    conclude(run, setup, upcoming(run, setup), landed, reports)
    torch.testing.assert_close(seen["trained"], landed.start + own)
    torch.testing.assert_close(seen["gradients"], -own / LR)


def test_a_choice_that_was_not_offered_is_rejected() -> None:
    job = task()
    asked = replace(briefs(0, [0, 1, 2], job.start()), candidates=job.start().expand(2, -1))
    reports = Loop(job).train(asked)
    _, usable, _, rejected = accept(asked, replace(reports, choice=torch.tensor([0, 2, 1])))
    assert usable.ids.tolist() == [0, 2]
    assert rejected == ((1, "its choice is 2"),)


def test_the_model_that_a_client_chose_is_the_one_its_update_is_measured_from() -> None:
    job = task()
    setup = Setup(Algorithm(), Recipe(rounds=1, cohort=3, lr=LR), 3, job.layout)
    candidates = torch.stack([job.start(), job.start() + 1])
    asked = replace(briefs(0, [0, 1, 2], job.start()), candidates=candidates)
    reports = replace(Loop(job).train(asked), choice=torch.tensor([1, 0, 1]))
    now = replace(
        upcoming(Run.start(job.start(), setup, seed=0), setup), briefs=asked, reports=reports
    )
    assert torch.equal(now.trained(), candidates[[1, 0, 1]] + reports.delta)


# Low-rank pairs.


class Adapted(nn.Module):
    """y = (W + 2 b a) x, with the sum of the outputs as prediction."""

    def __init__(self) -> None:
        super().__init__()
        rng = np.random.default_rng(3)
        self.a = nn.Parameter(torch.from_numpy(rng.standard_normal((3, 2))))
        self.b = nn.Parameter(torch.from_numpy(rng.standard_normal((4, 3))))
        self.w = nn.Parameter(torch.from_numpy(rng.standard_normal((4, 2))), requires_grad=False)

    def forward(self, x: Tensor) -> Tensor:
        return (x @ (self.w + 2 * self.b @ self.a).T).sum(1)


def adapted(
    pairs: tuple[tuple[str, str, str, float], ...] = (("a", "b", "w", 2.0),),
) -> Task:
    x, y = data()
    samples = Samples(torch.from_numpy(x), torch.from_numpy(y))
    clients = Population.from_lists(np.split(np.arange(len(x)), np.cumsum(SIZES)[:-1]))
    lines = DataSet("line", samples, samples, classes=0)
    return Task(Adapted(), lines, clients, loss=squares, metrics={}, pairs=pairs)


def test_the_layout_knows_its_pairs() -> None:
    layout = adapted().layout
    (pair,) = layout.pairs
    assert (pair.rank, pair.scale, pair.base.shape) == (3, 2.0, (4, 2))
    x = adapted().start()
    a, b = x[:6].view(3, 2), x[6:].view(4, 3)
    torch.testing.assert_close(pair.product(x), 2 * b @ a)
    torch.testing.assert_close(pair.product(torch.stack([x, 2 * x]))[1], 8 * b @ a)
    assert layout.within(2).tolist() == [True] * 4 + [False] * 2 + [True, True, False] * 4
    assert [layout.size_at(rank) for rank in (0, 1, 2, 3, 9)] == [0, 6, 12, 18, 18]
    assert int(layout.within(2).sum()) == 12


@pytest.mark.parametrize(
    ("pair", "sentence"),
    [
        (("q", "b", "w", 1.0), "'q' is the name of no shared tensor of the model; there are a, b"),
        (("a", "b", "a", 1.0), "'a' is the name of no frozen tensor of the model; there are w"),
        (("b", "a", "w", 1.0), r"have the shapes \[\[4, 3\], \[3, 2\], \[4, 2\]\]; they must be"),
    ],
)
def test_a_pair_that_is_none_is_refused(pair: tuple[str, str, str, float], sentence: str) -> None:
    with pytest.raises(UserError, match=f"pairs: .*{sentence}"):
        assert adapted((pair,)).layout


@dataclass(frozen=True, kw_only=True)
class Ranks(Rule):
    """Client i has i + 1 components, and a push that moves all of them."""

    def brief(self, briefs: Briefs, memory: Memory, now: Round) -> Briefs:
        return replace(briefs.pushed(torch.ones_like(now.x)), rank=briefs.ids + 1)


@engines
def test_a_client_has_only_the_components_of_its_rank(engine: str) -> None:
    job = adapted()
    how = Recipe(rounds=1, cohort=3, batch_size=8, lr=LR, epochs=2, weight_decay=0.1, momentum=0.5)
    setup = Setup(Algorithm((Ranks(),)), how, 3, job.layout)
    made = {"loop": Loop, "batched": Batched}[engine](job)
    (run,) = drive(rounds(Run.start(job.start(), setup, seed=0), setup), made)
    x, y = data()
    ends = np.cumsum(SIZES)
    frozen = job.model.w.numpy()
    for client, rows in enumerate(np.split(np.arange(len(x)), ends[:-1])):
        rank = client + 1
        a = job.model.a.detach().numpy()[:rank].copy()
        b = job.model.b.detach().numpy()[:, :rank].copy()
        begun = [a.copy(), b.copy()]
        speed = [np.zeros_like(a), np.zeros_like(b)]
        for _ in range(2):
            error = 2 * ((x[rows] @ (frozen + 2 * b @ a).T).sum(1) - y[rows]) / len(rows)
            slopes = np.ones((4, 1)) * (error @ x[rows])  # of the weights w + 2 b a
            steps = [2 * b.T @ slopes + 0.1 * a + 1, 2 * slopes @ a.T + 0.1 * b + 1]
            speed = [0.5 * v + step for v, step in zip(speed, steps, strict=True)]
            a, b = a - LR * speed[0], b - LR * speed[1]
        delta = updates(run)[client]
        np.testing.assert_allclose(delta[:6].reshape(3, 2)[:rank], a - begun[0], atol=1e-12)
        np.testing.assert_allclose(delta[6:].reshape(4, 3)[:, :rank], b - begun[1], atol=1e-12)
        assert not delta[:6].reshape(3, 2)[rank:].any()
        assert not delta[6:].reshape(4, 3)[:, rank:].any()
    # 6, 12 and 18 numbers of the model and of the push go down, and come up once
    assert run.record.bytes_down == 8 * (2 * (6 + 12 + 18) + 3 * _numbers(run))
    assert run.record.bytes_up == 8 * (6 + 12 + 18 + 3 * run.record.reports.numbers())


def _numbers(run: Run) -> int:
    return replace(briefs(0, [0], run.x), rank=torch.ones(1)).numbers()


def test_messages_in_another_form_have_the_bytes_that_they_have() -> None:
    layout = Layout.of({"w": torch.zeros(3)})
    told = replace(briefs(0, [1, 2], torch.zeros(3)), coded=torch.tensor([5, 7]))
    assert told.all_bytes(layout, 4) == 5 + 7 + 2 * 8 * told.numbers()
    assert replace(told, coded=None).all_bytes(layout, 4) == 2 * told.bytes(layout, 4)
    reports = Loop(task()).train(briefs(0, [0, 2], task().start()))
    coded = replace(reports, coded=torch.tensor([2, 3]))
    assert coded.all_bytes(told, layout, 8) == 2 + 3 + 2 * 8 * reports.numbers()
    assert reports.all_bytes(told, layout, 8) == 2 * reports.bytes(layout, 8)
