"""One client following one brief, against loops written by hand and the closed forms of FedNova's
paper.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from kairosfl.client.trainer import Trainer, batches
from kairosfl.core.fields import AFTER, BEFORE, Brief, Briefs, Report, Reports
from kairosfl.core.mass import mass, mean_gradients
from kairosfl.core.streams import Streams, key, stream
from kairosfl.tasks.dataset import DataSet, Samples
from kairosfl.tasks.population import Population
from kairosfl.tasks.prepare import mislabelled, sample_keys
from kairosfl.tasks.task import Task
from kairosfl.tasks.vector import flatten, load

SIZES = (11, 4, 8)


def network(*, dropout: float = 0.0) -> nn.Sequential:
    torch.manual_seed(1)
    layers = [
        nn.Linear(5, 6),
        nn.Tanh(),
        nn.Dropout(dropout),
        nn.Linear(6, 4),
        nn.Tanh(),
        nn.Linear(4, 3),
    ]
    return nn.Sequential(*layers).double()


def make_task(model: nn.Module | None = None) -> Task:
    rng = np.random.default_rng(0)
    n = sum(SIZES)
    samples = Samples(
        torch.from_numpy(rng.normal(size=(n, 5))), torch.from_numpy(rng.integers(0, 3, n))
    )
    clients = Population.from_lists(np.split(rng.permutation(n), np.cumsum(SIZES)[:-1]))
    return Task(model or network(), DataSet("small", samples, samples, classes=3), clients)


def make_brief(task: Task, **changes: object) -> Brief:
    return replace(
        Brief(seed=3, round=2, client=0, start=task.start(), lr=0.1, batch_size=4, epochs=3),
        **changes,
    )


def features(model: nn.Sequential, inputs: Tensor) -> Tensor:
    return model[:-1](inputs)


def epochs_of(task: Task, brief: Brief) -> Iterator[list[np.ndarray]]:
    """The batches as the design has them: one stream per (seed, round, client), a permutation for
    every epoch.
    """
    mine = task.clients[brief.client]
    rng = stream(brief.seed, "batches", brief.round, brief.client)
    for _ in range(brief.epochs):
        order = mine[rng.permutation(len(mine))]
        cut = [order[k : k + brief.batch_size] for k in range(0, len(order), brief.batch_size)]
        yield [rows for rows in cut if len(rows) == brief.batch_size] if brief.drop_last else cut


def by_hand(task: Task, brief: Brief) -> dict[str, object]:
    """The same with torch.optim.SGD and torch's own clipping, on a model of its own."""
    model = network()
    load(model, brief.start)
    start, global_, previous = network(), network(), network()
    load(start, brief.start if brief.stop_reference is None else brief.stop_reference)
    load(global_, brief.start)
    if brief.previous is not None:
        load(previous, brief.previous)
    shared = {"lr": brief.lr, "weight_decay": brief.weight_decay}
    optimiser: torch.optim.Optimizer = torch.optim.SGD(
        model.parameters(), momentum=brief.momentum, **shared
    )
    if brief.optimizer == "adamw":
        optimiser = torch.optim.AdamW(
            model.parameters(), betas=(brief.beta1, brief.beta2), eps=brief.eps, **shared
        )
    inputs, targets = task.dataset.train.inputs, task.dataset.train.targets
    losses, counts, squares, steps, done, similarity = [], [], [], 0, 0.0, 1.0
    for epoch in epochs_of(task, brief):
        stop, position = False, 0
        for rows in epoch:
            batch, labels = inputs[rows], targets[rows]
            z = features(model, batch)
            if brief.stop_below is not None:
                cosines = F.cosine_similarity(z, features(start, batch)).detach()
                similarity = float(
                    cosines.mean() if brief.stop_statistic == "mean" else cosines.min()
                )
                stop = stop or similarity < brief.stop_below

            def objective(batch: Tensor = batch, labels: Tensor = labels) -> Tensor:
                z = features(model, batch)
                loss = F.cross_entropy(model(batch), labels)
                if brief.previous is not None:
                    near = torch.exp(
                        F.cosine_similarity(z, features(global_, batch).detach())
                        / brief.temperature
                    )
                    far = torch.exp(
                        F.cosine_similarity(z, features(previous, batch).detach())
                        / brief.temperature
                    )
                    loss = loss - brief.contrast * torch.log(near / (near + far)).mean()
                return loss

            loss = objective()
            optimiser.zero_grad()
            loss.backward()
            if brief.radius:
                here, g = (
                    flatten(model),
                    torch.cat([p.grad.reshape(-1) for p in model.parameters()]),
                )
                squares.append(float(g @ g))
                load(model, here + brief.radius * g / g.norm())
                optimiser.zero_grad()
                objective().backward()
                load(model, here)
            if brief.clip < float("inf") and not brief.clip_after:
                nn.utils.clip_grad_norm_(model.parameters(), brief.clip)
            g = torch.cat([p.grad.reshape(-1) for p in model.parameters()])
            if not brief.radius:
                squares.append(float(g @ g))
            g = brief.scale * g + brief.pull * (flatten(model) - brief.start)
            if brief.push is not None and not brief.push_after:
                g = g + brief.push
            for parameter, part in zip(
                model.parameters(), g.split([p.numel() for p in model.parameters()]), strict=True
            ):
                parameter.grad = part.view_as(parameter)
            if brief.clip_after:
                before = nn.utils.clip_grad_norm_(model.parameters(), brief.clip)
                squares[-1] *= (
                    1 if brief.radius else min(1.0, brief.clip / (float(before) + 1e-6)) ** 2
                )
            optimiser.step()
            if brief.push is not None and brief.push_after:
                load(model, flatten(model) - brief.lr * brief.push)
            losses.append(float(loss.detach()))
            counts.append(len(rows))
            steps, position = steps + 1, position + 1
            if stop and brief.stop_per == "batch":
                break
        done += position / len(epoch)
        if stop:
            break
    return {
        "delta": (flatten(model) - brief.start).numpy(),
        "loss": float(np.average(losses, weights=counts)),
        "grad_sq": sum(squares),
        "steps": steps,
        "epochs": done,
        "similarity": None if brief.stop_below is None else similarity,
    }


