"""Models of which a part is frozen, on every engine: the same updates, and a base that stays as it
is, bit for bit.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from test_batched import assert_equal, make_briefs, make_task
from torch import Tensor, nn

from kairosfl.core.fields import FISHER, SCORE_AFTER, SCORE_BEFORE
from kairosfl.engines.batched import Batched
from kairosfl.engines.loop import Loop
from kairosfl.errors import UserError
from kairosfl.tasks.task import Task
from kairosfl.tasks.vector import base, flatten

SHAPE, TOKENS, LENGTH = (2, 6, 6), 9, 5
STACKED = "stacked layer by layer"
LIFTED = "stacked by lifting its parameters: it has a Conv1d"


class LoRA(nn.Module):
    """A frozen linear layer and two small trained matrices beside it."""

    def __init__(self, inputs: int, outputs: int, rank: int = 2) -> None:
        super().__init__()
        self.base = nn.Linear(inputs, outputs).requires_grad_(False)
        self.a, self.b = (
            nn.Parameter(torch.empty(rank, inputs)),
            nn.Parameter(torch.empty(outputs, rank)),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + F.linear(F.linear(x, self.a), self.b)


class Adapter(nn.Module):
    """The same with layers, as adapter libraries write it."""

    def __init__(self, inputs: int, outputs: int, rank: int = 2) -> None:
        super().__init__()
        self.base = nn.Linear(inputs, outputs).requires_grad_(False)
        self.a, self.b = nn.Linear(inputs, rank, bias=False), nn.Linear(rank, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.b(self.a(x))


class Text(nn.Module):
    """Frozen embedding and positions, a constant table of them, and a body of some kind."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.tokens = nn.Embedding(TOKENS, 8, padding_idx=0).requires_grad_(False)
        self.positions = nn.Parameter(torch.empty(LENGTH, 8), requires_grad=False)
        self.register_buffer("position_ids", torch.arange(LENGTH)[None])
        self.register_buffer("scale", torch.linspace(0.5, 2, 8))
        self.body, self.out = body, nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = (self.tokens(x) + self.positions[self.position_ids]) * self.scale
        x = self.body(x)
        return self.out((x[0] if isinstance(self.body, nn.LSTM) else x).mean(1))


class Unused(nn.Module):
    """Has a layer that no forward pass reaches."""

    def __init__(self) -> None:
        super().__init__()
        self.out, self.spare = nn.Linear(72, 3), nn.Linear(72, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(x.flatten(1))


def some(*frozen: str) -> Callable[[nn.Module], nn.Module]:
    """Freezes the parameters whose names end so."""

    def freeze(model: nn.Module) -> nn.Module:
        for name, parameter in model.named_parameters():
            if name.endswith(frozen):
                parameter.requires_grad_(False)
        return model

    return freeze


def images(middle: nn.Module | None = None) -> nn.Sequential:
    """A body of a convolution and norms, and a head."""
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1),
        nn.GroupNorm(2, 4),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(36, 8),
        nn.LayerNorm(8),
        nn.Tanh(),
        middle or nn.Linear(8, 8),
        nn.Linear(8, 3),
    )


def tied() -> nn.Sequential:
    model = nn.Sequential(
        nn.Flatten(), nn.Linear(72, 8), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 3)
    )
    model[4].weight = model[2].weight
    return some("1.weight", "1.bias", "4.bias")(model)


def tied_base() -> nn.Sequential:
    model = tied().requires_grad_(True)
    return some("2.weight")(model)


def conv1d(frozen: str = "") -> list[nn.Module]:
    """A frozen layer of a kind that has no stacked form."""
    return [nn.Unflatten(1, (2, -1)), some(frozen)(nn.Conv1d(2, 2, 3, padding=1)), nn.Flatten()]


def encoder(dropout: float = 0.0) -> nn.TransformerEncoderLayer:
    return nn.TransformerEncoderLayer(8, 2, 16, dropout, batch_first=True)


def attention() -> Text:
    model = Text(nn.TransformerEncoder(encoder(), 2, enable_nested_tensor=False))
    return some("in_proj_weight", "linear1.weight", "out_proj.bias", "norm1.weight")(model)


