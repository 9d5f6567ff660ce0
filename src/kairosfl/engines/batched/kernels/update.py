"""The optimiser in one pass over the rows: every weight, momentum and gradient is read from memory
once.
"""

# mypy: ignore-errors

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kairosfl.engines.batched.kernels.device import FUSED
from kairosfl.engines.batched.kernels.launch import on
from kairosfl.engines.batched.state import Real

BLOCK = 4096

# Rows of `reals`, from the list of the brief's fields.
LR, MOMENTUM_ROW, DECAY = (
    tl.constexpr(Real.lr),
    tl.constexpr(Real.momentum),
    tl.constexpr(Real.weight_decay),
)
PULL_ROW = tl.constexpr(Real.pull)


@triton.jit
def stepped(
    g,
    w,
    v,
    anchor,
    push,
    lr,
    momentum,
    decay,
    pull,
    PULL: tl.constexpr,
    PUSH: tl.constexpr,
    MOMENTUM: tl.constexpr,
):
    """New weights and momenta from the gradient, which is already clipped and scaled.

    g, w, v, anchor and push are tiles of one shape, float32; lr, momentum, decay and pull are
    scalars of the client.
    """
    g += decay * w
    if PULL:
        g += pull * (w - anchor)
    if PUSH:
        g += push
    if MOMENTUM:
        g += momentum * v
    return w - lr * g, g


@triton.jit
def _update(
    w_rows,
    v_rows,
    g_rows,
    anchor_rows,
    push_rows,
    reals,
    factors,
    live,
    blocks,
    partials,
    row,
    slots,
    columns,
    PULL: tl.constexpr,
    PUSH: tl.constexpr,
    MOMENTUM: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One optimiser step; one program per piece of columns of a client, grid (pieces, m).

    w_rows, v_rows            [m, width]         weights and momenta, float32, stride `row`; updated in place
    g_rows                    [m, width]         gradients, float32, stride `row`
    anchor_rows, push_rows    [m, width]         float32, stride `row`; read only if PULL, PUSH
    reals                     [fields, slots]    float32: one line per hyper-parameter, one column per slot
    factors                   [m]                float32: scale, times the clipping factor
    live                      [m]                int8: a client with 0 keeps what it has
    blocks                    [pieces, 2]        int32: first column and length of each piece, multiples of 32
    partials                  [m, ≥ pieces]      float32 output, stride `columns`: ‖g‖² of each piece, before scaling
    """
    number = tl.program_id(0)
    client = tl.program_id(1)
    total = 0.0
    if tl.load(live + client) != 0:
        begin = tl.multiple_of(tl.load(blocks + 2 * number), 32)
        size = tl.multiple_of(tl.load(blocks + 2 * number + 1), 32)
        lanes = tl.arange(0, BLOCK)
        inside = lanes < size
        places = client.to(tl.int64) * row + begin + lanes
        g = tl.load(g_rows + places, inside, 0.0)
        w = tl.load(w_rows + places, inside, 0.0)
        v = tl.load(v_rows + places, inside, 0.0) if MOMENTUM else g
        anchor = tl.load(anchor_rows + places, inside, 0.0) if PULL else g
        push = tl.load(push_rows + places, inside, 0.0) if PUSH else g
        total = tl.sum(g * g)
        lr = tl.load(reals + LR * slots + client)
        momentum = tl.load(reals + MOMENTUM_ROW * slots + client)
        decay = tl.load(reals + DECAY * slots + client)
        pull = tl.load(reals + PULL_ROW * slots + client)
        g *= tl.load(factors + client)
        w, v = stepped(g, w, v, anchor, push, lr, momentum, decay, pull, PULL, PUSH, MOMENTUM)
        tl.store(w_rows + places, w, inside)
        if MOMENTUM:
            tl.store(v_rows + places, v, inside)
    tl.store(partials + client * columns + number, total)


@triton.jit
def _squares(g_rows, live, blocks, partials, row, columns, BLOCK: tl.constexpr):
    """‖g‖² of a piece of columns of a client, as `_update` has it; grid (pieces, m)."""
    number = tl.program_id(0)
    client = tl.program_id(1)
    total = 0.0
    if tl.load(live + client) != 0:
        begin = tl.multiple_of(tl.load(blocks + 2 * number), 32)
        lanes = tl.arange(0, BLOCK)
        inside = lanes < tl.load(blocks + 2 * number + 1)
        g = tl.load(g_rows + client.to(tl.int64) * row + begin + lanes, inside, 0.0)
        total = tl.sum(g * g)
    tl.store(partials + client * columns + number, total)


def squares(g: Tensor, live: Tensor, pieces: Tensor, partials: Tensor) -> None:
    """Write ‖g‖² of every piece of the live rows `[m, width]` to `partials[:, : len(pieces)]`."""
    strides = (g.stride(0), partials.stride(0))
    on(_squares, (len(pieces), len(g)))(
        g, live, pieces, partials, *strides, BLOCK=BLOCK, num_warps=8, **FUSED
    )


def blocks(ranges: list[tuple[int, int]], device: torch.device) -> Tensor:
    """Ranges (begin, end) of columns split into pieces for one program each: `[pieces, 2]` int32
    (begin, length).
    """
    pieces = [
        (begin, min(BLOCK, end - begin))
        for first, end in ranges
        for begin in range(first, end, BLOCK)
    ]
    return torch.tensor(pieces, dtype=torch.int32).to(device)


def update(
    w: Tensor,
    v: Tensor,
    g: Tensor,
    anchor: Tensor | None,
    push: Tensor | None,
    reals: Tensor,
    factors: Tensor,
    live: Tensor,
    pieces: Tensor,
    partials: Tensor,
    momentum: bool,
) -> None:
    """One step of the rows `[m, width]` in these pieces; ‖g‖² of every piece goes to `partials[:, :
    len(pieces)]`.

    w, v, g, anchor and push are float32 with one stride between rows; `reals` is `[fields, slots]`,
    `factors` `[m]`, `live` `[m]` int8, and `pieces` comes from `blocks`.
    """
    on(_update, (len(pieces), len(w)))(
        w,
        v,
        g,
        w if anchor is None else anchor,
        w if push is None else push,
        reals,
        factors,
        live,
        pieces,
        partials,
        w.stride(0),
        reals.stride(0),
        partials.stride(0),
        PULL=anchor is not None,
        PUSH=push is not None,
        MOMENTUM=momentum,
        BLOCK=BLOCK,
        num_warps=8,
        **FUSED,
    )
