"""Convolutions of stacked clients as matrix products whose patches are gathered as they are needed, never stored.

Images are `[m, b, H, W, C]` and weights `[O, h, w, C]` in every client's row. The three products run over

    forward            rows: output pixels    columns: outputs    sum: taps × inputs
    gradient of x      rows: input pixels     columns: inputs     sum: taps × outputs
    gradient of w      rows: outputs          columns: taps × inputs    sum: output pixels, in parts
"""

# mypy: ignore-errors
# ruff: noqa: E741, SIM102

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kairosfl.engines.batched.conv import Shape

FILL = 512  # programs that keep a large GPU busy


@triton.jit
def _forward(
    x_rows,
    w_rows,
    b_rows,
    y_rows,
    row,
    side,
    pixels,
    H: tl.constexpr,
    W: tl.constexpr,
    C: tl.constexpr,
    OH: tl.constexpr,
    OW: tl.constexpr,
    O: tl.constexpr,
    KH: tl.constexpr,
    KW: tl.constexpr,
    SH: tl.constexpr,
    SW: tl.constexpr,
    PH: tl.constexpr,
    PW: tl.constexpr,
    BIAS: tl.constexpr,
    DOT: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    client = tl.program_id(1).to(tl.int64)
    tiles: tl.constexpr = (O + BN - 1) // BN
    number = tl.program_id(0)
    p = (number // tiles) * BM + tl.arange(0, BM)
    o = (number % tiles) * BN + tl.arange(0, BN)
    image = p // (OH * OW)
    top = (p // OW) % OH * SH - PH
    left = p % OW * SW - PW
    known = p < pixels
    x_rows += client * (pixels // (OH * OW)) * (H * W * C)
    w_rows += client * row
    K: tl.constexpr = KH * KW * C
    acc = tl.zeros([BM, BN], dtype=tl.float32)
    for begin in range(0, K, BK):
        k = begin + tl.arange(0, BK)
        if C % BK == 0:  # one tap in all of the block
            tap = begin // C
            h = top + tap // KW
            wide = left + tap % KW
            spot = ((image * H + h) * W + wide) * C + begin % C
            good = known & (h >= 0) & (h < H) & (wide >= 0) & (wide < W)
            x = tl.load(x_rows + spot[:, None] + tl.arange(0, BK)[None, :], good[:, None], 0.0)
        else:
            tap = k // C
            h = top[:, None] + (tap // KW)[None, :]
            wide = left[:, None] + (tap % KW)[None, :]
            good = known[:, None] & (k < K)[None, :] & (h >= 0) & (h < H) & (wide >= 0) & (wide < W)
            x = tl.load(x_rows + ((image[:, None] * H + h) * W + wide) * C + (k % C)[None, :], good, 0.0)
        w = tl.load(w_rows + o[:, None] * K + k[None, :], (o < O)[:, None] & (k < K)[None, :], 0.0)
        acc = tl.dot(x, tl.trans(w.to(x.dtype)), acc, input_precision=DOT)
    if BIAS:
        acc += tl.load(b_rows + client * side + o, o < O, 0.0)[None, :]
    y_rows += client * pixels * O
    tl.store(y_rows + p[:, None] * O + o[None, :], acc.to(y_rows.dtype.element_ty), known[:, None] & (o < O)[None, :])


@triton.jit
def _inward(
    dy_rows,
    w_rows,
    dx_rows,
    row,
    pixels,
    H: tl.constexpr,
    W: tl.constexpr,
    C: tl.constexpr,
    OH: tl.constexpr,
    OW: tl.constexpr,
    O: tl.constexpr,
    KH: tl.constexpr,
    KW: tl.constexpr,
    SH: tl.constexpr,
    SW: tl.constexpr,
    PH: tl.constexpr,
    PW: tl.constexpr,
    DOT: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    client = tl.program_id(1).to(tl.int64)
    tiles: tl.constexpr = (C + BN - 1) // BN
    number = tl.program_id(0)
    p = (number // tiles) * BM + tl.arange(0, BM)
    c = (number % tiles) * BN + tl.arange(0, BN)
    image = p // (H * W)
    low = (p // W) % H + PH
    right = p % W + PW
    known = p < pixels
    dy_rows += client * (pixels // (H * W)) * (OH * OW * O)
    w_rows += client * row
    acc = tl.zeros([BM, BN], dtype=tl.float32)
    PARTS: tl.constexpr = (O + BK - 1) // BK
    for step in range(KH * KW * PARTS):
        tap = step // PARTS
        o = step % PARTS * BK + tl.arange(0, BK)
        h = low - tap // KW
        wide = right - tap % KW
        good = known & (h >= 0) & (wide >= 0)
        if SH > 1:
            good = good & (h % SH == 0)
            h = h // SH
        if SW > 1:
            good = good & (wide % SW == 0)
            wide = wide // SW
        good = good & (h < OH) & (wide < OW)
        spot = ((image * OH + h) * OW + wide) * O
        dy = tl.load(dy_rows + spot[:, None] + o[None, :], good[:, None] & (o < O)[None, :], 0.0)
        w = tl.load(w_rows + (o * (KH * KW) + tap)[:, None] * C + c[None, :], (o < O)[:, None] & (c < C)[None, :], 0.0)
        acc = tl.dot(dy, w.to(dy.dtype), acc, input_precision=DOT)
    dx_rows += client * pixels * C
    tl.store(dx_rows + p[:, None] * C + c[None, :], acc.to(dx_rows.dtype.element_ty), known[:, None] & (c < C)[None, :])


@triton.jit
def _weights(
    x_rows,
    dy_rows,
    dw_rows,
    db_rows,
    row,
    side,
    part,
    pixels,
    share,
    H: tl.constexpr,
    W: tl.constexpr,
    C: tl.constexpr,
    OH: tl.constexpr,
    OW: tl.constexpr,
    O: tl.constexpr,
    KH: tl.constexpr,
    KW: tl.constexpr,
    SH: tl.constexpr,
    SW: tl.constexpr,
    PH: tl.constexpr,
    PW: tl.constexpr,
    BIAS: tl.constexpr,
    DOT: tl.constexpr,
    BM: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    client = tl.program_id(1).to(tl.int64)
    piece = tl.program_id(2)
    K: tl.constexpr = KH * KW * C
    tiles: tl.constexpr = (K + BN - 1) // BN
    number = tl.program_id(0)
    o = (number // tiles) * BM + tl.arange(0, BM)
    k = (number % tiles) * BN + tl.arange(0, BN)
    tap = k // C
    down = tap // KW - PH
    over = tap % KW - PW
    inner = k % C
    x_rows += client * (pixels // (OH * OW)) * (H * W * C)
    dy_rows += client * pixels * O
    acc = tl.zeros([BM, BN], dtype=tl.float32)
    total = tl.zeros([BM], dtype=tl.float32)
    for begin in range(piece * share, min(piece * share + share, pixels), BK):
        p = begin + tl.arange(0, BK)
        known = p < pixels
        h = ((p // OW) % OH * SH)[:, None] + down[None, :]
        wide = (p % OW * SW)[:, None] + over[None, :]
        good = known[:, None] & (k < K)[None, :] & (h >= 0) & (h < H) & (wide >= 0) & (wide < W)
        x = tl.load(x_rows + (((p // (OH * OW))[:, None] * H + h) * W + wide) * C + inner[None, :], good, 0.0)
        dy = tl.load(dy_rows + p[:, None] * O + o[None, :], known[:, None] & (o < O)[None, :], 0.0)
        acc = tl.dot(tl.trans(dy), x, acc, input_precision=DOT)
        if BIAS:
            total += tl.sum(dy.to(tl.float32), 0)
    dw_rows += client * row + piece.to(tl.int64) * part
    tl.store(dw_rows + o[:, None] * K + k[None, :], acc, (o < O)[:, None] & (k < K)[None, :])
    if BIAS:
        if number % tiles == 0:
            tl.store(db_rows + client * side + piece.to(tl.int64) * part + o, total, o < O)


def _fixed(shape: Shape, height: int, width: int) -> dict[str, int]:
    rows, columns = shape.size(height, width)
    return {
        "H": height,
        "W": width,
        "C": shape.inputs,
        "OH": rows,
        "OW": columns,
        "O": shape.outputs,
        "KH": shape.kernel[0],
        "KW": shape.kernel[1],
        "SH": shape.stride[0],
        "SW": shape.stride[1],
        "PH": shape.padding[0],
        "PW": shape.padding[1],
    }


def _tile(count: int, most: int) -> int:
    return max(16, min(most, triton.next_power_of_2(count)))


def forward(shape: Shape, x: Tensor, w: Tensor, b: Tensor | None, dot: str) -> Tensor:
    """x `[m·b, C, H, W]` channels last to `[m·b, O, ...]` channels last."""
    n, _, height, width = x.shape
    fixed = _fixed(shape, height, width)
    y = _empty(x, n, shape.outputs, fixed["OH"], fixed["OW"])
    m = len(w)
    pixels = n // m * fixed["OH"] * fixed["OW"]
    bm, bn = 128, _tile(shape.outputs, 128)
    _forward[(triton.cdiv(pixels, bm) * triton.cdiv(shape.outputs, bn), m)](
        x,
        w,
        w if b is None else b,
        y,
        w.stride(0),
        0 if b is None else b.stride(0),
        pixels,
        **fixed,
        BIAS=b is not None,
        DOT=dot,
        BM=bm,
        BN=bn,
        BK=_depth(shape.inputs),
        num_warps=8 if bn == 128 else 4,
        num_stages=3,
    )
    return y


def inward(shape: Shape, dy: Tensor, w: Tensor, height: int, width: int, dot: str) -> Tensor:
    """The gradient of x."""
    n, m = len(dy), len(w)
    dx = _empty(dy, n, shape.inputs, height, width)
    pixels = n // m * height * width
    bm, bn = 128, _tile(shape.inputs, 128)
    _inward[(triton.cdiv(pixels, bm) * triton.cdiv(shape.inputs, bn), m)](
        dy,
        w,
        dx,
        w.stride(0),
        pixels,
        **_fixed(shape, height, width),
        DOT=dot,
        BM=bm,
        BN=bn,
        BK=_depth(shape.outputs),
        num_warps=8 if bn == 128 else 4,
        num_stages=3,
    )
    return dx


def weights(shape: Shape, x: Tensor, dy: Tensor, dw: Tensor, db: Tensor | None, dot: str) -> None:
    """The gradients of the weights `[m, O, h, w, C]` and the bias `[m, O]`, into their places."""
    n, _, height, width = x.shape
    fixed = _fixed(shape, height, width)
    m = len(dw)
    pixels = n // m * fixed["OH"] * fixed["OW"]
    taps = shape.kernel[0] * shape.kernel[1] * shape.inputs
    bm, bn, depth = _tile(shape.outputs, 64), _tile(taps, 128), 32
    tiles = triton.cdiv(shape.outputs, bm) * triton.cdiv(taps, bn)
    # The sum over pixels is cut into parts where there are too few tiles to keep the GPU busy.
    parts = max(1, min(triton.cdiv(FILL, tiles * m), triton.cdiv(pixels, 4 * depth)))
    share = triton.cdiv(triton.cdiv(pixels, parts), depth) * depth
    parts = triton.cdiv(pixels, share)
    size = shape.outputs * taps
    if parts == 1:
        slopes, sides, part = dw, dw if db is None else db, 0
    else:
        sums = torch.empty(parts, m, size + shape.outputs, dtype=dw.dtype, device=dw.device)
        slopes, sides, part = sums[0, :, :size], sums[0, :, size:], sums.stride(0)
    _weights[(tiles, m, parts)](
        x,
        dy,
        slopes,
        sides,
        slopes.stride(0),
        sides.stride(0),
        part,
        pixels,
        share,
        **fixed,
        BIAS=db is not None,
        DOT=dot,
        BM=bm,
        BN=bn,
        BK=depth,
        num_warps=4 if bm * bn <= 4096 else 8,
        num_stages=3,
    )
    if parts > 1:
        total = sums.sum(0)
        dw.copy_(total[:, :size].view(dw.shape))
        if db is not None:
            db.copy_(total[:, size:])


def _depth(channels: int) -> int:
    """How much of the sum one iteration takes: part of one tap where channels allow."""
    return 32 if channels % 32 == 0 else 16 if channels % 16 == 0 else 32


def _empty(like: Tensor, n: int, channels: int, height: int, width: int) -> Tensor:
    return torch.empty(n, height, width, channels, dtype=like.dtype, device=like.device).permute(0, 3, 1, 2)
