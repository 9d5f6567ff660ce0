"""The Triton kernels, compiled for GPUs that this machine does not have: they must compile, and
fit.

The interpreter of `test_kernels.py` computes what they say, but knows nothing of layouts, registers
and shared memory. Here an engine on the CPU trains models of their real sizes with kernels that are
compiled instead of run, for several generations of GPUs. What they return is left uninitialised.
"""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import count
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("runs without TRITON_INTERPRET", allow_module_level=True)

from step_cases import WIDTH, make_state, using
from test_batched import make_briefs, make_task
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from kairosfl.engines.batched import (
    Batched,
    conv,
    dropout,
    fast,
    layers,
    lifts,
    pool,
    recurrent,
    rehearsal,
    rows,
    step,
    update,
)
from kairosfl.engines.batched.evaluator import single
from kairosfl.engines.batched.kernels import batch, device, launch, linear, loss, passes
from kairosfl.engines.batched.kernels import recurrent as lstm
from kairosfl.engines.batched.kernels import update as optimiser
from kairosfl.engines.batched.state import Kind, State
from kairosfl.models import build
from kairosfl.tasks.task import Task

READERS = (
    conv,
    dropout,
    layers,
    lifts,
    pool,
    recurrent,
    rehearsal,
    rows,
    update,
)  # modules that look for kernels; `step` is tested by itself
# An A100, a consumer card like it, an H100, a B200 and a consumer card like that, by capability,
# with the bytes of shared memory that a program may have.
GPUS = {80: 163 << 10, 86: 99 << 10, 90: 227 << 10, 100: 227 << 10, 120: 99 << 10}


QUICK = ((86, torch.float32, 64), (90, torch.bfloat16, 16))  # of the cases of an LSTM
NUMBERS = count()  # of devices, by which Triton keeps what it compiled


class Compiled:
    """A driver that has no GPU, and what was compiled for it."""

    def __init__(self, capability: int) -> None:
        self.capability = capability
        self.number = next(NUMBERS)
        self.kernels: list[tuple[str, Any]] = []
        self.launchers: list[str] = []
        memory = {"max_shared_mem": GPUS[capability]}
        self.utils = SimpleNamespace(get_device_properties=lambda index: memory)

    def shared(self) -> dict[str, int]:
        """The largest shared memory of every kernel so far."""
        done = [
            (name, kernel.result() if hasattr(kernel, "result") else kernel)
            for name, kernel in self.kernels
        ]
        return {
            name: max(kernel.metadata.shared for each, kernel in done if each == name)
            for name in dict(self.kernels)
        }

    def launcher_cls(self, source: Any, metadata: Any) -> None:
        self.launchers.append(metadata.name)

    def get_current_target(self) -> Any:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return self.number

    def get_current_stream(self, index: int) -> int:
        return 0


@pytest.fixture
def compiled(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Compiled]:
    """A GPU for which kernels are compiled, and that runs none of them."""
    gpu, run = Compiled(request.param), JITFunction.run
    monkeypatch.setattr(driver, "_active", gpu)

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        gpu.kernels.append((self.__name__, run(self, *args, grid=grid, warmup=True, **options)))

    monkeypatch.setattr(JITFunction, "run", compile_only)
    device.stages.cache_clear()
    yield gpu
    device.stages.cache_clear()
    shared = gpu.shared()
    assert shared
    assert max(shared.values()) <= GPUS[request.param], shared