def agree(report: Report, want: dict[str, object]) -> None:
    np.testing.assert_allclose(report.delta.numpy(), want["delta"], rtol=0, atol=1e-13)
    for name in ("loss", "grad_sq", "epochs"):
        assert getattr(report, name) == pytest.approx(want[name], rel=1e-12), name
    assert report.steps == want["steps"]
    assert (report.similarity is None) == (want["similarity"] is None)
    if report.similarity is not None:
        assert report.similarity == pytest.approx(want["similarity"], rel=1e-12)


def vector(task: Task, seed: int, scale: float = 0.3) -> Tensor:
    return torch.from_numpy(scale * np.random.default_rng(seed).normal(size=task.layout.size))


@pytest.mark.parametrize("client", [0, 1, 2])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"momentum": 0.9},
        {"weight_decay": 0.05, "momentum": 0.5},
        {"clip": 0.2},
        {"clip": 1e9},
        {"optimizer": "adamw", "lr": 0.01},
        {
            "optimizer": "adamw",
            "lr": 0.02,
            "weight_decay": 0.1,
            "beta1": 0.5,
            "beta2": 0.9,
            "eps": 1e-4,
        },
        {"optimizer": "adamw", "lr": 0.01, "pull": 0.3, "scale": 0.7, "clip": 0.2},
        {"radius": 0.05},
        {"radius": 0.1, "momentum": 0.9, "clip": 0.2, "weight_decay": 0.05},
        {"radius": 0.05, "optimizer": "adamw", "lr": 0.01},
        {"drop_last": True},
        {"batch_size": 100},
        {"batch_size": 1, "epochs": 1},
        {"pull": 0.7, "momentum": 0.9},
        {"scale": 0.1, "momentum": 0.3},
        {
            "scale": 0.4,
            "pull": 0.3,
            "momentum": 0.6,
            "weight_decay": 0.02,
            "clip": 0.3,
            "drop_last": True,
        },
    ],
    ids=str,
)
def test_local_training(changes: dict[str, object], client: int) -> None:
    task = make_task()
    brief = make_brief(task, client=client, **changes)
    if brief.drop_last and len(task.clients[client]) < brief.batch_size:
        brief = replace(brief, batch_size=len(task.clients[client]))
    report = Trainer(task, torch.device("cpu")).follow(brief)
    agree(report, by_hand(task, brief))
    assert report.client == client
    assert report.n == SIZES[client]


