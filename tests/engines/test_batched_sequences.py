"""Recurrent layers, attention and Transformer encoders stacked over clients: as one client after
another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from test_batched import assert_equal, make_briefs, make_task
from torch import Tensor, nn

from kairosfl.engines.batched import Batched
from kairosfl.engines.loop import Loop
from kairosfl.tasks.task import Task

SHAPE = (2, 6, 6)  # 12 steps of 6 numbers


class Recurrent(nn.Module):
    """Reads all outputs and the last states; `begins` from states of its own, `learns` them, keeps
    some weights.
    """

    def __init__(
        self,
        kind: type[nn.RNNBase],
        *,
        begins: bool = False,
        learns: bool = False,
        frozen: Sequence[str] = (),
        **options: Any,
    ) -> None:
        super().__init__()
        self.layer, self.begins = kind(6, 5, **options), begins or learns
        self.start = nn.Linear(6, 5) if learns else None
        for name in frozen:
            self.layer.get_parameter(name).requires_grad_(False)
        sides = 2 if options.get("bidirectional") else 1
        self.groups = sides * options.get("num_layers", 1)
        self.out = nn.Linear(5 * (sides + self.groups), 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1, 2)
        first = self.layer.batch_first
        state = None
        if self.begins:
            start = (x[:, 0, :5] if self.start is None else self.start(x[:, 0])).expand(
                self.groups, -1, -1
            )
            state = (start, 2 * start) if isinstance(self.layer, nn.LSTM) else start
        y, end = self.layer(x if first else x.transpose(0, 1), state)
        end = end[0] + end[1] if isinstance(self.layer, nn.LSTM) else end
        y = y if first else y.transpose(0, 1)
        return self.out(torch.cat([y[:, -2], end.transpose(0, 1).flatten(1)], 1))


class Attention(nn.Module):
    """Attention of a sequence to another, with masks of positions and of each sample's padding."""

    def __init__(self, mask: torch.dtype | None, pads: bool = False, **options: Any) -> None:
        super().__init__()
        self.layer, self.mask, self.pads = nn.MultiheadAttention(6, 2, **options), mask, pads
        self.first, self.out = options.get("batch_first", False), nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1, 2)
        place = torch.ones_like(x[0, :, 0]).cumsum(0)
        later = place[None] > place[:, None]
        padding = _padding(x) if self.pads else None
        x = x if self.first else x.transpose(0, 1)
        mask = (
            None
            if self.mask is None
            else later
            if self.mask == torch.bool
            else later.to(self.mask) * -1e9
        )
        y, _ = self.layer(
            x, 2 * x, x.flip(-1), key_padding_mask=padding, need_weights=False, attn_mask=mask
        )
        y = y if self.first else y.transpose(0, 1)
        return self.out(y[:, 3:].mean(1))


def _padding(x: Tensor) -> Tensor:
    """Of each sample the last positions, from its own brightest on; never the first."""
    lit = (x[..., 0] >= x[..., 0].amax(1, keepdim=True)).to(x.dtype)
    return torch.cat([torch.zeros_like(lit[:, :1]), lit.cumsum(1)[:, :-1]], 1) > 0


class Encoder(nn.Module):
    def __init__(
        self,
        *,
        layers: int = 1,
        norm: bool = False,
        dropout: float = 0.0,
        pads: bool = False,
        **options: Any,
    ) -> None:
        super().__init__()
        self.pads = pads
        layer = nn.TransformerEncoderLayer(6, 2, 9, dropout, **options)
        self.first = options.get("batch_first", False)
        many = nn.TransformerEncoder(
            layer, layers, nn.LayerNorm(6) if norm else None, enable_nested_tensor=False
        )
        self.body, self.out = many if layers > 1 else layer, nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1, 2)
        padding = _padding(x) if self.pads else None
        y = self.body(x if self.first else x.transpose(0, 1), src_key_padding_mask=padding)
        return self.out((y if self.first else y.transpose(0, 1))[:, -1])


