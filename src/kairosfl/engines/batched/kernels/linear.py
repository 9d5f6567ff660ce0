"""Linear layers of stacked clients.

With few samples a client, a linear layer is its weights crossing memory. The backward pass reads them once, for the
gradient of its input and for the step alike, and never writes their gradients.
"""

# mypy: ignore-errors
# ruff: noqa: SIM102

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from kairosfl.engines.batched.kernels.update import stepped

MOST = 64  # samples a client that fit into one tile
LARGE = 1 << 20  # weights of a layer worth a measurement
MEASURED = 8  # clients
Tile = tuple[int, int, int, int]
FORWARD_TILES = ((64, 64, 4, 4), (128, 32, 4, 4))  # inputs, outputs, warps, stages
_forwards: dict[tuple[object, ...], Tile | None] = {}


@triton.jit
def _backward(
    x_rows,
    dy_rows,
    dx_rows,
    w_rows,
    v_rows,
    anchor_rows,
    push_rows,
    reals,
    live,
    partials,
    row,
    slots,
    columns,
    column,
    weight,
    bias,
    R,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    BIAS: tl.constexpr,
    INWARD: tl.constexpr,
    PULL: tl.constexpr,
    PUSH: tl.constexpr,
    MOMENTUM: tl.constexpr,
    DOT: tl.constexpr,
    BR: tl.constexpr,
    BI: tl.constexpr,
    BO: tl.constexpr,
):
    strip = tl.program_id(0)
    client = tl.program_id(1)
    base = client.to(tl.int64) * row
    samples = tl.arange(0, BR)
    inputs = strip * BI + tl.arange(0, BI)
    here = (samples < R)[:, None] & (inputs < IN)[None, :]
    first = client.to(tl.int64) * R
    x = tl.load(x_rows + (first + samples)[:, None] * IN + inputs[None, :], here, 0.0)
    acc = tl.zeros([BR, BI], dtype=tl.float32)
    total = tl.zeros([BO, BI], dtype=tl.float32)
    on = tl.load(live + client) != 0
    lr = tl.load(reals + client)
    momentum = tl.load(reals + slots + client)
    decay = tl.load(reals + 2 * slots + client)
    scale = tl.load(reals + 4 * slots + client)
    pull = tl.load(reals + 5 * slots + client)
    side = 0.0
    if on:
        for begin in range(0, OUT, BO):
            outputs = begin + tl.arange(0, BO)
            there = (samples < R)[:, None] & (outputs < OUT)[None, :]
            dy = tl.load(dy_rows + (first + samples)[:, None] * OUT + outputs[None, :], there, 0.0)
            places = base + weight + outputs[:, None] * IN + inputs[None, :]
            inside = (outputs < OUT)[:, None] & (inputs < IN)[None, :]
            w = tl.load(w_rows + places, inside, 0.0)
            v = tl.load(v_rows + places, inside, 0.0) if MOMENTUM else w
            anchor = tl.load(anchor_rows + places, inside, 0.0) if PULL else w
            push = tl.load(push_rows + places, inside, 0.0) if PUSH else w
            if INWARD:
                acc = tl.dot(dy, w.to(dy.dtype), acc, input_precision=DOT)
            g = tl.dot(tl.trans(dy), x, input_precision=DOT)
            total += g * g
            w, v = stepped(g * scale, w, v, anchor, push, lr, momentum, decay, pull, PULL, PUSH, MOMENTUM)
            tl.store(w_rows + places, w, inside)
            if MOMENTUM:
                tl.store(v_rows + places, v, inside)
            if BIAS:
                if strip == 0:
                    db = tl.sum(dy.to(tl.float32), 0)
                    side += tl.sum(db * db)
                    spots = base + bias + outputs
                    known = outputs < OUT
                    w1 = tl.load(w_rows + spots, known, 0.0)
                    v1 = tl.load(v_rows + spots, known, 0.0) if MOMENTUM else w1
                    anchor1 = tl.load(anchor_rows + spots, known, 0.0) if PULL else w1
                    push1 = tl.load(push_rows + spots, known, 0.0) if PUSH else w1
                    w1, v1 = stepped(
                        db * scale, w1, v1, anchor1, push1, lr, momentum, decay, pull, PULL, PUSH, MOMENTUM
                    )
                    tl.store(w_rows + spots, w1, known)
                    if MOMENTUM:
                        tl.store(v_rows + spots, v1, known)
    tl.store(partials + client * columns + column + strip, tl.sum(total) + side)
    if INWARD:
        tl.store(dx_rows + (first + samples)[:, None] * IN + inputs[None, :], acc.to(dx_rows.dtype.element_ty), here)


