"""The Triton kernels in Triton's own interpreter, on a CPU: `make test-kernels`.

The interpreter cannot multiply bfloat16, and knows nothing of tiles that are too large: that is for
test_gpu.py.
"""

from __future__ import annotations

import copy
import gc
import os
from collections import Counter
from dataclasses import replace
from weakref import ref

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") != "1":  # it would change the kernels of all other tests
    pytest.skip("runs with TRITON_INTERPRET=1", allow_module_level=True)

from kairosfl.core.fields import REALS, Briefs
from kairosfl.engines.batched import Batched, layers, step, update
from kairosfl.engines.batched import conv as ways
from kairosfl.engines.batched import dropout as drops
from kairosfl.engines.batched import pool as pools
from kairosfl.engines.batched import recurrent as recurrences
from kairosfl.engines.batched import rows as layouts
from kairosfl.engines.batched.conv import Pair, Shape
from kairosfl.engines.batched.dropout import keep, seeded
from kairosfl.engines.batched.kernels import (
    batch,
    conv,
    depthwise,
    dropout,
    linear,
    loss,
    norm,
    passes,
    pool,
    recurrent,
)
from kairosfl.engines.batched.kernels import update as optimiser
from kairosfl.engines.choices import Choices
from kairosfl.engines.loop import Loop
from kairosfl.models import build
from kairosfl.tasks.dataset import DataSet, Samples
from kairosfl.tasks.population import Population
from kairosfl.tasks.task import Task
from kairosfl.tasks.vector import layout_of

CLIENTS, BATCH = 2, 3
# inputs, outputs, kernel, stride, padding, height and width
CONVOLUTIONS = [
    (3, 8, (3, 3), (1, 1), (1, 1), (9, 9)),
    (16, 24, (3, 3), (2, 2), (1, 1), (9, 9)),
    (32, 16, (5, 5), (2, 2), (2, 2), (8, 8)),
    (64, 64, (3, 3), (1, 1), (1, 1), (6, 6)),
    (16, 32, (1, 1), (2, 2), (0, 0), (7, 7)),
    (128, 128, (3, 3), (1, 1), (1, 1), (4, 4)),
    (3, 64, (3, 3), (2, 2), (1, 1), (8, 8)),
    (3, 5, (3, 2), (2, 3), (1, 0), (9, 7)),
    (5, 7, (1, 3), (4, 1), (0, 4), (6, 5)),
    (32, 17, (2, 3), (1, 2), (0, 1), (5, 8)),
    (64, 33, (3, 1), (3, 1), (2, 0), (7, 4)),
]


@pytest.fixture(autouse=True)
def no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (conv, linear, recurrent):
        monkeypatch.setattr(module, "stages", lambda device: 3)


def close(found: Tensor, wanted: Tensor) -> None:
    assert float((found.double() - wanted).norm() / wanted.norm()) <= 1e-6


@pytest.mark.parametrize("shape", CONVOLUTIONS)
@pytest.mark.parametrize("biased", [True, False])
def test_convolutions_there_and_back(
    shape: tuple[int, int, Pair, Pair, Pair, Pair], biased: bool
) -> None:
    inputs, outputs, kernel, stride, padding, sides = shape
    form = Shape(inputs, outputs, kernel, stride, padding, (1, 1), 1)
    torch.manual_seed(0)
    x = torch.randn(CLIENTS * BATCH, inputs, *sides).contiguous(memory_format=torch.channels_last)
    size = outputs * kernel[0] * kernel[1] * inputs
    rows = torch.randn(CLIENTS, 32 + size + 8)
    w = rows[:, 32 : 32 + size].view(CLIENTS, outputs, *kernel, inputs)
    b = torch.randn(CLIENTS, outputs)
    exact = [
        each.double().requires_grad_()
        for each in (x, w.permute(0, 1, 4, 2, 3), b if biased else 0 * b)
    ]
    y = torch.cat(
        [
            F.conv2d(images, weights, bias, stride, padding)
            for images, weights, bias in zip(exact[0].chunk(CLIENTS), *exact[1:], strict=True)
        ]
    )
    close(conv.forward(form, x, w, b if biased else None, False, "ieee"), y.detach())
    dy = torch.randn(y.shape).contiguous(memory_format=torch.channels_last)
    dx, slope, shift = torch.autograd.grad(y, exact, dy.double())
    close(conv.inward(form, dy, w, x, False, "ieee"), dx)
    dw, db = (
        torch.full(w.shape, float("nan")),
        torch.full((CLIENTS, outputs + 3), float("nan"))[:, 1 : outputs + 1],
    )
    conv.weights(form, x, dy, dw, db if biased else None, "ieee")
    close(dw, slope.permute(0, 1, 3, 4, 2))
    if biased:
        close(db, shift)


