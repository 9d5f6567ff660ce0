"""GroupNorm of stacked clients in channels-last order, with the ReLU that follows it.

Every sample is one program: its mean and variance, then the clients' own scale and shift. The backward pass works the
normalised values out again instead of storing them.
"""

# mypy: ignore-errors

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 4096  # numbers that a program holds at once


@triton.jit
def _spread(values, G: tl.constexpr, CG: tl.constexpr):
    """Mean over each group's channels, for every channel."""
    grouped = tl.sum(tl.reshape(values, [G, CG]), 1) / CG
    return tl.reshape(tl.broadcast_to(grouped[:, None], [G, CG]), [G * CG])


@triton.jit
def _forward(
    x_rows,
    y_rows,
    stats,
    w_rows,
    b_rows,
    row,
    each,
    eps,
    HW: tl.constexpr,
    G: tl.constexpr,
    CG: tl.constexpr,
    RELU: tl.constexpr,
    BP: tl.constexpr,
):
    C: tl.constexpr = G * CG
    sample = tl.program_id(0).to(tl.int64)
    client = sample // each
    c = tl.arange(0, C)
    x_rows += sample * (HW * C)
    y_rows += sample * (HW * C)
    total = tl.zeros([C], dtype=tl.float32)
    for begin in range(0, HW, BP):
        p = begin + tl.arange(0, BP)
        x = tl.load(x_rows + p[:, None] * C + c[None, :], (p < HW)[:, None], 0.0).to(tl.float32)
        total += tl.sum(x, 0)
    mean = _spread(total / HW, G, CG)
    total = tl.zeros([C], dtype=tl.float32)
    for begin in range(0, HW, BP):
        p = begin + tl.arange(0, BP)
        x = tl.load(x_rows + p[:, None] * C + c[None, :], (p < HW)[:, None], 0.0).to(tl.float32)
        away = tl.where((p < HW)[:, None], x - mean[None, :], 0.0)
        total += tl.sum(away * away, 0)
    rstd = tl.rsqrt(_spread(total / HW, G, CG) + eps)
    tl.store(stats + sample * (2 * C) + c, mean)
    tl.store(stats + sample * (2 * C) + C + c, rstd)
    scale = tl.load(w_rows + client * row + c) * rstd
    shift = tl.load(b_rows + client * row + c) - mean * scale
    for begin in range(0, HW, BP):
        p = begin + tl.arange(0, BP)
        spots = p[:, None] * C + c[None, :]
        x = tl.load(x_rows + spots, (p < HW)[:, None], 0.0).to(tl.float32)
        y = x * scale[None, :] + shift[None, :]
        if RELU:
            y = tl.maximum(y, 0.0)
        tl.store(y_rows + spots, y.to(y_rows.dtype.element_ty), (p < HW)[:, None])


@triton.jit
def _backward(
    x_rows,
    dy_rows,
    dx_rows,
    stats,
    w_rows,
    b_rows,
    slopes,
    row,
    each,
    HW: tl.constexpr,
    G: tl.constexpr,
    CG: tl.constexpr,
    RELU: tl.constexpr,
    BP: tl.constexpr,
):
    C: tl.constexpr = G * CG
    sample = tl.program_id(0).to(tl.int64)
    client = sample // each
    c = tl.arange(0, C)
    x_rows += sample * (HW * C)
    dy_rows += sample * (HW * C)
    dx_rows += sample * (HW * C)
    mean = tl.load(stats + sample * (2 * C) + c)
    rstd = tl.load(stats + sample * (2 * C) + C + c)
    w = tl.load(w_rows + client * row + c)
    b = tl.load(b_rows + client * row + c)
    dw = tl.zeros([C], dtype=tl.float32)
    db = tl.zeros([C], dtype=tl.float32)
    for begin in range(0, HW, BP):
        p = begin + tl.arange(0, BP)
        spots = p[:, None] * C + c[None, :]
        x = tl.load(x_rows + spots, (p < HW)[:, None], 0.0).to(tl.float32)
        dy = tl.load(dy_rows + spots, (p < HW)[:, None], 0.0).to(tl.float32)
        normal = (x - mean[None, :]) * rstd[None, :]
        if RELU:
            dy = tl.where(normal * w[None, :] + b[None, :] > 0, dy, 0.0)
        dw += tl.sum(dy * normal, 0)
        db += tl.sum(dy, 0)
    tl.store(slopes + sample * (2 * C) + c, dw)
    tl.store(slopes + sample * (2 * C) + C + c, db)
    along = _spread(dw * w / HW, G, CG)
    level = _spread(db * w / HW, G, CG)
    for begin in range(0, HW, BP):
        p = begin + tl.arange(0, BP)
        spots = p[:, None] * C + c[None, :]
        x = tl.load(x_rows + spots, (p < HW)[:, None], 0.0).to(tl.float32)
        dy = tl.load(dy_rows + spots, (p < HW)[:, None], 0.0).to(tl.float32)
        normal = (x - mean[None, :]) * rstd[None, :]
        if RELU:
            dy = tl.where(normal * w[None, :] + b[None, :] > 0, dy, 0.0)
        dx = (dy * w[None, :] - level[None, :] - normal * along[None, :]) * rstd[None, :]
        tl.store(dx_rows + spots, dx.to(dx_rows.dtype.element_ty), (p < HW)[:, None])


def fits(channels: int, groups: int) -> bool:
    """Whether the kernels take it: powers of two, a row of channels in a tile."""
    return channels & (channels - 1) == 0 and groups & (groups - 1) == 0 and 16 <= channels <= TILE // 4


def _options(x: Tensor, groups: int, relu: bool) -> dict[str, int | bool]:
    channels, pixels = x.shape[1], x.shape[2] * x.shape[3]
    rows = min(triton.next_power_of_2(pixels), TILE // channels)
    return {"HW": pixels, "G": groups, "CG": channels // groups, "RELU": relu, "BP": rows, "num_warps": 4}


def forward(x: Tensor, w: Tensor, b: Tensor, groups: int, eps: float, relu: bool) -> tuple[Tensor, Tensor]:
    """x `[m·b, C, H, W]` channels last; the result and the means and deviations for the backward pass."""
    n, channels = x.shape[:2]
    y = torch.empty_like(x)
    stats = torch.empty(n, 2, channels, dtype=torch.float32, device=x.device)
    _forward[(n,)](x, y, stats, w, b, w.stride(0), n // len(w), eps, **_options(x, groups, relu))
    return y, stats


def backward(
    x: Tensor, dy: Tensor, stats: Tensor, w: Tensor, b: Tensor, groups: int, relu: bool
) -> tuple[Tensor, Tensor]:
    """The gradient of x, and those of scale and shift, `[m, 2, C]`."""
    n, channels = x.shape[:2]
    dx = torch.empty_like(x)
    slopes = torch.empty(n, 2, channels, dtype=torch.float32, device=x.device)
    _backward[(n,)](x, dy, dx, stats, w, b, slopes, w.stride(0), n // len(w), **_options(x, groups, relu))
    return dx, slopes.view(len(w), -1, 2, channels).sum(1)
