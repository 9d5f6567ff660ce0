"""What surrounds the model in a step: choosing every client's batch, reading its images, and
counting the step.

Each is one kernel: there is so little to compute that every operation by itself would take longer
to start than to run.
"""

# mypy: ignore-errors

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kairosfl.engines.batched.kernels.device import FUSED
from kairosfl.engines.batched.kernels.launch import on
from kairosfl.engines.batched.state import Sum, Whole
from kairosfl.engines.batched.step import ODD

PIXELS, COLUMNS = 1024, 1024  # numbers of an image, and of squares, that a program handles at once

# Rows of `wholes` and `sums`, and the constant of `step`.
POSITION, TOTAL, SIZE = (
    tl.constexpr(int(Whole.POSITION)),
    tl.constexpr(int(Whole.TOTAL)),
    tl.constexpr(int(Whole.SIZE)),
)
END, BATCHES = tl.constexpr(int(Whole.END)), tl.constexpr(int(Whole.BATCHES))
DROPS, SAMPLES = tl.constexpr(int(Whole.DROPS)), tl.constexpr(int(Whole.SAMPLES))
LOSS, GRAD_SQ = tl.constexpr(int(Sum.LOSS)), tl.constexpr(int(Sum.GRAD_SQ))
SPREAD = tl.constexpr(ODD)