def test_push_is_added_after_clipping() -> None:
    task = make_task()
    brief = make_brief(task, push=vector(task, 5, 2.0), clip=0.1, scale=0.5, momentum=0.4)
    agree(Trainer(task, torch.device("cpu")).follow(brief), by_hand(task, brief))


@pytest.mark.parametrize("momentum", [0.0, 0.4])
def test_with_push_after_the_step_is_corrected(momentum: float) -> None:
    task = make_task()
    brief = make_brief(
        task,
        push=vector(task, 5, 2.0),
        push_after=True,
        clip=0.1,
        scale=0.5,
        weight_decay=0.05,
        momentum=momentum,
    )
    agree(Trainer(task, torch.device("cpu")).follow(brief), by_hand(task, brief))


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("clip", [0.1, 1.0, 1e9])
def test_with_clip_after_the_corrected_gradient_is_clipped(clip: float, optimizer: str) -> None:
    task = make_task()
    changes = {
        "push": vector(task, 5, 0.2),
        "pull": 0.3,
        "scale": 0.5,
        "weight_decay": 0.05,
        "optimizer": optimizer,
    }
    brief = make_brief(task, clip=clip, clip_after=True, lr=0.02, **changes)
    agree(Trainer(task, torch.device("cpu")).follow(brief), by_hand(task, brief))


def test_clip_after_is_the_same_where_nothing_is_corrected() -> None:
    task = make_task()
    trainer = Trainer(task, torch.device("cpu"))
    before, after = (
        trainer.follow(make_brief(task, clip=0.2, clip_after=late, momentum=0.9))
        for late in (False, True)
    )
    assert torch.equal(before.delta, after.delta)
    assert before.grad_sq == after.grad_sq


def test_the_neutral_brief_is_plain_sgd_to_the_bit() -> None:
    """scale = 1, pull = 0, a push of zeros and no clipping change nothing."""
    task = make_task()
    trainer = Trainer(task, torch.device("cpu"))
    plain = trainer.follow(make_brief(task, momentum=0.9))
    neutral = make_brief(
        task,
        momentum=0.9,
        scale=1.0,
        pull=0.0,
        clip=float("inf"),
        push=torch.zeros(task.layout.size),
    )
    assert torch.equal(trainer.follow(neutral).delta, plain.delta)


@pytest.mark.parametrize("statistic", ["mean", "min"])
@pytest.mark.parametrize("per", ["epoch", "batch"])
@pytest.mark.parametrize("reference", [False, True])
@pytest.mark.parametrize("below", [-1.0, 0.97, 0.9999])
def test_stopping(statistic: str, per: str, reference: bool, below: float) -> None:
    task = make_task()
    away = task.start() + vector(task, 4, 0.1) if reference else None
    brief = make_brief(
        task,
        epochs=8,
        stop_below=below,
        stop_statistic=statistic,
        stop_per=per,
        stop_reference=away,
        momentum=0.5,
    )
    report = Trainer(task, torch.device("cpu")).follow(brief)
    agree(report, by_hand(task, brief))
    assert (report.epochs == 8) == (below == -1.0)


def test_stopping_at_a_batch_counts_a_part_of_an_epoch() -> None:
    """Eleven samples in batches of four: the first batch already stands below a threshold above 1."""
    task = make_task()
    trainer = Trainer(task, torch.device("cpu"))
    at_once = trainer.follow(make_brief(task, stop_below=1.5, stop_per="batch"))
    assert (at_once.steps, at_once.epochs) == (1, pytest.approx(1 / 3))
    whole = trainer.follow(make_brief(task, stop_below=1.5))
    assert (whole.steps, whole.epochs) == (3, 1.0)


