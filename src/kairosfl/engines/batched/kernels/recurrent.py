"""LSTMs of stacked clients: a time step is one launch, forward and backward.

With few samples per client, the cost of a step is reading the recurrent weights. The gates are
computed where the product is, so that no step writes it; cells stay in float32.
"""

# mypy: ignore-errors

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kairosfl.engines.batched.kernels.device import FUSED, stages
from kairosfl.engines.batched.kernels.launch import on

MOST = 64  # samples of a tile


@triton.jit
def _tanh(x):
    return 2 * tl.sigmoid(2 * x) - 1


@triton.jit(do_not_specialize=["step"])
def _forward(
    into,
    weights,
    begin,
    y,
    cells,
    gates,
    step,
    B,
    T,
    H: tl.constexpr,
    DOT: tl.constexpr,
    BR: tl.constexpr,
    BU: tl.constexpr,
    BK: tl.constexpr,
):
    """The state after a step from that before it. Grid (tiles of BU units, tiles of BR samples, m).

    into     [m, B, T, 4H]      what the input and the biases add to the gates (enter, forget, candidate, leave)
    weights  [m, 4H, H]         recurrent, dtype of `into`
    begin    [m, B, H]          the hidden state before the first step, dtype of `into`
    y        [m, B, T, H]       the hidden state after each step, dtype of `into`: read at step - 1, written at `step`
    cells    [m, B, T + 1, H]   float32: read at `step`, written at step + 1
    gates    [m, B, T, 4H]      output: the activated gates, dtype of `into`
    """
    units = tl.program_id(0) * BU + tl.arange(0, BU)
    samples = tl.program_id(1) * BR + tl.arange(0, BR)
    client = tl.program_id(2).to(tl.int64)
    row = client * B + samples
    before = begin + row * H
    if step > 0:
        before = y + (row * T + step - 1) * H
    own = weights + client * 4 * H * H
    a = tl.zeros([BR, BU], dtype=tl.float32)
    b = tl.zeros([BR, BU], dtype=tl.float32)
    c = tl.zeros([BR, BU], dtype=tl.float32)
    d = tl.zeros([BR, BU], dtype=tl.float32)
    for k in range(0, H, BK):
        inner = k + tl.arange(0, BK)
        h = tl.load(
            before[:, None] + inner[None, :], (samples < B)[:, None] & (inner < H)[None, :], 0.0
        )
        spots = own + units[:, None] * H + inner[None, :]
        there = (units < H)[:, None] & (inner < H)[None, :]
        a = tl.dot(h, tl.trans(tl.load(spots, there, 0.0)), a, input_precision=DOT)
        b = tl.dot(h, tl.trans(tl.load(spots + H * H, there, 0.0)), b, input_precision=DOT)
        c = tl.dot(h, tl.trans(tl.load(spots + 2 * H * H, there, 0.0)), c, input_precision=DOT)
        d = tl.dot(h, tl.trans(tl.load(spots + 3 * H * H, there, 0.0)), d, input_precision=DOT)
    here = (samples < B)[:, None] & (units < H)[None, :]
    at = (row * T + step)[:, None] * (4 * H) + units[None, :]
    enter = tl.sigmoid(a + tl.load(into + at, here, 0.0))
    forget = tl.sigmoid(b + tl.load(into + at + H, here, 0.0))
    candidate = _tanh(c + tl.load(into + at + 2 * H, here, 0.0))
    leave = tl.sigmoid(d + tl.load(into + at + 3 * H, here, 0.0))
    cell = (row * (T + 1) + step)[:, None] * H + units[None, :]
    new = forget * tl.load(cells + cell, here, 0.0) + enter * candidate
    tl.store(cells + cell + H, new, here)
    kind = y.dtype.element_ty
    tl.store(
        y + (row * T + step)[:, None] * H + units[None, :], (leave * _tanh(new)).to(kind), here
    )
    tl.store(gates + at, enter.to(kind), here)
    tl.store(gates + at + H, forget.to(kind), here)
    tl.store(gates + at + 2 * H, candidate.to(kind), here)
    tl.store(gates + at + 3 * H, leave.to(kind), here)


