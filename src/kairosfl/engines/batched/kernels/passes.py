"""Between vectors, in the model's own order, and rows of `RowLayout`: all tensors of all clients in
one launch.

With a launch or two for every tensor, the host would take longer than the GPU where models are
small.
"""

# mypy: ignore-errors

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kairosfl.engines.batched.kernels.device import FUSED
from kairosfl.engines.batched.rows import ALIGN, Place

BLOCK = 4096
COLUMNS = tl.constexpr(6)  # of the table
ALIGNED = tl.constexpr(ALIGN)


@triton.jit
def _found(table, piece, B: tl.constexpr):
    """Where the numbers of a piece are in a vector and in a row, which of them exist, and which are
    in the tensor or in the gap behind it; `table` as by `pieces`.

    A row has (outputs, pixels, inputs) where a vector has (outputs, inputs, pixels).
    """
    at = table + piece * COLUMNS
    p = tl.load(at + 2) + tl.arange(0, B)
    size, block, pixels = tl.load(at + 3), tl.load(at + 4), tl.load(at + 5)
    inside, spot = p < size, p
    if pixels > 1:
        rest = p % block
        spot = tl.where(inside, p - rest + rest % pixels * (block // pixels) + rest // pixels, p)
    row = tl.multiple_of(tl.load(at + 1), ALIGNED)
    return tl.load(at) + p, row + spot, inside, p < (size + ALIGNED - 1) // ALIGNED * ALIGNED


@triton.jit(do_not_specialize=["m"])
def _fill(vectors, rows, table, m, step, stride, B: tl.constexpr):
    """Each row of `rows` from its vector, with zeros in the gaps between tensors. Grid (pieces ×
    m).

    vectors  [m, d]        stride `step` (0: one for all)
    rows     [m, width]    the same type, stride `stride`
    """
    client = (tl.program_id(0) % m).to(tl.int64)
    here, there, inside, own = _found(table, tl.program_id(0) // m, B)
    tl.store(
        rows + client * stride + there, tl.load(vectors + client * step + here, inside, 0.0), own
    )


@triton.jit(do_not_specialize=["m"])
def _subtract(rows, starts, out, table, m, stride, step, apart, B: tl.constexpr):
    """out = rows − starts, as vectors. Grid (pieces × m).

    rows         [m, width]    stride `stride`
    starts, out  [m, d]        the same type, strides `step` (0: one start for all) and `apart`
    """
    client = (tl.program_id(0) % m).to(tl.int64)
    here, there, inside, _ = _found(table, tl.program_id(0) // m, B)
    end = tl.load(rows + client * stride + there, inside)
    begin = tl.load(starts + client * step + here, inside)
    tl.store(out + client * apart + here, end - begin, inside)


def pieces(places: tuple[Place, ...], device: torch.device) -> Tensor:
    """The tensors in pieces for one program each, `[pieces, COLUMNS]` int32.

    Where its tensor begins in a vector and in a row; where it begins in its tensor; how large the
    tensor is; how many numbers an output has, and how many pixels.
    """
    table, begin = [], 0
    for place in places:
        block, pixels = (
            (place.size // place.shape[0], place.shape[1] * place.shape[2])
            if place.swapped
            else (1, 1)
        )
        for first in range(0, place.size, BLOCK):
            table.append((begin, place.offset, first, place.size, block, pixels))
        begin += place.size
    return torch.tensor(table, dtype=torch.int32).to(device)


def fill(vectors: Tensor, rows: Tensor, table: Tensor) -> None:
    """Write vectors `[m, d]`, or one expanded to them, to rows `[m, width]`."""
    m = len(rows)
    _fill[(len(table) * m,)](
        vectors, rows, table, m, vectors.stride(0), rows.stride(0), B=BLOCK, num_warps=8, **FUSED
    )


def subtract(rows: Tensor, starts: Tensor, out: Tensor, table: Tensor) -> None:
    """Write rows `[m, width]` minus `starts`, `[m, d]` or one expanded to them, to vectors `[m,
    d]`.
    """
    m, strides = len(rows), (rows.stride(0), starts.stride(0), out.stride(0))
    _subtract[(len(table) * m,)](
        rows, starts, out, table, m, *strides, B=BLOCK, num_warps=8, **FUSED
    )
