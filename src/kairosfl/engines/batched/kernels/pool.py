"""ReLU and 2×2 max-pooling in one pass, channels last; the index of the maximum is stored in one byte."""

# mypy: ignore-errors

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024
DEAD = tl.constexpr(4)  # index that says: no pixel of the window was above zero


@triton.jit
def _forward(
    x_rows,
    y_rows,
    wins,
    count,
    H: tl.constexpr,
    W: tl.constexpr,
    C: tl.constexpr,
    OH: tl.constexpr,
    OW: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """y = max_pool2d(relu(x), 2); one program per BLOCK elements of y.

    x_rows  [n, H, W, C]      float32 or bfloat16, contiguous
    y_rows  [n, OH, OW, C]    output, dtype of x, OH = H // 2 and OW = W // 2
    wins    [n, OH, OW, C]    int8: index of the maximum in its window (2·row + column), or DEAD
    count   n·OH·OW·C
    """
    spot = tl.program_id(0).to(count.dtype) * BLOCK + tl.arange(0, BLOCK)
    inside = spot < count
    c = spot % C
    column = spot // C % OW
    line = spot // (C * OW) % OH
    image = spot // (C * OW * OH)
    corner = x_rows + ((image * H + line * 2) * W + column * 2) * C + c
    best = tl.load(corner, inside, 0.0).to(tl.float32)
    win = tl.zeros([BLOCK], dtype=tl.int32)
    for other in tl.static_range(1, 4):
        x = tl.load(corner + (other // 2 * W + other % 2) * C, inside, 0.0).to(tl.float32)
        win = tl.where(x > best, other, win)
        best = tl.maximum(best, x)
    win = tl.where(best > 0, win, DEAD)
    tl.store(y_rows + spot, tl.maximum(best, 0.0).to(y_rows.dtype.element_ty), inside)
    tl.store(wins + spot, win.to(tl.int8), inside)


@triton.jit
def _backward(
    dy_rows,
    wins,
    dx_rows,
    count,
    H: tl.constexpr,
    W: tl.constexpr,
    C: tl.constexpr,
    OH: tl.constexpr,
    OW: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """dx from dy; one program per BLOCK elements of dx.

    dy_rows  [n, OH, OW, C]    gradient of the output
    wins     [n, OH, OW, C]    int8, as written by `_forward`
    dx_rows  [n, H, W, C]      output, dtype of dy; zero in an odd last row or column, which no window covers
    count    n·H·W·C
    """
    spot = tl.program_id(0).to(count.dtype) * BLOCK + tl.arange(0, BLOCK)
    inside = spot < count
    c = spot % C
    column = spot // C % W
    line = spot // (C * W) % H
    image = spot // (C * W * H)
    pooled = inside & (line < 2 * OH) & (column < 2 * OW)
    source = ((image * OH + line // 2) * OW + column // 2) * C + c
    win = tl.load(wins + source, pooled, DEAD).to(tl.int32)
    dy = tl.load(dy_rows + source, pooled, 0.0)
    mine = win == line % 2 * 2 + column % 2
    tl.store(dx_rows + spot, tl.where(mine, dy, 0.0).to(dx_rows.dtype.element_ty), inside)


def _options(channels: int, height: int, width: int) -> dict[str, int]:
    sizes = {"H": height, "W": width, "C": channels, "OH": height // 2, "OW": width // 2}
    return sizes | {"BLOCK": BLOCK, "num_warps": 4}


def forward(x: Tensor) -> tuple[Tensor, Tensor]:
    """x `[n, C, H, W]` to y `[n, C, H // 2, W // 2]`, both channels last, and `wins` `[n, H // 2, W // 2, C]`."""
    n, channels, height, width = x.shape
    size = (n, height // 2, width // 2, channels)
    y = torch.empty(size, dtype=x.dtype, device=x.device)
    wins = torch.empty(size, dtype=torch.int8, device=x.device)
    _forward[(triton.cdiv(y.numel(), BLOCK),)](x, y, wins, y.numel(), **_options(channels, height, width))
    return y.permute(0, 3, 1, 2), wins


def backward(dy: Tensor, wins: Tensor, size: torch.Size) -> Tensor:
    """The gradient of x, `[n, C, H, W]` = `size`, channels last; dy is channels last and `wins` from `forward`."""
    n, channels, height, width = size
    dx = torch.empty(n, height, width, channels, dtype=dy.dtype, device=dy.device)
    _backward[(triton.cdiv(dx.numel(), BLOCK),)](dy, wins, dx, dx.numel(), **_options(channels, height, width))
    return dx.permute(0, 3, 1, 2)
