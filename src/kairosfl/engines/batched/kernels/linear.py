"""Linear layers of stacked clients.

With few samples per client, the cost of a linear layer is reading its weights. The backward pass
reads them once, for both the gradient of the input and the optimiser step, and never writes their
gradients. Nor does it where gradients are clipped: the length of a layer's gradient follows from
its inputs and outputs, and it steps when that of all is known.
"""

# mypy: ignore-errors

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from kairosfl.engines.batched.fast import timed
from kairosfl.engines.batched.kernels.device import FUSED, stages
from kairosfl.engines.batched.kernels.launch import on
from kairosfl.engines.batched.kernels.update import DECAY, LR, MOMENTUM_ROW, PULL_ROW, stepped
from kairosfl.engines.batched.rows import STRIP
from kairosfl.engines.choices import Choices

MOST = 64  # samples a client that fit into one tile
LARGE = 1 << 20  # weights of a layer worth a measurement
MEASURED = 8  # clients
WIDE, DEEP = (
    64,
    128,
)  # outputs and inputs of a tile in the forward pass, the second if there are few samples


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
    factors,
    live,
    partials,
    row,
    slots,
    columns,
    column,
    weight,
    R,
    IN: tl.constexpr,
    OUT: tl.constexpr,
    INWARD: tl.constexpr,
    PULL: tl.constexpr,
    PUSH: tl.constexpr,
    MOMENTUM: tl.constexpr,
    DOT: tl.constexpr,
    BR: tl.constexpr,
    BI: tl.constexpr,
    BO: tl.constexpr,
    STAGES: tl.constexpr,
):
    """dx and the optimiser step of the weights; one program per strip of BI inputs of a client,
    grid (strips, m).

    x_rows                    [m, R, IN]         inputs, float32 or bfloat16, contiguous; R <= BR samples per client
    dy_rows                   [m, R, OUT]        gradient of the output, dtype of x, contiguous
    dx_rows                   [m, R, IN]         output, dtype of x; written only if INWARD
    w_rows, v_rows            [m, width]         weights and momenta, float32, stride `row`; the layer's matrix
                                                 [OUT, IN] starts at column `weight` and is updated in place
    anchor_rows, push_rows    [m, width]         float32, stride `row`; read only if PULL, PUSH
    reals                     [fields, slots]    float32: one line per hyper-parameter, one column per slot
    factors                   [m]                float32: scale, times the clipping factor
    live                      [m]                int8: a client with 0 keeps its weights
    partials                  [m, ...]           float32 output, stride `columns`: ‖∇L‖² of each strip, from `column` on

    The loop runs over the OUT rows of the matrix, BO at a time: each tile [BO, BI] of weights is
    read once, used for dx += dy · w, stepped by g = dyᵀ · x, and written back.
    """
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
    lr = tl.load(reals + LR * slots + client)
    momentum = tl.load(reals + MOMENTUM_ROW * slots + client)
    decay = tl.load(reals + DECAY * slots + client)
    scale = tl.load(factors + client)
    pull = tl.load(reals + PULL_ROW * slots + client)
    if tl.load(live + client) != 0:
        # The number of stages must be given here, or only the operands of the product are
        # prefetched, not the momenta.
        for begin in tl.range(0, OUT, BO, num_stages=STAGES):
            outputs = begin + tl.arange(0, BO)
            places = base + weight + outputs[:, None] * IN + inputs[None, :]
            inside = (outputs < OUT)[:, None] & (inputs < IN)[None, :]
            w = tl.load(w_rows + places, inside, 0.0)
            v = tl.load(v_rows + places, inside, 0.0) if MOMENTUM else w
            anchor = tl.load(anchor_rows + places, inside, 0.0) if PULL else w
            push = tl.load(push_rows + places, inside, 0.0) if PUSH else w
            spots = dy_rows + (first + samples)[:, None] * OUT + outputs[None, :]
            there = (samples < R)[:, None] & (outputs < OUT)[None, :]
            if INWARD:
                acc = tl.dot(tl.load(spots, there, 0.0), w.to(x.dtype), acc, input_precision=DOT)
            # Read a second time: a tile that two products want in different orders is not loaded
            # ahead.
            turned = tl.load(tl.trans(spots), tl.trans(there), 0.0)
            g = tl.dot(turned, x, input_precision=DOT)
            total += g * g
            w, v = stepped(
                g * scale, w, v, anchor, push, lr, momentum, decay, pull, PULL, PUSH, MOMENTUM
            )
            tl.store(w_rows + places, w, inside)
            if MOMENTUM:
                tl.store(v_rows + places, v, inside)
    tl.store(partials + client * columns + column + strip, tl.sum(total))
    if INWARD:
        tl.store(
            dx_rows + (first + samples)[:, None] * IN + inputs[None, :],
            acc.to(dx_rows.dtype.element_ty),
            here,
        )


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
    """y = x · wᵀ + bias; one program per BO outputs of a client, grid (output tiles, m).

    x_rows  [m, R, IN]     inputs, float32 or bfloat16, contiguous; R <= BR samples per client
    y_rows  [m, R, OUT]    output, dtype of x
    w_rows  [m, width]     all parameters, float32, stride `row`: the matrix [OUT, IN] starts at column `weight`, the
                           bias [OUT] at column `bias` (read only if BIAS)
    """
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
    tl.store(
        y_rows + (first + samples)[:, None] * OUT + outputs[None, :],
        acc.to(y_rows.dtype.element_ty),
        there,
    )


