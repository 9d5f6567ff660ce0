"""Depthwise convolutions of stacked clients in channels-last order, without moving channels beside
each other.

In memory, images are `[m, b, H, W, C]`, outputs `[m, b, OH, OW, C]`, and the weights in a client's
row `[C, KH·KW]`. A *tap* is one position of the KH × KW kernel. Every program has a tile of pixels
× channels of one client.
"""

# mypy: ignore-errors

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kairosfl.engines.batched.conv import Shape
from kairosfl.engines.batched.kernels.device import FUSED
from kairosfl.engines.batched.kernels.launch import on

PIXELS, CHANNELS = 32, 64  # of a tile
PARTS = 32  # of a client's pixels, for the gradient of its weights


@triton.jit
def _forward(
    x_rows,
    w_rows,
    b_rows,
    y_rows,
    row,
    side,
    each,
    H: tl.constexpr,
    W: tl.constexpr,
    C: tl.constexpr,
    OH: tl.constexpr,
    OW: tl.constexpr,
    KH: tl.constexpr,
    KW: tl.constexpr,
    SH: tl.constexpr,
    SW: tl.constexpr,
    PH: tl.constexpr,
    PW: tl.constexpr,
    DH: tl.constexpr,
    DW: tl.constexpr,
    BIAS: tl.constexpr,
    BM: tl.constexpr,
    BC: tl.constexpr,
):
    """y = conv(x, w) + bias.

    x_rows  [m, each, H, W, C]      float32 or bfloat16
    w_rows  [m, C, KH·KW]           float32, stride `row` between clients
    b_rows  [m, C]                  float32, stride `side` between clients; read only if BIAS
    y_rows  [m, each, OH, OW, C]    output, dtype of x
    grid    (pixel tiles, channel tiles, m)
    """
    client = tl.program_id(2).to(tl.int64)
    p = tl.program_id(0) * BM + tl.arange(0, BM)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    known, real = p < each * (OH * OW), c < C
    image, top, left = p // (OH * OW), p // OW % OH * SH - PH, p % OW * SW - PW
    x_rows += client * each * (H * W * C)
    w_rows += client * row
    acc = tl.zeros([BM, BC], dtype=tl.float32)
    for tap in tl.static_range(KH * KW):
        h, wide = top + tap // KW * DH, left + tap % KW * DW
        good = known & (h >= 0) & (h < H) & (wide >= 0) & (wide < W)
        spot = ((image * H + h) * W + wide) * C
        x = tl.load(x_rows + spot[:, None] + c[None, :], good[:, None] & real[None, :], 0.0).to(
            tl.float32
        )
        acc += x * tl.load(w_rows + c * (KH * KW) + tap, real, 0.0)[None, :]
    if BIAS:
        acc += tl.load(b_rows + client * side + c, real, 0.0)[None, :]
    y_rows += client * each * (OH * OW * C)
    tl.store(
        y_rows + p[:, None] * C + c[None, :],
        acc.to(y_rows.dtype.element_ty),
        known[:, None] & real[None, :],
    )


@triton.jit
def _inward(
    dy_rows,
    w_rows,
    dx_rows,
    row,
    each,
    H: tl.constexpr,
    W: tl.constexpr,
    C: tl.constexpr,
    OH: tl.constexpr,
    OW: tl.constexpr,
    KH: tl.constexpr,
    KW: tl.constexpr,
    SH: tl.constexpr,
    SW: tl.constexpr,
    PH: tl.constexpr,
    PW: tl.constexpr,
    DH: tl.constexpr,
    DW: tl.constexpr,
    BM: tl.constexpr,
    BC: tl.constexpr,
):
    """The gradient of x, one program per tile of input pixels; arguments as in `_forward`."""
    client = tl.program_id(2).to(tl.int64)
    p = tl.program_id(0) * BM + tl.arange(0, BM)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    known, real = p < each * (H * W), c < C
    image, h, wide = p // (H * W), p // W % H + PH, p % W + PW
    dy_rows += client * each * (OH * OW * C)
    w_rows += client * row
    acc = tl.zeros([BM, BC], dtype=tl.float32)
    for tap in tl.static_range(KH * KW):
        # The output pixel whose tap lies here, if there is one between the strides.
        up, across = h - tap // KW * DH, wide - tap % KW * DW
        good = known & (up >= 0) & (across >= 0) & (up % SH == 0) & (across % SW == 0)
        up, across = up // SH, across // SW
        good = good & (up < OH) & (across < OW)
        spot = ((image * OH + up) * OW + across) * C
        dy = tl.load(dy_rows + spot[:, None] + c[None, :], good[:, None] & real[None, :], 0.0).to(
            tl.float32
        )
        acc += dy * tl.load(w_rows + c * (KH * KW) + tap, real, 0.0)[None, :]
    dx_rows += client * each * (H * W * C)
    tl.store(
        dx_rows + p[:, None] * C + c[None, :],
        acc.to(dx_rows.dtype.element_ty),
        known[:, None] & real[None, :],
    )