@triton.jit(do_not_specialize=["step"])
def _backward(
    dy,
    weights,
    cells,
    gates,
    slopes,
    dc,
    step,
    B,
    T,
    H: tl.constexpr,
    DOT: tl.constexpr,
    BR: tl.constexpr,
    BU: tl.constexpr,
    BK: tl.constexpr,
):
    """The gradient of a step's gates from that of the step after it. Grid as for `_forward`.

    dy       [m, B, T, H]     gradient of the outputs, dtype of the gates
    weights, cells, gates     as `_forward` has them
    slopes   [m, B, T, 4H]    gradient of what enters the gates, their dtype: read at step + 1, written at `step`
    dc       [m, B, H]        float32: the gradient of the cells after this step, replaced by that before it
    """
    units = tl.program_id(0) * BU + tl.arange(0, BU)
    samples = tl.program_id(1) * BR + tl.arange(0, BR)
    client = tl.program_id(2).to(tl.int64)
    row = client * B + samples
    first = row * T + step
    own = weights + client * 4 * H * H
    dh = tl.zeros([BR, BU], dtype=tl.float32)
    wide = 4 * H
    if step == T - 1:
        wide = 0
    for k in range(0, wide, BK):
        outer = k + tl.arange(0, BK)
        after = slopes + (first + 1)[:, None] * (4 * H) + outer[None, :]
        s = tl.load(after, (samples < B)[:, None] & (outer < 4 * H)[None, :], 0.0)
        there = (outer < 4 * H)[:, None] & (units < H)[None, :]
        w = tl.load(own + outer[:, None] * H + units[None, :], there, 0.0)
        dh = tl.dot(s, w, dh, input_precision=DOT)
    here = (samples < B)[:, None] & (units < H)[None, :]
    dh += tl.load(dy + first[:, None] * H + units[None, :], here, 0.0)
    at = first[:, None] * (4 * H) + units[None, :]
    enter = tl.load(gates + at, here, 0.0).to(tl.float32)
    forget = tl.load(gates + at + H, here, 0.0).to(tl.float32)
    candidate = tl.load(gates + at + 2 * H, here, 0.0).to(tl.float32)
    leave = tl.load(gates + at + 3 * H, here, 0.0).to(tl.float32)
    cell = (row * (T + 1) + step)[:, None] * H + units[None, :]
    top = _tanh(tl.load(cells + cell + H, here, 0.0))
    slot = row[:, None] * H + units[None, :]
    slope = tl.load(dc + slot, here, 0.0) + dh * leave * (1 - top * top)
    tl.store(dc + slot, slope * forget, here)
    kind = slopes.dtype.element_ty
    tl.store(slopes + at, (slope * candidate * enter * (1 - enter)).to(kind), here)
    inward = slope * tl.load(cells + cell, here, 0.0) * forget * (1 - forget)
    tl.store(slopes + at + H, inward.to(kind), here)
    tl.store(slopes + at + 2 * H, (slope * enter * (1 - candidate * candidate)).to(kind), here)
    tl.store(slopes + at + 3 * H, (dh * top * leave * (1 - leave)).to(kind), here)


def _tiles(gates: Tensor, dot: str, products: int) -> tuple[tuple[int, int, int], dict]:
    """The grid of a kernel that loads tiles for so many products at once, and the sizes of its
    tiles.
    """
    m, samples, _, wide = gates.shape
    half = gates.dtype == torch.bfloat16
    rounded, units = min(MOST, max(16, triton.next_power_of_2(samples))), 64 if half else 32
    deep = 64 if half or products == 1 else 32  # more would not fit into shared memory
    grid = triton.cdiv(wide // 4, units), triton.cdiv(samples, rounded), m
    sizes = {"H": wide // 4, "DOT": dot, "BR": rounded, "BU": units, "BK": deep}
    return grid, {**sizes, "num_warps": 4, "num_stages": stages(gates.device), **FUSED}


def forward(
    into: Tensor, recurrent: Tensor, hidden: Tensor, cell: Tensor, dot: str, *, keeps: bool = True
) -> tuple[Tensor, Tensor, Tensor]:
    """Outputs `[m, b, time, h]`, cells `[m, b, time + 1, h]` in float32 and activated gates `[m, b,
    time, 4h]`.

    `into` `[m, b, time, 4h]` is what the input and both biases add to the gates, `recurrent` `[m,
    4h, h]`. Unless `keeps`, the gates replace it.
    """
    m, samples, time, wide = into.shape
    into, recurrent, hidden = into.contiguous(), recurrent.contiguous(), hidden.contiguous()
    y, gates = (
        into.new_empty(m, samples, time, wide // 4),
        torch.empty_like(into) if keeps else into,
    )
    cells = torch.empty(m, samples, time + 1, wide // 4, device=into.device)
    cells[:, :, 0] = cell
    grid, sizes = _tiles(into, dot, products=4)
    for step in range(time):
        on(_forward, grid)(into, recurrent, hidden, y, cells, gates, step, samples, time, **sizes)
    return y, cells, gates


def backward(
    dy: Tensor, dc: Tensor, recurrent: Tensor, cells: Tensor, gates: Tensor, dot: str
) -> tuple[Tensor, Tensor]:
    """The gradients of `into` `[m, b, time, 4h]` and of the first cells `[m, b, h]`, in float32.

    dy is that of the outputs, dc that of the last cells.
    """
    samples, time = gates.shape[1:3]
    dy, recurrent, slopes = dy.contiguous(), recurrent.contiguous(), torch.empty_like(gates)
    dc = dc.to(torch.float32, memory_format=torch.contiguous_format, copy=True)
    grid, sizes = _tiles(gates, dot, products=1)
    for step in reversed(range(time)):
        on(_backward, grid)(dy, recurrent, cells, gates, slopes, dc, step, samples, time, **sizes)
    return slopes, dc