@pytest.mark.parametrize("mu", [0.5, 5.0])
def test_the_contrastive_term(mu: float) -> None:
    task = make_task()
    brief = make_brief(
        task,
        contrast=mu,
        temperature=0.4,
        previous=task.start() + vector(task, 6),
        clip=0.5,
        momentum=0.5,
    )
    agree(Trainer(task, torch.device("cpu")).follow(brief), by_hand(task, brief))


def test_contrast_and_stopping_together() -> None:
    task = make_task()
    brief = make_brief(
        task,
        epochs=8,
        contrast=2.0,
        temperature=0.5,
        previous=task.start() + vector(task, 6),
        stop_below=0.98,
        stop_reference=task.start() + vector(task, 7, 0.05),
    )
    agree(Trainer(task, torch.device("cpu")).follow(brief), by_hand(task, brief))


def test_scores_are_mean_losses_and_accuracies_on_all_local_data() -> None:
    task = make_task()
    brief = make_brief(task, measure=frozenset({*BEFORE, *AFTER}))
    report = Trainer(task, torch.device("cpu")).follow(brief)
    rows = task.clients[0]
    inputs, targets = task.dataset.train.inputs[rows], task.dataset.train.targets[rows]
    measured = {
        brief.start: (report.score_before, report.accuracy_before),
        brief.start + report.delta: (report.score_after, report.accuracy_after),
    }
    for at, (score, accuracy) in measured.items():
        model = network()
        load(model, at)
        assert score == pytest.approx(
            float(F.cross_entropy(model(inputs), targets).detach()), rel=1e-12
        )
        assert accuracy == sum((model(inputs).argmax(1) == targets).tolist()) / len(rows)
    unasked = Trainer(task, torch.device("cpu")).follow(make_brief(task))
    assert unasked.score_before is None
    assert unasked.score_after is None
    assert unasked.accuracy_after is None


def test_wrong_labels_are_those_of_another_data_set() -> None:
    """Training with label noise is training on the same samples with the labels that it gives them,
    and scores by the right ones; without the measurements, nothing else in the report differs."""
    task = make_task()
    brief = make_brief(task, label_noise=0.5, measure=frozenset(AFTER))
    noisy = Trainer(task, torch.device("cpu")).follow(brief)
    train = task.dataset.train
    keys = sample_keys(
        torch.arange(len(train)), seed=key(3, "labels") % 2**63, round=0, client=0, step=0
    )
    labels = mislabelled(train.targets, keys, 0.5, task.dataset)
    assert 0 < int((labels != train.targets)[task.clients[0]].sum()) < len(task.clients[0])
    other = replace(task, dataset=replace(task.dataset, train=Samples(train.inputs, labels)))
    clean = Trainer(other, torch.device("cpu")).follow(replace(brief, label_noise=0.0))
    assert torch.equal(noisy.delta, clean.delta)
    assert (noisy.loss, noisy.grad_sq) == (clean.loss, clean.grad_sq)
    assert noisy.score_after != clean.score_after
    plain = Trainer(task, torch.device("cpu")).follow(make_brief(task))
    assert not torch.equal(noisy.delta, plain.delta)


def test_two_steps_by_hand() -> None:
    """f(w) = w² / 2 from w = 1 with lr 0.1 and momentum 0.5: v 1, w 0.9; v 0.5 + 0.9 = 1.4, w 0.76."""

    class Weight(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones(1, dtype=torch.float64))

        def forward(self, inputs: Tensor) -> Tensor:
            return (self.w**2 / 2).expand(len(inputs), 1)

    samples = Samples(torch.zeros(3, 1, dtype=torch.float64), torch.zeros(3, dtype=torch.int64))
    population = Population.from_lists([np.arange(3)])
    task = Task(
        Weight(),
        DataSet("one", samples, samples, classes=1),
        population,
        loss=lambda out, _: out[:, 0],
    )
    report = Trainer(task, torch.device("cpu")).follow(
        Brief(seed=0, round=0, client=0, start=task.start(), lr=0.1, momentum=0.5, batch_size=2)
    )
    assert float(report.delta) == pytest.approx(-0.24, rel=1e-14)
    assert report.grad_sq == pytest.approx(1 + 0.81, rel=1e-14)
    assert report.loss == pytest.approx(
        (2 * 0.5 + 1 * 0.405) / 3, rel=1e-14
    )  # the last batch holds one sample


