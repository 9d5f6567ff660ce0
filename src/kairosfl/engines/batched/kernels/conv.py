"""Convolutions of stacked clients by the kernels of `conv_programs`: sizes of tiles, numbers of
programs, results.
"""

# mypy: ignore-errors

from __future__ import annotations

import torch
import triton
from torch import Tensor

from kairosfl.engines.batched.conv import Shape, total
from kairosfl.engines.batched.kernels import conv_programs as programs
from kairosfl.engines.batched.kernels.device import FUSED, stages
from kairosfl.engines.batched.kernels.launch import on

FILL = 4096  # number of warps that keeps a large GPU busy
TURN = 64  # inputs and outputs per tile when weights are transposed
FEW = 16  # inputs below which the gradient of the bias is best summed with that of the weights


def _fixed(shape: Shape, height: int, width: int) -> dict[str, int]:
    """The compile-time constants of a convolution of images of this size."""
    sizes = (height, width, shape.inputs, *shape.size(height, width), shape.outputs)
    names = ("H", "W", "C", "OH", "OW", "O", "KH", "KW", "SH", "SW", "PH", "PW")
    return dict(zip(names, (*sizes, *shape.kernel, *shape.stride, *shape.padding), strict=True))


def _tile(count: int, most: int) -> int:
    return max(16, min(most, triton.next_power_of_2(count)))


def _product(columns: int, depth: int, x: Tensor) -> dict[str, int]:
    """Tile sizes of a product with this many columns that sums over taps of `depth` channels; tuned
    on an H200.
    """
    bn = 128 if columns % 128 == 0 else _tile(columns, 64)
    bm, warps = 128, 4
    if bn == 128:
        warps = 8
    elif bn == 32:
        bm, warps = 256, 8

    bk = 32
    if x.dtype == torch.bfloat16 and depth % 64 == 0:
        bk = 64
    elif depth % 32 and depth % 16 == 0:
        bk = 16
    return {
        "BM": bm,
        "BN": bn,
        "BK": bk,
        "num_warps": warps,
        "num_stages": stages(x.device),
        **FUSED,
    }


def _slope(outputs: int, inputs: int, taps: int, x: Tensor, dot: str) -> dict[str, int]:
    """Tile sizes of the gradient of the weights; `taps` is KH·KW·C."""
    bm, bn, bk, warps = _tile(outputs, 64), _tile(taps, 128), 32, 2
    if outputs % 128 == 0 and inputs % 64 == 0:
        bm, bn = 128, 64
    if x.dtype == torch.bfloat16:
        bn = next((wide for wide in (128, 64, 32) if inputs % wide == 0), bn)
        bk, warps = 32 if inputs % 32 else 64, 4
    if bm < 64 or dot == "ieee":
        warps = 4
    return {
        "BM": bm,
        "BN": bn,
        "BK": bk,
        "num_warps": warps,
        "num_stages": stages(x.device),
        **FUSED,
    }


def forward(shape: Shape, x: Tensor, w: Tensor, b: Tensor | None, relu: bool, dot: str) -> Tensor:
    """Convolve x `[m·b, C, H, W]`, channels last, to `[m·b, O, OH, OW]`, channels last, with a ReLU
    if `relu`.

    w `[m, O, KH, KW, C]` and b `[m, O]` may have any stride between clients, but must be contiguous
    within one.
    """
    n, _, height, width = x.shape
    fixed = _fixed(shape, height, width)
    y = _empty(x, n, shape.outputs, fixed["OH"], fixed["OW"])
    m, w = len(w), w.to(x.dtype)  # converted once, not in every program
    pixels = n // m * fixed["OH"] * fixed["OW"]
    tile = _product(shape.outputs, shape.inputs, x)
    on(
        programs.forward,
        (triton.cdiv(pixels, tile["BM"]) * triton.cdiv(shape.outputs, tile["BN"]), m),
    )(
        x,
        w,
        w if b is None else b,
        y,
        w.stride(0),
        0 if b is None else b.stride(0),
        pixels,
        **fixed,
        BIAS=b is not None,
        RELU=relu,
        DOT=dot,
        **tile,
    )
    return y


