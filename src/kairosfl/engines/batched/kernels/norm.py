"""GroupNorm of stacked clients in channels-last order, with the activation that follows it.

Every sample is one program: mean and variance, then its client's own scale and shift. The backward
pass recomputes the normalised values instead of storing them, and sums up the gradient of x, which
is that of a bias added just before.
"""

# mypy: ignore-errors

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kairosfl.engines.batched.kernels.device import FUSED
from kairosfl.engines.batched.kernels.launch import on

TILE = 4096  # elements that a program holds at once


@triton.jit
def _spread(values, G: tl.constexpr, CG: tl.constexpr):
    """values [G·CG] to [G·CG]: each channel gets the mean over the CG channels of its group."""
    grouped = tl.sum(tl.reshape(values, [G, CG]), 1) / CG
    return tl.reshape(tl.broadcast_to(grouped[:, None], [G, CG]), [G * CG])


@triton.jit
def _active(y, ACT: tl.constexpr):
    """The activation of y; an empty name is none."""
    if ACT == "relu":
        y = tl.maximum(y, 0.0)
    if ACT == "silu":
        y = y * tl.sigmoid(y)
    if ACT == "gelu":
        y = y * _normal_below(y)
    return y


@triton.jit
def _inside(y, dy, ACT: tl.constexpr):
    """The gradient of y from that of its activation."""
    if ACT == "relu":
        dy = tl.where(y > 0, dy, 0.0)
    if ACT == "silu":
        gate = tl.sigmoid(y)
        dy = dy * gate * (1 + y * (1 - gate))
    if ACT == "gelu":
        dy = dy * (_normal_below(y) + y * tl.exp(-0.5 * y * y) * 0.3989422804014327)  # 1 / sqrt(2π)
    return dy


@triton.jit
def _normal_below(y):
    """The probability that a standard normal number is below y."""
    return 0.5 + 0.5 * tl.erf(y * 0.7071067811865476)


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
    ACT: tl.constexpr,
    BP: tl.constexpr,
):
    """y = activation(group_norm(x)); one program per sample, BP pixels × all C = G·CG channels at a
    time.

    x_rows, y_rows  [m·each, HW, C]    float32 or bfloat16; y has the dtype of x
    stats           [m·each, 3, C]     float32 output: every channel's mean, and mean and 1/deviation of its group
    w_rows, b_rows  [m, C]             float32 scale and shift, stride `row` between clients
    each            samples per client; grid: (m·each,)
    """
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
    own = total / HW
    mean = _spread(own, G, CG)
    total = tl.zeros([C], dtype=tl.float32)
    for begin in range(0, HW, BP):
        p = begin + tl.arange(0, BP)
        x = tl.load(x_rows + p[:, None] * C + c[None, :], (p < HW)[:, None], 0.0).to(tl.float32)
        away = tl.where((p < HW)[:, None], x - mean[None, :], 0.0)
        total += tl.sum(away * away, 0)
    rstd = tl.rsqrt(_spread(total / HW, G, CG) + eps)
    stats += sample * (3 * C)
    tl.store(stats + c, own)
    tl.store(stats + C + c, mean)
    tl.store(stats + 2 * C + c, rstd)
    scale = tl.load(w_rows + client * row + c) * rstd
    shift = tl.load(b_rows + client * row + c) - mean * scale
    for begin in range(0, HW, BP):
        p = begin + tl.arange(0, BP)
        spots = p[:, None] * C + c[None, :]
        x = tl.load(x_rows + spots, (p < HW)[:, None], 0.0).to(tl.float32)
        y = _active(x * scale[None, :] + shift[None, :], ACT)
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
    ACT: tl.constexpr,
    BP: tl.constexpr,
):
    """dx, and each sample's part of the gradients of scale, shift and a bias in x; one program per
    sample.

    x_rows, dy_rows, dx_rows  [m·each, HW, C]    float32 or bfloat16
    stats                     [m·each, 3, C]     as written by `_forward`
    w_rows, b_rows            [m, C]             float32, stride `row` between clients; b only for the activation
    slopes                    [m·each, 3, C]     float32 output: gradients of scale, shift and bias, to be summed
    """
    C: tl.constexpr = G * CG
    sample = tl.program_id(0).to(tl.int64)
    client = sample // each
    c = tl.arange(0, C)
    x_rows += sample * (HW * C)
    dy_rows += sample * (HW * C)
    dx_rows += sample * (HW * C)
    stats += sample * (3 * C)
    slopes += sample * (3 * C)
    mean = tl.load(stats + C + c)
    rstd = tl.load(stats + 2 * C + c)
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
        dy = _inside(normal * w[None, :] + b[None, :], dy, ACT)
        dw += tl.sum(dy * normal, 0)
        db += tl.sum(dy, 0)
    tl.store(slopes + c, dw)
    tl.store(slopes + C + c, db)
    along = _spread(dw * w / HW, G, CG)
    level = _spread(db * w / HW, G, CG)
    normal_mean = (tl.load(stats + c) - mean) * rstd
    tl.store(
        slopes + 2 * C + c, (db * w - HW * (level + normal_mean * along)) * rstd
    )  # the sum of dx below
    for begin in range(0, HW, BP):
        p = begin + tl.arange(0, BP)
        spots = p[:, None] * C + c[None, :]
        x = tl.load(x_rows + spots, (p < HW)[:, None], 0.0).to(tl.float32)
        dy = tl.load(dy_rows + spots, (p < HW)[:, None], 0.0).to(tl.float32)
        normal = (x - mean[None, :]) * rstd[None, :]
        dy = _inside(normal * w[None, :] + b[None, :], dy, ACT)
        dx = (dy * w[None, :] - level[None, :] - normal * along[None, :]) * rstd[None, :]
        tl.store(dx_rows + spots, dx.to(dx_rows.dtype.element_ty), (p < HW)[:, None])