# How to make it, and how the batched engine runs it.
MODELS: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "head only": (
        lambda: some("0.weight", "0.bias", "1.weight", "1.bias", "5.weight", "5.bias")(images()),
        STACKED,
    ),
    "body only": (lambda: some("9.weight", "9.bias")(images()), STACKED),
    "a layer in the middle": (
        lambda: some("5.weight", "5.bias", "6.weight", "6.bias")(images()),
        STACKED,
    ),
    "biases only": (lambda: some("weight")(images()), STACKED),
    "weights only": (lambda: some("bias")(images()), STACKED),
    "a layer of another kind": (lambda: images(nn.Sequential(*conv1d())), STACKED),
    "a partly frozen one": (
        lambda: nn.Sequential(nn.Flatten(), nn.Linear(72, 8), *conv1d("bias"), nn.Linear(8, 3)),
        LIFTED,
    ),
    "one after a GroupNorm": (lambda: images(nn.Sequential(*conv1d("bias"))), LIFTED),
    "LoRA": (
        lambda: nn.Sequential(nn.Flatten(), LoRA(72, 8), nn.Tanh(), LoRA(8, 3)),
        "stacked by lifting its parameters: it uses",
    ),
    "adapters": (
        lambda: nn.Sequential(nn.Flatten(), Adapter(72, 8), nn.Tanh(), Adapter(8, 3)),
        STACKED,
    ),
    "tied weights": (tied, STACKED),
    "tied weights in the base": (tied_base, STACKED),
    "frozen embedding": (lambda: Text(nn.Linear(8, 8)), STACKED),
    "frozen encoder": (lambda: Text(encoder().requires_grad_(False)), STACKED),
    "partly frozen encoder": (attention, STACKED),
    "frozen LSTM": (lambda: Text(nn.LSTM(8, 8, batch_first=True).requires_grad_(False)), STACKED),
    "partly frozen LSTM": (lambda: some("hh_l0")(Text(nn.LSTM(8, 8, batch_first=True))), STACKED),
    "an unused layer": (Unused, STACKED),
}


def task_of(model: nn.Module, dtype: torch.dtype = torch.float64) -> Task:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    text = isinstance(model, Text)
    return make_task(model.to(dtype), (LENGTH,) if text else SHAPE, tokens=TOKENS if text else 0)


def kept(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in base(model).items()}


def assert_kept(model: nn.Module, before: dict[str, Tensor]) -> None:
    now = base(model)
    assert now.keys() == before.keys()
    assert all(torch.equal(tensor, before[name]) for name, tensor in now.items())


@pytest.mark.parametrize("name", MODELS)
def test_both_engines_train_what_is_trained_and_nothing_else(name: str) -> None:
    make, why = MODELS[name]
    task = task_of(make())
    before, x = kept(task.model), flatten(task.model)
    loop, batched = Loop(task), Batched(task)
    assert batched.why.startswith(why)
    for changes in ({}, {"pull": 0.1, "clip": 0.5}, {"measure": {SCORE_BEFORE, SCORE_AFTER}}):
        briefs = make_briefs(task, **changes)
        wanted = loop.train(briefs)
        assert (
            wanted.delta.shape
            == (4, task.layout.size)
            == (4, sum(p.numel() for p in by_hand(task)))
        )
        assert_equal(batched.train(briefs), wanted, 1e-10)
    assert batched.evaluate(x) == loop.evaluate(x)
    assert torch.equal(flatten(task.model), x)
    for model in (task.model, loop.trainer.model, loop.trainer.still, batched.trainer.model):
        assert_kept(model, before)


def by_hand(task: Task) -> list[nn.Parameter]:
    """What an optimiser would be given."""
    return [parameter for parameter in task.model.parameters() if parameter.requires_grad]


@pytest.mark.parametrize("name", MODELS)
def test_both_engines_in_float32(name: str) -> None:
    task = task_of(MODELS[name][0](), torch.float32)
    one = make_briefs(task, epochs=1, batch_size=64, lr=0.1)
    found, wanted = Batched(task).train(one).delta, Loop(task).train(one).delta
    assert (found - wanted).norm() <= 1e-5 * (task.start() + wanted).norm()