def inward(shape: Shape, dy: Tensor, w: Tensor, x: Tensor, masked: bool, dot: str) -> Tensor:
    """The gradient of x `[m·b, C, H, W]` from dy `[m·b, O, OH, OW]`, all channels last, and w as
    above.

    If `masked`, x is what a ReLU returned, and the gradient is that of the input of the ReLU.
    """
    n, m = len(dy), len(w)
    height, width = x.shape[2:]
    (down, right), fixed = shape.stride, _fixed(shape, height, width)
    turned = _turned(w, dy.dtype)
    dx = _empty(dy, n, shape.inputs, height, width)
    pixels = n // m * triton.cdiv(height, down) * triton.cdiv(width, right)
    tile = _product(shape.inputs, shape.outputs, dy)
    grid = (
        triton.cdiv(pixels, tile["BM"]) * triton.cdiv(shape.inputs, tile["BN"]),
        m,
        down * right,
    )
    if masked:
        tile["maxnreg"] = (
            # the mask would take more, and leave room for only one program of 8 warps at a time
            128
        )
    on(programs.inward, grid)(dy, turned, x, dx, n // m, **fixed, MASK=masked, DOT=dot, **tile)
    return dx


def _turned(w: Tensor, dtype: torch.dtype) -> Tensor:
    """The weights `[m, O, KH, KW, C]` transposed to `[m, KH, KW, C, O]`, contiguous."""
    m, outputs, high, wide, inputs = w.shape
    turned = torch.empty(m, high, wide, inputs, outputs, dtype=dtype, device=w.device)
    grid = (triton.cdiv(outputs, TURN) * triton.cdiv(inputs, TURN), m, high * wide)
    on(programs.turn, grid)(
        w, turned, w.stride(0), C=inputs, O=outputs, TAPS=high * wide, B=TURN, num_warps=4, **FUSED
    )
    return turned


def weights(shape: Shape, x: Tensor, dy: Tensor, dw: Tensor, db: Tensor | None, dot: str) -> None:
    """Write the gradient of the weights to dw `[m, O, KH, KW, C]` and, if wanted, that of the bias
    to db `[m, O]`.

    x is `[m·b, C, H, W]` and dy `[m·b, O, OH, OW]`, both channels last; dw and db are float32, with
    any stride between clients.
    """
    n, _, height, width = x.shape
    fixed = _fixed(shape, height, width)
    m = len(dw)
    pixels = n // m * fixed["OH"] * fixed["OW"]
    taps = shape.kernel[0] * shape.kernel[1] * shape.inputs
    tile = _slope(shape.outputs, shape.inputs, taps, x, dot)
    depth, tiles = (
        tile["BK"],
        triton.cdiv(shape.outputs, tile["BM"]) * triton.cdiv(taps, tile["BN"]),
    )
    # The sum over pixels is split into parts if there are too few tiles to keep the GPU busy.
    parts = max(
        1, min(triton.cdiv(FILL // tile["num_warps"], tiles * m), triton.cdiv(pixels, 4 * depth))
    )
    share = triton.cdiv(triton.cdiv(pixels, parts), depth) * depth
    parts = triton.cdiv(pixels, share)
    joint = db is not None and shape.inputs < FEW
    if not joint:
        total(dy, db)
    slopes = [dw.flatten(1), db] if joint else [dw.flatten(1)]
    sums = [slope[None] for slope in slopes]
    if parts > 1:
        sizes = [slope.shape[1] for slope in slopes]
        sums = torch.empty(parts, m, sum(sizes), dtype=dw.dtype, device=dw.device).split(sizes, 2)
    steps = (sums[0].stride(1), sums[-1].stride(1), sums[0].stride(0), pixels, share)
    on(programs.weights, (tiles, m, parts))(
        x, dy, sums[0], sums[-1], *steps, **fixed, BIAS=joint, DOT=dot, **tile
    )
    if parts > 1:
        for slope, each in zip(slopes, sums, strict=True):
            torch.sum(each, 0, out=slope)


def _empty(like: Tensor, n: int, channels: int, height: int, width: int) -> Tensor:
    """An uninitialised `[n, channels, height, width]` in channels-last order, not as a view: see
    `_Conv`.
    """
    size = (n, channels, height, width)
    return torch.empty(
        size, dtype=like.dtype, device=like.device, memory_format=torch.channels_last
    )