@pytest.mark.parametrize("shape", [CONVOLUTIONS[number] for number in (0, 1, 7, 9)])
def test_a_relu_after_a_convolution_and_before_one(
    shape: tuple[int, int, Pair, Pair, Pair, Pair],
) -> None:
    inputs, outputs, kernel, stride, padding, sides = shape
    form = Shape(inputs, outputs, kernel, stride, padding, (1, 1), 1)
    torch.manual_seed(0)
    x = (
        torch.randn(CLIENTS * BATCH, inputs, *sides)
        .relu()
        .contiguous(memory_format=torch.channels_last)
    )
    w, b = torch.randn(CLIENTS, outputs, *kernel, inputs), torch.randn(CLIENTS, outputs)
    gathered, plain = ways.Gathered(conv, "ieee"), ways.Columns()
    y = plain.forward(form, x, w, b, relu=True)
    assert (y == 0).any()
    assert torch.equal(y, plain.forward(form, x, w, b).relu())
    close(gathered.forward(form, x, w, b, relu=True), y.double())
    dy, dw = torch.randn(y.shape), torch.empty_like(w)
    found, wanted, whole = (
        way.backward(form, dy, x, w, (dw, None), inward=True, masked=masked)
        for way, masked in ((gathered, True), (plain, True), (plain, False))
    )
    assert torch.equal(wanted, torch.where(x > 0, whole, 0.0))
    close(found, wanted.double())
    assert (found[x == 0] == 0).all()
    x[0, 0, 1, 1] = float("nan")  # a client that diverges is seen
    assert gathered.forward(form, x, w, b, relu=True)[0, :, 0, 0].isnan().all()


@pytest.mark.parametrize(("stride", "side"), [(1, 1), (2, 2)])
def test_a_convolution_without_the_taps_that_meet_padding_alone(stride: int, side: int) -> None:
    form = Shape(16, 32, (3, 3), (stride, stride), (1, 1), (1, 1), 1)
    torch.manual_seed(0)
    x = torch.randn(CLIENTS * BATCH, 16, side, side).contiguous(memory_format=torch.channels_last)
    w, b = torch.randn(CLIENTS, 32, 3, 3, 16), torch.randn(CLIENTS, 32)
    crop = ways.cropped(form, side, side)
    assert crop is not None
    both = ways.Cropped(ways.Gathered(conv, "ieee"), *crop), ways.Columns()
    y = both[1].forward(form, x, w, b)
    close(both[0].forward(form, x, w, b), y.double())
    dy, slopes = torch.randn(y.shape), [(torch.empty_like(w), torch.empty_like(b)) for _ in both]
    dx = [
        way.backward(form, dy, x, w, into, inward=True)
        for way, into in zip(both, slopes, strict=True)
    ]
    for found, wanted in zip((dx[0], *slopes[0]), (dx[1], *slopes[1]), strict=True):
        close(found, wanted.double())


@pytest.mark.parametrize(
    ("channels", "kernel", "stride", "padding", "dilation", "sides"),
    [
        (8, (3, 3), (1, 1), (1, 1), (1, 1), (6, 6)),
        (70, (3, 3), (2, 2), (1, 1), (1, 1), (7, 5)),
        (5, (5, 2), (2, 3), (2, 0), (1, 1), (9, 8)),
        (16, (3, 3), (1, 2), (2, 4), (2, 3), (8, 9)),
    ],
)
@pytest.mark.parametrize("biased", [True, False])
def test_depthwise_convolutions_there_and_back(
    channels: int,
    kernel: Pair,
    stride: Pair,
    padding: Pair,
    dilation: Pair,
    sides: Pair,
    biased: bool,
) -> None:
    form = Shape(channels, channels, kernel, stride, padding, dilation, channels)
    torch.manual_seed(0)
    x = torch.randn(CLIENTS * BATCH, channels, *sides).contiguous(memory_format=torch.channels_last)
    size = channels * kernel[0] * kernel[1]
    w = torch.randn(CLIENTS, 32 + size + 8)[:, 32 : 32 + size].view(CLIENTS, channels, *kernel, 1)
    b = torch.randn(CLIENTS, channels) if biased else None
    plain, fast = ways.Grouped(), ways.Depthwise(depthwise)
    for relu in (True, False):
        wanted, found = (way.forward(form, x, w, b, relu) for way in (plain, fast))
        close(found, wanted.double())
    dy = torch.randn(wanted.shape)
    slopes = [
        (torch.empty_like(w), torch.empty(CLIENTS, channels) if biased else None) for _ in range(2)
    ]
    for way, (dw, db) in zip((plain, fast), slopes, strict=True):
        dx = way.backward(form, dy, x, w, (dw, db), inward=True, masked=biased)
        wanted, found = (dx, found) if way is plain else (wanted, dx)
    close(found, wanted.double())
    for right, mine in zip(*slopes, strict=True):
        if right is not None:
            close(mine, right.double())


