"""An epoch of every model whose speed docs/gpu.md gives, at its own size: engine `batched` against
`loop` in float32.

Rounding may decide a ReLU or a max pooling whose inputs are nearly equal, and every later step
follows. At ten times the learning rate `cnn`, `pfl_cnn` and `resnet18` end more than 1e-5 apart (up
to 2e-4), and `loop` on a CPU ends 8e-5 from float64 with `pfl_cnn`. In float64 the two engines
agree to 1e-10: see test_batched.py.
"""

from __future__ import annotations

from functools import partial

import adapters
import anymodel
import pytest
import torch

from kairosfl.bench import briefs_of
from kairosfl.core.recipe import Recipe
from kairosfl.engines.batched import Batched
from kairosfl.engines.loop import Loop
from kairosfl.models import build

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

OPTIONS = {
    "pfl_cnn": {"dropout": (0.0, 0.0)},
    "alexnet": {"dropout": 0.0},
    "cnn": {},
    "alt_cnn": {},
    "resnet18": {},
}
KINKED = {
    name: anymodel.Case(
        partial(build, name, shape=(3, 32, 32), classes=10, seed=1, **options),
        (3, 32, 32),
        0,
        40,
        32,
        8,
        ("float32",),
    )
    for name, options in OPTIONS.items()
}
SMOOTH = {
    name: case
    for name, case in (anymodel.CASES | adapters.CASES).items()
    if not name.endswith("again")
}
CASES = KINKED | SMOOTH
CLIENTS = 3


@pytest.mark.parametrize("name", CASES)
def test_an_epoch_of_every_model_ends_where_the_loops_does(name: str) -> None:
    torch.manual_seed(0)
    case = CASES[name]
    task = anymodel.task_of(case, CLIENTS, case.make())
    recipe = Recipe(cohort=CLIENTS, lr=0.001, momentum=0.9, batch_size=case.batch)
    start = task.start().cuda()
    briefs = briefs_of(recipe, torch.arange(CLIENTS), start)
    engine = Batched(task, "cuda", precision="float32")
    assert engine.why.startswith("stacked"), engine.why
    found, wanted = engine.train(briefs), Loop(task, "cuda", precision="float32").train(briefs)
    assert torch.equal(found.steps, wanted.steps)
    assert int(found.steps.min()) == case.steps
    apart = (found.delta.double() - wanted.delta.double()).norm(dim=1)
    of_model, of_update = (
        apart / (start.double() + wanted.delta).norm(dim=1),
        apart / wanted.delta.double().norm(dim=1),
    )
    print(
        f"{name}: {float(of_model.max()):.1e} of the model apart, {float(of_update.max()):.1e} of the update"
    )
    assert float(of_model.max()) <= 1e-5
    assert name in KINKED or float(of_update.max()) <= 3e-5
