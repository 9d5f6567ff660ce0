"""An epoch of every model whose speed docs/gpu.md gives, at its own size: engine `batched` against `loop` in float32."""

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
from kairosfl.tasks.models import build

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

OPTIONS = {"pfl_cnn": {"dropout": (0.0, 0.0)}, "alexnet": {"dropout": 0.0}, "cnn": {}, "alt_cnn": {}, "resnet18": {}}
IMAGES = {
    name: anymodel.Case(
        partial(build, name, shape=(3, 32, 32), classes=10, seed=1, **options), (3, 32, 32), 0, 40, 32, 8, ("float32",)
    )
    for name, options in OPTIONS.items()
}
CASES = IMAGES | anymodel.CASES | adapters.CASES
CLIENTS = 3


@pytest.mark.parametrize("name", CASES)
def test_an_epoch_of_every_model_ends_where_the_loops_does(name: str) -> None:
    torch.manual_seed(0)
    case = CASES[name]
    task = anymodel.task_of(case, CLIENTS, case.make())
    recipe = Recipe(cohort=CLIENTS, lr=0.01, momentum=0.9, batch_size=case.batch)
    start = task.start().cuda()
    briefs = briefs_of(recipe, torch.arange(CLIENTS), start)
    engine = Batched(task, "cuda", precision="float32")
    assert engine.why.startswith("stacked"), engine.why
    found, wanted = engine.train(briefs), Loop(task, "cuda", precision="float32").train(briefs)
    assert torch.equal(found.steps, wanted.steps)
    assert int(found.steps.min()) == case.steps
    ends = [start.double() + reports.delta.double() for reports in (found, wanted)]
    off = (ends[0] - ends[1]).norm(dim=1) / ends[1].norm(dim=1)
    moved = wanted.delta.norm(dim=1) / start.norm()
    print(f"{name}: {case.steps} steps moved {float(moved.max()):.1e} of the model; {float(off.max()):.1e} apart")
    assert float(off.max()) <= 1e-5