@triton.jit
def _batch(
    wholes,
    order_rows,
    awake,
    samples_rows,
    share_rows,
    lengths,
    live,
    keys,
    slots,
    row,
    batch,
    BLOCK: tl.constexpr,
):
    """The next batch of a client, as in `step`; one program per client, grid (m,).

    wholes         [numbers, slots]    int64: one line per number, one column per slot
    order_rows     [m, ≥ samples]      int64, stride `row`: a client's samples in the order in which it trains on them
    awake          []                  int8: 0 if no client is live
    samples_rows   [m, batch]          int64 output: the samples; beyond the client's own the first one
    share_rows     [m, batch]          output, float32 or bfloat16: 1 / length; beyond the client's own 0
    lengths, live  [m]                 int64 and int8 outputs
    keys           [m]                 int64 output: the keys of dropout
    """
    client = tl.program_id(0)
    numbers = wholes + client
    position = tl.load(numbers + POSITION * slots)
    size = tl.load(numbers + SIZE * slots)
    end = tl.load(numbers + END * slots)
    batches = tl.load(numbers + BATCHES * slots)
    alive = (position < tl.load(numbers + TOTAL * slots)) & (tl.load(awake) != 0)
    taken = position % batches * size
    length = tl.where(alive, tl.minimum(size, end - taken), 0)
    place = tl.arange(0, BLOCK)
    inside, own = place < batch, place < length
    spot = tl.where(own, position // batches * end + taken + place, 0)
    sample = tl.load(order_rows + client.to(tl.int64) * row + spot, inside, 0)
    kind = share_rows.dtype.element_ty
    divisor = tl.maximum(length, 1).to(tl.float32).to(kind).to(tl.float32)
    share = tl.div_rn(own.to(tl.float32), divisor).to(
        kind
    )  # as PyTorch divides; `/` would be off by a bit
    tl.store(samples_rows + client * batch + place, sample, inside)
    tl.store(share_rows + client * batch + place, share, inside)
    tl.store(lengths + client, length)
    tl.store(live + client, alive.to(tl.int8))
    tl.store(keys + client, tl.load(numbers + DROPS * slots) + position * SPREAD)


def batch(
    wholes: Tensor, order: Tensor, awake: Tensor, clients: int, size: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Samples `[m, size]`, shares `[m, size]` of this type, lengths, who is live (bool) and keys,
    `[m]` each.

    `wholes`, `order` and `awake` (`on`) are those of the state, and m = `clients` the number of
    slots that take part.
    """
    samples = torch.empty(clients, size, dtype=torch.int64, device=wholes.device)
    share = torch.empty(clients, size, dtype=dtype, device=wholes.device)
    lengths, keys = torch.empty(2, clients, dtype=torch.int64, device=wholes.device)
    live = torch.empty(clients, dtype=torch.bool, device=wholes.device)
    block = triton.next_power_of_2(size)
    on(_batch, (clients,))(
        wholes,
        order,
        awake.view(torch.int8),
        samples,
        share,
        lengths,
        live.view(torch.int8),
        keys,
        wholes.stride(0),
        order.stride(0),
        size,
        BLOCK=block,
        num_warps=min(32, max(1, block // 512)),
        **FUSED,
    )
    return samples, share, lengths, live, keys


@triton.jit
def _images(
    stored,
    samples,
    scales,
    shifts,
    y_rows,
    stride,
    C: tl.constexpr,
    HW: tl.constexpr,
    LAST: tl.constexpr,
    B: tl.constexpr,
):
    """y = stored[sample] · scale + shift, rounded after each; one program per B numbers of an
    image.

    stored          [N, C, HW]                   uint8
    samples         [n]                          int64
    scales, shifts  [C], or [1] with stride 0    float32, stride `stride`
    y_rows          [n, HW, C] if LAST, else [n, C, HW]; float32 or bfloat16
    grid            (n × tiles), tiles innermost
    """
    tiles: tl.constexpr = (C * HW + B - 1) // B
    number = tl.program_id(0) // tiles
    place = tl.program_id(0) % tiles * B + tl.arange(0, B)
    inside = place < C * HW
    channel = place % C if LAST else place // HW
    source = channel * HW + place // C if LAST else place
    x = tl.load(stored + tl.load(samples + number) * (C * HW) + source, inside, 0).to(tl.float32)
    y = x * tl.load(scales + channel * stride, inside, 0.0) + tl.load(
        shifts + channel * stride, inside, 0.0
    )
    tl.store(y_rows + number.to(tl.int64) * (C * HW) + place, y.to(y_rows.dtype.element_ty), inside)


def images(
    stored: Tensor, samples: Tensor, scale: Tensor, shift: Tensor, dtype: torch.dtype, last: bool
) -> Tensor:
    """The samples `[n]` of the images `[N, C, H, W]`, normalised and of this type; channels last or
    contiguous.

    `scale` and `shift` are those of `tasks.prepare`, `[C, 1, 1]` or `[1, 1, 1]`.
    """
    _, channels, height, width = stored.shape
    order = torch.channels_last if last else torch.contiguous_format
    size = (len(samples), channels, height, width)
    y = torch.empty(size, dtype=dtype, device=stored.device, memory_format=order)
    scale, shift = (each.expand(channels, 1, 1) for each in (scale, shift))
    numbers = channels * height * width
    block = min(PIXELS, triton.next_power_of_2(numbers))
    on(_images, (len(samples) * triton.cdiv(numbers, block),))(
        stored,
        samples,
        scale,
        shift,
        y,
        scale.stride(0),
        channels,
        height * width,
        last,
        block,
        num_warps=4,
        enable_fp_fusion=False,  # the product is rounded before the sum, as in `tasks.prepare`
    )
    return y


@triton.jit
def _count(
    wholes, sums, lengths, live, losses, squares_rows, slots, row, columns, BLOCK: tl.constexpr
):
    """Add a step to what a live client has done; one program per client, grid (m,).

    wholes, sums   [numbers, slots]    int64 and float64, updated in place
    lengths, live  [m]                 int64 and int8
    losses         [m]                 float32 or bfloat16: the mean loss of the batch
    squares_rows   [m, columns]        float32 or bfloat16, stride `row`: what adds up to ‖∇L‖²
    """
    client = tl.program_id(0)
    if tl.load(live + client) != 0:
        total = tl.zeros([BLOCK], dtype=tl.float64)
        for begin in range(0, columns, BLOCK):
            place = begin + tl.arange(0, BLOCK)
            total += tl.load(
                squares_rows + client.to(tl.int64) * row + place, place < columns, 0.0
            ).to(tl.float64)
        length = tl.load(lengths + client)
        wholes += client
        sums += client
        loss = tl.load(losses + client).to(tl.float64) * length.to(tl.float64)
        tl.store(sums + LOSS * slots, tl.load(sums + LOSS * slots) + loss)
        tl.store(sums + GRAD_SQ * slots, tl.load(sums + GRAD_SQ * slots) + tl.sum(total, 0))
        tl.store(wholes + SAMPLES * slots, tl.load(wholes + SAMPLES * slots) + length)
        tl.store(wholes + POSITION * slots, tl.load(wholes + POSITION * slots) + 1)


def count(
    wholes: Tensor, sums: Tensor, lengths: Tensor, live: Tensor, losses: Tensor, squares: Tensor
) -> None:
    """Add a step to `wholes` and `sums` of the state; `squares` is `[m, columns]`, its sums over
    columns are ‖∇L‖².
    """
    columns = squares.shape[1]
    block = min(COLUMNS, triton.next_power_of_2(columns))
    on(_count, (len(live),))(
        wholes,
        sums,
        lengths,
        live.view(torch.int8),
        losses,
        squares,
        wholes.stride(0),
        squares.stride(0),
        columns,
        BLOCK=block,
        num_warps=4,
        **FUSED,
    )
