"""Models whose own forward runs for all clients with stacked parameters: updates as of one client
after another.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_batched import assert_equal, make_briefs, make_task
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import zoo
from kairosfl.core.fields import FISHER
from kairosfl.engines.batched import Batched, graphs
from kairosfl.engines.loop import Loop
from kairosfl.tasks.task import Task
from kairosfl.tasks.vector import base

SHAPE = (2, 6, 6)
WHY = "stacked by lifting its parameters"


class Tokens(nn.Module):
    """A small ViT: class token, positions, scaled residuals, relative positions as an attention
    mask, a tied matrix.
    """

    def __init__(self, dropout: float = 0.0, again: bool = False, depth: float = 0.0) -> None:
        super().__init__()
        self.dropout, self.again, self.depth = dropout, again, depth
        self.patches = nn.Conv2d(2, 8, 2, 2)
        self.token, self.position = (
            nn.Parameter(torch.empty(1, 1, 8)),
            nn.Parameter(torch.empty(1, 10, 8)),
        )
        self.norm, self.qkv, self.out = nn.LayerNorm(8), nn.Linear(8, 24), nn.Linear(8, 8)
        self.scale, self.table = nn.Parameter(torch.empty(8)), nn.Parameter(torch.empty(19, 2))
        self.head = nn.Linear(8, 3)
        self.register_buffer("places", torch.arange(10)[:, None] - torch.arange(10)[None] + 9)

    def block(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        q, k, v = self.qkv(y).reshape(len(x), 10, 3, 2, 4).permute(2, 0, 3, 1, 4)
        nearness = self.table[self.places.view(-1)].view(10, 10, 2).permute(2, 0, 1)
        drop = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, nearness.unsqueeze(0), dropout_p=drop)
        y = self.scale * F.dropout(
            self.out(y.transpose(1, 2).flatten(2)), self.dropout, self.training
        )
        if self.depth and self.training:
            y = y * (y.new_empty(len(y), 1, 1).bernoulli_(1 - self.depth) / (1 - self.depth))
        return x + y @ self.out.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2)
        x = torch.cat([self.token.expand(len(x), -1, -1), x], 1) + self.position
        for _ in range(2):
            x = checkpoint(self.block, x, use_reentrant=False) if self.again else self.block(x)
        return self.head(x[:, 0])


class Functional(nn.Module):
    """Parameters without layers: products of all kinds, norms, convolutions, in place, the batch
    along another axis.
    """

    def __init__(self) -> None:
        super().__init__()
        shapes = {
            "mix": (6, 6), "left": (6, 6), "heads": (3, 6, 2), "gain": (6,), "slope": (2,), "kernel": (4, 2, 3),
            "back": (4, 2, 2), "cube": (2, 2, 1, 1, 1), "depthwise": (4, 1, 3, 3), "many": (1, 1, 6), "bias": (6,),
        }  # fmt: skip
        for name, shape in shapes.items():
            setattr(self, name, nn.Parameter(torch.empty(shape)))
        self.norm, self.out = nn.GroupNorm(1, 4), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = F.prelu(x, self.slope) @ self.mix + self.left.softmax(-1) @ x
        x = F.instance_norm(x, weight=self.slope, bias=None)
        x = F.conv3d(x.unsqueeze(2), self.cube, padding="same").squeeze(2)
        y = F.conv1d(x.flatten(2), self.kernel, dilation=2, padding=2)
        y = self.norm(y.unflatten(2, (6, 6)))
        y = F.silu(
            F.conv2d(y, F.normalize(self.depthwise, dim=2), padding=1, groups=4), inplace=True
        )
        y = F.conv_transpose1d(y.flatten(2), self.back, stride=1)[..., :36].unflatten(2, (6, 6))
        x = torch.cat([x, y, self.many.repeat(len(x), 2, 6, 1)[:, :, :6]], 1).mean(1)
        x = x + torch.einsum("bij,hjk->bhik", x, self.heads).flatten(1)[:, :36].unflatten(1, (6, 6))
        x = torch.addmm(self.bias, x.reshape(-1, 6), self.mix).view_as(x)
        x = x.transpose(0, 1)  # time first
        x = F.rms_norm(F.linear(x, self.left, self.bias), (6,), self.gain)
        x += self.gain
        return self.out(torch.where(x > 0, x, self.bias.exp()).mean(0))


class Loops(nn.Module):
    """Layers with stacked forms of their own inside code that torch.fx cannot trace."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.lstm = (
            nn.Embedding(zoo.VOCABULARY, 6, padding_idx=0),
            nn.LSTM(6, 6, batch_first=True),
        )
        self.attend = nn.MultiheadAttention(6, 2)
        self.out = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        if x.shape[1] > 3:
            x, _ = self.lstm(x)
        x = x.transpose(0, 1)
        return self.out(self.attend(x, x, x, need_weights=False)[0].mean(0))


