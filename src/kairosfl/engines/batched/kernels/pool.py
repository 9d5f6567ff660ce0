"""ReLU, 2×2 max-pooling and dropout in one pass; the index of the maximum is stored in one byte.

Inputs are channels last. Outputs are, too, or *flat*: contiguous, as the linear layer after them
reads them. Every program has a tile of windows × channels of one image.
"""

# mypy: ignore-errors

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kairosfl.engines.batched.dropout import SPREAD, least
from kairosfl.engines.batched.kernels.device import FUSED
from kairosfl.engines.batched.kernels.dropout import scaled, stays
from kairosfl.engines.batched.kernels.launch import on

CHANNELS = 64  # channels that a tile has at least, if there are as many
DEAD = tl.constexpr(
    4
)  # index that says: no pixel of the window was above zero, or their maximum was dropped


@triton.jit
def _forward(
    x_rows,
    y_rows,
    wins,
    keys,
    draw,
    least,
    scale,
    images,
    H: tl.constexpr,
    W: tl.constexpr,
    C: tl.constexpr,
    FLAT: tl.constexpr,
    DROP: tl.constexpr,
    BP: tl.constexpr,
    BC: tl.constexpr,
):
    """y = max_pool2d(relu(x), 2), then dropout if DROP.

    x_rows  [n, H, W, C]                      float32 or bfloat16
    y_rows  [n, OH, OW, C], or [n, C, OH, OW] if FLAT; dtype of x, OH = H // 2 and OW = W // 2
    wins    [n, OH, OW, C]                    int8: index of the maximum in its window (2·row + column), or DEAD
    keys    [m]                               int64; with `draw`, `least` and `scale` as in `dropout`, read only if DROP
    images  n / m, the images of a client
    grid    (n × window tiles, channel tiles), window tiles innermost
    """
    OW: tl.constexpr = W // 2
    COUNT: tl.constexpr = H // 2 * OW
    tiles: tl.constexpr = (COUNT + BP - 1) // BP
    image = (tl.program_id(0) // tiles).to(tl.int64)
    p = tl.program_id(0) % tiles * BP + tl.arange(0, BP)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    inside = (p < COUNT)[:, None] & (c < C)[None, :]
    corner = x_rows + image * (H * W * C) + ((p // OW * W + p % OW) * (2 * C))[:, None] + c[None, :]
    best = tl.load(corner, inside, 0.0).to(tl.float32)
    win = tl.zeros([BP, BC], dtype=tl.int32)
    for other in tl.static_range(1, 4):
        x = tl.load(corner + (other // 2 * W + other % 2) * C, inside, 0.0).to(tl.float32)
        above = (x > best) | (x != x)  # NaN stays NaN, as in PyTorch
        win = tl.where(above, other, win)
        best = tl.where(above, x, best)
    dead = best <= 0
    if DROP:
        place = (image % images * C + c[None, :]) * COUNT + p[:, None]
        dead |= ~stays(tl.load(keys + image // images), draw, place, least)
        best *= scale
    y_rows += image * (COUNT * C)
    wins += image * (COUNT * C)
    place = p[:, None] * C + c[None, :]
    tl.store(wins + place, tl.where(dead, DEAD, win).to(tl.int8), inside)
    spot = c[None, :] * COUNT + p[:, None] if FLAT else place
    tl.store(y_rows + spot, tl.where(dead, 0.0, best).to(y_rows.dtype.element_ty), inside)


@triton.jit
def _backward(
    dy_rows,
    wins,
    dx_rows,
    sums,
    scale,
    H: tl.constexpr,
    W: tl.constexpr,
    C: tl.constexpr,
    FLAT: tl.constexpr,
    BIAS: tl.constexpr,
    BP: tl.constexpr,
    BC: tl.constexpr,
):
    """dx from dy and, if BIAS, its sums over pixels.

    dy_rows  [n, OH, OW, C], or [n, C, OH, OW] if FLAT
    wins     [n, OH, OW, C]    int8, as written by `_forward`
    dx_rows  [n, H, W, C]      output, dtype of dy; zero in an odd last row or column, which no window covers
    sums     [n × window tiles, C]    float32 output; written only if BIAS
    scale    of what dropout left
    grid     as in `_forward`, but windows may reach beyond an odd last row or column
    """
    OW: tl.constexpr = W // 2
    COUNT: tl.constexpr = H // 2 * OW
    WIDE: tl.constexpr = (W + 1) // 2
    ALL: tl.constexpr = (H + 1) // 2 * WIDE
    tiles: tl.constexpr = (ALL + BP - 1) // BP
    image = (tl.program_id(0) // tiles).to(tl.int64)
    p = tl.program_id(0) % tiles * BP + tl.arange(0, BP)
    c = tl.program_id(1) * BC + tl.arange(0, BC)
    line, column = p // WIDE, p % WIDE
    # Written so that the compiler sees that windows follow each other where no column is left over.
    source = p if WIDE == OW else line * OW + column
    pooled = ((line < H // 2) & (column < OW))[:, None] & (c < C)[None, :]
    wins += image * (COUNT * C)
    dy_rows += image * (COUNT * C)
    win = tl.load(wins + source[:, None] * C + c[None, :], pooled, DEAD).to(tl.int32)
    spot = c[None, :] * COUNT + source[:, None] if FLAT else source[:, None] * C + c[None, :]
    dy = tl.load(dy_rows + spot, pooled, 0.0).to(tl.float32) * scale
    if BIAS:
        tl.store(
            sums + tl.program_id(0).to(tl.int64) * C + c,
            tl.sum(tl.where(win == DEAD, 0.0, dy), 0),
            c < C,
        )
    corner = dx_rows + image * (H * W * C) + ((line * W + column) * (2 * C))[:, None] + c[None, :]
    for other in tl.static_range(4):
        good = (p < ALL) & (line * 2 + other // 2 < H) & (column * 2 + other % 2 < W)
        dx = tl.where(win == other, dy, 0.0).to(dx_rows.dtype.element_ty)
        tl.store(corner + (other // 2 * W + other % 2) * C, dx, good[:, None] & (c < C)[None, :])


def _tiles(n: int, windows: int, channels: int, most: int) -> tuple[tuple[int, int], int, int]:
    """The grid, and how large a tile is, of at most so many numbers."""
    lines, columns = (triton.next_power_of_2(count) for count in (windows, channels))
    high = min(most // min(CHANNELS, columns), lines)
    wide = min(most // high, columns)
    return (n * triton.cdiv(windows, high), triton.cdiv(channels, wide)), high, wide


def forward(
    x: Tensor, flat: bool, drops: tuple[Tensor, int, float] | None
) -> tuple[Tensor, Tensor]:
    """x `[n, C, H, W]`, channels last, to y `[n, C, H // 2, W // 2]`, contiguous if `flat`, else
    channels last.

    `drops` are the clients' keys `[m, 1]` int64, the number and the probability of dropout. The
    second result is `wins`, `[n, H // 2, W // 2, C]`.
    """
    n, channels, height, width = x.shape
    size = (n, channels, height // 2, width // 2)
    order = torch.contiguous_format if flat else torch.channels_last
    y = torch.empty(size, dtype=x.dtype, device=x.device, memory_format=order)
    wins = torch.empty(n, *size[2:], channels, dtype=torch.int8, device=x.device)
    grid, high, wide = _tiles(n, size[2] * size[3], channels, 1024)
    keys, draw, p = drops or (wins, 0, 0.0)
    how = (keys, draw * SPREAD, least(p), scaled(p), n // len(keys))
    sizes = (height, width, channels)
    on(_forward, grid)(
        x, y, wins, *how, *sizes, flat, drops is not None, high, wide, num_warps=8, **FUSED
    )
    return y, wins


def backward(dy: Tensor, wins: Tensor, size: torch.Size, p: float, slope: Tensor | None) -> Tensor:
    """The gradient of x, `[n, C, H, W]` = `size`, channels last; dy is channels last or contiguous,
    p that of dropout.

    Its sums over every client's images and pixels are written to `slope` `[m, C]`, if given.
    """
    n, channels, height, width = size
    dx = torch.empty(size, dtype=dy.dtype, device=dy.device, memory_format=torch.channels_last)
    grid, high, wide = _tiles(n, triton.cdiv(height, 2) * triton.cdiv(width, 2), channels, 2048)
    flat = not dy.is_contiguous(memory_format=torch.channels_last)
    biased = slope is not None
    sums = torch.empty(grid[0], channels, dtype=torch.float32, device=dy.device) if biased else dy
    sizes = (height, width, channels)
    on(_backward, grid)(
        dy, wins, dx, sums, scaled(p), *sizes, flat, biased, high, wide, num_warps=4, **FUSED
    )
    if biased:
        torch.sum(sums.view(len(slope), -1, channels), 1, out=slope)
    return dx