@triton.jit
def _forward(
    x_rows,
    y_rows,
    w_rows,
    row,
    weight,
    bias,
    R,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    BIAS: tl.constexpr,
    DOT: tl.constexpr,
    BR: tl.constexpr,
    BI: tl.constexpr,
    BO: tl.constexpr,
):
    outputs = tl.program_id(0) * BO + tl.arange(0, BO)
    client = tl.program_id(1)
    base = client.to(tl.int64) * row
    samples = tl.arange(0, BR)
    first = client.to(tl.int64) * R
    acc = tl.zeros([BR, BO], dtype=tl.float32)
    for begin in range(0, IN, BI):
        inputs = begin + tl.arange(0, BI)
        here = (samples < R)[:, None] & (inputs < IN)[None, :]
        x = tl.load(x_rows + (first + samples)[:, None] * IN + inputs[None, :], here, 0.0)
        inside = (outputs < OUT)[:, None] & (inputs < IN)[None, :]
        w = tl.load(w_rows + base + weight + outputs[:, None] * IN + inputs[None, :], inside, 0.0)
        acc = tl.dot(x, tl.trans(w.to(x.dtype)), acc, input_precision=DOT)
    if BIAS:
        acc += tl.load(w_rows + base + bias + outputs, outputs < OUT, 0.0)[None, :]
    there = (samples < R)[:, None] & (outputs < OUT)[None, :]
    tl.store(y_rows + (first + samples)[:, None] * OUT + outputs[None, :], acc.to(y_rows.dtype.element_ty), there)


def forward(
    x: Tensor, rows: Tensor, weight: int, bias: int | None, outputs: int, dot: str, plain: Callable[[], Tensor]
) -> Tensor:
    """x `[m, r, in]` times the weights that begin at column `weight` of the rows, read as they lie there; by `plain`
    where that was measured to be quicker, or nothing was measured."""
    m, samples, inputs = x.shape
    x = x.contiguous()

    def launch(tile: Tile | None) -> Tensor:
        if tile is None:
            return plain()
        y = x.new_empty(m, samples, outputs)
        deep, wide, warps, stages = tile
        _forward[(triton.cdiv(outputs, wide), m)](
            x,
            y,
            rows,
            rows.stride(0),
            weight,
            bias or 0,
            samples,
            IN=inputs,
            OUT=outputs,
            BIAS=bias is not None,
            DOT=dot,
            BR=max(16, triton.next_power_of_2(samples)),
            BI=deep,
            BO=wide,
            num_warps=warps,
            num_stages=stages,
        )
        return y

    kind = (samples, inputs, outputs, x.dtype, dot)
    worth = m >= MEASURED and samples <= MOST and inputs * outputs >= LARGE
    if worth and kind not in _forwards and not torch.cuda.is_current_stream_capturing():
        times = {tile: _seconds(lambda tile=tile: launch(tile)) for tile in (None, *FORWARD_TILES)}
        _forwards[kind] = min(times, key=times.__getitem__)
    return launch(_forwards.get(kind) if worth else None)


TILES = ((64, 32, 4, 2), (64, 16, 4, 3), (128, 16, 8, 2), (64, 32, 8, 3))  # inputs, outputs, warps, stages
_best: dict[tuple[object, ...], Tile] = {}


def backward(
    x: Tensor,
    dy: Tensor,
    w: Tensor,
    v: Tensor,
    anchor: Tensor | None,
    push: Tensor | None,
    reals: Tensor,
    live: Tensor,
    partials: Tensor,
    column: int,
    weight: int,
    bias: int | None,
    inward: bool,
    momentum: bool,
    dot: str,
    measures: bool,
) -> Tensor | None:
    """The gradient of the input, if `inward`; the weights and the bias have stepped.

    ‖∇L‖² goes to one column of `partials` per strip of inputs, from `column` on.
    """
    m, samples, inputs = x.shape
    x, dy = x.contiguous(), dy.contiguous()  # the last of a sequence's steps, say, lies in strides
    dx = torch.empty_like(x) if inward else None

    def launch(w: Tensor, v: Tensor, live: Tensor, clients: int, tile: Tile) -> None:
        wide, deep, warps, stages = tile
        _backward[(triton.cdiv(inputs, wide), clients)](
            x,
            dy,
            x if dx is None else dx,
            w,
            v,
            w if anchor is None else anchor,
            w if push is None else push,
            reals,
            live,
            partials,
            w.stride(0),
            reals.stride(0),
            partials.stride(0),
            column,
            weight,
            bias or 0,
            samples,
            IN=inputs,
            OUT=dy.shape[2],
            BIAS=bias is not None,
            INWARD=inward,
            PULL=anchor is not None,
            PUSH=push is not None,
            MOMENTUM=momentum,
            DOT=dot,
            BR=max(16, triton.next_power_of_2(samples)),
            BI=wide,
            BO=deep,
            num_warps=warps,
            num_stages=stages,
        )

    kind = (samples, inputs, dy.shape[2], x.dtype, dot)
    large = inputs * dy.shape[2] >= LARGE
    if measures and large and kind not in _best and not torch.cuda.is_current_stream_capturing():
        clients = min(m, 8)
        spare, on = (w[:clients].clone(), v[:clients].clone()), torch.ones_like(live)
        times = {tile: _seconds(lambda tile=tile: launch(*spare, on, clients, tile)) for tile in TILES}
        _best[kind] = min(times, key=times.__getitem__)
    launch(w, v, live, m, _best.get(kind, TILES[0]) if measures else TILES[0])
    return dx


def _seconds(action: Callable[[], None]) -> float:
    times = []
    for _ in range(3):
        began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        began.record()
        action()
        ended.record()
        ended.synchronize()
        times.append(began.elapsed_time(ended))
    return min(times)
