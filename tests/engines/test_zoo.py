"""Models and tasks that nobody here wrote: the same updates on loop and batched, or a refusal with
the fix.
"""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from test_batched import assert_equal, make_briefs
from torch import nn

import kairosfl
import zoo
from kairosfl.engines.batched import Batched
from kairosfl.engines.loop import Loop
from kairosfl.errors import UserError
from kairosfl.tasks.dataset import DataSet, Samples
from kairosfl.tasks.population import Population
from kairosfl.tasks.task import Task
from kairosfl.tasks.vector import base, trained
from zoo_cases import CASES, Case
from zoo_refused import REFUSED

QUICK = {
    "u-net, group_norm",
    "u-net, freeze_norms",
    "lstm",
    "1-d cnn, two inputs, one logit",
    "tabular regression",
}
QUICK |= {"tabular multilabel"}
SIMULATED = [
    "timm vit, multilabel",
    "timm efficientnet, freeze_norms",
    "torchvision fcn, group_norm",
]
SIMULATED += [
    "bert with lora",
    "bert regression",
    "llama language model",
    "1-d cnn, two inputs, one logit",
]
DROPPING = {
    "bert": lambda: zoo.tiny_hugging(
        "Bert", hidden_dropout_prob=0.5, attention_probs_dropout_prob=0.5
    ),
    "timm swin": lambda: zoo.tiny_timm(
        "swin_tiny_patch4_window7_224", **zoo.SWIN | {"drop_path_rate": 0.5}
    ),
}


def listed(names: list[str]) -> list[object]:
    return [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in names]


def made(case: Case) -> nn.Module:
    if case.needs is not None and zoo.library(case.needs) is None:
        pytest.skip(f"needs {case.needs}")
    torch.manual_seed(0)
    return case.make()


def task_of(case: Case, model: nn.Module) -> Task:
    """Three clients of different sizes."""
    samples = Samples(case.inputs(), case.targets())
    order = np.random.default_rng(0).permutation(len(samples))
    task = Task(
        model,
        DataSet("zoo", samples, samples, kind=case.kind),
        Population(order, np.array([0, 5, 13, len(order)])),
    )
    task.check()
    return task


@pytest.mark.parametrize("name", listed(list(CASES)))
def test_updates_are_those_of_one_client_after_another(name: str) -> None:
    """In float32 the engines differ by the order of sums alone, measured as up to 9e-6 of the
    update; each is as far from float64 as the other: 1e-6 to 2e-4, since the weights are rounded at
    every step."""
    case = CASES[name]
    model = made(case)
    for dtype, tolerance in ((torch.float32, case.tolerance), (torch.float64, 1e-10)):
        mixed = len({parameter.dtype for parameter in model.parameters()}) > 1
        if dtype == torch.float64 and mixed:  # it would not be this model any more
            continue
        task = task_of(case, copy.deepcopy(model).to(None if mixed else dtype))
        before = {name: tensor.clone() for name, tensor in base(task.model).items()}
        batched, loop = Batched(task), Loop(task)
        assert batched.why.startswith(case.way), batched.why
        briefs = make_briefs(task, epochs=1, lr=0.01)
        found, wanted = batched.train(briefs), loop.train(briefs)
        assert batched.why.startswith(case.way), batched.why
        assert wanted.delta.norm() > 0
        assert_equal(found, wanted, tolerance)
        if dtype == torch.float64:  # tensor by tensor, which rounding hides in float32
            most = 1e-12 * wanted.delta.norm()
            for (entry, mine), (_, theirs) in zip(
                task.layout.views(found.delta), task.layout.views(wanted.delta), strict=True
            ):
                assert (mine - theirs).norm() <= 1e-8 * theirs.norm() + most, entry
        held = [task.model, loop.trainer.model, batched.trainer.model]
        held += (
            [batched._work.stack.model]
            if batched._work is not None and batched.why.startswith("stacked by")
            else []
        )
        for each in held:
            now = base(each)
            assert all(torch.equal(now[name], tensor) for name, tensor in before.items())


@pytest.mark.parametrize("name", listed(SIMULATED))
def test_one_call_trains_them(name: str) -> None:
    case = CASES[name]
    model = made(case)
    data = (case.inputs(), case.targets())
    kind = {} if case.kind in ("binary", "multilabel", "regression") else {"kind": case.kind}
    start = {key: value.clone() for key, value in model.state_dict().items()}
    done = [
        kairosfl.simulate(
            model, data, data, clients=3, rounds=2, partition="iid", lr=0.05, batch_size=4, engine=engine,
            progress=False, **kind,
        )
        for engine in ("loop", "batched")
    ]  # fmt: skip
    assert all(torch.equal(value, start[key]) for key, value in model.state_dict().items())
    first = torch.cat([value.detach().flatten() for value in trained(model).values()])
    loop, batched = (history.x - first for history in done)
    assert loop.norm() > 0
    assert (batched - loop).norm() <= 1e-5 * loop.norm()
    assert np.isfinite(done[0].score)
    for history in done:
        same = base(history.model)
        assert all(torch.equal(same[name], tensor) for name, tensor in base(model).items())


@pytest.mark.slow
@pytest.mark.parametrize("name", DROPPING)
def test_masks_depend_on_the_client_alone(name: str) -> None:
    case = CASES["timm vit" if name == "timm swin" else "bert classification"]
    task = task_of(case, made(Case(DROPPING[name], case.inputs, case.targets, needs=case.needs)))
    together, alone = (Batched(task, slots=slots) for slots in (3, 1))
    briefs = make_briefs(task, epochs=1, lr=0.01)
    found = together.train(briefs)
    assert together.stacks
    assert_equal(found, alone.train(briefs), 1e-5)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(key, marks=[pytest.mark.slow] * bool(case.needs))
        for key, (case, _) in REFUSED.items()
    ],
)
@pytest.mark.parametrize("engine", ["loop", "batched"])
def test_what_cannot_be_trained_is_refused_with_the_fix(name: str, engine: str) -> None:
    case, message = REFUSED[name]
    model = made(case)
    data = (case.inputs(), case.targets())
    kind = {} if case.kind == "classification" else {"kind": case.kind}
    with pytest.raises(UserError, match=message):
        kairosfl.simulate(
            model,
            data,
            data,
            clients=3,
            rounds=1,
            partition="iid",
            batch_size=4,
            engine=engine,
            progress=False,
            **kind,
        )
