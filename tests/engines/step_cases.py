"""What the kernels around the model in a step must give: the bits of the plain operations, on a GPU
or interpreted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from types import ModuleType, SimpleNamespace
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
from torch import nn

from kairosfl.engines.batched import step
from kairosfl.engines.batched.rows import RowLayout
from kairosfl.engines.batched.state import Kind, State, Sum, Whole
from kairosfl.tasks.dataset import DataSet, Samples
from kairosfl.tasks.population import Population
from kairosfl.tasks.task import Task
from kairosfl.tasks.vector import layout_of

T = TypeVar("T")
SLOTS, WIDTH, LENGTH, LARGEST = 9, 8, 64, 11
IMAGES = [  # shape, mean, std
    ((3, 32, 32), (0.49, 0.48, 0.45), (0.25, 0.24, 0.26)),
    ((1, 28, 28), (0.13,), (0.31,)),
    ((4, 5, 7), (0.5,), (0.3,)),
    ((3, 2, 1), (), ()),
]


def using(module: ModuleType | None, action: Callable[[], T]) -> T:
    """With these kernels for what surrounds the model, or with none."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(step, "kernels", lambda name, tensor: module if name == "batch" else None)
        return action()


def make_state(device: str, dtype: torch.dtype) -> tuple[State, Kind]:
    """Clients with batches of different sizes, in the middle of an epoch, at its end, and finished."""
    rng = np.random.default_rng(0)
    state = State(
        RowLayout.of(layout_of(nn.Linear(3, 2))), SLOTS, LENGTH, dtype, torch.device(device)
    )
    size, end, epochs = (
        torch.from_numpy(rng.integers(1, most + 1, SLOTS)) for most in (LARGEST, 20, 3)
    )
    whole, batches = (
        torch.from_numpy(rng.integers(-(2**62), 2**62, (len(Whole), SLOTS))),
        -(-end // size),
    )
    whole[Whole.SIZE], whole[Whole.END], whole[Whole.BATCHES], whole[Whole.TOTAL] = (
        size,
        end,
        batches,
        epochs * batches,
    )
    whole[Whole.POSITION] = torch.from_numpy(rng.integers(0, whole[Whole.TOTAL].numpy()))
    whole[Whole.POSITION, 2] = whole[Whole.TOTAL, 2]
    whole[Whole.SAMPLES] = 5
    state.wholes.copy_(whole)
    state.sums.copy_(torch.from_numpy(rng.standard_normal((len(Sum), SLOTS))))
    state.order.copy_(torch.from_numpy(rng.integers(0, 1000, (SLOTS, LENGTH))))
    return state, Kind(WIDTH, LARGEST)


def check_batches(module: ModuleType, device: str, dtype: torch.dtype) -> None:
    """At every position of the clients, and with steps switched off."""
    state, kind = make_state(device, dtype)
    for count in range(7):
        wanted, found = (using(each, partial(step._batch, state, kind)) for each in (None, module))
        assert wanted.live.any() == (count < 6)
        for entry in fields(step.Batch):
            mine, right = getattr(found, entry.name), getattr(wanted, entry.name)
            assert mine.dtype == right.dtype
            assert torch.equal(mine, right), entry.name
        state.wholes[Whole.POSITION] = (state.wholes[Whole.POSITION] + 1) % (
            state.wholes[Whole.TOTAL] + 1
        )
        state.on.fill_(count < 5)


def check_images(module: ModuleType, device: str, dtype: torch.dtype) -> None:
    """All kinds of images, in both orders; what is not an image is left to the plain operations."""
    rng = np.random.default_rng(0)
    for shape, mean, std in IMAGES:
        inputs = torch.from_numpy(rng.integers(0, 256, (12, *shape), dtype=np.uint8))
        held = Samples(inputs, torch.from_numpy(rng.integers(0, 3, 12)))
        model = nn.Sequential(nn.Flatten(), nn.Linear(inputs[0].numel(), 3))
        dataset = DataSet("random", held, held, 3, mean=mean, std=std)
        task = Task(model, dataset, Population(np.arange(12), np.array([0, 12])))
        samples, stored = (
            torch.from_numpy(rng.integers(0, 12, 30)).to(device),
            held.to(torch.device(device)),
        )
        for last in (True, False):
            stack: Any = SimpleNamespace(frame=SimpleNamespace(last=last))
            read = partial(step.Work(stack, task, stored, dtype).prepared, samples)
            wanted, found = (using(each, read) for each in (None, module))
            assert found[0].dtype == dtype
            assert found[0].is_contiguous(
                memory_format=torch.channels_last if last else torch.contiguous_format
            )
            for mine, right in zip(found, wanted, strict=True):
                assert torch.equal(mine, right), (shape, last)
        for other in (
            stored.inputs.float(),
            stored.inputs[:, :, 0],
            stored.inputs[:, :, :, :1].expand(*inputs.shape[:3], 2),
        ):
            work = step.Work(stack, task, replace(stored, inputs=other), dtype)
            assert using(module, partial(work._images, samples)) is None


def check_counts(module: ModuleType, device: str, dtype: torch.dtype) -> None:
    """Sums of one number and of many; a client that is not live keeps what it has."""
    state, kind = make_state(device, dtype)
    batch, before = using(None, partial(step._batch, state, kind)), state.numbers.clone()
    draw = torch.Generator().manual_seed(0)
    loss = torch.rand(WIDTH, generator=draw).to(device, dtype)
    for columns in (1, 5, 1500):
        squares = torch.rand(WIDTH, columns, generator=draw).to(device)
        ends = []
        for each, numbers in ((None, squares.double()), (module, squares)):
            state.numbers.copy_(before)
            using(each, partial(step._count, state, kind, batch, loss, numbers))
            ends.append((state.wholes.clone(), state.sums.clone()))
        (whole, sums), (found, mine) = ends
        assert torch.equal(found, whole)
        assert torch.equal(mine[Sum.LOSS], sums[Sum.LOSS])
        torch.testing.assert_close(mine, sums, rtol=1e-14, atol=0)
        kept = [2, *range(WIDTH, SLOTS)]
        assert torch.equal(state.numbers[:, kept], before[:, kept])


CHECKS = {"batches": check_batches, "images": check_images, "counts": check_counts}