class Temperature(nn.Module):
    """Parameters without axes, as of CLIP: a learned temperature by which features of length 1 are
    divided.
    """

    def __init__(self, dropout: float = 0.0, inputs: int = 72, classes: int = 3) -> None:
        super().__init__()
        self.inner, self.drop = nn.Linear(inputs, 8), nn.Dropout(dropout)
        self.out = nn.Linear(8, classes, bias=False)
        self.heat, self.shift = nn.Parameter(torch.tensor(0.5)), nn.Parameter(torch.tensor(0.1))

    def forward(self, x: Tensor) -> Tensor:
        features = self.inner(x.flatten(1)).tanh() + self.shift
        features = features / features.norm(dim=1, keepdim=True)
        return self.out(self.drop(features)) / self.heat


def filled(model: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model.double()


def equal(task: Task, tolerance: float, **changes: Any) -> Batched:
    """The engine, after training as the loop does."""
    before = {name: tensor.clone() for name, tensor in base(task.model).items()}
    engine, briefs = Batched(task), make_briefs(task, **changes)
    assert_equal(engine.train(briefs), Loop(task).train(briefs), tolerance)
    assert engine.why.startswith(WHY), engine.why
    assert all(torch.equal(before[name], tensor) for name, tensor in base(task.model).items())
    return engine


@pytest.mark.parametrize(
    "make", [Tokens, lambda: Tokens(again=True), Functional], ids=["tokens", "again", "functional"]
)
def test_parameters_outside_layers_train_as_one_client_after_another(
    make: Callable[[], nn.Module],
) -> None:
    equal(make_task(filled(make()), SHAPE), 1e-10)


TEMPERED: dict[str, dict[str, Any]] = {
    "plain": {},
    "clipped": {"clip": 0.5, "pull": 0.1},
    "adamw": {"optimizer": "adamw", "momentum": 0.0, "lr": 1e-3},
    "sharp": {"radius": 0.05},
    "stopping": {"stop_below": 0.999, "epochs": 4},
    "fisher": {"measure": frozenset({FISHER})},
}


@pytest.mark.parametrize("changes", TEMPERED.values(), ids=TEMPERED)
def test_parameters_without_axes_train_as_one_client_after_another(changes: dict[str, Any]) -> None:
    equal(make_task(filled(Temperature()), SHAPE), 1e-10, **changes)


def test_parameters_without_axes_in_float32() -> None:
    equal(make_task(filled(Temperature()).float(), SHAPE), 1e-4)


@pytest.mark.parametrize("normed", [False, True])
def test_a_client_without_a_previous_model_is_not_compared_with_zeros(normed: bool) -> None:
    """At zero weights these models are not a number, and so would be the gradient of a term that
    counts nothing.
    """
    inner = nn.utils.parametrizations.weight_norm(nn.Linear(72, 8))
    model = (
        nn.Sequential(nn.Flatten(), inner, nn.Tanh(), nn.Linear(8, 3)) if normed else Temperature()
    )
    task = make_task(filled(model), SHAPE)
    previous = torch.stack([task.start() * scale for scale in (0.0, 1.1, 0.0, 0.9)])
    contrast = {"contrast": [0.0, 1.0, 0.0, 2.0], "temperature": 0.5, "previous": previous}
    engine = equal(task, 1e-10, **contrast)
    # Then in slots of which others have had a previous model before.
    briefs = make_briefs(task, **contrast)
    swapped = replace(briefs, contrast=[1.0, 0.0, 2.0, 0.0], previous=previous.roll(-1, 0))
    assert_equal(engine.train(swapped), Loop(task).train(swapped), 1e-10)


def test_a_client_in_training_is_not_compared_with_zeros_when_others_join() -> None:
    task = make_task(filled(Temperature()), SHAPE)
    long, joining = make_briefs(task, epochs=9), make_briefs(task, epochs=1, seed=4)
    joining = replace(joining, contrast=[1.0, 1.0, 0.0, 2.0], previous=task.start() * 1.1)
    engine = Batched(task, slots=5)
    tickets = [engine.submit(task, briefs) for briefs in (long, joining)]
    engine.collect(), engine.collect()
    for ticket, briefs in zip(tickets, (long, joining), strict=True):
        assert_equal(ticket.reports(), Loop(task).train(briefs), 1e-10)


def test_layers_with_stacked_forms_inside_code_that_cannot_be_traced() -> None:
    equal(make_task(filled(Loops()), (zoo.LENGTH,), tokens=zoo.VOCABULARY), 1e-10)


@pytest.mark.parametrize("size", [2, 4, 9, 10, 18])
def test_a_batch_as_large_as_another_axis_is_told_from_it(size: int) -> None:
    task = make_task(filled(Tokens()), SHAPE)
    equal(task, 1e-10, batch_size=size)


def test_features_are_the_input_of_the_last_linear_layer() -> None:
    equal(make_task(filled(Tokens()), SHAPE), 1e-9, stop_below=0.99)


@pytest.mark.parametrize("options", [{"dropout": 0.5}, {"depth": 0.5}])
def test_random_masks_depend_on_the_client_alone(options: dict[str, float]) -> None:
    task = make_task(filled(Tokens(**options)), SHAPE)
    together, alone = (Batched(task, slots=slots) for slots in (4, 1))
    assert together.why.startswith(WHY)
    found, wanted = together.train(make_briefs(task)), alone.train(make_briefs(task))
    assert_equal(found, wanted, 1e-10)
    still = Batched(make_task(filled(Tokens()), SHAPE)).train(make_briefs(task))
    assert (found.delta - still.delta).norm() > 0.01 * still.delta.norm()


def test_dropout_functions_in_recomputed_parts_are_not_lifted() -> None:
    engine = Batched(make_task(filled(Tokens(dropout=0.5, again=True)), SHAPE))
    assert not engine.stacks
    assert "; lifted, stacking fails on it" in engine.why


class Sequence(nn.Module):
    """Dropout on sequences whose steps come before the samples."""

    def __init__(self, dropout: float = 0.5, again: bool = False) -> None:
        super().__init__()
        self.start, self.inner = nn.Parameter(torch.ones(6)), nn.Linear(6, 6)
        self.drop, self.out, self.again = nn.Dropout(dropout), nn.Linear(6, 3), again

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1, 2).transpose(0, 1) + self.start  # [12, samples, 6]
        return self.out(
            (checkpoint(self.block, x, use_reentrant=False) if self.again else self.block(x)).mean(
                0
            )
        )

    def block(self, x: Tensor) -> Tensor:
        return self.drop(self.inner(x).tanh())


