"""Engine `batched` against `local.py`: the same reports, client by client, whatever the brief says."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch
from torch import nn

from kairosfl.core.clock import Fleet
from kairosfl.core.fields import AFTER, BEFORE, Briefs, Reports
from kairosfl.core.recipe import Recipe
from kairosfl.core.round import drive, rounds
from kairosfl.core.run import Run, Setup
from kairosfl.detectors import FGN, FedFIM
from kairosfl.engines.batched import Batched, fast
from kairosfl.engines.batched import engine as batched_engine
from kairosfl.engines.batched.memory import SERVER_VECTORS
from kairosfl.engines.loop import Loop
from kairosfl.errors import UserError
from kairosfl.models import build
from kairosfl.rules import RULES, parse
from kairosfl.tasks.crops import Crops
from kairosfl.tasks.dataset import DataSet, Samples
from kairosfl.tasks.population import Population
from kairosfl.tasks.task import Task

MODELS = {
    "logistic": ((1, 6, 6), {}),
    "mlp": ((1, 6, 6), {"hidden": (7,)}),
    "lenet": ((3, 16, 16), {}),
    "cnn": ((3, 16, 16), {"hidden": 8}),
    "alt_cnn": ((3, 16, 16), {"projection": 9}),
    "aware_cnn": ((2, 18, 18), {"hidden": 8}),
    "pfl_cnn": ((2, 8, 8), {"hidden": 8, "dropout": (0.0, 0.0)}),
    "alexnet": ((3, 32, 32), {"width": 6, "dropout": 0.0}),
    "vgg11": ((1, 32, 32), {"width": 6, "dropout": 0.0}),
    "resnet18": ((3, 16, 16), {"width": 4, "projection": 6}),
    "resnet50": ((3, 32, 32), {"width": 4, "groups": 1}),
    "char_lstm": ((5,), {"vocabulary": 9, "embedding": 4, "hidden": 6, "dropout": 0.0}),
    "gpt_neox": ((5,), {"vocabulary": 9, "hidden": 16, "layers": 2, "heads": 2, "rotary_pct": 0.5}),
}
IN_CI = [pytest.param(name, marks=[pytest.mark.slow] * (name == "vgg11")) for name in MODELS]


def make_task(
    model: nn.Module,
    shape: tuple[int, ...],
    *,
    samples: int = 40,
    clients: int = 4,
    tokens: int = 0,
) -> Task:
    """Random samples dealt to clients of very different sizes."""
    rng = np.random.default_rng(0)
    inputs = rng.integers(0, tokens or 256, (samples, *shape))
    targets = torch.from_numpy(rng.integers(0, 3, samples))
    held = Samples(torch.from_numpy(inputs if tokens else inputs.astype(np.uint8)), targets)
    scale = () if tokens else (0.5,) * shape[0]
    dataset = DataSet("random", held, held, 3, mean=scale, std=scale, vocabulary=tokens)
    cuts = np.sort(rng.choice(np.arange(2, samples - 2), clients - 1, replace=False))
    return Task(model, dataset, Population(rng.permutation(samples), np.array([0, *cuts, samples])))


def named(name: str, dtype: torch.dtype = torch.float64) -> Task:
    shape, options = MODELS[name]
    model = build(name, shape=shape, classes=3, seed=1, **options).to(dtype)
    few = name in ("alexnet", "vgg11", "resnet50")  # the slow ones
    return make_task(
        model,
        shape,
        samples=12 if few else 40,
        clients=2 if few else 4,
        tokens=9 if len(shape) == 1 else 0,
    )


def make_briefs(task: Task, **changes: object) -> Briefs:
    m = len(task.clients)
    briefs = Briefs(
        seed=3,
        round=2,
        ids=torch.arange(m),
        start=task.start(),
        lr=[0.002 * (1 + client) for client in range(m)],
        momentum=0.9,
        weight_decay=1e-3,
        batch_size=8,
        epochs=2,
    )
    return replace(briefs, **changes)


def assert_equal(found: Reports, wanted: Reports, tolerance: float) -> None:
    for name in ("ids", "n", "steps", "epochs"):
        assert torch.equal(getattr(found, name), getattr(wanted, name)), name
    for name in ("delta", "loss", "grad_sq", "similarity", "fisher", *BEFORE, *AFTER):
        a, b = getattr(found, name), getattr(wanted, name)
        assert (a is None) == (b is None), name
        if a is not None:
            assert (a - b).norm() <= tolerance * b.norm(), name
            assert torch.isfinite(a).all()


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.mark.parametrize("name", IN_CI)
def test_every_model_trains_as_alone(name: str) -> None:
    task = named(name)
    engine = Batched(task)
    assert engine.why == "stacked layer by layer"
    assert_equal(engine.train(make_briefs(task)), Loop(task).train(make_briefs(task)), 1e-10)


@pytest.mark.parametrize("name", IN_CI)
def test_every_model_in_float32(name: str) -> None:
    task = named(name, torch.float32)
    engine, loop = Batched(task), Loop(task)
    one = make_briefs(task, epochs=1, batch_size=64, lr=0.5)
    for briefs, tolerance in ((one, 1e-5), (make_briefs(task), 1e-3)):
        found, wanted = engine.train(briefs).delta, loop.train(briefs).delta
        assert (found - wanted).norm() <= tolerance * (task.start() + wanted).norm()


def _vectors(task: Task, seed: int, scale: float) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(
        len(task.clients), task.layout.size, generator=generator, dtype=torch.float64
    )


def _variants(task: Task) -> dict[str, dict[str, object]]:
    near = task.start() + _vectors(task, 1, 0.05)
    push = _vectors(task, 2, 0.01)
    mu = [0.0, 1.0, 2.0, 0.5]

    def stop(
        threshold: float, statistic: str, per: str, reference: torch.Tensor | None = None
    ) -> dict[str, object]:
        below = [threshold, threshold, -1.0, threshold]
        return {
            "stop_below": below,
            "stop_statistic": statistic,
            "stop_per": per,
            "stop_reference": reference,
        }

    long: dict[str, object] = {"epochs": 5, "lr": 0.05}
    moon: dict[str, object] = {"contrast": mu, "temperature": 0.5, "previous": near}
    adamw: dict[str, object] = {
        "optimizer": "adamw",
        "momentum": 0.0,
        "beta1": [0.9, 0.8, 0.9, 0.0],
        "eps": 1e-6,
    }
    return {
        "plain": {"momentum": 0.0, "weight_decay": 0.0},
        "starts": {"start": near},
        "pull": {"pull": [0.0, 0.1, 0.2, 0.3]},
        "push": {"push": push},
        "shared push": {"push": push[0], "scale": 0.5},
        "push after": {
            "push": push,
            "push_after": True,
            "momentum": [0.9, 0.0, 0.5, 0.9],
            "clip": 0.5,
        },
        "shared push after": {"push": push[0], "push_after": True},
        "push after, no momentum": {"push": push, "push_after": True, "momentum": 0.0},
        "clip": {"clip": [0.5, float("inf"), 0.1, 1.0]},
        "all of them": {"start": near, "pull": 0.1, "push": push, "clip": 0.5},
        "clip after": {
            "clip": [0.5, float("inf"), 0.1, 1.0],
            "clip_after": True,
            "pull": 0.1,
            "push": push,
            "scale": 0.5,
        },
        "clip after, no clip": {"clip_after": True, "push": push},
        "batches": {
            "batch_size": [4, 8, 3, 100],
            "epochs": [1, 3, 2, 4],
        },
        "drop last": {"drop_last": True},
        "mean": stop(0.9999, "mean", "epoch") | long,
        "min": stop(0.999, "min", "epoch") | long,
        "at once": stop(0.9999, "mean", "batch") | long,
        "own reference": stop(0.9, "mean", "epoch", near) | long,
        "contrast": moon,
        "contrast and stop": moon | stop(0.999, "min", "batch", near + push),
        "adamw": adamw,
        "adamw, clip after": adamw | {"push": push, "pull": 0.1, "clip": 0.5, "clip_after": True},
        "sharp, clip after": {
            "radius": 0.05,
            "push": push,
            "clip": 0.5,
            "clip_after": True,
            "scale": 0.1,
        },
        "adamw with everything": adamw
        | {"start": near, "pull": 0.1, "push": push, "clip": 0.5, "scale": 0.7},
        "sharp": {"radius": 0.05},
        "sharp for some": {"radius": [0.0, 0.1, 0.05, 0.0], "clip": [0.5, float("inf"), 0.1, 1.0]},
        "sharp adamw": adamw | {"radius": 0.05},
        "sharp contrast and stop": moon
        | stop(0.999, "min", "batch", near + push)
        | {"radius": 0.05, "push": push},
        "scores": {"measure": frozenset({*BEFORE, *AFTER, "fisher"})},
        "wrong labels": {
            "label_noise": [0.0, 0.5, 0.8, 0.2],
            "contrast": [0.0, 1.0, 0.0, 0.0],
            "previous": near,
        },
        "sampled": {"measure": frozenset({"fisher_sampled"}), "start": near},
    }


VARIANTS = list(_variants(named("mlp")))


@cache
def _alone(variant: str) -> tuple[Task, Briefs, Reports]:
    task = named("alt_cnn")
    briefs = make_briefs(task, **_variants(task)[variant])
    return task, briefs, Loop(task).train(briefs)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("slots", [None, 3])
def test_every_brief_is_followed_as_alone(variant: str, slots: int | None) -> None:
    task, briefs, wanted = _alone(variant)
    assert_equal(Batched(task, slots=slots).train(briefs), wanted, 1e-10)


def test_the_original_stem_of_resnet_trains_as_alone() -> None:
    model = build(
        "resnet18", shape=(3, 32, 32), classes=3, seed=1, width=4, groups=2, stem=7
    ).double()
    task = make_task(model, (3, 32, 32), samples=12, clients=2)
    engine = Batched(task)
    assert engine.why == "stacked layer by layer"
    assert_equal(engine.train(make_briefs(task)), Loop(task).train(make_briefs(task)), 1e-10)


def test_stop_rules_stop_somebody() -> None:
    task = named("alt_cnn")
    for variant in ("mean", "min", "at once", "own reference"):
        epochs = Batched(task).train(make_briefs(task, **_variants(task)[variant])).epochs
        assert epochs[2] == 5
        assert (epochs < 5).any(), variant


# Those that keep an own part or a model are compared in rules/test_personal_rules.py.
KEEPING = [name for name, rule in RULES.items() if rule().traits().keeps]  # type: ignore[attr-defined]


@pytest.mark.parametrize("text", ["fedavg", *(name for name in RULES if name not in KEEPING)])
def test_every_rule_gives_the_same_run(text: str) -> None:
    task = named("mlp")
    algorithm = parse(text)
    recipe = Recipe(rounds=4, cohort=3, epochs=2, batch_size=8, lr=0.05, momentum=0.5)
    detectors = (
        (FGN(),) if text == "localprivacy" else (FGN(), FedFIM())
    )  # nothing is measured beside its noise
    fleet = Fleet(4, seconds=np.array([1.0, 7.0, 3.0, 2.0])) if algorithm.any("clock") else None
    sizes = task.clients.sizes
    setup = Setup(algorithm, recipe, 4, task.layout, detectors, sizes=sizes, fleet=fleet)
    ends = []
    for engine in (Loop(task), Batched(task)):
        run = Run.start(engine.start(), setup, seed=5)
        course = rounds(run, setup)
        *_, end = drive(course, engine)
        ends.append(end)
    assert (ends[0].x - ends[1].x).norm() <= 1e-10 * ends[0].x.norm()


def test_many_runs_share_the_slots() -> None:
    task = named("alt_cnn")
    other = replace(task, clients=Population(task.clients.order, np.array([0, 5, 10, 20, 40])))
    variants = _variants(task)
    jobs = [
        (task, make_briefs(task, **variants[name]))
        for name in ("pull", "mean", "contrast", "own reference")
    ]
    jobs.append((other, make_briefs(other, seed=8, round=9, **variants["push"])))
    jobs += [
        (task, make_briefs(task, **variants[name]))
        for name in ("clip after", "clip", "adamw, clip after")
    ]
    wanted = [Loop(each).train(briefs) for each, briefs in jobs]
    for slots in (None, 1, 2, 7):
        for found, alone in zip(Batched(task, slots=slots).train_many(jobs), wanted, strict=True):
            assert_equal(found, alone, 1e-10)


def test_slots_that_are_not_neighbours_take_clients_in_float32() -> None:
    task = named("mlp", torch.float32)
    task = replace(task, clients=Population(task.clients.order, np.array([0, 10, 20, 30, 40])))
    engine = Batched(task, slots=6)
    jobs = [
        (task, make_briefs(task, epochs=each))
        for each in ([4, 5, 4, 4], [3, 3, 5, 2], [5, 4, 1, 2])
    ]
    for found, (_, briefs) in zip(engine.train_many(jobs), jobs, strict=True):
        assert_equal(found, Loop(task).train(briefs), 1e-4)
    assert engine.stacks, engine.why  # instead of one client after another, after a failure


def test_a_client_that_diverged_leaves_nothing_in_its_slot() -> None:
    task = named("mlp", torch.float32)
    engine = Batched(task, slots=1)
    with np.errstate(all="ignore"):
        lost = engine.train(make_briefs(task, lr=1e30, clip=1e30, weight_decay=0.1))
    assert not lost.delta.isfinite().all()
    fine = make_briefs(task, clip=1.0, weight_decay=0.1)
    assert_equal(engine.train(fine), Loop(task).train(fine), 1e-4)


def test_momenta_are_zero_for_everyone_who_moves_in() -> None:
    task = named("mlp", torch.float32)
    engine = Batched(task, slots=3)
    plain, heavy, mixed = {"momentum": 0.0}, {"momentum": 0.9}, {"momentum": [0.0, 0.9, 0.0, 0.5]}
    lost, adamw = (
        {"momentum": [0.9, 0.0, 0.9, 0.0], "lr": 1e30, "weight_decay": 0.1},
        {**plain, "optimizer": "adamw"},
    )
    for changes in (
        plain,
        lost,
        mixed,
        plain,
        heavy,
        lost,
        plain,
        adamw,
        mixed,
        adamw,
        lost,
        heavy,
        lost,
        adamw,
    ):
        briefs = make_briefs(task, **changes)
        found = engine.train(briefs)
        if changes is lost:
            assert not found.delta.isfinite().all()
        else:
            assert_equal(found, Loop(task).train(briefs), 1e-4)
    assert engine.stacks, engine.why


def test_a_waiting_cohort_joins_while_another_trains() -> None:
    task = named("mlp")
    engine = Batched(task, slots=3)
    short = make_briefs(task, epochs=1)
    long = make_briefs(task, epochs=9, seed=4)
    first, second = engine.submit(task, long), engine.submit(task, short)
    assert engine.collect() is second
    third = engine.submit(task, short)
    assert {engine.collect(), engine.collect()} == {first, third}
    assert_equal(first.reports(), Loop(task).train(long), 1e-10)
    assert_equal(third.reports(), Loop(task).train(short), 1e-10)
    with pytest.raises(UserError, match="no cohort is in training"):
        engine.collect()


def test_a_server_that_finds_no_memory_gets_some_of_the_slots(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    task = named("mlp")
    engine = Batched(task, slots=4)
    short, long = (
        make_briefs(task, epochs=1),
        make_briefs(task, epochs=9),
    )
    asked = []
    monkeypatch.setattr(batched_engine, "available", lambda device: asked.append(device) or 0)
    assert_equal(engine.train(short), Loop(task).train(short), 1e-10)
    assert asked == []  # the host has what it has
    engine.home = torch.device("cuda")
    first, second = engine.submit(task, short), engine.submit(task, long)
    assert engine.collect() is first
    assert engine._limit == 2
    assert engine.collect() is second  # its clients began again
    assert_equal(first.reports(), Loop(task).train(short), 1e-10)
    assert_equal(second.reports(), Loop(task).train(long), 1e-10)


def test_free_memory_is_counted_again_when_it_may_be_used_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    task = named("mlp")
    engine, briefs = Batched(task, slots=4), make_briefs(task, epochs=1)
    wanted = 2 * SERVER_VECTORS * len(briefs) * task.layout.size * task.start().element_size()
    asked: list[torch.device] = []
    monkeypatch.setattr(
        batched_engine, "available", lambda device: asked.append(device) or 4 * wanted
    )
    engine.home = torch.device("cuda")
    counts = []
    for _ in range(9):
        engine.train(briefs)
        counts.append(len(asked))
    assert counts == [1, 1, 1, 1, 2, 2, 2, 2, 3]
    assert engine._limit == 4


@pytest.mark.parametrize("other", [{}, {"clip": 0.5}, {"pull": 0.3}])
@pytest.mark.parametrize("mine", [{}, {"momentum": 0.0, "weight_decay": 0.0}])
def test_deterministic_results_do_not_depend_on_the_neighbours(
    mine: dict[str, torch.Tensor], other: dict[str, torch.Tensor]
) -> None:
    task = named("alt_cnn", torch.float32)
    briefs = make_briefs(task, scale=0.7, **mine)
    others = make_briefs(task, seed=8, epochs=3, **other)
    alone = Batched(task, deterministic=True).train(briefs)
    together = Batched(task, deterministic=True).train_many([(task, others), (task, briefs)])[1]
    assert torch.equal(alone.delta, together.delta)
    assert torch.equal(alone.loss, together.loss)


def test_deterministic_cohorts_may_be_of_several_kinds() -> None:
    task = named("alt_cnn")
    several = {
        "batch_size": torch.tensor([8, 5, 8, 5]),
        "momentum": torch.tensor([0.0, 0.9, 0.9, 0.0]),
    }
    briefs = make_briefs(task, **several)
    assert_equal(Batched(task, deterministic=True).train(briefs), Loop(task).train(briefs), 1e-10)


@pytest.mark.parametrize("pull", [0.0, 0.1])
def test_slots_that_were_idle_take_later_clients(pull: float) -> None:
    task = named("mlp", torch.float32)
    briefs = make_briefs(task, optimizer="adamw", pull=pull)
    later = replace(briefs, pull=0.1 + 0 * briefs.lr, clip=0.5 + 0 * briefs.lr)
    engine = Batched(task, deterministic=True, slots=4)
    engine.train(briefs.take(torch.arange(2)))  # the other slots step with zeros
    found, wanted = (
        each.train(later) for each in (engine, Batched(task, deterministic=True, slots=4))
    )
    assert torch.equal(found.delta, wanted.delta)
    assert torch.equal(found.grad_sq, wanted.grad_sq)


@pytest.mark.parametrize("mkl", [True, False])
@pytest.mark.parametrize("name", ["mlp", "alt_cnn"])
def test_products_for_cpus_with_and_without_mkl_give_the_same(
    name: str, mkl: bool, monkeypatch
) -> None:
    monkeypatch.setattr(fast, "MKL", mkl)
    task = named(name)
    briefs = make_briefs(task)
    assert_equal(Batched(task).train(briefs), Loop(task).train(briefs), 1e-10)


@pytest.mark.parametrize("crops", [True, Crops(0.5, "mean"), Crops(padding="reflect")])
def test_augmentation_is_that_of_the_loop(crops: bool | Crops) -> None:
    task = replace(named("alt_cnn"), augment=crops)
    briefs = make_briefs(task)
    assert_equal(Batched(task).train(briefs), Loop(task).train(briefs), 1e-10)


def test_dropout_depends_on_the_client_alone() -> None:
    model = build(
        "pfl_cnn", shape=(2, 8, 8), classes=3, seed=1, hidden=8, dropout=(0.5, 0.5)
    ).double()
    task = make_task(model, (2, 8, 8), samples=16)
    briefs = make_briefs(task)
    together = Batched(task).train(briefs)
    alone = Batched(task).train(briefs.take(torch.tensor([2])))
    assert (together.delta[2] - alone.delta[0]).norm() <= 1e-10 * alone.delta.norm()
    other_round = Batched(task).train(replace(briefs, round=7))
    assert (together.delta - other_round.delta).norm() > 1e-3 * together.delta.norm()


def test_another_task_is_refused_when_it_differs() -> None:
    task = named("mlp")
    engine = Batched(task)
    with pytest.raises(UserError, match="another augmentation cannot share"):
        engine.submit(replace(task, augment=True), make_briefs(task))
    with pytest.raises(UserError, match="another model cannot share"):
        engine.submit(replace(task, model=named("logistic").model), make_briefs(task))
    with pytest.raises(UserError, match=r"run\.precision = 'half' is not a precision"):
        Batched(task, precision="half")
    with pytest.raises(UserError, match=r"run\.slots = 0 must be 1 or more"):
        Batched(task, slots=0)


def test_evaluation_is_that_of_the_loop() -> None:
    task = named("cnn")
    x = task.start()
    assert Batched(task).evaluate(x) == Loop(task).evaluate(x)
    assert np.array_equal(Batched(task).evaluate_clients(x), Loop(task).evaluate_clients(x))
