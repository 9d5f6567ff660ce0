"""The Triton kernels in Triton's own interpreter, on a CPU, against PyTorch in float64; without Triton skipped.

The interpreter cannot multiply bfloat16, and knows nothing of tiles that are too large: that is for test_gpu.py.
"""

from __future__ import annotations

import os

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

os.environ.setdefault("TRITON_INTERPRET", "1")
pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("test_gpu.py runs the kernels themselves", allow_module_level=True)

from kairosfl.engines.batched.conv import Shape
from kairosfl.engines.batched.kernels import conv, dropout, linear
from kairosfl.engines.batched.layers import keep

CLIENTS, BATCH = 2, 3
# inputs, outputs, kernel, stride, padding, height and width
CONVOLUTIONS = [
    (3, 8, 3, 1, 1, 9),
    (16, 24, 3, 2, 1, 9),
    (32, 16, 5, 2, 2, 8),
    (64, 64, 3, 1, 1, 6),
    (16, 32, 1, 2, 0, 7),
    (128, 128, 3, 1, 1, 4),
    (3, 64, 3, 2, 1, 8),
    (16, 16, 3, 3, 0, 10),
]


@pytest.fixture(autouse=True)
def no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (conv, linear):
        monkeypatch.setattr(module, "stages", lambda device: 3)


def close(found: Tensor, wanted: Tensor) -> None:
    assert float((found.double() - wanted).norm() / wanted.norm()) <= 1e-6


@pytest.mark.parametrize("shape", CONVOLUTIONS)
def test_convolutions_there_and_back(shape: tuple[int, ...]) -> None:
    inputs, outputs, kernel, stride, padding, side = shape
    pairs = [(each, each) for each in (kernel, stride, padding)]
    form = Shape(inputs, outputs, *pairs, (1, 1), 1)
    torch.manual_seed(0)
    x = torch.randn(CLIENTS * BATCH, inputs, side, side).contiguous(memory_format=torch.channels_last)
    size = outputs * kernel * kernel * inputs
    rows = torch.randn(CLIENTS, 32 + size + 8)
    w = rows[:, 32 : 32 + size].view(CLIENTS, outputs, kernel, kernel, inputs)
    b = torch.randn(CLIENTS, outputs)
    exact = [each.double().requires_grad_() for each in (x, w.permute(0, 1, 4, 2, 3))]
    y = torch.cat(
        [
            F.conv2d(images, weights, bias, stride, padding)
            for images, weights, bias in zip(exact[0].chunk(CLIENTS), exact[1], b.double(), strict=True)
        ]
    )
    close(conv.forward(form, x, w, b, "ieee"), y.detach())
    dy = torch.randn(y.shape).contiguous(memory_format=torch.channels_last)
    dx, slope = torch.autograd.grad(y, exact, dy.double())
    close(conv.inward(form, dy, w, side, side, "ieee"), dx)
    dw = torch.full(w.shape, float("nan"))
    conv.weights(form, x, dy, dw, "ieee")
    close(dw, slope.permute(0, 1, 3, 4, 2))


@pytest.mark.parametrize("quicker", [True, False])
def test_linear_layers_forward_by_the_quicker_way(quicker: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "LARGE", 1)
    monkeypatch.setattr(linear, "_quicker", {})
    monkeypatch.setattr(linear, "timed", lambda way: float(way() is marked) if quicker else float(way() is not marked))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    clients, samples, inputs, outputs, begin = 8, 20, 100, 70, 32
    torch.manual_seed(0)
    marked = torch.zeros(())
    rows, bias = torch.randn(clients, begin + inputs * outputs + outputs), begin + inputs * outputs
    x = torch.randn(clients, samples, 2, inputs)[:, :, 0]  # lies in strides
    found = linear.forward(x, rows, begin, bias, outputs, "ieee", lambda: marked)
    assert (found is marked) != quicker
    if quicker:
        close(found, x.double() @ _matrix(rows, begin, outputs, inputs).mT + rows[:, None, bias:].double())


@pytest.mark.parametrize("corrected", [False, True])
def test_linear_layers_step_in_their_backward_pass(corrected: bool) -> None:
    samples, inputs, outputs, begin = 20, 100, 70, 32
    torch.manual_seed(0)
    w, v, anchor, push = (torch.randn(CLIENTS, begin + inputs * outputs + 8) for _ in range(4))
    x, dy = torch.randn(CLIENTS, samples, inputs), torch.randn(CLIENTS, samples, outputs)
    reals, live, partials = torch.rand(9, CLIENTS), torch.tensor([1, 0], dtype=torch.int32), torch.zeros(CLIENTS, 4)
    old = {name: _matrix(rows, begin, outputs, inputs).clone() for name, rows in (("w", w), ("v", v))}
    more = (anchor, push) if corrected else (None, None)
    dx = linear.backward(x, dy, w, v, *more, reals, live, partials, 1, begin, True, True, "ieee")
    lr, momentum, decay, _, scale, pull = reals[:6, 0].double()
    g = dy[0].double().mT @ x[0].double()
    step = scale * g + decay * old["w"][0]
    if corrected:
        toward, by = (_matrix(rows, begin, outputs, inputs)[0] for rows in (anchor, push))
        step = step + pull * (old["w"][0] - toward) + by
    velocity = momentum * old["v"][0] + step
    close(_matrix(v, begin, outputs, inputs)[0], velocity)
    close(_matrix(w, begin, outputs, inputs)[0], old["w"][0] - lr * velocity)
    close(dx[0], dy[0].double() @ old["w"][0])
    close(partials[0].sum(), g.square().sum())
    for name, rows in (("w", w), ("v", v)):  # the second client has finished
        assert torch.equal(_matrix(rows, begin, outputs, inputs)[1], old[name][1])
    assert float(partials[1].sum()) == 0


def _matrix(rows: Tensor, begin: int, outputs: int, inputs: int) -> Tensor:
    return rows[:, begin : begin + outputs * inputs].view(len(rows), outputs, inputs).double()


def test_dropout_keeps_what_plain_operations_keep() -> None:
    x, seeds, p = torch.randn(CLIENTS * BATCH, 1000), torch.tensor([[5], [0xFFFFFFF0]]), 0.3
    stays = keep(seeds, p, BATCH * 1000).view(x.shape)
    torch.testing.assert_close(dropout.drop(x, seeds, p), torch.where(stays, x / (1 - p), 0.0))