MODELS: dict[str, Callable[[], nn.Module]] = {
    "lstm": lambda: Recurrent(nn.LSTM, batch_first=True),
    "lstm, two layers, both ways, time first": lambda: Recurrent(
        nn.LSTM, num_layers=2, bidirectional=True
    ),
    "lstm, begun": lambda: Recurrent(nn.LSTM, begins=True, num_layers=2, batch_first=True),
    "lstm, begun from what it learns": lambda: Recurrent(nn.LSTM, learns=True, batch_first=True),
    "lstm, recurrent weights frozen": lambda: Recurrent(
        nn.LSTM, frozen=["weight_hh_l0", "bias_ih_l0"]
    ),
    "lstm without biases": lambda: Recurrent(nn.LSTM, bias=False, batch_first=True),
    "gru": lambda: Recurrent(nn.GRU, batch_first=True),
    "gru, two layers, both ways, begun": lambda: Recurrent(
        nn.GRU, begins=True, num_layers=2, bidirectional=True
    ),
    "gru, begun from what it learns, time first": lambda: Recurrent(nn.GRU, learns=True),
    "gru, a bias frozen": lambda: Recurrent(nn.GRU, frozen=["bias_hh_l0"], batch_first=True),
    "rnn": lambda: Recurrent(nn.RNN, batch_first=True),
    "rnn of relu": lambda: Recurrent(nn.RNN, nonlinearity="relu", batch_first=True),
    "attention": lambda: Attention(None, batch_first=True),
    "attention, mask, time first": lambda: Attention(torch.bool),
    "attention, added mask, no biases": lambda: Attention(
        torch.float64, bias=False, batch_first=True
    ),
    "attention, padding": lambda: Attention(None, pads=True, batch_first=True),
    "attention, mask and padding, time first": lambda: Attention(torch.bool, pads=True),
    "encoder with padding": lambda: Encoder(layers=2, pads=True, norm=True),
    "encoder layer": lambda: Encoder(batch_first=True),
    "encoder layer, norm first, gelu": lambda: Encoder(norm_first=True, activation="gelu"),
    "encoder": lambda: Encoder(layers=2, norm=True, batch_first=True),
}


def _task(model: nn.Module) -> Task:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(0.4 * torch.randn(parameter.shape, generator=generator))
    return make_task(model.double(), SHAPE)


@pytest.mark.parametrize("name", MODELS)
def test_they_train_as_alone(name: str) -> None:
    task = _task(MODELS[name]())
    engine = Batched(task)
    assert engine.why == "stacked layer by layer"
    assert_equal(engine.train(make_briefs(task)), Loop(task).train(make_briefs(task)), 1e-10)


@pytest.mark.parametrize(
    "make",
    [
        lambda: Recurrent(nn.LSTM, num_layers=3, dropout=0.4, batch_first=True),
        lambda: Attention(torch.bool, dropout=0.4, batch_first=True),
        lambda: Encoder(layers=2, dropout=0.4, batch_first=True),
    ],
)
def test_their_dropout_depends_on_the_client_alone(make: Callable[[], nn.Module]) -> None:
    task = _task(make())
    engine, briefs = Batched(task), make_briefs(task)
    assert engine.why == "stacked layer by layer"
    together = engine.train(briefs)
    alone = engine.train(briefs.take(torch.tensor([1])))
    torch.testing.assert_close(together.delta[1], alone.delta[0], rtol=1e-10, atol=1e-12)
    other = engine.train(replace(briefs, round=3))
    off = Batched(_task(_without_dropout(make()))).train(briefs)
    for different in (other, off):
        assert (together.delta - different.delta).norm() > 1e-3 * together.delta.norm()


def test_the_layers_of_a_recurrence_draw_masks_of_their_own() -> None:
    engine = Batched(_task(Recurrent(nn.LSTM, num_layers=3, dropout=0.4, batch_first=True)))
    assert engine._work is not None
    (stacked,) = (
        module for module in engine._work.stack.model.modules() if hasattr(module, "drops")
    )
    assert len({drop.number for drop in stacked.drops}) == 3


def test_a_state_may_be_more_precise_than_what_is_computed() -> None:
    task = make_task(_Zeros(), SHAPE)
    engine = Batched(task, precision="bfloat16")
    assert engine.why == "stacked layer by layer"
    ours, alone = engine.train(make_briefs(task)).delta, Loop(task).train(make_briefs(task)).delta
    assert (ours - alone).norm() < 0.05 * alone.norm()


def test_what_they_cannot_do_falls_back() -> None:
    assert Batched(_task(_Weights())).why.startswith(
        "stacked by vmap: stacking layer by layer fails on it"
    )
    projecting = nn.Sequential(
        nn.Flatten(1, 2), nn.LSTM(6, 5, proj_size=2, batch_first=True), _Last(), nn.Linear(2, 3)
    )
    assert Batched(_task(projecting)).why.startswith("one client after another: vmap fails on it")


class _Weights(nn.Module):
    """Uses the attention weights, which a stacked attention does not give."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.out = nn.MultiheadAttention(6, 2, batch_first=True), nn.Linear(12, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1, 2)
        return self.out(self.layer(x, x, x)[1].mean(1))


class _Zeros(nn.Module):
    """Begins from zeros of the default type."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.out = nn.LSTM(6, 5, batch_first=True), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1, 2)
        zeros = torch.zeros(1, x.size(0), 5, device=x.device)
        return self.out(self.layer(x, (zeros, zeros))[0][:, -1])


class _Last(nn.Module):
    def forward(self, given: tuple[Tensor, Any]) -> Tensor:
        return given[0][:, -1]


def _without_dropout(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        elif isinstance(module, nn.RNNBase | nn.MultiheadAttention):
            module.dropout = 0.0
    return model
