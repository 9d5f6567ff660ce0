"""What the batched engine does with models that it cannot stack, and with memory that runs out."""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_batched import assert_equal, make_briefs, make_task, named
from torch import Tensor, nn

from kairosfl.engines.batched import Batched, conv, stack
from kairosfl.engines.batched.rows import ALIGN, RowLayout
from kairosfl.engines.batched.slots import widths
from kairosfl.engines.loop import Loop
from kairosfl.errors import UserError
from kairosfl.tasks.task import Task
from kairosfl.tasks.vector import layout_of

SHAPE = (2, 6, 6)


class OwnParameter(nn.Module):
    """Uses a parameter outside any layer."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.linspace(-1, 1, 72))
        self.out = nn.Linear(72, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(x.flatten(1) + self.shift)


class Branches(nn.Module):
    """Decides in Python by the values of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(72, 3)

    def forward(self, x: Tensor) -> Tensor:
        y = self.out(x.flatten(1))
        return y * 2 if float(y.detach().abs().max()) > 1e9 else y


class BatchStatistics(nn.Module):
    """Normalises with the mean of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(72, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        return self.out(x - x.mean(0))


class InTrainingOnly(nn.Module):
    """Has gradients in training mode only, like cuDNN's recurrent layers."""

    class Guard(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, training: bool) -> Tensor:
            ctx.training = training
            return x.clone()

        @staticmethod
        def backward(ctx: Any, slope: Tensor) -> tuple[Tensor, None]:
            if not ctx.training:
                raise RuntimeError("backward can only be called in training mode")
            return slope, None

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(72, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.Guard.apply(self.out(x.flatten(1)), self.training)


class Twice(nn.Module):
    """Uses one layer twice, and ties the weights of two."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2, 2, 3, padding=1)
        self.norm = nn.GroupNorm(1, 2)
        self.first, self.second = nn.Linear(72, 72), nn.Linear(72, 72)
        self.second.weight = self.first.weight
        self.out = nn.Linear(72, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(F.relu(self.conv(self.norm(self.conv(x))))).flatten(1)
        return self.out(torch.tanh(self.second(F.gelu(self.first(self.first(x))))))


class Grouped(nn.Module):
    """Grouped, dilated and strided convolutions, poolings and norms."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(2, 4, 3, padding=2, dilation=2, groups=2, bias=False),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(4, 6, (1, 2), stride=(1, 2)),
            nn.GELU(),
            nn.AvgPool2d((3, 1)),
            nn.Flatten(),
            nn.LayerNorm(6),
            nn.Linear(6, 3),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


def _task(model: nn.Module) -> Task:
    with torch.no_grad():
        generator = torch.Generator().manual_seed(0)
        for parameter in model.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return make_task(model.double(), SHAPE)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (Twice, "stacked layer by layer"),
        (Grouped, "stacked layer by layer"),
        (OwnParameter, "stacked by lifting its parameters: it uses 'shift' outside a layer"),
        (
            BatchStatistics,
            "one client after another: the samples of a batch change each other's outputs",
        ),
        (Branches, "one client after another: vmap fails on it"),
        (InTrainingOnly, "one client after another: it cannot be tried in evaluation mode"),
    ],
)
def test_every_model_runs_somehow_and_the_engine_says_how(
    make: Callable[[], nn.Module], why: str
) -> None:
    task = _task(make())
    engine = Batched(task)
    assert engine.why.startswith(why)
    assert engine.stacks == engine.why.startswith("stacked")
    assert_equal(engine.train(make_briefs(task)), Loop(task).train(make_briefs(task)), 1e-10)


def test_a_dropout_that_cannot_be_stacked_runs_one_client_after_another() -> None:
    task = _task(nn.Sequential(nn.AlphaDropout(0.5), nn.Flatten(), nn.Linear(72, 3)))
    engine = Batched(task)
    assert engine.why.startswith("one client after another: it has a AlphaDropout")
    assert_equal(engine.train(make_briefs(task)), Loop(task).train(make_briefs(task)), 1e-10)


def test_bfloat16_is_not_for_models_that_do_not_stack() -> None:
    with pytest.raises(
        UserError,
        match=r"run\.precision = 'bfloat16' needs a model that stacks, and here the samples",
    ):
        Batched(_task(BatchStatistics()), precision="bfloat16")


