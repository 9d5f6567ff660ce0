"""Cross-entropy and its gradient in one pass."""

# mypy: ignore-errors

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from kairosfl.engines.batched.kernels.device import FUSED
from kairosfl.engines.batched.kernels.launch import on

CLASSES = 1024  # the most that fit into a tile
TILE = 4096  # numbers that a program handles at once
IGNORED = tl.constexpr(-100)  # the target that does not count, as in PyTorch


@triton.jit
def _entropy(
    outputs_rows,
    targets,
    shares,
    losses,
    slopes_rows,
    batch,
    classes,
    BS: tl.constexpr,
    BC: tl.constexpr,
):
    """Every client's loss, and the gradient of its outputs; one program per client, grid (m,).

    outputs_rows  [m, batch, classes]    float32, contiguous
    targets       [m, batch]             int64
    shares        [m, batch]             float32: of a sample in the loss
    losses        [m]                    float32 output
    slopes_rows   [m, batch, classes]    float32 output
    """
    client = tl.program_id(0).to(tl.int64)
    c = tl.arange(0, BC)
    total = tl.zeros([BS], dtype=tl.float32)
    for begin in range(0, batch, BS):
        sample = begin + tl.arange(0, BS)
        inside = sample < batch
        row = client * batch + sample
        target = tl.load(targets + row, inside, IGNORED)
        share = tl.where(target == IGNORED, 0.0, tl.load(shares + row, inside, 0.0))
        there = inside[:, None] & (c < classes)[None, :]
        place = row[:, None] * classes + c[None, :]
        x = tl.load(outputs_rows + place, there, float("-inf"))
        x -= tl.where(inside, tl.max(x, 1), 0.0)[:, None]
        powers = tl.exp(x)
        sums = tl.where(inside, tl.sum(powers, 1), 1.0)
        hit = c[None, :] == target[:, None]
        loss = tl.log(sums) - tl.sum(tl.where(hit, x, 0.0), 1)
        total += tl.where(inside & (target != IGNORED), loss * share, 0.0)
        slope = (powers / sums[:, None] - tl.where(hit, 1.0, 0.0)) * share[:, None]
        tl.store(slopes_rows + place, slope, there)
    tl.store(losses + client, tl.sum(total))


def entropy(outputs: Tensor, targets: Tensor, share: Tensor) -> tuple[Tensor, Tensor]:
    """The clients' losses `[m]` and the gradient of their sum with respect to the outputs `[m·b,
    classes]`, float32.

    Targets are `[m·b]` int64, and `share` `[m, b]` is the weight of each sample.
    """
    outputs, targets = outputs.detach().contiguous(), targets.contiguous()
    (m, batch), classes = share.shape, outputs.shape[1]
    losses, slopes = (
        torch.empty(m, dtype=outputs.dtype, device=outputs.device),
        torch.empty_like(outputs),
    )
    wide = triton.next_power_of_2(classes)
    high = min(TILE // wide, triton.next_power_of_2(batch))
    fixed = {"BS": high, "BC": wide, "num_warps": 4, **FUSED}
    on(_entropy, (m,))(outputs, targets, share, losses, slopes, batch, classes, **fixed)
    return losses, slopes