def fits(channels: int, groups: int) -> bool:
    """Whether the kernels support it: powers of two, and all channels of a few pixels fit into a
    tile.
    """
    return (
        channels & (channels - 1) == 0
        and groups & (groups - 1) == 0
        and 16 <= channels <= TILE // 4
    )


def _options(x: Tensor, groups: int, activation: str) -> dict[str, int | str]:
    channels, pixels = x.shape[1], x.shape[2] * x.shape[3]
    rows = min(triton.next_power_of_2(pixels), TILE // channels)
    sizes = {"HW": pixels, "G": groups, "CG": channels // groups, "ACT": activation, "BP": rows}
    return sizes | {"num_warps": 4, **FUSED}


def forward(
    x: Tensor, w: Tensor, b: Tensor, groups: int, eps: float, activation: str
) -> tuple[Tensor, Tensor]:
    """y like x `[m·b, C, H, W]`, channels last, and `stats` `[m·b, 3, C]` for the backward pass.

    w and b are `[m, C]`, float32, with the same stride between clients; `activation` is "", "relu",
    "silu" or "gelu".
    """
    n, channels = x.shape[:2]
    y = torch.empty_like(x)
    stats = torch.empty(n, 3, channels, dtype=torch.float32, device=x.device)
    on(_forward, (n,))(
        x, y, stats, w, b, w.stride(0), n // len(w), eps, **_options(x, groups, activation)
    )
    return y, stats


def backward(
    x: Tensor, dy: Tensor, stats: Tensor, w: Tensor, b: Tensor, groups: int, activation: str
) -> tuple[Tensor, Tensor]:
    """The gradient of x `[m·b, C, H, W]`, channels last like dy, and those of scale, shift and a
    bias added to x.

    The latter three are `[m, 3, C]`, float32.
    """
    n, channels = x.shape[:2]
    dx = torch.empty_like(x)
    slopes = torch.empty(n, 3, channels, dtype=torch.float32, device=x.device)
    on(_backward, (n,))(
        x, dy, dx, stats, w, b, slopes, w.stride(0), n // len(w), **_options(x, groups, activation)
    )
    return dx, slopes.view(len(w), -1, 3, channels).sum(1)