@pytest.mark.parametrize(
    ("stacked", "alone", "runs"), [(1.0, 1.0, True), (3.0, 1.0, False), (inf, inf, False)]
)
def test_a_low_precision_may_cost_what_it_costs_one_client(
    stacked: float, alone: float, runs: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = iter([stacked, alone] * 3)  # by each way
    monkeypatch.setattr(stack, "_losses", lambda *both: [next(calls)] * 2)
    task = make_task(nn.Sequential(nn.Flatten(), nn.Linear(72, 3)), SHAPE)
    if runs:
        assert Batched(task, precision="bfloat16").why == "stacked layer by layer"
    else:
        with pytest.raises(UserError, match="loses its accuracy in bfloat16"):
            Batched(task, precision="bfloat16")


def test_memory_that_runs_out_halves_the_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    from kairosfl.engines.batched import graphs

    task = named("mlp")
    engine, step, seen = Batched(task), graphs.step, []

    def greedy(work: object, state: object, kind: object) -> None:
        seen.append(kind.width)  # type: ignore[attr-defined]
        if kind.width > 1:  # type: ignore[attr-defined]
            raise torch.OutOfMemoryError("too much")
        step(work, state, kind)  # type: ignore[arg-type]

    monkeypatch.setattr(graphs, "step", greedy)
    assert_equal(engine.train(make_briefs(task)), Loop(task).train(make_briefs(task)), 1e-10)
    assert seen[:3] == [4, 2, 1]


def test_a_way_to_convolve_that_does_not_run_is_not_the_quickest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(conv, "timed", lambda trial: trial() or 1.0)
    runs, short = conv.Grouped(), conv.Columns()

    def trial(way: conv.Method) -> None:
        if way is short:
            raise torch.OutOfMemoryError("too much")

    assert conv.quickest({"a": short, "b": runs, "c": short}, trial) == "b"
    with pytest.raises(torch.OutOfMemoryError):  # on which the engine takes fewer slots
        conv.quickest({"a": short, "b": short}, trial)


def test_a_deterministic_run_never_has_fewer_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    from kairosfl.engines.batched import graphs

    def greedy(work: object, state: object, kind: object) -> None:
        raise torch.OutOfMemoryError("too much")

    monkeypatch.setattr(graphs, "step", greedy)
    task = named("mlp")
    with pytest.raises(UserError, match=r"run.slots = 16 do not fit into memory"):
        Batched(task, deterministic=True).train(make_briefs(task))


def test_slots_grow_with_the_cohort() -> None:
    task = named("mlp")
    engine = Batched(task)
    few = make_briefs(task).take(torch.tensor([1]))
    engine.train(few)
    assert_equal(engine.train(make_briefs(task)), Loop(task).train(make_briefs(task)), 1e-10)


def test_widths_waste_little() -> None:
    assert widths(1) == [1]
    assert widths(10) == [1, 2, 3, 4, 5, 6, 7, 8, 10]
    assert widths(80) == [
        1,
        2,
        3,
        4,
        5,
        6,
        7,
        8,
        10,
        12,
        14,
        16,
        20,
        24,
        28,
        32,
        40,
        48,
        56,
        64,
        80,
    ]


def test_rows_are_aligned_and_come_back_as_they_were() -> None:
    model = nn.Sequential(nn.Conv2d(3, 5, (2, 4)), nn.Flatten(), nn.Linear(7, 2))
    rows = RowLayout.of(layout_of(model))
    vectors = torch.arange(2 * layout_of(model).size, dtype=torch.float32).view(2, -1)
    packed = rows.pack(vectors)
    assert all(place.offset % ALIGN == 0 for place in rows.places)
    assert packed.shape == (2, rows.width)
    unpacked = torch.empty_like(vectors)
    rows.unpack(packed, unpacked)
    assert torch.equal(unpacked, vectors)
    for start in (vectors[1], vectors.flip(0)):
        for dtype in (torch.float32, torch.float64):  # as in the rows, and another
            difference = torch.full_like(vectors, torch.nan, dtype=dtype)
            rows.subtract(packed, start.to(dtype), difference)
            assert torch.equal(difference, (vectors - start).to(dtype))
    assert torch.equal(rows.natural(packed, 0)[1], vectors[1, :120].view(5, 3, 2, 4))
    assert rows.ranges(frozenset({1})) == [(0, 128), (160, 224)]
