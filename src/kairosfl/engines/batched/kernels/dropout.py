"""Dropout in one pass: the mask is recomputed where it is used, forward and backward, and never
stored.

With the ReLU before it, the output tells the backward pass what both of them kept.
"""

# mypy: ignore-errors

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kairosfl.engines.batched.dropout import SPREAD, least
from kairosfl.engines.batched.kernels.device import FUSED
from kairosfl.engines.batched.kernels.launch import on

BLOCK = 2048


@triton.jit
def _scramble(bits):
    """The 32-bit finaliser of MurmurHash3, as in `_scramble` of batched/dropout.py; any shape of
    uint32.
    """
    bits = (bits ^ (bits >> 16)) * 0x85EBCA6B
    bits = (bits ^ (bits >> 13)) * 0xC2B2AE35
    return bits ^ (bits >> 16)


@triton.jit
def stays(key, draw, place, least):
    """Whether a client keeps its element at `place`, of any shape: hash(place ^ seed) >= least = p
    · 2³².
    """
    seed = _scramble((key ^ (key >> 32) ^ draw).to(tl.uint32))
    return _scramble(place.to(tl.uint32) ^ seed).to(tl.int64) >= least


def scaled(p: float) -> float:
    """The factor of what is kept."""
    return 1 / (1 - p) if p < 1 else 1.0


@triton.jit
def _drop(x_rows, y_rows, keys, draw, count, least, scale, RELU: tl.constexpr, BLOCK: tl.constexpr):
    """y = x · scale, or relu(x) · scale, where it stays, else 0; one program per BLOCK elements of
    a client.

    x_rows, y_rows  [m, count]    float32 or bfloat16, contiguous; `count` elements per client
    keys            [m]           int64; with `draw` they give the seeds, as in `seeded` there
    grid            (blocks, m)
    """
    client = tl.program_id(1).to(tl.int64)
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    x = tl.load(x_rows + client * count + place, inside, 0.0).to(tl.float32)
    kept = stays(tl.load(keys + client), draw, place, least)
    if RELU:
        kept &= ~(x <= 0)  # NaN stays NaN, as in PyTorch
    tl.store(
        y_rows + client * count + place,
        tl.where(kept, x * scale, 0.0).to(y_rows.dtype.element_ty),
        inside,
    )


def drop(x: Tensor, keys: Tensor, draw: int, p: float, relu: bool = False) -> Tensor:
    """Drop elements of x `[m·b, ...]`, or of relu(x), with probability p, by the clients' keys `[m,
    1]` int64.
    """
    x, m = x.contiguous(), len(keys)
    y, count = torch.empty_like(x), x.numel() // m
    on(_drop, (triton.cdiv(count, BLOCK), m))(
        x,
        y,
        keys,
        draw * SPREAD,
        count,
        least(p),
        scaled(p),
        RELU=relu,
        BLOCK=BLOCK,
        num_warps=4,
        **FUSED,
    )
    return y


@triton.jit
def _slope(dy_rows, y_rows, dx_rows, scale, count, BLOCK: tl.constexpr):
    """dx = dy · scale where y is above zero, else 0; one program per BLOCK elements of `count`,
    contiguous.
    """
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    dy = tl.load(dy_rows + place, inside, 0.0).to(tl.float32)
    y = tl.load(y_rows + place, inside, 0.0)
    tl.store(
        dx_rows + place, tl.where(y <= 0, 0.0, dy * scale).to(dx_rows.dtype.element_ty), inside
    )


def slope(dy: Tensor, y: Tensor, p: float) -> Tensor:
    """The gradient of x from that of y, which `drop` returned for relu(x)."""
    dy = dy.contiguous()
    dx = torch.empty_like(dy)
    on(_slope, (triton.cdiv(dy.numel(), BLOCK),))(
        dy, y, dx, scaled(p), dy.numel(), BLOCK=BLOCK, num_warps=4, **FUSED
    )
    return dx