@triton.jit
def _weights(
    x_rows,
    dy_rows,
    sums,
    each,
    share,
    H: tl.constexpr,
    W: tl.constexpr,
    C: tl.constexpr,
    OH: tl.constexpr,
    OW: tl.constexpr,
    KH: tl.constexpr,
    KW: tl.constexpr,
    SH: tl.constexpr,
    SW: tl.constexpr,
    PH: tl.constexpr,
    PW: tl.constexpr,
    DH: tl.constexpr,
    DW: tl.constexpr,
    ROWS: tl.constexpr,
    TAPS: tl.constexpr,
    BM: tl.constexpr,
    BC: tl.constexpr,
):
    """The gradients of w and, if ROWS is KH·KW + 1, of the bias over `share` output pixels: sums
    [parts, m, ROWS, C].

    TAPS is a power of two, at least ROWS; grid (parts, channel tiles, m).
    """
    client = tl.program_id(2).to(tl.int64)
    part = tl.program_id(0)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    real, taps = c < C, tl.arange(0, TAPS)
    pixels = each * (OH * OW)
    x_rows += client * each * (H * W * C)
    dy_rows += client * pixels * C
    acc = tl.zeros([TAPS, BC], dtype=tl.float32)
    for begin in range(part * share, tl.minimum(part * share + share, pixels), BM):
        p = begin + tl.arange(0, BM)
        known = (p < pixels) & (p < part * share + share)
        dy = tl.load(dy_rows + p[:, None] * C + c[None, :], known[:, None] & real[None, :], 0.0).to(
            tl.float32
        )
        image, top, left = p // (OH * OW), p // OW % OH * SH - PH, p % OW * SW - PW
        for tap in tl.static_range(KH * KW):
            h, wide = top + tap // KW * DH, left + tap % KW * DW
            good = known & (h >= 0) & (h < H) & (wide >= 0) & (wide < W)
            spot = ((image * H + h) * W + wide) * C
            x = tl.load(x_rows + spot[:, None] + c[None, :], good[:, None] & real[None, :], 0.0).to(
                tl.float32
            )
            acc += tl.where((taps == tap)[:, None], tl.sum(x * dy, 0)[None, :], 0.0)
        if ROWS > KH * KW:
            acc += tl.where((taps == KH * KW)[:, None], tl.sum(dy, 0)[None, :], 0.0)
    place = (part.to(tl.int64) * tl.num_programs(2) + client) * ROWS + taps
    tl.store(sums + place[:, None] * C + c[None, :], acc, (taps < ROWS)[:, None] & real[None, :])


def _sizes(shape: Shape, height: int, width: int) -> tuple[int, ...]:
    return (
        *(height, width, shape.inputs),
        *shape.size(height, width),
        *(*shape.kernel, *shape.stride, *shape.padding, *shape.dilation),
    )


def _tiles(pixels: int, channels: int) -> tuple[int, int, int, int]:
    """How many tiles, and how large."""
    wide = min(CHANNELS, triton.next_power_of_2(channels))
    high = PIXELS * CHANNELS // wide
    return triton.cdiv(pixels, high), triton.cdiv(channels, wide), high, wide


def forward(shape: Shape, x: Tensor, w: Tensor, b: Tensor | None) -> Tensor:
    """The outputs for images and weights `[m, C, KH, KW, 1]`."""
    m, sizes = len(w), _sizes(shape, *x.shape[2:])
    each, size = len(x) // m, (len(x), shape.outputs, *shape.size(*x.shape[2:]))
    y = torch.empty(size, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
    down, across, high, wide = _tiles(each * size[2] * size[3], shape.inputs)
    bias = w if b is None else b
    on(_forward, (down, across, m))(
        x, w, bias, y, w.stride(0), bias.stride(0), each, *sizes, b is not None, high, wide, **FUSED
    )
    return y


def inward(shape: Shape, dy: Tensor, w: Tensor, height: int, width: int) -> Tensor:
    """The gradient of the images."""
    m, each = len(w), len(dy) // len(w)
    size = (len(dy), shape.inputs, height, width)
    dx = torch.empty(size, dtype=dy.dtype, device=dy.device, memory_format=torch.channels_last)
    down, across, high, wide = _tiles(each * height * width, shape.inputs)
    on(_inward, (down, across, m))(
        dy, w, dx, w.stride(0), each, *_sizes(shape, height, width), high, wide, **FUSED
    )
    return dx


def weights(shape: Shape, x: Tensor, dy: Tensor, dw: Tensor, db: Tensor | None) -> None:
    """The gradients of weights and bias, written into dw `[m, C, KH, KW, 1]` and, if wanted, db
    `[m, C]`.
    """
    m, taps = len(dw), shape.kernel[0] * shape.kernel[1]
    rows = taps if db is None else taps + 1
    each = len(x) // m
    pixels = each * dy.shape[2] * dy.shape[3]
    down, across, high, wide = _tiles(pixels, shape.inputs)
    parts = min(PARTS, down)
    share = triton.cdiv(down, parts) * high
    sums = torch.empty(parts, m, rows, shape.inputs, dtype=torch.float32, device=x.device)
    sizes = _sizes(shape, *x.shape[2:])
    on(_weights, (parts, across, m))(
        x, dy, sums, each, share, *sizes, rows, triton.next_power_of_2(rows), high, wide, **FUSED
    )
    slopes = sums.sum(0)
    dw.copy_(slopes[:, :taps].mT.reshape(dw.shape))
    if db is not None:
        db.copy_(slopes[:, taps])