@pytest.mark.parametrize("activation", ["", "relu", "silu", "gelu"])
@pytest.mark.parametrize(
    ("channels", "groups", "sides"),
    [(16, 4, (15, 20)), (32, 1, (7, 5)), (64, 64, (9, 8)), (64, 8, (1, 1)), (1024, 8, (3, 3))],
)
def test_group_norms_and_what_follows_there_and_back(
    channels: int, groups: int, sides: Pair, activation: str
) -> None:
    torch.manual_seed(0)
    x = (3 * torch.randn(CLIENTS * BATCH, channels, *sides) + 1).contiguous(
        memory_format=torch.channels_last
    )
    w, b = torch.randn(CLIENTS, 32 + 2 * channels)[:, 32:].split(channels, 1)  # lie in strides
    dy = torch.randn(x.shape).contiguous(memory_format=torch.channels_last)
    exact = [each.double().requires_grad_() for each in (x, w, b)]
    parts = zip(*(each.chunk(CLIENTS) for each in exact), strict=True)
    y = torch.cat(
        [F.group_norm(images, groups, scale[0], shift[0]) for images, scale, shift in parts]
    )
    y = getattr(F, activation)(y) if activation else y
    dx, dw, db = torch.autograd.grad(y, exact, dy.double())
    found, stats = norm.forward(x, w, b, groups, 1e-5, activation)
    close(found, y.detach())
    inward, slopes = norm.backward(x, dy, stats, w, b, groups, activation)
    # Where only rounding is left of the sum, as in groups of one channel or pixel, it is compared
    # with its terms.
    largest = float(dx.norm()) + 1e-4 * float(dw.norm())
    assert float((inward - dx).norm()) <= 1e-6 * largest
    close(slopes[:, 0], dw)
    close(slopes[:, 1], db)
    bias = dx.unflatten(0, (CLIENTS, -1)).sum((1, 3, 4))
    assert float((slopes[:, 2] - bias).norm()) <= 1e-5 * largest


def test_rows_are_filled_and_subtracted() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 5, 3), nn.Conv2d(5, 70, (2, 1)), nn.Linear(95, 101), nn.Linear(7, 3)
    )
    model.scale = nn.Parameter(torch.tensor(1.5))  # without axes, the first of the vector
    layout = layout_of(model)
    rows = layouts.RowLayout.of(layout)
    table = passes.pieces(rows.places, torch.device("cpu"))
    state, vectors = torch.full((5, rows.width), 7.0), torch.randn(3, layout.size)
    for given in (vectors, vectors[1].expand(3, -1)):
        passes.fill(given, state[1:4], table)
        assert torch.equal(state[1:4], rows.pack(given))
        assert (state[[0, 4]] == 7).all()
    state[1:4] = rows.pack(vectors)
    out = torch.zeros(3, layout.size + 2)
    for start in (torch.randn(3, layout.size), torch.randn(layout.size).expand(3, -1)):
        passes.subtract(state[1:4], start, out[:, 1:-1], table)
        assert torch.equal(out[:, 1:-1], vectors - start)
    assert not out[:, [0, -1]].any()


