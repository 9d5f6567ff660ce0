"""Every way to convolve stacked clients against `F.conv2d` of each client, in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from kairosfl.engines.batched.conv import Cropped, Pair, Shape, cropped, methods

CLIENTS, BATCH = 2, 3
# inputs, outputs, kernel, stride, padding, dilation, groups; height and width; the taps that meet
# the image
CASES: list[tuple[Shape, Pair, tuple[slice, slice] | None]] = [
    (Shape(4, 6, (3, 3), (1, 1), (1, 1), (1, 1), 1), (1, 1), (slice(1, 2), slice(1, 2))),
    (Shape(4, 6, (3, 3), (2, 2), (1, 1), (1, 1), 1), (2, 2), (slice(1, 3), slice(1, 3))),
    (Shape(3, 5, (5, 3), (1, 2), (2, 1), (1, 1), 1), (2, 4), (slice(1, 4), slice(0, 3))),
    (Shape(3, 5, (3, 3), (1, 1), (2, 2), (2, 2), 1), (2, 5), (slice(1, 2), slice(0, 3))),
    (Shape(4, 4, (3, 3), (1, 1), (1, 1), (1, 1), 4), (1, 3), (slice(1, 2), slice(0, 3))),
    (Shape(4, 6, (3, 3), (1, 1), (1, 1), (1, 1), 1), (4, 4), None),
    (Shape(4, 6, (3, 3), (1, 1), (1, 1), (1, 1), 1), (2, 2), None),
    (Shape(4, 6, (7, 7), (2, 2), (3, 3), (1, 1), 1), (8, 8), None),
    (Shape(2, 3, (2, 2), (1, 1), (1, 1), (2, 2), 1), (1, 1), None),  # no tap meets the pixel
    (
        Shape(2, 3, (2, 2), (4, 4), (1, 1), (3, 3), 1),
        (3, 3),
        None,
    ),  # the first would begin inside the image
]


def apart(shape: Shape, x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    clients = zip(x.chunk(CLIENTS), w.permute(0, 1, 4, 2, 3), b, strict=True)
    options = (shape.stride, shape.padding, shape.dilation, shape.groups)
    return torch.cat([F.conv2d(*client, *options) for client in clients])


@pytest.mark.parametrize(("shape", "sides", "taps"), CASES)
def test_a_convolution_there_and_back(
    shape: Shape, sides: Pair, taps: tuple[slice, slice] | None
) -> None:
    torch.manual_seed(0)
    x = torch.randn(CLIENTS * BATCH, shape.inputs, *sides, dtype=torch.float64).requires_grad_()
    w = torch.randn(
        CLIENTS, shape.outputs, *shape.kernel, shape.inputs // shape.groups, dtype=torch.float64
    )
    b = torch.randn(CLIENTS, shape.outputs, dtype=torch.float64)
    y = apart(shape, x, w.requires_grad_(), b.requires_grad_())
    dy = torch.randn(y.shape, dtype=torch.float64)
    wanted = torch.autograd.grad(y, (x, w, b), dy)
    found = cropped(shape, *sides)
    assert (found and found[1:]) == taps
    for way in methods(shape, x, CLIENTS, "ieee").values():
        assert isinstance(way, Cropped) == (taps is not None)
        dw, db = torch.full_like(w, torch.nan), torch.full_like(b, torch.nan)
        with torch.no_grad():
            torch.testing.assert_close(way.forward(shape, x, w, b), y, rtol=1e-12, atol=1e-12)
            dx = way.backward(shape, dy, x, w, (dw, db), inward=True)
            assert way.backward(shape, dy, x, w, (dw, db), inward=False) is None
        torch.testing.assert_close((dx, dw, db), wanted, rtol=1e-12, atol=1e-12)
