"""Passes over all rows: PyTorch's own take up to twice as long where a row is repeated or rows are not aligned."""

# mypy: ignore-errors

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from kairosfl.engines.batched.kernels.device import FUSED

BLOCK = 4096
LARGE = 1 << 16  # columns for which a launch is worth its time


@triton.jit
def _spread(row_at, rows, stride, columns, B: tl.constexpr):
    """rows[i] = row for every i; grid (pieces, m).

    row_at  [columns]       float32 or bfloat16, contiguous
    rows    [m, columns]    the same type, stride `stride`
    """
    place = tl.program_id(0) * B + tl.arange(0, B)
    inside = place < columns
    tl.store(rows + tl.program_id(1).to(tl.int64) * stride + place, tl.load(row_at + place, inside), inside)


@triton.jit
def _subtract(rows, starts, out, stride, step, apart, columns, B: tl.constexpr):
    """out = rows − starts; grid (pieces, m).

    rows, starts, out    [m, columns]    one type, strides `stride`, `step` (0: one start for all) and `apart`
    """
    client = tl.program_id(1).to(tl.int64)
    place = tl.program_id(0) * B + tl.arange(0, B)
    inside = place < columns
    end = tl.load(rows + client * stride + place, inside)
    begin = tl.load(starts + client * step + place, inside)
    tl.store(out + client * apart + place, end - begin, inside)


def spread(row: Tensor, rows: Tensor) -> None:
    """Write one row `[columns]` to all of `rows` `[m, columns]`."""
    m, columns = rows.shape
    _spread[(triton.cdiv(columns, BLOCK), m)](row, rows, rows.stride(0), columns, B=BLOCK, num_warps=8, **FUSED)


def subtract(rows: Tensor, starts: Tensor, out: Tensor) -> None:
    """Write rows − starts to `out`, all `[m, columns]` with neighbouring columns; `starts` may be one row, expanded."""
    m, columns = rows.shape
    strides = (rows.stride(0), starts.stride(0), out.stride(0))
    _subtract[(triton.cdiv(columns, BLOCK), m)](rows, starts, out, *strides, columns, B=BLOCK, num_warps=8, **FUSED)