def use_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, too: after an engine has tried its model, since they leave what they return
    uninitialised.
    """
    for module in READERS:
        monkeypatch.setattr(module, "kernels", lambda name, tensor: fast._module(name))


def separable(classes: int) -> nn.Module:
    apart = nn.Conv2d(24, 24, 3, padding=1, groups=24)
    head = (
        nn.GroupNorm(4, 24),
        nn.SiLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(24, classes),
    )
    return nn.Sequential(nn.Conv2d(3, 24, 3), nn.ReLU(), apart, *head)


def cases() -> Iterator[Any]:
    """A few everywhere, and every model on two GPUs; CI has a few on these two."""
    first = [("pfl_cnn", "bfloat16"), ("separable", "tf32")]
    models = ("pfl_cnn", "separable", "cnn", "alt_cnn", "alexnet", "resnet18")
    every = [(name, precision) for name in models for precision in ("bfloat16", "tf32", "float32")]
    for gpu in GPUS:
        for case in every if gpu in (86, 90) else first:
            quick = gpu in (86, 90) and case in first
            yield pytest.param(gpu, *case, marks=[] if quick else pytest.mark.slow)


@pytest.mark.parametrize(("compiled", "name", "precision"), [*cases()], indirect=["compiled"])
def test_a_step_compiles_and_fits(
    compiled: Compiled, name: str, precision: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = (
        separable(3) if name == "separable" else build(name, shape=(3, 32, 32), classes=3, seed=1)
    )
    task = make_task(model, (3, 32, 32), samples=12, clients=2)
    engine = Batched(task, precision="bfloat16" if precision == "bfloat16" else "float32")
    assert engine.stacks, engine.why
    assert engine._work is not None
    engine._work.stack.frame.dot = "tf32" if precision == "tf32" else "ieee"
    use_kernels(monkeypatch)
    engine.train(make_briefs(task, epochs=1, batch_size=4))
    assert {"forward", "weights"} <= set(compiled.shared())


@pytest.mark.parametrize("compiled", [*GPUS], indirect=True)
def test_what_surrounds_a_step_compiles(compiled: Compiled) -> None:
    held, kind = make_state("cpu", torch.float32)
    using(batch, partial(step._batch, held, kind))
    chosen = using(None, partial(step._batch, held, kind))
    using(batch, partial(step._count, held, kind, chosen, torch.rand(WIDTH), torch.rand(WIDTH, 5)))
    task = make_task(nn.Linear(192, 3), (3, 8, 8))
    for dtype in (torch.float32, torch.bfloat16):
        for last in (True, False):
            stack: Any = SimpleNamespace(frame=SimpleNamespace(last=last))
            work = step.Work(stack, task, task.dataset.train, dtype)
            using(batch, partial(work.prepared, torch.arange(8)))
    pieces = optimiser.blocks([(0, 64)], torch.device("cpu"))
    optimiser.squares(torch.rand(2, 64), torch.ones(2, dtype=torch.int8), pieces, torch.rand(2, 1))
    for classes in (10, 1000):
        loss.entropy(torch.rand(8, classes), torch.zeros(8, dtype=torch.int64), torch.rand(2, 4))
    layout = rows.RowLayout.of(task.layout)
    table = passes.pieces(layout.places, torch.device("cpu"))
    for dtype in (torch.float32, torch.bfloat16):
        weights, vectors = (
            torch.zeros(2, layout.width, dtype=dtype),
            torch.zeros(2, task.layout.size, dtype=dtype),
        )
        passes.fill(vectors[0].expand(2, -1), weights, table)
        passes.subtract(weights, vectors, vectors, table)
    assert set(compiled.shared()) == {
        "_batch",
        "_count",
        "_images",
        "_entropy",
        "_squares",
        "_fill",
        "_subtract",
    }


@pytest.mark.parametrize(
    ("compiled", "dtype", "samples"),
    [
        pytest.param(
            gpu, dtype, samples, marks=[] if (gpu, dtype, samples) in QUICK else pytest.mark.slow
        )
        for gpu in GPUS
        for dtype in (torch.float32, torch.bfloat16)
        for samples in (16, 64)
    ],
    indirect=["compiled"],
)
def test_lstms_compile_and_fit(compiled: Compiled, dtype: torch.dtype, samples: int) -> None:
    for dot in ("ieee", "tf32") if dtype == torch.float32 else ("ieee",):
        into, weights = (
            torch.zeros(2, samples, 3, 4 * 512, dtype=dtype),
            torch.zeros(2, 4 * 512, 512, dtype=dtype),
        )
        zeros = torch.zeros(2, samples, 512, dtype=dtype)
        y, *kept = lstm.forward(into, weights, zeros, zeros, dot)
        lstm.backward(y, zeros, weights, *kept, dot)
    assert set(compiled.shared()) == {"_forward", "_backward"}


@pytest.fixture
def requested(monkeypatch: pytest.MonkeyPatch) -> dict[bool, list[str]]:
    """The modules of kernels that had to be compiled, in a rehearsal and otherwise."""
    found: dict[bool, list[str]] = {True: [], False: []}
    compile_one = JITFunction._do_compile

    def compiling(self: Any, *args: Any, **options: Any) -> Any:
        found[launch._rehearsing.get()].append(self.__module__.rpartition(".")[2])
        return compile_one(self, *args, **options)

    monkeypatch.setattr(JITFunction, "_do_compile", compiling)
    return found


def rehearsed(model: nn.Module, monkeypatch: pytest.MonkeyPatch) -> tuple[Batched, Task]:
    """An engine whose model was rehearsed for batches of 4."""
    task = make_task(model, (3, 32, 32), samples=12, clients=2)
    engine = Batched(task, precision="bfloat16")
    assert engine._work is not None
    use_kernels(monkeypatch)
    stack: Any = engine._work.stack
    weights, gradients = (torch.ones(2, stack.frame.layout.width) for _ in range(2))
    stack.frame.samples = 3  # of the last pass
    stack.rehearsal(stack.frame, weights, gradients, 4)
    assert float((weights - 1).norm()) == float(gradients.norm()) == 0
    return engine, task


@pytest.mark.parametrize("compiled", [90], indirect=True)
def test_a_rehearsal_compiles_the_layers_of_a_step(
    compiled: Compiled, requested: dict[bool, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, task = rehearsed(build("pfl_cnn", shape=(3, 32, 32), classes=3, seed=1), monkeypatch)
    assert {"conv_programs", "pool"} <= set(requested[True])
    assert not requested[False]
    assert set(compiled.launchers) == set(dict(compiled.kernels))
    assert len(compiled.launchers) == len({id(kernel) for _, kernel in compiled.kernels})
    engine.train(make_briefs(task, epochs=1, batch_size=4))
    assert not {"conv_programs", "pool"} & set(requested[False])


class Rows(nn.Module):
    """Reads an image line by line, time first."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.out = nn.LSTM(96, 32), nn.Linear(32, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.lstm(x.permute(2, 0, 1, 3).flatten(2))[0][-1])