@pytest.mark.parametrize("name", MODELS)
def test_a_step_is_that_of_a_torch_optimiser(name: str) -> None:
    task = task_of(MODELS[name][0]())
    one = make_briefs(task, epochs=1, batch_size=64)
    model = copy.deepcopy(task.model).train()
    rows = torch.from_numpy(task.clients[1].astype("int64"))
    inputs = task.dataset.train.inputs[rows]
    if not task.dataset.vocabulary:
        inputs = (inputs.float() / 255 - 0.5) / 0.5
    lr = float(one.lr[1])
    optimiser = torch.optim.SGD(
        [p for p in model.parameters() if p.requires_grad], lr=lr, weight_decay=1e-3
    )
    loss = F.cross_entropy(
        model(inputs.double() if inputs.is_floating_point() else inputs),
        task.dataset.train.targets[rows],
    )
    torch.autograd.backward(loss)
    # The optimiser skips what has no gradient; a client's gradient of it is zero, and weight decay
    # acts.
    for parameter in model.parameters():
        if parameter.requires_grad and parameter.grad is None:
            parameter.grad = torch.zeros_like(parameter)
    optimiser.step()
    wanted = flatten(model) - task.start()
    assert (
        Loop(task).train(one).delta[1] - wanted
    ).norm() <= 1e-6 * wanted.norm()  # images enter as float32


@pytest.mark.parametrize("name", ["head only", "body only", "LoRA", "biases only"])
def test_features_and_fisher_traces_with_a_frozen_part(name: str) -> None:
    task = task_of(MODELS[name][0]())
    previous = task.start() + 0.05 * torch.randn(4, task.layout.size, dtype=torch.float64)
    briefs = make_briefs(
        task,
        stop_below=0.9,
        contrast=1.0,
        temperature=0.5,
        previous=previous,
        measure={FISHER},
        lr=0.05,
    )
    assert_equal(Batched(task).train(briefs), Loop(task).train(briefs), 1e-9)


@pytest.mark.parametrize("frozen", [True, False])
def test_dropout_inside_a_frozen_layer_is_each_clients_own(frozen: bool) -> None:
    task = task_of(Text(encoder(0.5).requires_grad_(not frozen)))
    engine = Batched(task)
    assert engine.why == STACKED
    briefs = make_briefs(task)
    together = engine.train(briefs).delta
    assert not torch.allclose(
        together, Loop(replace(task, model=without_dropout(task.model))).train(briefs).delta
    )
    alone = torch.cat(
        [engine.train(briefs.take(torch.tensor([client]))).delta for client in range(4)]
    )
    assert (together - alone).norm() <= 1e-10 * alone.norm()


def without_dropout(model: nn.Module) -> nn.Module:
    model = copy.deepcopy(model)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if isinstance(module, nn.MultiheadAttention):
            module.dropout = 0.0
    return model


@pytest.mark.parametrize("name", MODELS)
def test_bfloat16_computes_in_it_and_keeps_the_base(name: str) -> None:
    task = task_of(MODELS[name][0](), torch.float32)
    before = kept(task.model)
    one = make_briefs(task, epochs=1, batch_size=64, lr=0.1)
    engine = Batched(task, precision="bfloat16")
    found, wanted = engine.train(one).delta, Loop(task).train(one).delta
    assert 0 < (found - wanted).norm() <= 0.1 * wanted.norm()
    assert_kept(task.model, before)


def test_a_model_that_cannot_run_in_bfloat16_is_refused_and_not_run_otherwise() -> None:
    class Exact(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("table", torch.eye(36))
            self.out = nn.Linear(36, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(torch.linalg.matrix_exp(x).flatten(2).mean(1) @ self.table)

    with pytest.raises(
        UserError,
        match=r"run\.precision = 'bfloat16' needs a model that stacks, and here vmap fails",
    ):
        Batched(task_of(Exact(), torch.float32), precision="bfloat16")


def test_tasks_with_another_base_do_not_share_an_engine() -> None:
    task = task_of(MODELS["head only"][0]())
    other = copy.deepcopy(task.model)
    with torch.no_grad():
        other[0].weight += 1
    engine = Batched(task)
    engine.train_many([(replace(task, model=copy.deepcopy(task.model)), make_briefs(task))])
    with pytest.raises(
        UserError, match="A task with another frozen part of the model cannot share this engine"
    ):
        engine.submit(replace(task, model=other), make_briefs(task))


def test_batch_norm_without_running_statistics_runs_one_client_after_another() -> None:
    layers = (
        nn.Flatten(),
        nn.Linear(72, 8),
        nn.BatchNorm1d(8, track_running_stats=False),
        nn.Linear(8, 3),
    )
    task = task_of(nn.Sequential(*layers))
    briefs = make_briefs(task, drop_last=True)
    engine = Batched(task)
    assert engine.why.startswith("one client after another: it fails on a single sample")
    assert_equal(engine.train(briefs), Loop(task).train(briefs), 1e-12)
