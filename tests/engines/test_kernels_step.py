"""The kernels around the model in a step, in Triton's own interpreter: `make test-kernels`."""

from __future__ import annotations

import os
from functools import partial

import pytest
import torch

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") != "1":  # it would change the kernels of all other tests
    pytest.skip("runs with TRITON_INTERPRET=1", allow_module_level=True)

from step_cases import CHECKS, using
from test_batched import make_briefs, make_task

from kairosfl.engines.batched import Batched
from kairosfl.engines.batched.kernels import batch
from kairosfl.models import build


@pytest.mark.parametrize("name", CHECKS)
def test_what_surrounds_the_model_is_that_of_plain_operations(name: str) -> None:
    CHECKS[name](
        batch, "cpu", torch.float32
    )  # the interpreter does not round to bfloat16 but cuts off


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"clip": 0.5},
        {"stop_below": 0.9999, "stop_per": "batch", "epochs": 4},
        {"stop_below": 0.9999, "stop_per": "epoch", "stop_statistic": "min", "epochs": 4},
        {"optimizer": "adamw", "momentum": 0.0, "lr": 1e-3, "eps": 1e-4},
        {"radius": 0.05},
        {"label_noise": 0.5},
    ],
)
@pytest.mark.parametrize("name", ["mlp", "pfl_cnn"])
def test_the_engine_trains_the_same_clients_to_the_bit(
    name: str, changes: dict[str, object]
) -> None:
    torch.set_num_threads(1)
    task = make_task(build(name, shape=(3, 8, 8), classes=3, seed=1), (3, 8, 8))
    briefs = make_briefs(task, **changes)
    engines = [Batched(task, slots=2) for _ in range(2)]
    assert [engine._work.stack.frame.last for engine in engines] == [name == "pfl_cnn"] * 2
    wanted, found = (
        using(module, partial(engine.train, briefs))
        for module, engine in zip((None, batch), engines, strict=True)
    )
    for entry in ("delta", "loss", "grad_sq", "steps", "similarity"):
        right = getattr(wanted, entry)
        assert right is None or torch.equal(getattr(found, entry), right), entry