def forward(
    x: Tensor,
    rows: Tensor,
    weight: int,
    bias: int | None,
    outputs: int,
    dot: str,
    plain: Callable[[], Tensor],
    choices: Choices,
) -> Tensor:
    """y `[m, r, out]` from x `[m, r, in]` and the weights `[out, in]` at column `weight` of `rows`
    `[m, width]`.

    Uses `plain` unless that was measured to be slower; the choice is stored in `choices`.
    """
    m, samples, inputs = x.shape
    rounded = max(16, triton.next_power_of_2(samples))

    def ours() -> Tensor:
        held, y = x.contiguous(), x.new_empty(m, samples, outputs)
        on(_forward, (triton.cdiv(outputs, WIDE), m))(
            held,
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
            BR=rounded,
            BI=DEEP if rounded == 16 else WIDE,  # more would not fit into shared memory
            BO=WIDE,
            num_warps=4,
            num_stages=stages(x.device) + 1,
            **FUSED,
        )
        return y

    name = f"linear {inputs} -> {outputs}, {samples} samples, {x.dtype}"
    worth = m >= MEASURED and samples <= MOST and inputs * outputs >= LARGE

    def quicker() -> str:
        first, second = (min(timed(way) for _ in range(3)) for way in (ours, plain))
        return "ours" if first < second else "plain"

    chosen = choices.made.get(name, "plain")
    if worth and not torch.cuda.is_current_stream_capturing():
        chosen = choices.choose(name, quicker, ("ours", "plain"), f"{m} clients, {dot}")
    return ours() if worth and chosen == "ours" else plain()


def backward(
    x: Tensor,
    dy: Tensor,
    w: Tensor,
    v: Tensor,
    anchor: Tensor | None,
    push: Tensor | None,
    reals: Tensor,
    factors: Tensor,
    live: Tensor,
    partials: Tensor,
    column: int,
    weight: int,
    inward: bool,
    momentum: bool,
    dot: str,
) -> Tensor | None:
    """The gradient of the input `[m, r, in]`, if `inward`; the weights take their optimiser step.

    x is `[m, r, in]` and dy `[m, r, out]`; w, v, anchor and push are rows `[m, width]` with one
    stride, in which the matrix `[out, in]` starts at column `weight`. Gradients are multiplied by
    `factors` `[m]`. ‖∇L‖² goes to one column of `partials` per strip of inputs, from `column` on.
    """
    m, samples, inputs = x.shape
    x, dy = x.contiguous(), dy.contiguous()  # for instance the last step of a sequence is strided
    dx = torch.empty_like(x) if inward else None
    ahead = stages(x.device) - (anchor is not None or push is not None)
    on(_backward, (triton.cdiv(inputs, STRIP), m))(
        x,
        dy,
        x if dx is None else dx,
        w,
        v,
        w if anchor is None else anchor,
        w if push is None else push,
        reals,
        factors,
        live,
        partials,
        w.stride(0),
        reals.stride(0),
        partials.stride(0),
        column,
        weight,
        samples,
        IN=inputs,
        OUT=dy.shape[2],
        INWARD=inward,
        PULL=anchor is not None,
        PUSH=push is not None,
        MOMENTUM=momentum,
        DOT=dot,
        BR=max(16, triton.next_power_of_2(samples)),
        BI=STRIP,
        BO=16,
        STAGES=ahead,
        num_warps=2,
        num_stages=ahead,
        **FUSED,
    )
    return dx


def squares(x: Tensor, dy: Tensor) -> Tensor:
    """‖dyᵀ · x‖² of every client, `[m]`, without the product: Σ over pairs of samples of (x_i ·
    x_j)(dy_i · dy_j).

    Its error is some 1e-7 of Σ ‖x_i‖² ‖dy_i‖², however much of that cancels. Factors of length
    about 1 do not overflow.
    """
    most = [
        each.abs().amax((1, 2), keepdim=True).float().clamp(min=torch.finfo().tiny)
        for each in (x, dy)
    ]
    x, dy = (each.float() / scale for each, scale in zip((x, dy), most, strict=True))
    total = (torch.bmm(x, x.mT) * torch.bmm(dy, dy.mT)).sum((1, 2)).clamp(min=0)
    return total * (most[0] * most[1]).square().flatten()