def test_masks_of_sequences_depend_on_the_client_alone() -> None:
    equal(make_task(filled(Sequence(dropout=0.0)), SHAPE), 1e-10)
    task, again = (make_task(filled(Sequence(again=again)), SHAPE) for again in (False, True))
    together, alone, recomputed = Batched(task, slots=4), Batched(task, slots=1), Batched(again)
    assert together.why.startswith(WHY)
    assert recomputed.why.startswith(WHY), recomputed.why
    wanted = together.train(make_briefs(task))
    assert_equal(alone.train(make_briefs(task)), wanted, 1e-10)
    assert_equal(recomputed.train(make_briefs(task)), wanted, 1e-10)


class Repeats(nn.Module):
    """One dropout layer, called twice on the same numbers; with equal masks, nothing before it is
    trained.
    """

    def __init__(self, again: bool) -> None:
        super().__init__()
        self.inner, self.drop, self.out = nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 3)
        self.scale, self.again = nn.Parameter(torch.ones(8)), again

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.end, x, use_reentrant=False) if self.again else self.end(x)

    def end(self, x: Tensor) -> Tensor:
        x = self.scale * self.inner(x.flatten(1)[:, :8]).tanh()
        return self.out(self.drop(x) - self.drop(x))


def test_a_dropout_that_is_called_twice_draws_two_masks() -> None:
    task = make_task(filled(Repeats(again=False)), SHAPE)
    engine = Batched(task)
    assert engine.why.startswith(WHY), engine.why
    moved = engine.train(make_briefs(task)).delta[:, : 8 + 64 + 8]  # all but the last layer
    assert float(moved.norm()) > 0
    assert not Batched(make_task(filled(Repeats(again=True)), SHAPE)).stacks


def test_bfloat16_keeps_weights_in_float32() -> None:
    task = make_task(filled(Tokens()).float(), SHAPE)
    engine = Batched(task, precision="bfloat16")
    assert engine.why.startswith(WHY)
    found, wanted = engine.train(make_briefs(task)), Loop(task).train(make_briefs(task))
    assert 0 < (found.delta - wanted.delta).norm() < 0.1 * wanted.delta.norm()


def test_a_step_that_fails_after_the_trial_is_trained_one_client_after_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    task = make_task(filled(Tokens()), SHAPE)
    engine, calls = Batched(task), []

    def failing(*given: Any) -> None:
        calls.append(given)
        if len(calls) > 2:
            raise RuntimeError("not at this batch size")
        step(*given)

    step = graphs.step
    monkeypatch.setattr(graphs, "step", failing)
    with pytest.warns(
        UserWarning, match=r"one client after another: a training step .*not at this batch size"
    ):
        found = engine.train(make_briefs(task))
    assert_equal(found, Loop(task).train(make_briefs(task)), 1e-10)
    assert not engine.stacks
    assert_equal(engine.train(make_briefs(task)), Loop(task).train(make_briefs(task)), 1e-10)