@pytest.mark.parametrize(
    ("changes", "want"),
    [
        ({}, -0.1),
        ({"weight_decay": 0.1}, -0.11),
        ({"scale": 0.5}, -0.05),
        ({"clip": 6**0.5 / 4}, -0.025),
    ],
    ids=str,
)
@pytest.mark.parametrize("kind", ["twice", "expanded"])
def test_gradients_that_share_memory(kind: str, changes: dict[str, float], want: float) -> None:
    """Autograd hands the two terms of a + b the same tensor, and a sum one number expanded; ∇L is 1
    in both.
    """

    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = (nn.Parameter(torch.ones(3, dtype=torch.float64)) for _ in range(2))

        def forward(self, inputs: Tensor) -> Tensor:
            both = (
                inputs @ (self.a + self.b)
                if kind == "twice"
                else (self.a.sum() + self.b.sum()).expand(len(inputs))
            )
            return both[:, None]

    samples = Samples(torch.ones(2, 3, dtype=torch.float64), torch.zeros(2, dtype=torch.int64))
    population = Population.from_lists([np.arange(2)])
    task = Task(
        Shared(),
        DataSet("ones", samples, samples, classes=1),
        population,
        loss=lambda out, _: out[:, 0],
    )
    brief = Brief(seed=0, round=0, client=0, start=task.start(), lr=0.1, **changes)  # type: ignore[arg-type]
    report = Trainer(task, torch.device("cpu")).follow(brief)
    np.testing.assert_allclose(report.delta.numpy(), want, rtol=1e-6)