@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.parametrize(
    ("channels", "sides"), [(64, (10, 12)), (6, (9, 8)), (70, (7, 5)), (1, (6, 7)), (130, (2, 3))]
)
def test_relu_and_pooling_there_and_back(channels: int, sides: Pair, flat: bool) -> None:
    torch.manual_seed(0)
    x = (
        torch.randn(CLIENTS * BATCH, channels, *sides)
        .contiguous(memory_format=torch.channels_last)
        .requires_grad_()
    )
    y = F.max_pool2d(x.relu(), 2)
    found, wins = pool.forward(x.detach(), flat, None)
    assert torch.equal(found, y)
    assert found.is_contiguous(
        memory_format=torch.contiguous_format if flat else torch.channels_last
    )
    for order in (torch.contiguous_format, torch.channels_last):
        dy = torch.randn(y.shape).contiguous(memory_format=order)
        (dx,) = torch.autograd.grad(y, x, dy, retain_graph=True)
        assert torch.equal(pool.backward(dy, wins, x.shape, 0.0, None), dx)
    for place in range(4):  # a client that diverges is seen
        spoilt = x.detach().clone()
        spoilt[:, :, place // 2, place % 2] = float("nan")
        found, _ = pool.forward(spoilt, flat, None)
        assert torch.equal(found.isnan(), F.max_pool2d(spoilt.relu(), 2).isnan())


@pytest.mark.parametrize("flat", [True, False])
@pytest.mark.parametrize("p", [0.0, 0.3, 1.0])
@pytest.mark.parametrize(("channels", "sides"), [(64, (10, 12)), (6, (9, 8)), (70, (7, 5))])
def test_pooling_drops_and_sums_the_gradient_of_the_bias(
    channels: int, sides: Pair, p: float, flat: bool
) -> None:
    torch.manual_seed(0)
    x = (
        torch.randn(CLIENTS * BATCH, channels, *sides)
        .contiguous(memory_format=torch.channels_last)
        .requires_grad_()
    )
    keys, number = torch.tensor([[5], [-0x7FFFFFF0_12345678]]), 7
    pooled = F.max_pool2d(x.relu(), 2)
    stays = keep(seeded(keys, number), p, pooled[0].numel() * BATCH).view(pooled.shape)
    y = torch.where(stays, pooled / max(1 - p, 1e-9), 0.0)
    found, wins = pool.forward(x.detach(), flat, (keys, number, p))
    torch.testing.assert_close(found, y)
    dy, wide = torch.randn(y.shape), torch.full((CLIENTS, channels + 4), 3.0)
    (dx,) = torch.autograd.grad(y, x, dy)
    torch.testing.assert_close(pool.backward(dy, wins, x.shape, p, wide[:, 2:-2]), dx)
    wanted = dx.double().view(CLIENTS, BATCH, channels, -1).sum((1, 3))
    torch.testing.assert_close(wide[:, 2:-2].double(), wanted, rtol=1e-5, atol=1e-5)
    assert (wide[:, [0, 1, -2, -1]] == 3.0).all()


@pytest.mark.parametrize("quicker", [True, False])
@pytest.mark.parametrize("biased", [True, False])
def test_linear_layers_forward_by_the_quicker_way(
    quicker: bool, biased: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(linear, "LARGE", 1)
    monkeypatch.setattr(linear, "timed", lambda way: float((way() is marked) == quicker))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    clients, samples, inputs, outputs, begin = 8, 20, 100, 70, 32
    torch.manual_seed(0)
    marked, choices = torch.zeros(()), Choices()
    rows, bias = torch.randn(clients, begin + inputs * outputs + outputs), begin + inputs * outputs
    x = torch.randn(clients, samples, 2, inputs)[:, :, 0]  # lies in strides
    found = linear.forward(
        x, rows, begin, bias if biased else None, outputs, "ieee", lambda: marked, choices
    )
    assert (found is marked) != quicker
    assert list(choices.made.values()) == ["ours" if quicker else "plain"]
    if quicker:
        wanted = x.double() @ _matrix(rows, begin, outputs, inputs).mT
        close(found, wanted + rows[:, None, bias:].double() if biased else wanted)


@pytest.mark.parametrize("corrected", [False, True])
@pytest.mark.parametrize("velocities", [False, True])
def test_linear_layers_step_in_their_backward_pass(corrected: bool, velocities: bool) -> None:
    samples, inputs, outputs, begin, column = 20, 100, 70, 32, 1
    torch.manual_seed(0)
    w, v, anchor, push = (torch.randn(CLIENTS, begin + inputs * outputs + 8) for _ in range(4))
    x, dy = torch.randn(CLIENTS, samples, inputs), torch.randn(CLIENTS, samples, outputs)
    reals, partials = torch.rand(len(REALS), CLIENTS), torch.zeros(CLIENTS, 4)
    live = torch.tensor([1, 0], dtype=torch.int8)
    old = {
        name: _matrix(rows, begin, outputs, inputs).clone() for name, rows in (("w", w), ("v", v))
    }
    more = (anchor, push) if corrected else (None, None)
    factors = reals[REALS.index("scale")]
    dx = linear.backward(
        x, dy, w, v, *more, reals, factors, live, partials, column, begin, True, velocities, "ieee"
    )
    lr, momentum, decay, scale, pull = (
        reals[REALS.index(name), 0].double()
        for name in ("lr", "momentum", "weight_decay", "scale", "pull")
    )
    g = dy[0].double().mT @ x[0].double()
    step = scale * g + decay * old["w"][0]
    if corrected:
        toward, by = (_matrix(rows, begin, outputs, inputs)[0] for rows in (anchor, push))
        step = step + pull * (old["w"][0] - toward) + by
    if velocities:
        step = step + momentum * old["v"][0]
    close(_matrix(v, begin, outputs, inputs)[0], step if velocities else old["v"][0])
    close(_matrix(w, begin, outputs, inputs)[0], old["w"][0] - lr * step)
    close(dx[0], dy[0].double() @ old["w"][0])
    close(
        partials[0, column:3],
        torch.stack([part.square().sum() for part in g.split(linear.STRIP, 1)]),
    )
    for name, rows in (("w", w), ("v", v)):  # the second client has finished
        assert torch.equal(_matrix(rows, begin, outputs, inputs)[1], old[name][1])
    assert partials[0, 0] == partials[0, 3] == partials[1].abs().sum() == 0


@pytest.mark.parametrize(("samples", "width", "time"), [(3, 8, 5), (1, 37, 1), (70, 33, 2)])
def test_lstms_there_and_back(samples: int, width: int, time: int) -> None:
    torch.manual_seed(0)
    theirs = [nn.LSTM(5, width, batch_first=True).double() for _ in range(CLIENTS)]
    x = torch.randn(CLIENTS, samples, time, 5, dtype=torch.float64, requires_grad=True)
    hidden, cell = (
        torch.randn(CLIENTS, samples, width, dtype=torch.float64, requires_grad=True)
        for _ in range(2)
    )
    pairs = [each(x[k], (hidden[k, None], cell[k, None])) for k, each in enumerate(theirs)]
    wanted = torch.stack([y for y, _ in pairs]), torch.cat([end for _, (_, end) in pairs])
    slopes = [torch.randn_like(each) for each in wanted]
    recurrent_ones: list[Tensor] = [each.weight_hh_l0 for each in theirs]
    back = torch.autograd.grad(wanted, [hidden, cell, *recurrent_ones], slopes, retain_graph=True)
    into_of = torch.autograd.grad(wanted, [each.bias_ih_l0 for each in theirs], slopes)

    into = torch.stack(
        [x[k] @ e.weight_ih_l0.mT + e.bias_ih_l0 + e.bias_hh_l0 for k, e in enumerate(theirs)]
    )
    given = [
        each.detach().float().requires_grad_()
        for each in (into, torch.stack(recurrent_ones), hidden, cell)
    ]
    found = recurrences._Fused.apply(recurrent, *given, "ieee")
    for mine, value in zip(found, wanted, strict=True):
        close(mine.detach(), value.detach())
    with torch.no_grad():
        alone = recurrences._Fused.apply(
            recurrent, given[0].detach().clone(), *(each.detach() for each in given[1:]), "ieee"
        )
    assert all(torch.equal(mine, value) for mine, value in zip(alone, found, strict=True))
    gates, weights, *states = torch.autograd.grad(found, given, [each.float() for each in slopes])
    for mine, value in zip((*states, *weights, *gates.sum((1, 2))), (*back, *into_of), strict=True):
        close(mine, value)


def test_the_length_of_a_product_without_it() -> None:
    torch.manual_seed(0)
    x, dy = torch.randn(CLIENTS, 20, 100), torch.randn(CLIENTS, 20, 70)
    for dtype in (torch.float32, torch.bfloat16):
        x, dy = x.to(dtype), dy.to(dtype)
        wanted = (dy.double().mT @ x.double()).square().sum((1, 2))
        torch.testing.assert_close(linear.squares(x, dy).double(), wanted, rtol=1e-5, atol=0)
    x, dy = x.float(), dy.float()
    torch.testing.assert_close(
        linear.squares(1e20 * x, 1e-20 * dy).double(), wanted, rtol=1e-5, atol=0
    )
    assert linear.squares(1e20 * x, dy).isinf().all()  # not NaN, for which nothing would be clipped
    assert linear.squares(x * torch.nan, dy).isnan().all()
    equal, balanced = (
        x[:, :1].expand_as(x),
        dy - dy.mean(1, keepdim=True),
    )  # of length zero, but for rounding
    assert (linear.squares(equal, balanced) >= 0).all()
    assert not linear.squares(x, 0 * dy).any()


def _matrix(rows: Tensor, begin: int, outputs: int, inputs: int) -> Tensor:
    return rows[:, begin : begin + outputs * inputs].view(len(rows), outputs, inputs).double()


@pytest.mark.parametrize("p", [0.3, 1.0])
def test_dropout_keeps_what_plain_operations_keep(p: float) -> None:
    x, keys = torch.randn(CLIENTS * BATCH, 1000), torch.tensor([[5], [-0x7FFFFFF0_12345678]])
    for draw in (0, 7, 4_000_000):
        stays = keep(seeded(keys, draw), p, BATCH * 1000).view(x.shape)
        torch.testing.assert_close(
            dropout.drop(x, keys, draw, p), torch.where(stays, x / max(1 - p, 1e-9), 0.0)
        )


@pytest.mark.parametrize("p", [0.3, 1.0])
def test_dropout_with_the_relu_before_it(p: float) -> None:
    torch.manual_seed(0)
    x, keys = (
        torch.randn(CLIENTS * BATCH, 700, requires_grad=True),
        torch.tensor([[5], [-0x7FFFFFF0_12345678]]),
    )
    stays = keep(seeded(keys, 3), p, BATCH * 700).view(x.shape)
    y, dy = torch.where(stays, x.relu() / max(1 - p, 1e-9), 0.0), torch.randn(x.shape)
    found = dropout.drop(x.detach(), keys, 3, p, relu=True)
    torch.testing.assert_close(found, y)
    torch.testing.assert_close(dropout.slope(dy, found, p), torch.autograd.grad(y, x, dy)[0])
    spoilt = x.detach().clone()
    spoilt[:, 5] = float("nan")  # a client that diverges is seen
    assert torch.equal(dropout.drop(spoilt, keys, 3, p, relu=True).isnan(), spoilt.isnan() & stays)


@pytest.mark.parametrize(("batch", "classes"), [(10, 10), (3, 2), (40, 100), (9, 1000)])
def test_cross_entropy_there_and_back(batch: int, classes: int) -> None:
    torch.manual_seed(0)
    outputs = (3 * torch.randn(CLIENTS * batch, classes, dtype=torch.float64)).requires_grad_()
    targets, share = torch.randint(classes, (CLIENTS * batch,)), torch.rand(CLIENTS, batch)
    share[1, -1], targets[1] = 0.0, -100  # padding, and a target that does not count
    wanted = (F.cross_entropy(outputs, targets, reduction="none").view(CLIENTS, batch) * share).sum(
        1
    )
    losses, slopes = loss.entropy(outputs.float(), targets, share)
    torch.testing.assert_close(losses.double(), wanted, rtol=1e-6, atol=1e-6)
    (slope,) = torch.autograd.grad(wanted.sum(), outputs)
    torch.testing.assert_close(slopes.double(), slope, rtol=1e-5, atol=1e-7)
    with torch.no_grad():
        outputs[0, 1] = float("nan")
    losses, slopes = loss.entropy(outputs.float(), targets, share)
    assert losses.isnan().tolist() == [True, False]
    assert slopes.isnan().any(1).tolist() == [True] + [False] * (len(slopes) - 1)


class Turned(nn.Module):
    """Pooling and dropout of a tensor whose first axis is not that of the samples."""

    def __init__(self) -> None:
        super().__init__()
        self.relu, self.pool, self.drop, self.out = (
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Dropout(0.5),
            nn.Linear(12, 4),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.out(
            self.drop(self.pool(self.relu(x.transpose(0, 1)))).transpose(0, 1).flatten(1)
        )


class Flat(nn.Module):
    """Pooling of a tensor without channels."""

    def __init__(self) -> None:
        super().__init__()
        self.relu, self.pool, self.out = nn.ReLU(), nn.MaxPool2d(2), nn.Linear(12, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.pool(self.relu(x.flatten(1, 2))).flatten(1))


class Tied(nn.Module):
    """Two convolutions with one bias, of which a GroupNorm follows the second alone."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.norm = (
            nn.Conv2d(3, 16, 1, 2),
            nn.Conv2d(16, 16, 1),
            nn.GroupNorm(4, 16),
        )
        self.two.bias = self.one.bias
        self.out = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.norm(self.two(self.one(x))).relu().mean((2, 3)))


class Recurrent(nn.Module):
    """Two LSTMs, one above the other, over 12 steps of 4 numbers; it reads all outputs and the last
    cells.
    """

    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.out = nn.LSTM(4, 9, 2, batch_first=True, dropout=0.3), nn.Linear(18, 4)

    def forward(self, x: Tensor) -> Tensor:
        y, (_, cells) = self.lstm(x.flatten(1, 2))
        return self.out(torch.cat([y.mean(1), cells[0]], 1))


MODELS = {
    "recurrent": Recurrent,
    "tiny": lambda: nn.Sequential(nn.Flatten(), nn.Linear(48, 8), nn.ReLU(), nn.Linear(8, 4)),
    "small": lambda: nn.Sequential(
        nn.Flatten(), *(nn.Linear(48, 48) for _ in range(3)), nn.Linear(48, 4, bias=False)
    ),
    "images": lambda: nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.GroupNorm(4, 16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, stride=2, padding=1, bias=False),
        nn.GroupNorm(2, 32),
        nn.ReLU(),
        nn.Flatten(),
        nn.Dropout(0.3),
        nn.Linear(32, 4),
    ),
    "activated": lambda: nn.Sequential(
        nn.Conv2d(3, 16, 3, 2, 1),
        nn.GroupNorm(4, 16),
        nn.SiLU(inplace=True),
        nn.Conv2d(16, 16, 3, padding=1, groups=16),
        nn.GroupNorm(8, 16),
        nn.GELU(),
        nn.SiLU(),
        nn.Conv2d(16, 16, 1),
        nn.GroupNorm(2, 16),
        nn.Flatten(),
        nn.Linear(64, 4),
    ),
    "chained": lambda: nn.Sequential(
        *(
            nn.Conv2d(3, 9, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(9, 17, 3, padding=1, bias=False),
            nn.ReLU(inplace=True),
        ),
        *(nn.Conv2d(17, 17, 3, padding=1, groups=17), nn.ReLU(), nn.Flatten(), nn.Linear(272, 4)),
    ),
    "tied": Tied,
    "normed after its ReLU": lambda: nn.Sequential(
        *(
            nn.Conv2d(3, 16, 3, padding=1),
            nn.ReLU(),
            nn.GroupNorm(4, 16),
            nn.Flatten(),
            nn.Linear(256, 4),
        )
    ),
    "channels first": Turned,
    "one image of rows": Flat,
    "pooled": lambda: nn.Sequential(
        *(nn.Conv2d(3, 16, (3, 2)), nn.ReLU(), nn.MaxPool2d(2), nn.Dropout(0.3), nn.Flatten()),
        *(nn.Linear(16, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 4)),
    ),
}


def use_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    modules = {
        "conv": conv,
        "depthwise": depthwise,
        "dropout": dropout,
        "linear": linear,
        "norm": norm,
        "pool": pool,
    }
    modules |= {
        "recurrent": recurrent,
        "batch": batch,
        "loss": loss,
        "passes": passes,
        "update": optimiser,
    }
    for user in (layouts, ways, drops, layers, pools, recurrences, step, update):
        monkeypatch.setattr(user, "kernels", lambda name, tensor: modules[name])


@pytest.mark.parametrize(
    "name",
    [pytest.param(each, marks=[pytest.mark.slow] * (each == "activated")) for each in MODELS],
)
@pytest.mark.parametrize("corrected", [pytest.param(False, marks=pytest.mark.slow), True])
def test_the_engine_with_kernels_is_the_engine_without(
    name: str, corrected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    sizes, rng = np.array([5, 10, 15]), np.random.default_rng(0)
    inputs = torch.from_numpy(rng.standard_normal((30, 3, 4, 4)).astype(np.float32))
    held = Samples(inputs, torch.from_numpy(rng.integers(0, 4, 30)))
    clients = Population(np.arange(30), np.array([0, *np.cumsum(sizes)]))
    task = Task(MODELS[name](), DataSet("random", held, held, 4), clients)
    numbers = {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01, "clip": float("inf"), "scale": 0.9}
    briefs = Briefs(
        seed=3,
        round=2,
        ids=torch.arange(3),
        start=task.start(),
        batch_size=8,
        epochs=2,
        pull=0.1 if corrected else 0.0,
        push=0.01 * torch.randn(3, task.layout.size) if corrected else None,
        **numbers,
    )
    plain = Batched(task).train(briefs)
    use_kernels(monkeypatch)
    engine = Batched(task, deterministic=True, slots=3)  # which measures nothing
    assert engine.why == "stacked layer by layer"  # the trial step found nothing wrong
    found = engine.train(briefs)
    close(found.delta, plain.delta.double())
    torch.testing.assert_close(found.grad_sq, plain.grad_sq, rtol=1e-5, atol=0)
    torch.testing.assert_close(found.loss, plain.loss, rtol=1e-5, atol=0)


@pytest.mark.parametrize("corrected", [pytest.param(False, marks=pytest.mark.slow), True])
def test_clipped_layers_step_when_all_lengths_are_known(
    corrected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    inputs = torch.from_numpy(rng.standard_normal((30, 3, 4, 4)).astype(np.float32))
    held = Samples(inputs, torch.from_numpy(rng.integers(0, 4, 30)))
    model = nn.Sequential(
        nn.Conv2d(3, 5, 3), nn.Flatten(), nn.Linear(20, 70), nn.ReLU(), nn.Linear(70, 4)
    )
    task = Task(
        model, DataSet("random", held, held, 4), Population(np.arange(30), np.array([0, 5, 15, 30]))
    )
    more = {"pull": 0.1, "push": 0.01 * torch.randn(3, task.layout.size)} if corrected else {}
    told = {
        "seed": 3,
        "round": 2,
        "ids": torch.arange(3),
        "start": task.start(),
        "batch_size": 8,
        "epochs": 2,
    }
    told |= {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01, "scale": 0.9}
    clip = torch.tensor([0.2, float("inf"), 0.5], dtype=torch.float64)  # the lengths are about 1
    clipped, sharp = Briefs(clip=clip, **told, **more), Briefs(clip=0.3, radius=0.05, **told)
    late = replace(clipped, clip_after=True)
    wanted, wanted_late = (Batched(task).train(briefs) for briefs in (clipped, late))
    assert bool(
        (
            wanted.grad_sq[[0, 2]]
            < 0.5 * Batched(task).train(Briefs(**told, **more)).grad_sq[[0, 2]]
        ).all()
    )
    use_kernels(monkeypatch)
    monkeypatch.setattr(linear, "LARGE", 100)
    engine, stepped = Batched(task, deterministic=True, slots=3), Counter()
    step_one = update.Optimiser._step

    def noted(
        self: update.Optimiser, x: Tensor, dy: Tensor, weight: int, *rest: object, **more: object
    ) -> object:
        stepped[weight] += 1
        return step_one(self, x, dy, weight, *rest, **more)

    monkeypatch.setattr(update.Optimiser, "_step", noted)
    engine.train(sharp)  # leaves gradients behind that must not count
    assert not stepped
    found = engine.train(clipped)
    assert stepped[2] == stepped[4] > 0  # by the numbers of their weights
    close(found.delta, wanted.delta.double())
    torch.testing.assert_close(found.grad_sq, wanted.grad_sq, rtol=1e-5, atol=0)
    close(engine.train(late).delta, wanted_late.delta.double())
    engine.train(clipped)
    parts = [ref(part) for part in (engine, engine._slots.state, engine._work.stack.frame)]
    del engine
    gc.collect()
    assert [part() for part in parts] == [None] * 3  # no layer that was held keeps them


@pytest.mark.parametrize("clip", [float("inf"), 0.3])
@pytest.mark.parametrize(
    ("name", "own"), [("small", "1.*"), pytest.param("images", "0.*", marks=pytest.mark.slow)]
)
def test_still_tensors_and_own_parts_with_kernels(
    name: str, own: str, clip: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Linear layers that are still do not step in their backward pass; the others do."""
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    inputs = torch.from_numpy(rng.standard_normal((30, 3, 4, 4)).astype(np.float32))
    held = Samples(inputs, torch.from_numpy(rng.integers(0, 4, 30)))
    clients = Population(np.arange(30), np.array([0, 5, 15, 30]))
    model = MODELS[name]()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0  # or masks would differ from those of engine loop
    task = Task(model, DataSet("random", held, held, 4), clients, own=(own,))
    kept = task.own_start() * torch.tensor([[0.5], [1.0], [1.5]])
    briefs = Briefs(
        seed=3,
        round=2,
        ids=torch.arange(3),
        start=task.start(),
        own=kept,
        own_epochs=[1, 0, 2],
        max_steps=[9, 2, 3],
        still=frozenset({2}),
        measure=frozenset({"squared_loss"}),
        push=0.01 * torch.randn(3, task.layout.size),
        clip=clip,
        lr=0.1,
        momentum=0.9,
        weight_decay=0.01,
        batch_size=8,
        epochs=2,
        pull=0.1,
    )
    wanted = Loop(task).train(briefs)
    use_kernels(monkeypatch)
    monkeypatch.setattr(linear, "LARGE", 100)
    engine = Batched(task, deterministic=True, slots=3)
    found = engine.train(briefs)
    assert engine.why == "stacked layer by layer"
    assert not task.layout.entries[2].view(found.delta).any()
    close(found.delta, wanted.delta.double())
    close(found.own - kept, (wanted.own - kept).double())
    for field in ("grad_sq", "loss", "squared_loss"):
        torch.testing.assert_close(
            getattr(found, field), getattr(wanted, field), rtol=1e-5, atol=0, msg=field
        )


@pytest.mark.slow
@pytest.mark.parametrize("dropout", [(0.0, 0.0), (0.25, 0.5)])
def test_the_cnn_of_the_benchmark_at_its_own_size(
    dropout: tuple[float, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(0)
    inputs = torch.from_numpy(rng.standard_normal((5, 3, 32, 32)).astype(np.float32))
    held = Samples(inputs, torch.from_numpy(rng.integers(0, 10, 5)))
    model = build("pfl_cnn", shape=(3, 32, 32), classes=10, seed=1, dropout=dropout)
    task = Task(
        model, DataSet("random", held, held, 10), Population(np.arange(5), np.array([0, 2, 5]))
    )
    exact = replace(task, model=copy.deepcopy(model).double())
    options = {
        "seed": 3,
        "round": 2,
        "ids": torch.arange(2),
        "batch_size": 3,
        "epochs": 1,
        "lr": 0.1,
    }
    # Masks of dropout are those of engine `batched`, not of `loop`.
    judge = Batched(exact) if any(dropout) else Loop(exact)
    wanted = judge.train(Briefs(start=exact.start(), **options))
    use_kernels(monkeypatch)
    engine = Batched(task, deterministic=True, slots=2)
    assert engine.why == "stacked layer by layer"
    found = engine.train(Briefs(start=task.start(), **options))
    assert float((found.delta - wanted.delta).norm() / wanted.delta.norm()) <= 1e-5
    torch.testing.assert_close(found.loss.double(), wanted.loss.double(), rtol=1e-5, atol=0)
