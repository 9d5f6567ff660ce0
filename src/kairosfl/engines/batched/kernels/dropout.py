"""Dropout in one pass: the mask is recomputed where it is used, forward and backward, and never stored."""

# mypy: ignore-errors

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kairosfl.engines.batched.kernels.device import FUSED
from kairosfl.engines.batched.kernels.launch import on
from kairosfl.engines.batched.layers import SPREAD

BLOCK = 2048


@triton.jit
def _scramble(bits):
    """The 32-bit finaliser of MurmurHash3, as in `layers._scramble`; any shape of uint32."""
    bits = (bits ^ (bits >> 16)) * 0x85EBCA6B
    bits = (bits ^ (bits >> 13)) * 0xC2B2AE35
    return bits ^ (bits >> 16)


@triton.jit
def _drop(x_rows, y_rows, keys, draw, count, least, scale, BLOCK: tl.constexpr):
    """y = x · scale where hash(place ^ seed) >= least, else 0; one program per BLOCK elements of a client.

    x_rows, y_rows  [m, count]    float32 or bfloat16, contiguous; `count` elements per client
    keys            [m]           int64; with `draw` they give the seeds, as in `layers.seeded`
    least           p · 2³², so that an element is dropped with probability p
    grid            (blocks, m)
    """
    client = tl.program_id(1).to(tl.int64)
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = place < count
    key = tl.load(keys + client)
    seed = _scramble((key ^ (key >> 32) ^ draw).to(tl.uint32))
    stays = _scramble(place.to(tl.uint32) ^ seed).to(tl.int64) >= least
    x = tl.load(x_rows + client * count + place, inside, 0.0).to(tl.float32)
    tl.store(y_rows + client * count + place, tl.where(stays, x * scale, 0.0).to(y_rows.dtype.element_ty), inside)


def drop(x: Tensor, keys: Tensor, draw: int, p: float) -> Tensor:
    """Drop elements of x `[m·b, ...]` with probability p, by the clients' keys `[m, 1]` int64 in this draw."""
    x, m = x.contiguous(), len(keys)
    y, count = torch.empty_like(x), x.numel() // m
    scale = 1 / (1 - p) if p < 1 else 1.0
    on(_drop, (triton.cdiv(count, BLOCK), m))(
        x, y, keys, draw * SPREAD, count, int(p * 2**32), scale, BLOCK=BLOCK, num_warps=4, **FUSED
    )
    return y