class Functional(nn.Module):
    """A network that draws random numbers of its own accord, in no layer for it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = network()

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layers(nn.functional.dropout(inputs, 0.4, self.training))


@pytest.mark.parametrize("model", [network(dropout=0.4), Functional().double()])
def test_a_client_does_not_depend_on_who_trained_before(model: nn.Module) -> None:
    task = make_task(model)
    trainer = Trainer(task, torch.device("cpu"))
    first = [trainer.follow(make_brief(task, client=i, momentum=0.9)).delta for i in (0, 1, 2)]
    before = torch.random.get_rng_state()
    again = [trainer.follow(make_brief(task, client=i, momentum=0.9)).delta for i in (2, 0, 1)]
    assert torch.equal(torch.random.get_rng_state(), before), (
        "training moved the global random generator"
    )
    for i, delta in zip((2, 0, 1), again, strict=True):
        assert torch.equal(delta, first[i])
    elsewhere = trainer.follow(make_brief(task, client=0, momentum=0.9, round=3)).delta
    assert not torch.equal(elsewhere, first[0])


def test_batches_cover_everything_once_an_epoch() -> None:
    brief = Brief(seed=0, round=0, client=0, start=torch.zeros(1), lr=0.1, batch_size=4, epochs=2)
    epochs = list(batches(brief, 11))
    assert [[len(rows) for rows in epoch] for epoch in epochs] == [[4, 4, 3]] * 2
    assert all(sorted(np.concatenate(epoch)) == list(range(11)) for epoch in epochs)
    assert not np.array_equal(np.concatenate(epochs[0]), np.concatenate(epochs[1]))
    dropped = list(batches(replace(brief, drop_last=True), 11))
    assert [[len(rows) for rows in epoch] for epoch in dropped] == [[4, 4]] * 2
    few = list(
        batches(replace(brief, drop_last=True), 3)
    )  # fewer than a batch: one batch of all of them
    assert [[len(rows) for rows in epoch] for epoch in few] == [[3]] * 2


def test_streams_draw_what_fresh_generators_draw() -> None:
    streams = Streams()
    for seed, purpose, round, client in (
        (0, "batches", 0, 0),
        (3, "batches", 7, 5),
        (3, "select", 7, 5),
    ):
        given = streams(seed, purpose, round, client)
        fresh = stream(seed, purpose, round, client)
        assert given.permutation(37).tolist() == fresh.permutation(37).tolist()
        assert given.random(3).tolist() == fresh.random(3).tolist()
        assert given.integers(9, size=3).tolist() == fresh.integers(9, size=3).tolist()


def cohort(
    steps: list[int], *, lr: float, momentum: float = 0.0, pull: float = 0.0, decay: float = 0.0
) -> Tensor:
    m = len(steps)
    briefs = Briefs(
        seed=0,
        round=0,
        ids=torch.arange(m),
        start=torch.zeros(1),
        lr=lr,
        momentum=momentum,
        weight_decay=decay,
        pull=pull,
    )
    return mass(briefs, torch.tensor(steps))


STEPS = [1, 2, 3, 10, 157, 2500]


def test_mass_of_plain_sgd_is_steps_times_lr() -> None:
    np.testing.assert_allclose(cohort(STEPS, lr=0.03).numpy(), 0.03 * np.array(STEPS), rtol=1e-13)


@pytest.mark.parametrize("rho", [0.1, 0.9, 0.99])
def test_mass_with_momentum(rho: float) -> None:
    """Wang et al., Section 4: ‖a‖₁ = [τ − ρ (1 − ρ^τ) / (1 − ρ)] / (1 − ρ)."""
    tau = np.array(STEPS, dtype=float)
    want = 0.03 * (tau - rho * (1 - rho**tau) / (1 - rho)) / (1 - rho)
    np.testing.assert_allclose(cohort(STEPS, lr=0.03, momentum=rho).numpy(), want, rtol=1e-10)


@pytest.mark.parametrize(("pull", "decay"), [(0.7, 0.0), (0.0, 0.7), (0.4, 0.3)])
def test_mass_with_a_proximal_pull_or_weight_decay(pull: float, decay: float) -> None:
    """Wang et al., Section 4: ‖a‖₁ = [1 − (1 − ημ)^τ] / (ημ)."""
    tau, a = np.array(STEPS, dtype=float), 0.03 * 0.7
    want = 0.03 * (1 - (1 - a) ** tau) / a
    np.testing.assert_allclose(
        cohort(STEPS, lr=0.03, pull=pull, decay=decay).numpy(), want, rtol=1e-10
    )


@pytest.mark.parametrize("start", ["shared", "own"])
def test_the_mean_gradient_of_a_linear_loss_is_that_gradient(start: str) -> None:
    """f(w) = ⟨g, w⟩ with momentum, pull, decay and many steps: −(w − start) / mass = g + decay ·
    start.
    """

    class Linear(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64))

        def forward(self, inputs: Tensor) -> Tensor:
            return (inputs @ self.w)[:, None]

    slopes = torch.tensor([[0.3, -0.1, 0.8], [1.0, 0.4, -0.2]], dtype=torch.float64)
    samples = Samples(slopes.repeat_interleave(3, 0), torch.zeros(6, dtype=torch.int64))
    population = Population.from_lists([np.arange(3), np.arange(3, 6)])
    task = Task(
        Linear(),
        DataSet("two", samples, samples, classes=1),
        population,
        loss=lambda out, _: out[:, 0],
    )
    x = task.start()
    starts = x if start == "shared" else torch.stack([x + 0.1, x - 0.4])
    offset = None if start == "shared" else starts - x
    m, cpu = 2, torch.device("cpu")
    briefs = Briefs(
        seed=0,
        round=0,
        ids=torch.arange(m),
        start=starts,
        offset=offset,
        lr=[0.05, 0.02],
        momentum=0.8,
        weight_decay=[0.1, 0.0],
        clip=float("inf"),
        batch_size=2,
        epochs=[4, 7],
        scale=1.0,
        pull=[0.0, 0.6],
    )
    trained = [Trainer(task, cpu).follow(brief) for brief in briefs.each()]
    reports = Reports.stack(trained, torch.stack([report.delta for report in trained]))
    reports = replace(reports, delta=reports.delta + starts - x, mass=mass(briefs, reports.steps))
    want = slopes + briefs.weight_decay[:, None] * (starts.expand(2, 3))
    torch.testing.assert_close(
        mean_gradients(SimpleNamespace(briefs=briefs, reports=reports, version=x)),
        want,
        rtol=0,
        atol=1e-12,
    )
