"""How many slots fit into memory."""

from __future__ import annotations

import gc

import torch

from kairosfl.engines.batched.state import Kind, State
from kairosfl.engines.batched.step import Work, step

MOST = 256
SHARE = 0.7  # of the free memory: evaluation, captured steps and the server want some
CPU_BYTES = 1 << 31


def affordable(work: Work, kind: Kind, length: int, dtype: torch.dtype, device: torch.device) -> int:
    """The slots that free memory allows, at least one, by the peak of one step of two clients."""
    layout = work.stack.frame.layout
    if device.type != "cuda":
        row = layout.width * dtype.itemsize
        return max(1, min(MOST, CPU_BYTES // (row * (4 + len(kind.needs())))))
    gc.collect()  # traced models of earlier engines are cycles, and hold on to their slots
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    try:
        state = State(layout, 2, length, dtype, device)
        for name in kind.needs():
            state.rows(name)
        state.on.fill_(False)
        step(work, state, kind.wide(2))
    except torch.OutOfMemoryError:
        return 1
    finally:
        peak = torch.cuda.max_memory_allocated(device) - before
        work.stack.frame.close()
        torch.cuda.empty_cache()
    return max(1, min(MOST, int(SHARE * free / (peak / 2))))