@pytest.mark.parametrize("compiled", [90], indirect=True)
def test_a_rehearsal_compiles_a_recurrence_of_what_are_data(
    compiled: Compiled, requested: dict[bool, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, task = rehearsed(Rows(), monkeypatch)
    assert requested[True].count("recurrent") == 2  # forward and backward
    engine.train(make_briefs(task, epochs=1, batch_size=4))
    assert "recurrent" not in requested[False]


@pytest.mark.parametrize("compiled", [90], indirect=True)
def test_a_rehearsal_compiles_what_a_step_may_choose_and_the_evaluation_of_one_model(
    compiled: Compiled, requested: dict[bool, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear, "MEASURED", 2)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    task = make_task(
        build("pfl_cnn", shape=(3, 32, 32), classes=3, seed=1), (3, 32, 32), samples=12, clients=2
    )
    engine = Batched(task)
    work: Any = engine._work
    work.stack.frame.measures = True
    use_kernels(monkeypatch)
    state, kind = (
        State(work.stack.frame.layout, 2, 12, torch.float32, torch.device("cpu")),
        Kind(2, 4),
    )
    work.rehearse(state, kind)
    assert requested[True].count("linear") == 3  # the large layer's forward, and both backward
    assert not engine.choices.made
    before = len(requested[True])
    inputs = task.prepared(task.dataset.test.inputs, torch.float32)
    predict = single(work)
    for _ in range(2):
        predict(task.start(), inputs)
        assert requested[True][before:] == ["pool"]  # those of convolutions are the step's
    assert not requested[False]


@pytest.mark.parametrize(
    "name", ["pfl_cnn", "cnn"]
)  # in the second, pooling finds the gradients of all biases
@pytest.mark.parametrize("compiled", [90], indirect=True)
def test_trials_of_convolutions_need_no_kernels_of_their_own(
    compiled: Compiled, requested: dict[bool, list[str]], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layers, "MEASURE", 2)
    monkeypatch.setattr(conv, "timed", lambda trial: trial() or 1.0)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    task = make_task(
        build(name, shape=(3, 32, 32), classes=3, seed=1), (3, 32, 32), samples=8, clients=2
    )
    engine = Batched(task)
    work: Any = engine._work
    work.stack.frame.measures = True
    use_kernels(monkeypatch)
    work.rehearse(
        State(work.stack.frame.layout, 2, 12, torch.float32, torch.device("cpu")), Kind(2, 4)
    )
    engine.train(make_briefs(task, epochs=1, batch_size=4))
    assert [choice for key, choice in engine.choices.made.items() if key.startswith("conv")] == [
        "gathered"
    ] * 2
    assert "conv_programs" not in requested[False]


@pytest.mark.parametrize("compiled", [90], indirect=True)
def test_a_rehearsal_of_a_step_compiles_what_surrounds_the_layers(
    compiled: Compiled, requested: dict[bool, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    task = make_task(
        build("pfl_cnn", shape=(3, 32, 32), classes=3, seed=1), (3, 32, 32), samples=12, clients=2
    )
    work: Any = Batched(task)._work
    use_kernels(monkeypatch)
    monkeypatch.setattr(step, "kernels", lambda name, tensor: fast._module(name))
    kinds = (
        {"momentum": True},
        {"clip": True},
        {"clip": True, "late": True},
        {"adamw": True},
        {"sam": True},
    )
    for flags in kinds:
        state, kind = (
            State(work.stack.frame.layout, 2, 12, torch.float32, torch.device("cpu")),
            Kind(2, 4, **flags),
        )
        for name in kind.needs():
            state.rows(name)
        for each in (state.w, state.v, state.g):
            each.fill_(1)
        before = copy.deepcopy((state.w, state.v, state.numbers, state.reals, state.extra))
        work.rehearse(state, kind)
        torch.testing.assert_close(
            (state.w, state.v, state.numbers, state.reals, state.extra), before, rtol=0, atol=0
        )
        assert not state.g.any()
    wanted = {"batch", "conv_programs", "dropout", "linear", "loss", "pool", "update"}
    assert set(requested[True]) == wanted
    assert not requested[False]


@pytest.mark.parametrize("compiled", [90], indirect=True)
def test_a_rehearsal_does_not_call_a_loss_of_ones_own(
    compiled: Compiled, requested: dict[bool, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may not be defined for outputs and targets that a rehearsal invents."""
    task = replace(
        make_task(nn.Sequential(nn.Flatten(), nn.Linear(192, 3)), (3, 8, 8), clients=2),
        loss=own_loss,
    )
    work: Any = Batched(task)._work
    use_kernels(monkeypatch)
    monkeypatch.setattr(step, "kernels", lambda name, tensor: fast._module(name))
    state, called = (
        State(work.stack.frame.layout, 2, 12, torch.float32, torch.device("cpu")),
        len(CALLS),
    )
    work.rehearse(state, Kind(2, 4))
    assert len(CALLS) == called
    assert set(requested[True]) == {"batch", "linear", "update"}


CALLS: list[torch.Size] = []


def own_loss(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    CALLS.append(outputs.shape)
    return nn.functional.cross_entropy(outputs, targets, reduction="none")


@pytest.mark.parametrize("compiled", [90], indirect=True)
def test_a_layer_that_fails_does_not_end_the_rehearsal(
    compiled: Compiled, requested: dict[bool, list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    frozen = nn.Conv2d(3, 4, 3).requires_grad_(False)
    head = (
        nn.MaxPool2d(2),
        nn.Conv2d(4, 16, 3),
        nn.GroupNorm(4, 16),
        nn.Flatten(),
        nn.Linear(2704, 3),
    )
    first = pool.ReluPool.forward

    def forward(self: pool.ReluPool, x: torch.Tensor) -> torch.Tensor:
        y = first(self, x)
        if launch._rehearsing.get():
            raise RuntimeError
        return y

    monkeypatch.setattr(pool.ReluPool, "forward", forward)
    rehearsed(nn.Sequential(frozen, nn.ReLU(), *head), monkeypatch)
    assert {"pool", "conv_programs", "norm"} <= set(requested[True])
